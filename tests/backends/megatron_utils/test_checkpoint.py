"""Checkpoints: what is loaded is what was saved, in every layout, and the last published one survives every accident."""

from __future__ import annotations

import copy
import re
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime.arguments.checkpoints import WeightSource
from tests.support.distributed import run_distributed
from tests.support.tiny_model import tiny_args, write_tiny_model

SEQUENCES = ([5, 9, 77, 100, 31, 8], [90, 3, 14, 15, 92, 65, 35])
ROLLOUTS_PER_STEP = 8


def make_args(hf_dir, save, **overrides) -> SimpleNamespace:
    values = {
        "save": str(save), "save_hf": None, "no_save_optim": False, "no_load_rng": False, "keep_last": None, "world_size": 1,
        "optimizer": "adam", "lr": 1e-2, "min_lr": 1e-3, "lr_decay_style": "linear", "lr_decay_iters": 4,
        "lr_warmup_iters": 0, "lr_warmup_fraction": None, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.98,
        "adam_eps": 1e-8, "clip_grad": 1.0, "num_rollout": 4, "rollout_batch_size": 8, "n_samples_per_prompt": 1,
        "global_batch_size": ROLLOUTS_PER_STEP,
    }  # fmt: skip
    return SimpleNamespace(**{**vars(tiny_args(hf_dir, **overrides)), **values, **overrides})


class Trainer:
    """Model, optimizer and scheduler of this rank, at the weights of the HF checkpoint."""

    def __init__(self, args) -> None:
        from tests.support.megatron_worker import load_model

        self.args = args
        self.model = load_model(args)
        from slime.backends.megatron_utils.optimizer import build_optimizer_and_scheduler

        self.optimizer, self.scheduler = build_optimizer_and_scheduler(args, self.model)

    def step(self) -> None:
        """One optimizer step on the same data on every rank."""
        from megatron.core.distributed import finalize_model_grads

        from tests.support.megatron_worker import next_token_loss, packed_forward

        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        next_token_loss(packed_forward(self.model[0], SEQUENCES), SEQUENCES).backward()
        finalize_model_grads(self.model)
        self.optimizer.step()
        self.scheduler.step(increment=ROLLOUTS_PER_STEP)

    def save(self, iteration, publish=True) -> None:
        from slime.backends.megatron_utils.checkpoint import publish_checkpoint, save_checkpoint

        save_checkpoint(self.args, iteration, self.model, self.optimizer, self.scheduler)
        if publish and torch.distributed.get_rank() == 0:
            publish_checkpoint(self.args, iteration)
        torch.distributed.barrier()

    def load(self, source) -> int:
        from slime.backends.megatron_utils.checkpoint import load_checkpoint

        iteration = load_checkpoint(self.args, source, self.model, self.optimizer, self.scheduler)
        self.optimizer.reload_model_params()
        return iteration

    def state(self) -> dict:
        """Weights under their HF names, schedule, and what the generators give next."""
        from slime.backends.megatron_utils.hf_conversion import iter_hf_named_tensors

        weights = {name: tensor.clone().numpy() for name, tensor in iter_hf_named_tensors(self.args, self.model)}
        return {
            "weights": weights,
            "rollouts": self.scheduler.num_steps,
            "lr": self.optimizer.param_groups[0]["lr"],
            "random": torch.rand(4).tolist(),
        }


def resume(args, source) -> tuple[int, dict, dict]:
    """Load into a trainer that has other weights. Its iteration, its state, and that after one more step."""
    trainer = Trainer(args)
    with torch.no_grad():
        for parameter in trainer.model[0].parameters():
            parameter.add_(1.0)
    torch.rand(7)
    iteration = trainer.load(source)
    loaded = trainer.state()
    trainer.step()
    return iteration, loaded, trainer.state()


def train_and_save(args) -> tuple[dict, dict]:
    """One step, a checkpoint of rollout 3, one step: the states at the checkpoint and after the second step."""
    trainer = Trainer(args)
    trainer.step()
    trainer.save(3)
    saved = trainer.state()
    trainer.step()
    return saved, trainer.state()


def train_and_save_in_layouts(cases) -> dict:
    return {name: train_and_save(args) for name, args in cases.items()}


def resume_in_layouts(cases) -> dict:
    return {name: resume(args, WeightSource("megatron", path, resume=True)) for name, (args, path) in cases.items()}


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, tied=False)
    return directory


LAYOUTS = {
    "dp1": {},
    "dp2": {"world_size": 2},
    "tp2": {"world_size": 2, "tensor_model_parallel_size": 2},
}


