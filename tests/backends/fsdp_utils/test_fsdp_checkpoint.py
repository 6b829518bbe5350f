"""Checkpoints of FSDP: a run that was stopped goes on as if it had not been, and each is a Hugging Face directory besides."""

import json
import shutil
from unittest import mock

import pytest

from slime.arguments.checkpoints import WeightSource, resolve_initial_weights
from slime.utils.checkpoint_directory import iteration_directory
from slime.utils.errors import RunError, UserError
from slime.weights.push import read_weight_version
from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import layout_args, shard
from tests.support.processes.resumed_run import changed, digest

STEPS = 3
# An odd number: two ranks have rows of different number.
VOCABULARY = 131
# What a schedule of eight steps would forget if it began anew; all Adam remembers counts.
FLAGS = {
    "train_backend": "fsdp", "lr": 1e-3, "lr_decay_style": "cosine", "lr_decay_iters": 8, "lr_warmup_iters": 1, "min_lr": 1e-5,
    "start_weight_decay": 0.01, "end_weight_decay": 0.1, "weight_decay_incr_style": "cosine", "train_iters": 8,
    "keep_last": None, "save_hf": None, "log_level": "ERROR", "no_save_optim": False, "no_save_rng": False,
}  # fmt: skip


def arguments(hf_dir, save, size, **overrides):
    return layout_args(hf_dir, **{**FLAGS, "save": str(save), "data_parallel_size": size, **overrides})


class Run:
    """A rank's backend with its data."""

    def __init__(self, args, source):
        from slime.training.advantages import compute_advantages_and_returns
        from slime.training.backend import make_backend

        self.args, self.backend = args, make_backend(args)
        self.backend.place()
        self.rollout = self.backend.load(source)
        self.data = shard(args, self.backend.groups.data_rank, self.backend.groups.cp)
        self.data["log_probs"] = self.data["ref_log_probs"]
        compute_advantages_and_returns(args, self.data)

    def step(self):
        """One optimizer step; draws a number too, as functions of a user's may."""
        import torch

        from slime.training.train_step import train_one_step

        metrics = train_one_step(self.args, self.backend, self.data, 0, 0)
        return {**metrics, "drawn": torch.rand(()).item()}

    def save(self, rollout, *states):
        import torch.distributed as dist

        from slime.training.checkpoint_publication import publish_checkpoint

        self.backend.save(rollout, *states).finish()
        if dist.get_rank() == 0:
            publish_checkpoint(self.args, rollout)
        dist.barrier()

    def digests(self):
        """This rank's part of what the next steps depend on."""
        states = [self.backend.optimizer.state[parameter] for parameter in self.backend.model.parameters()]
        remembered = [state[kind] for state in states for kind in ("step", "exp_avg", "exp_avg_sq")]
        return {
            "weights": digest(tensor for _, tensor in self.backend.live_tensors()),
            "remembered": digest(getattr(tensor, "_local_tensor", tensor) for tensor in remembered),
            "groups": [(group["lr"], group["weight_decay"]) for group in self.backend.optimizer.param_groups],
            "rollouts": self.backend.scheduler.num_steps,
        }


def worker(hf_dir, other, directory, size, bf16):
    """Six steps; three, a checkpoint with a further set of weights, and three behind it; and what else is asked of one."""
    import torch

    from slime.training.model_states import REFERENCE, ROLLOUT_ACTOR, ModelStates

    args, start = arguments(hf_dir, directory, size, bf16=bf16), WeightSource("hf", hf_dir)
    torch.manual_seed(5)
    whole = Run(args, start)
    assert torch.initial_seed() == args.seed, "what functions of a user's draw goes by the flag"
    found = {"whole": [whole.step() for _ in range(2 * STEPS)], "end": whole.digests()}

    torch.manual_seed(5)
    first = Run(args, start)
    states = ModelStates(first.backend.live_tensors)
    with states.aside():
        first.backend.load_weights(WeightSource("hf", other))
        states.capture(REFERENCE)
    found["first"] = [first.step() for _ in range(STEPS)]
    found["saved"] = first.digests()
    first.save(2, states, (REFERENCE,), 7)
    # A save changes nothing.
    assert first.digests() == found["saved"]

    source = resolve_initial_weights(changed(args, load=str(directory), ckpt_step=None, finetune=False))
    torch.manual_seed(6)
    resumed = Run(changed(args, seed=args.seed + 77), source)
    assert (source.resume, resumed.rollout) == (True, 2)
    found["loaded"] = resumed.digests()
    found["second"] = [resumed.step() for _ in range(STEPS)]
    found["resumed"] = resumed.digests()

    assert resumed.backend.load_weights(source, REFERENCE) and not resumed.backend.load_weights(source, ROLLOUT_ACTOR)
    found["reference"] = digest(tensor for _, tensor in resumed.backend.live_tensors())
    resumed.backend.load_weights(WeightSource("hf", other))
    found["other"] = digest(tensor for _, tensor in resumed.backend.live_tensors())
    found["weights alone"] = weights_alone(args, directory)
    found["other Adam"] = [own_adam(args, directory, kept) for kept in (False, True)]
    found["bare"] = bare_save(changed(args, save=f"{directory}-bare"), start)
    found["moments"] = places_of_moments(args, directory)
    found["untrained"] = untrained_weight(changed(args, save=f"{directory}-untrained"), start)
    found["failed"] = failed_save(resumed, directory)
    return found