@pytest.fixture(scope="module")
def saved(hf_dir, tmp_path_factory):
    """Per layout the directory and what `train_and_save` returned on rank 0."""
    cases = {name: make_args(hf_dir, tmp_path_factory.mktemp(name), **layout) for name, layout in LAYOUTS.items()}
    two = {name: args for name, args in cases.items() if args.world_size == 2}
    results = run_distributed(train_and_save_in_layouts, 2, (two,))[0]
    results |= run_distributed(train_and_save_in_layouts, 1, ({"dp1": cases["dp1"]},))[0]
    return {name: (Path(cases[name].save), *results[name]) for name in cases}


@pytest.fixture(scope="module")
def resumed(hf_dir, saved):
    """What `resume` returned on one rank, per layout that had saved."""
    cases = {name: (make_args(hf_dir, "unused"), str(directory)) for name, (directory, *_) in saved.items()}
    return run_distributed(resume_in_layouts, 1, (cases,))[0]


def assert_same(state, expected, relative) -> None:
    assert state["weights"].keys() == expected["weights"].keys()
    for name, weight in state["weights"].items():
        torch.testing.assert_close(
            torch.from_numpy(weight),
            torch.from_numpy(expected["weights"][name]),
            rtol=relative,
            atol=relative,
            msg=name,
        )
    assert (state["rollouts"], state["lr"]) == (expected["rollouts"], expected["lr"])


def test_the_same_layout_goes_on_bitwise(saved, resumed):
    _, at_checkpoint, after = saved["dp1"]
    iteration, loaded, stepped = resumed["dp1"]
    assert iteration == 3
    assert_same(loaded, at_checkpoint, 0)
    # Equal only when the moments of the optimizer and its schedule came back too.
    assert_same(stepped, after, 0)
    assert stepped["rollouts"] == 2 * ROLLOUTS_PER_STEP
    assert (loaded["random"], stepped["random"]) == (at_checkpoint["random"], after["random"])


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_another_layout_goes_on_with_the_same_numbers(saved, resumed, layout):
    _, at_checkpoint, after = saved[layout]
    _, loaded, stepped = resumed[layout]
    assert_same(loaded, at_checkpoint, 0)
    assert_same(stepped, after, 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_common_part_holds_plain_values(saved, layout):
    common = torch.load(saved[layout][0] / "iter_0000003/common.pt", weights_only=True)
    assert common["iteration"] == 3 and common["has_optimizer"] is True
    assert common["layout"]["tensor_model_parallel_size"] == (2 if layout == "tp2" else 1)


def save_on_full_disk(trainer, iteration, full_ranks) -> str | None:
    """Save while files of more than 2000 bytes cannot be written on some ranks; the message of the error."""
    from slime.utils.errors import RunError

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if torch.distributed.get_rank() in full_ranks:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    try:
        trainer.save(iteration)
        return None
    except RunError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def full_disk_of_one_rank_worker(args) -> tuple:
    trainer = Trainer(args)
    trainer.step()
    trainer.save(0)
    message = save_on_full_disk(trainer, 1, full_ranks=(1,))
    names = sorted(path.name for path in Path(args.save).iterdir())
    torch.distributed.barrier()
    trainer.save(2)
    return message, names, trainer.load(WeightSource("megatron", args.save))


def accidents_worker(args) -> dict:
    """Everything that may happen to a save, in one process. Files are looked at by the test, afterwards."""
    results = {}
    trainer = Trainer(args)
    trainer.step()
    trainer.save(0)
    trainer.step()
    trainer.save(1)
    published = trainer.state()["weights"]
    trainer.step()

    # The process ends between the two.
    trainer.save(2, publish=False)
    results["before publication"] = (published, resume(args, WeightSource("megatron", args.save, resume=True)))

    results["disk full"] = save_on_full_disk(trainer, 3, full_ranks=(0,))
    results["directory"] = sorted(path.name for path in Path(args.save).iterdir())
    results["after disk full"] = resume(args, WeightSource("megatron", args.save, resume=True))

    without = copy.copy(args)
    without.save, without.no_save_optim = args.save + "_without_optimizer", True
    trainer = Trainer(without)
    trainer.step()
    trainer.save(4)
    results["weights only"] = (trainer.state(), resume(without, WeightSource("megatron", without.save, resume=True)))

    keeping = copy.copy(args)
    keeping.save, keeping.keep_last = args.save + "_keep_last", 2
    trainer = Trainer(keeping)
    trainer.step()
    for iteration in (1, 3, 5):
        (Path(keeping.save) / f"rollout/global_dataset_state_dict_{iteration}").mkdir(parents=True)
        trainer.save(iteration)
    return results


@pytest.fixture(scope="module")
def accidents(hf_dir, tmp_path_factory):
    save = tmp_path_factory.mktemp("accidents") / "checkpoints"
    return save, run_distributed(accidents_worker, 1, (make_args(hf_dir, save),))[0]


def test_the_pointer_is_written_last(accidents):
    save, results = accidents
    published, (iteration, loaded, _) = results["before publication"]
    assert not (save / "iter_0000002").exists()
    assert iteration == 1
    assert all((loaded["weights"][name] == weight).all() for name, weight in published.items())


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(accidents):
    save, results = accidents
    message = results["disk full"]
    # What torch says of a failed write is "iostream error".
    cause = r"RuntimeError: .+\. \d+ MB are free there\. Older checkpoints are untouched"
    assert re.fullmatch(rf"checkpoint {save}/iter_0000003 could not be written: {cause}", message)
    assert results["directory"] == [
        ".iter_0000002.writing", "iter_0000000", "iter_0000001", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
    iteration, loaded, _ = results["after disk full"]
    assert iteration == 1
    assert all((loaded["weights"][name] == w).all() for name, w in results["before publication"][0].items())


def test_o1_without_optimizer_state_the_weights_are_loaded_and_the_schedule_goes_on(accidents):
    saved, (iteration, loaded, _) = accidents[1]["weights only"]
    assert iteration == 4
    assert all((loaded["weights"][name] == weight).all() for name, weight in saved["weights"].items())
    assert saved["rollouts"] == loaded["rollouts"] == ROLLOUTS_PER_STEP
    assert saved["lr"] == loaded["lr"]


def test_keep_last_deletes_older_checkpoints_with_their_data_states(accidents):
    save = accidents[0].with_name("checkpoints_keep_last")
    assert sorted(path.name for path in save.glob("iter_*")) == ["iter_0000003", "iter_0000005"]
    assert sorted(path.name for path in (save / "rollout").iterdir()) == [
        "global_dataset_state_dict_3", "global_dataset_state_dict_5",
    ]  # fmt: skip


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_a_disk_that_is_full_on_one_node_fails_the_save_on_all(hf_dir, tmp_path, layout):
    args = make_args(hf_dir, tmp_path / "checkpoints", **LAYOUTS[layout])
    for message, names, iteration in run_distributed(full_disk_of_one_rank_worker, 2, (args,)):
        assert re.search(
            r"iter_0000001 could not be written: (rank 1: )?\w+Error: .*Older checkpoints are untouched", message
        )
        assert len(message.splitlines()) == 1 and "Traceback" not in message, message
        assert names == ["iter_0000000", "latest_checkpointed_iteration.txt"]
        # The ranks are still in step with each other.
        assert iteration == 2


def flags_worker(args) -> dict:
    """Saves and loads on two ranks that hold the same weights, with the flags about how that is done."""
    results = {}
    ways = {
        "default": {},
        "alone": {"ckpt_fully_parallel_save": False, "ckpt_fully_parallel_load": False},
        "other": {
            "no_save_rng": True, "distrib_optim_fully_reshardable_mem_efficient": True,
            "ckpt_fully_parallel_load_exchange_algo": "gather_object", "dist_ckpt_strictness": "raise_all",
        },
    }  # fmt: skip
    for name, flags in ways.items():
        case = SimpleNamespace(**{**vars(args), "save": f"{args.save}_{name}", **flags})
        results[name] = (*train_and_save(case), resume(case, WeightSource("megatron", case.save, resume=True)))
    return results


def test_flags_of_writing_and_reading(hf_dir, tmp_path):
    ranks = run_distributed(flags_worker, 2, (make_args(hf_dir, tmp_path / "save", **LAYOUTS["dp2"]),))
    for results in ranks:
        for name, (at_checkpoint, after, (iteration, loaded, stepped)) in results.items():
            assert iteration == 3
            assert_same(loaded, at_checkpoint, 0)
            assert_same(stepped, after, 1e-6)
            assert (loaded["random"] == at_checkpoint["random"]) == (name != "other"), name
    written = {
        name: [path.stat().st_size for path in sorted((tmp_path / f"save_{name}/iter_0000003").glob("*.distcp"))]
        for name in ("default", "alone")
    }
    # Both ranks write a share of what they hold alike; left alone, the first one writes all of it.
    assert max(written["default"]) < 0.7 * sum(written["default"])
    assert max(written["alone"]) > max(written["default"])
    assert not list((tmp_path / "save_other/iter_0000003").glob("rng_*"))