def weights_alone(args, directory):
    """What is taken of a checkpoint by a run that goes on without its optimizer, and by one that begins from its weights."""
    without = Run(changed(args, no_load_optim=True), WeightSource("megatron", str(directory), resume=True))
    begun = Run(args, WeightSource("megatron", str(directory), 2))
    return [
        (len(run.backend.optimizer.state), run.backend.scheduler.num_steps, run.rollout) for run in (without, begun)
    ]


def own_adam(args, directory, kept):
    """The settings of Adam of a resume with other flags for them: its own, or those of the checkpoint."""
    args = changed(args, adam_beta1=0.5, adam_eps=1e-3, use_checkpoint_opt_param_scheduler=kept)
    run = Run(args, WeightSource("megatron", str(directory), resume=True))
    return [(group["betas"], group["eps"]) for group in run.backend.optimizer.param_groups]


def bare_save(args, start):
    """Files of a checkpoint without optimizer and generators, and what a resume finds of Adam's states."""
    run = Run(changed(args, no_save_optim=True, no_save_rng=True), start)
    run.step()
    run.save(2)
    resumed = Run(changed(args, no_load_rng=True), WeightSource("megatron", args.save, resume=True))
    files = {path.name for path in iteration_directory(args.save, 2).iterdir()}
    return files, len(run.backend.optimizer.state) > 0, len(resumed.backend.optimizer.state)


def places_of_moments(args, directory):
    """Where a resume puts moments that are on the host between updates, before its first one."""
    from slime.backends.fsdp_utils.backend import FSDPBackend

    asked = []
    with mock.patch.object(FSDPBackend, "_put_moments", lambda self, device: asked.append(device.type)):
        Run(changed(args, optimizer_cpu_offload=True), WeightSource("megatron", str(directory), resume=True))
    return asked


def untrained_weight(args, start):
    """The step behind a checkpoint, without and with a resume, of a model that has no gradient of one of its weights; and how
    many weights have moments then, of how many."""
    from slime.backends.fsdp_utils.backend import FSDPBackend

    build = FSDPBackend._build

    def build_with_untrained_weight(backend):
        model = build(backend)
        model.get_parameter("model.norm.weight").requires_grad_(False)
        return model

    with mock.patch.object(FSDPBackend, "_build", build_with_untrained_weight):
        run = Run(args, start)
        run.step()
        run.save(0)
        step = run.step()
        resumed = Run(args, WeightSource("megatron", args.save, resume=True))
        return step, resumed.step(), len(resumed.backend.optimizer.state), len(list(resumed.backend.model.parameters()))


def failed_save(run, directory):
    """What ranks say of a save that the second one's disk refuses, and what is there afterwards."""
    import torch.distributed as dist

    from slime.backends.fsdp_utils import backend

    refused = OSError(28, "No space left on device") if dist.get_rank() == 1 else None
    real = backend.save_generators
    with mock.patch.object(backend, "save_generators", side_effect=refused, wraps=real):
        unfinished = run.backend.save(3)
    assert unfinished.has_ended()
    for _ in range(2):
        if dist.get_world_size() > 1:
            with pytest.raises(RunError) as error:
                unfinished.finish()
    dist.barrier()
    return str(error.value) if dist.get_world_size() > 1 else None


def on_one_rank(hf_dir, directory, further):
    """The whole tensors of a checkpoint that more ranks wrote, with what the optimizer remembers. A run that begins from it as
    from a model leaves a checkpoint in `further`."""
    import torch

    run = Run(arguments(hf_dir, directory, 1), WeightSource("megatron", str(directory), resume=True))
    drawn = torch.rand(()).item()
    Run(arguments(hf_dir, directory, 1), WeightSource("hf", hf_dir))
    assert drawn == torch.rand(()).item(), "generators of other ranks are taken"
    whole = {name: tensor.clone().numpy() for name, tensor in run.backend.stage_tensors()()}
    model = str(iteration_directory(directory, 2))
    Run(arguments(model, further, 1), WeightSource("hf", model)).save(0, None, (), 1)
    return whole, run.digests()


def refused_sources(hf_dir, directory):
    """What is said of checkpoints that cannot be loaded."""
    from slime.training.backend import make_backend

    backend = make_backend(arguments(hf_dir, directory, 1))
    backend.place()
    found = {}
    for place in sorted(directory.iterdir()):
        with pytest.raises(UserError) as error:
            backend.load(WeightSource("megatron", str(place), 2, resume=True))
        found[place.name] = str(error.value)
    for name in ("deeper", "headless"):
        with pytest.raises(UserError) as error:
            backend.load_weights(WeightSource("hf", str(iteration_directory(directory / name, 2))))
        found[f"{name} as a model"] = str(error.value)
        model = str(iteration_directory(directory / name, 2))
        backend_of_its_config = make_backend(arguments(model, directory, 1))
        backend_of_its_config.place()
        with pytest.raises(UserError) as error:
            backend_of_its_config.load_weights(WeightSource("hf", model))
        found[f"{name} as the model of the run"] = str(error.value)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two tiny models with the same names."""
    places = [tmp_path_factory.mktemp(name) for name in ("model", "other")]
    for seed, place in enumerate(places):
        write_tiny_model(place, vocab_size=VOCABULARY, seed=seed)
        (place / "tokenizer.json").write_text("{}")
    return [str(place) for place in places]


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """Directories, in which an earlier save was killed."""
    places = {size: tmp_path_factory.mktemp(f"save{size}") for size in (1, 2)}
    for place in places.values():
        for name in (".iter_0000002.writing", "..iter_0000002.writing.writing"):
            (place / name / "states" / "old").mkdir(parents=True)
            (place / name / "model-00001-of-00009.safetensors").write_text("half")
    return places


@pytest.fixture(scope="module")
def one_rank(models, saves):
    return run_distributed(worker, 1, (*models, saves[1], 1, False), timeout=300)


@pytest.fixture(scope="module")
def two_ranks(models, saves):
    """In bfloat16, which cannot hold what a checkpoint has to."""
    return run_distributed(worker, 2, (*models, saves[2], 2, True), timeout=300)


@pytest.fixture(params=["one_rank", "two_ranks"])
def ranks(request):
    return request.getfixturevalue(request.param)


def test_three_and_three_rollouts_are_six(ranks):
    for rank in ranks:
        assert rank["first"] == rank["whole"][:STEPS]
        assert rank["loaded"] == rank["saved"]
        assert rank["second"] == rank["whole"][STEPS:]
        assert rank["resumed"] == rank["end"]
        rates = [step["lr-pg_0"] for step in rank["whole"]]
        assert len(set(rates)) == 2 * STEPS


def test_a_checkpoint_holds_further_sets_of_weights(ranks, saves):
    for rank in ranks:
        assert rank["reference"] == rank["other"] != rank["end"]["weights"]
    assert read_weight_version(iteration_directory(saves[len(ranks)], 2)) == 7


def test_parts_of_a_checkpoint_are_taken_alone(ranks):
    for rank in ranks:
        assert rank["weights alone"] == [(0, rank["saved"]["rollouts"], 2), (0, 0, -1)]
        assert rank["saved"]["rollouts"] > 0


def test_adam_has_the_settings_of_the_flags_unless_those_of_the_checkpoint_are_asked_for(ranks):
    for rank in ranks:
        own, kept = rank["other Adam"]
        assert set(own) == {((0.5, 0.98), 1e-3)} and set(kept) == {((0.9, 0.98), 1e-4)}


def test_a_checkpoint_has_neither_optimizer_nor_generators_where_nobody_wants_them(ranks, saves):
    whole = {path.name for path in iteration_directory(saves[len(ranks)], 2).iterdir()}
    for rank in ranks:
        files, trained, resumed = rank["bare"]
        assert whole - files == {"optimizer", "states", "weight_version.json"} | {
            f"rng_{number:05d}.safetensors" for number in range(len(ranks))
        }
        assert trained and resumed == 0


def test_moments_that_are_kept_on_the_host_are_there_after_a_resume(ranks):
    assert all(rank["moments"] == ["cpu"] for rank in ranks)


def test_a_weight_without_a_gradient_has_no_moments_and_a_resume_asks_for_none(ranks):
    for rank in ranks:
        step, resumed, states, weights = rank["untrained"]
        assert resumed == step and states == weights - 1


def test_a_rank_that_cannot_write_fails_the_save_on_all(two_ranks, saves):
    expected = f"checkpoint {saves[2]}/iter_0000003 could not be written: OSError: [Errno 28] No space left on device. "
    assert all(rank["failed"].startswith(expected) for rank in two_ranks)
    assert all(rank["failed"].endswith("Older checkpoints are untouched") for rank in two_ranks)


def test_nothing_is_left_beside_what_was_published(ranks, saves):
    save = saves[len(ranks)]
    left = {path.name for path in save.iterdir()} - {".iter_0000003.writing"}
    assert left == {"iter_0000002", "latest_checkpointed_iteration.txt"}
    assert (save / ".iter_0000003.writing").exists() == (len(ranks) == 1)
    inside = {path.name for path in (save / "iter_0000002").iterdir()}
    assert not [name for name in inside if name.endswith("-of-00009.safetensors")]
    assert {path.name for path in (save / "iter_0000002" / "states").iterdir()} == {"ref"}


def test_a_checkpoint_is_a_hugging_face_directory(models, saves, two_ranks, tmp_path):
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    directory = iteration_directory(saves[2], 2)
    assert (directory / "tokenizer.json").is_file() and (directory / "config.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ((whole, digests),) = run_distributed(on_one_rank, 1, (models[0], saves[2], tmp_path), timeout=300)
    named = dict(model.named_parameters())
    assert named.keys() == whole.keys()
    assert all(np.array_equal(named[name].detach().numpy(), tensor) for name, tensor in whole.items())
    # Other ranks go on from it as those that saved it.
    assert (
        digests["groups"] == two_ranks[0]["saved"]["groups"]
        and digests["rollouts"] == two_ranks[0]["saved"]["rollouts"]
    )
    # What it tells of its own weights is nothing that a run which begins from it repeats.
    assert (read_weight_version(directory), read_weight_version(iteration_directory(tmp_path, 0))) == (7, 1)
    assert json.loads((iteration_directory(tmp_path, 0) / "metadata.json").read_text())["iteration"] == 0


def test_what_cannot_be_loaded_is_refused_by_name(models, saves, one_rank, tmp_path):
    whole = iteration_directory(saves[1], 2)
    for name in ("cut", "megatron", "optimizer", "no optimizer", "deeper", "headless"):
        shutil.copytree(whole, iteration_directory(tmp_path / name, 2))
        (tmp_path / name / "latest_checkpointed_iteration.txt").write_text("2")
    (iteration_directory(tmp_path / "cut", 2) / "metadata.json").unlink()
    (iteration_directory(tmp_path / "megatron", 2) / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    for file in (iteration_directory(tmp_path / "optimizer", 2) / "optimizer").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    shutil.rmtree(iteration_directory(tmp_path / "no optimizer", 2) / "optimizer")
    for name in ("deeper", "headless"):
        index = iteration_directory(tmp_path / name, 2) / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        file = content["weight_map"].pop("lm_head.weight")
        content["weight_map"] |= {"model.layers.9.mlp.up_proj.weight": file} if name == "deeper" else {}
        index.write_text(json.dumps(content))
    (found,) = run_distributed(refused_sources, 1, (models[0], tmp_path), timeout=300)
    for name in ("cut", "megatron"):
        assert "was not saved with --train-backend fsdp" in found[name] and "convert_torch_dist_to_hf" in found[name]
    assert (
        "/optimizer cannot be loaded" in found["optimizer"] and "/optimizer cannot be loaded" in found["no optimizer"]
    )
    other, own = "is of another model than --hf-checkpoint", "iter_0000002 does not fit its own config.json"
    for told, given in ((other, ""), (other, " as a model"), (own, " as the model of the run")):
        assert f"{told}, which has no model.layers.9.mlp.up_proj.weight" in found[f"deeper{given}"]
        assert f"{told}: it has no lm_head.weight" in found[f"headless{given}"]
