"""A training rank with several sets of weights: what it computes with each, and a resume that finds all of them again."""

import json
from collections import Counter
from pathlib import Path

import pytest

from slime.arguments.checkpoints import ACTOR, OLD_ACTOR
from slime.utils.errors import UserError
from tests.support.models.grpo_batch import make_samples
from tests.support.models.tiny_families import TINY_FAMILIES
from tests.support.models.tiny_model import PREDICTS_BESIDE, write_predicting, write_tiny_delta_net, write_tiny_model
from tests.support.processes.actor_run import TEMPERATURE, Rank, command_line, same
from tests.support.processes.distributed import run_distributed


def export_worker(directory: Path, layouts: dict[str, list[str]]) -> dict[str, list[str]]:
    """By layout, the names of the tensors that this rank made for an export."""
    results = {}
    for name, layout in layouts.items():
        run, made = Rank(command_line(directory, *layout)), []
        stage_tensors = run.actor.backend.stage_tensors

        def counted(stage_tensors=stage_tensors, made=made):
            walk = stage_tensors()
            return lambda: ((made.append(hf_name), (hf_name, tensor))[1] for hf_name, tensor in walk())

        run.actor.backend.stage_tensors = counted
        run.actor.export_hf(str(directory / name))
        results[name] = made
        run.end()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_vl", "qwen3_vl tied", "qwen3_vl_moe"])
def test_an_export_has_the_parts_that_are_not_trained(tmp_path, model_type):
    """A vision tower, and a layer for multi-token prediction."""
    import torch
    from safetensors.torch import load_file, save_file

    TINY_FAMILIES[model_type].save(tmp_path / "actor")
    path = tmp_path / "actor" / "model.safetensors"
    stored = load_file(path) | ({"mtp.fc.weight": torch.ones(2, 3)} if model_type == "qwen3_5" else {})
    save_file(stored, path, metadata={"format": "pt"})
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "unused"}) + "\n")
    # Each of two ranks has half of the experts, which are stacked in the checkpoint.
    halves = ["--sequence-parallel", "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]
    layouts = {"export": halves if model_type == "qwen3_vl_moe" else []}
    made = run_distributed(export_worker, 2, (tmp_path, layouts))[0]["export"]
    assert not [name for name in made if name.startswith(("model.visual.", "mtp."))]
    exported = load_file(next((tmp_path / "export").glob("*.safetensors")))
    assert exported.keys() == stored.keys() and all(exported[name].equal(stored[name]) for name in stored)
    assert len(stored.keys() - made) > 5


@pytest.mark.slow
def test_an_export_has_a_prediction_layer_of_the_model_where_a_run_asks_for_it(tmp_path):
    """Beside the model in the checkpoint, where it is else a part that is not trained."""
    from safetensors.torch import load_file

    entries = {**TINY_FAMILIES["qwen3_5_text"].entries, "layer_types": ["linear_attention", *["full_attention"] * 2]}
    del entries["layers"]
    write_predicting(
        tmp_path / "actor", write_tiny_delta_net, PREDICTS_BESIDE, model_type="qwen3_5_text", vocab_size=131, **entries
    )
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "unused"}) + "\n")
    layouts = {"with": ["--mtp-num-layers", "1"], "without": []}
    found = run_distributed(export_worker, 2, (tmp_path, layouts))[0]
    stored = load_file(tmp_path / "actor" / "model.safetensors")
    of_layer = {name for name in stored if name.startswith("mtp.")}
    assert len(of_layer) > 10 and of_layer <= set(found["with"]) and not of_layer & set(found["without"])
    for name in layouts:
        exported = load_file(next((tmp_path / name).glob("*.safetensors")))
        assert exported.keys() == stored.keys() and all(exported[key].equal(stored[key]) for key in stored), name


@pytest.mark.slow
def test_an_export_has_a_layer_behind_the_models_last_one_whether_or_not_a_run_asks_for_it(tmp_path):
    """As of GLM-4.5 and DeepSeek V3; without the copies of embedding and head, which would be old ones."""
    from safetensors.torch import load_file

    family = TINY_FAMILIES["glm4_moe"]
    write_predicting(tmp_path / "actor", family.write, model_type=family.model_type, vocab_size=131, **family.entries)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "unused"}) + "\n")
    layout = ["--sequence-parallel"]
    layouts = {"with": [*layout, "--mtp-num-layers", "1"], "without": layout}
    found = run_distributed(export_worker, 2, (tmp_path, layouts))[0]
    stored = load_file(tmp_path / "actor" / "model.safetensors")
    copies = {f"model.layers.2.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
    of_layer = {name for name in stored if name.startswith("model.layers.2.")} - copies
    assert copies < stored.keys() and len(of_layer) > 10
    assert of_layer <= set(found["with"]) and not of_layer & set(found["without"])
    for name in layouts:
        exported = load_file(next((tmp_path / name).glob("*.safetensors")))
        assert exported.keys() == stored.keys() - copies, name
        assert all(tensor.equal(stored[key]) for key, tensor in exported.items()), name


def push_worker(directory: Path, cases: dict[str, tuple[str, list[str]]]) -> dict:
    """By case, the buckets that this rank makes for a push, and the names that a push is held to."""
    results = {}
    for name, (model, words) in cases.items():
        words = command_line(directory / model, "--update-weight-buffer-size", "20000", *words)
        # Engines that nobody starts.
        run = Rank(words, rollout_num_gpus=1)
        try:
            expected = run.actor.open_weight_push().expected_names
            buckets = [[(hf, tensor.clone()) for hf, tensor in bucket] for bucket in run.actor.weight_source._buckets()]
            results[name] = expected, buckets
        except UserError as error:
            results[name] = str(error)
        run.end()
    return results


@pytest.mark.slow
def test_a_push_brings_the_layer_that_engines_draft_with_whether_or_not_the_trainer_has_it(tmp_path):
    from safetensors.torch import load_file, save_file

    beside = {"layer_types": ["linear_attention", *["full_attention"] * 2]}
    own_names_of = {"deepseek_v3": None, "qwen3_5_text": PREDICTS_BESIDE, "qwen3_next": PREDICTS_BESIDE}
    for name, own_names in own_names_of.items():
        row = TINY_FAMILIES[name]
        entries = {entry: value for entry, value in {**row.entries, **(beside if own_names else {})}.items()}
        entries.pop("layers", None)
        write_predicting(
            tmp_path / name / "actor", row.write, own_names, model_type=row.model_type, vocab_size=131, **entries
        )
        (tmp_path / name / "prompts.jsonl").write_text(json.dumps({"prompt": "unused"}) + "\n")
    without = tmp_path / "qwen3_next" / "actor" / "model.safetensors"
    of_model = {name: tensor for name, tensor in load_file(without).items() if not name.startswith("mtp.")}
    save_file(of_model, without, metadata={"format": "pt"})
    drafting, layout = ["--sglang-speculative-algorithm", "EAGLE"], ["--sequence-parallel"]
    cases = {
        f"{name} {kind}": (name, [*layout, *words])
        for name in ("deepseek_v3", "qwen3_5_text")
        for kind, words in {"stored": drafting, "trained": [*drafting, "--mtp-num-layers", "1"], "plain": []}.items()
    } | {"without": ("qwen3_next", [*layout, *drafting])}
    first, second = run_distributed(push_worker, 2, (tmp_path, cases), timeout=600)
    assert first["without"] == second["without"] and "no file there has its weights; drop the flag" in first["without"]
    for name, prefix in {"deepseek_v3": "model.layers.2.", "qwen3_5_text": "mtp."}.items():
        stored = load_file(tmp_path / name / "actor" / "model.safetensors")
        whole = {key for key in stored if not key.endswith((".2.embed_tokens.weight", ".shared_head.head.weight"))}
        of_layer = {key for key in whole if key.startswith(prefix)}
        assert len(of_layer) > 10
        for kind, wanted in {"stored": whole, "trained": whole, "plain": whole - of_layer}.items():
            expected, buckets = first[f"{name} {kind}"]
            assert expected == second[f"{name} {kind}"][0] == wanted, (name, kind)
            sent = [pair for bucket in buckets for pair in bucket]
            assert {key for key, _ in sent} == wanted and len(sent) == len(wanted) and len(buckets) > 2
            assert all(tensor.equal(stored[key]) for key, tensor in sent), (name, kind)
            together = [
                [key for key, _ in bucket if key.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight"))]
                for bucket in buckets
            ]
            assert all(len(parts) % 2 == 0 for parts in together)
            # It sends nothing, and what is stored is gathered from nobody.
            helped = {key for bucket in second[f"{name} {kind}"][1] for key, _ in bucket}
            assert helped == (wanted if kind == "trained" else whole - of_layer)


@pytest.mark.slow
def test_an_export_is_made_by_one_copy_of_the_weights_and_written_by_its_stages(tmp_path):
    from safetensors.torch import load_file

    write_tiny_model(tmp_path / "actor", vocab_size=131)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "unused"}) + "\n")
    layouts = {
        "tensor": [],
        "data": ["--tensor-model-parallel-size", "1"],
        "context": ["--tensor-model-parallel-size", "1", "--context-parallel-size", "2"],
        "pipeline": ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "2"],
    }
    first, second = run_distributed(export_worker, 2, (tmp_path, layouts), timeout=300)
    stored = load_file(tmp_path / "actor" / "model.safetensors")
    for name in layouts:
        directory = tmp_path / name
        index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
        exported = {hf_name: load_file(directory / file)[hf_name] for hf_name, file in index.items()}
        assert exported.keys() == stored.keys() and all(exported[key].equal(stored[key]) for key in stored)
        files = sorted(path.name for path in directory.glob("*.safetensors"))
        assert len(files) == (2 if name == "pipeline" else 1)
        made = {0: set(first[name]), 1: set(second[name])}
        if name == "tensor":
            assert made[0] == made[1] == set(stored)
        elif name == "pipeline":
            assert made[0] | made[1] == set(stored) and not made[0] & made[1]
            assert {hf_name for hf_name, file in index.items() if file == files[0]} == made[0]
        else:
            assert made == {0: set(stored), 1: set()}
    assert not list(tmp_path.glob(".*"))


def resume_worker(directory: Path) -> dict:
    save = ["--save", str(directory / "run"), "--load", str(directory / "run")]
    kl = ["--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3", "--ref-load", str(directory / "other")]
    words = command_line(directory, *save, *kl, "--ref-update-interval", "2", "--keep-old-actor", "--bf16")
    run = Rank(words)
    columns = {}
    for rollout_id in range(5):
        columns[rollout_id] = run.train(rollout_id)
        if rollout_id == 3:
            kept = {state: same(log_probs_of(run, state), columns[3])["log_probs"] for state in (OLD_ACTOR, ACTOR)}
        if rollout_id == 2:
            run.actor.weight_version = 7
            run.save(2)
            rate = run.learning_rate()
    weights = run.weights()
    results = {"changed_args": run.changed_args, "s12": refusals(run), "kept": kept}
    results["old"] = same(columns[3], columns[4])
    run.end()

    resumed = Rank(words)
    results["first"] = (run.first, resumed.first)
    results["weight version"] = resumed.actor.open_weight_push().weight_version
    results["resumed"] = {rollout_id: same(columns[rollout_id], resumed.train(rollout_id)) for rollout_id in (3, 4)}
    results["weights"] = all(same(weights, resumed.weights()).values())
    resumed.end()

    # O1: without the optimizer's state the schedule still goes on where it was, once.
    without = Rank([*words, "--no-load-optim"])
    results["o1"] = (rate, without.learning_rate(), without.actor.backend.scheduler.num_steps)
    results["o1 moments"] = [group.get("step") for group in without.actor.backend.optimizer.param_groups]
    without.end()

    # O3: a run that only evaluates.
    evaluating = Rank([*words, "--num-rollout", "0"])
    results["o3"] = (evaluating.actor.backend.optimizer, evaluating.actor.backend.scheduler)
    results["o3 weights"] = evaluating.first
    evaluating.end()
    return results


def log_probs_of(run: Rank, state: str) -> dict:
    """What the weights of a state give for the samples of every rollout."""
    from slime.training.train_step import forward_log_probs

    with run.actor.states(state):
        return forward_log_probs(run.args, run.actor.backend, run._data(), with_entropy=False)


def refusals(run) -> dict[str, str]:
    from slime.utils.errors import RunError

    found = {}
    for name, call in {"push": lambda: run.actor.send_weights(0, 1), "save": lambda: run.actor.save(9)}.items():
        try:
            with run.actor.states("ref"):
                call()
        except RunError as error:
            found[name] = str(error)
    return found


def teacher_worker(directory: Path) -> dict:
    from slime.training.model_states import HostCopy

    words = f"--use-kl-loss --kl-loss-coef 0.1 --use-rollout-entropy --ref-load {directory / 'actor'}".split()
    distillation = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": str(directory / "other")}
    run = Rank(command_line(directory, *words), **distillation, opd_teacher_ckpt_step=None, opd_kl_coef=1.0)
    copies = []
    for way in ("fill", "put_into"):
        original = getattr(HostCopy, way)
        setattr(HostCopy, way, lambda copy, tensors, way=way, do=original: copies.append(way) or do(copy, tensors))
    data = run.train(0)
    columns = {name: [tensor.tolist() for tensor in tensors] for name, tensors in data.items()}
    found = {"sample_indices": run.data["sample_indices"], "copies": copies[:], "told": run.told()}
    vars(run.args)["global_batch_size"] = 3
    run.train(1)
    found["told of whole steps"] = run.told()
    run.end()
    return {**columns, **found}


def worker(directory: Path) -> tuple[dict, dict]:
    return resume_worker(directory), teacher_worker(directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("states")
    for name, seed in (("actor", 0), ("other", 1)):
        write_tiny_model(directory / name, tied=True, seed=seed)
    (directory / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": "1+1", "label": "2"}) + "\n" for _ in range(8))
    )
    return directory


@pytest.fixture(scope="module")
def ranks(directory):
    return run_distributed(worker, 2, (directory,), timeout=300)


def test_a_resume_finds_the_refreshed_reference_and_the_old_actor(ranks):
    for results, _ in ranks:
        assert results["first"] == (0, 3)
        assert results["weight version"] == 7
        # The reference was refreshed after rollouts 1 and 3, the second time by the resumed run itself.
        assert not any(results["old"].values()), "reference and old actor moved between rollouts 3 and 4"
        for rollout_id, equal in results["resumed"].items():
            assert equal["ref_log_probs"], f"reference in rollout {rollout_id}"
            assert equal["log_probs"], f"old actor in rollout {rollout_id}"
        assert results["weights"] and results["kept"] == {OLD_ACTOR: True, ACTOR: False}


def test_a12_loading_a_state_leaves_the_arguments_as_they_were(ranks):
    assert [results["changed_args"] for results, _ in ranks] == [[], []]


def test_s12_only_the_actor_is_pushed_and_saved(ranks):
    for results, _ in ranks:
        message = "the live model holds the state 'ref', not 'actor'"
        assert results["s12"] == {"push": message, "save": message}


def test_o1_the_schedule_is_restored_once_without_the_optimizer(ranks):
    for results, _ in ranks:
        rate, resumed, scheduled = results["o1"]
        # Three of six steps of eight rollouts are done.
        assert rate == pytest.approx(0.01 / 2) and resumed == rate and scheduled == 24
        assert set(results["o1 moments"]) == {None}


def test_o3_a_run_that_only_evaluates_builds_no_optimizer(ranks):
    for results, _ in ranks:
        assert results["o3"] == (None, None)


def test_reference_and_teacher_share_the_snapshot_of_the_actor(ranks):
    for _, columns in ranks:
        # Actor aside; reference, teacher and actor into the model.
        assert columns["copies"] == ["fill", *["put_into"] * 3]


def test_a_rank_tells_how_fast_its_phases_were_and_how_long_it_waited(ranks):
    for _, columns in ranks:
        assert (told := columns["told"])["perf/rank_host_memory_gib"] > 0
        lengths = [len(sample.tokens) for sample in make_samples(131)]
        assert told["perf/actor_train_tok_per_s"] == pytest.approx(sum(lengths) / told["perf/actor_train_time"])
        # Two steps of three executions, of which one has two samples; the others are dropped.
        steps = columns["told of whole steps"]
        assert steps["perf/actor_train_tok_per_s"] == pytest.approx(sum(lengths[:7]) / steps["perf/actor_train_time"])
        # Reference and actor go over the same samples once, training is three times as much.
        work = {name: told[f"perf/{name}_tflops"] * told[f"perf/{name}_time"] for name in PHASES}
        assert work["log_probs"] > 0 and work["ref_log_probs"] == pytest.approx(work["log_probs"])
        assert work["actor_train"] == pytest.approx(3 * work["log_probs"])
        wait, busy = told["perf/train_wait_time"], told["perf/train_time"]
        assert told["perf/wait_time_ratio"] == pytest.approx(wait / (wait + busy)) and wait > 0


def distributions(directory: Path):
    """(sample, log-probs [response, vocabulary] at the rollout's temperature) by transformers, of every sample."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for sample in make_samples(131):
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[0, -sample.response_length - 1 : -1]
        yield sample, (logits.double() / TEMPERATURE).log_softmax(-1)


def test_each_state_gives_its_own_log_probs_at_the_rollouts_temperature(directory, ranks):
    columns = ranks[0][1]
    sources = {"ref_log_probs": "actor", "teacher_log_probs": "other", "log_probs": "actor"}
    for column, name in sources.items():
        for sample, log_probs in distributions(directory / name):
            row, response = columns["sample_indices"].index(sample.index), sample.tokens[-sample.response_length :]
            expected = [float(of_token[token]) for of_token, token in zip(log_probs, response, strict=True)]
            assert columns[column][row] == pytest.approx(expected, abs=2e-5), (column, sample.index)


def test_the_entropy_of_a_rollout_is_that_of_the_policy(directory, ranks):
    sums, tokens = Counter(), Counter()
    for sample, log_probs in distributions(directory / "actor"):
        mask = log_probs.new_tensor(sample.loss_mask or [1] * sample.response_length)
        sums[sample.rollout_id] -= float((log_probs.exp() * log_probs).sum(-1) @ mask)
        tokens[sample.rollout_id] += float(mask.sum())
    # An execution without a trained token counts with 0.
    expected = sum(sums[execution] / max(tokens[execution], 1) for execution in tokens) / len(tokens)
    for _, columns in ranks:
        assert columns["told"]["rollout/entropy"] == pytest.approx(expected, abs=2e-5)


def start_worker(directory: Path) -> list[dict[str, bool]]:
    """By weight whether it is as without another state beside the actor, as it was drawn, and whether it is that state's."""

    def start(*words: str) -> tuple[dict, Rank]:
        run = Rank(command_line(directory, *words))
        return {name: tensor.clone() for name, tensor in run.actor.backend.live_tensors()}, run

    def compare(state: str, alone: list[str], beside: list[str]) -> list[dict[str, bool]]:
        expected, run = start(*alone)
        run.end()
        weights, run = start(*alone, *beside)
        with run.actor.states(state):
            of_state = same(weights, dict(run.actor.backend.live_tensors()))
        run.end()
        return [same(expected, weights), of_state]

    own, distils = str(directory / "own"), ["--use-opd", "--opd-type", "megatron"]
    found = compare(
        "teacher",
        ["--random-init", "--load", own, "--save", own],
        [*distils, "--opd-teacher-load", str(directory / "other")],
    )
    predicts, other = ["--mtp-num-layers", "1"], str(directory / "predicting")
    _, run = start(*predicts, "--random-init", "--seed", "7", "--save", other)
    run.save(0)
    run.end()
    from_files = ["--load", str(directory / "actor"), *predicts]
    return [*found, *compare("ref", from_files, ["--use-kl-loss", "--ref-load", other])]


def test_an_actor_starts_as_without_the_states_beside_it(directory):
    """With random weights, and with a layer for multi-token prediction that its files lack and its reference has."""
    for random, as_teacher, from_files, as_reference in run_distributed(start_worker, 2, (directory,), timeout=300):
        for as_alone, as_other in ((random, as_teacher), (from_files, as_reference)):
            assert all(as_alone.values()) and not all(as_other.values())
        of_layer = [name for name in as_reference if ".mtp." in name]
        assert of_layer and not all(as_reference[name] for name in of_layer)


def nobodys_advantages(args, rollout_data):
    raise AssertionError("imitation has no advantages")


def returned_data(args, rollout_id, rollout_data):
    return {"loss_masks": rollout_data["loss_masks"]}


def with_a_number(args, rollout_id, rollout_data):
    rollout_data["mean"] = 0.5


def imitation_worker(directory: Path) -> dict:
    """By flag that says that it has no effect there, what a rollout of imitation logs, or the error that ends it."""
    import torch

    def fetch(run: Rank) -> dict:
        data = run._data()
        data["values"] = [torch.zeros(length) for length in data["response_lengths"]]
        return data

    kl = ["--kl-coef", "0.1", "--ref-load", str(directory / "actor"), "--load", str(directory / "actor")]
    beside = {
        "nothing": [],
        "mismatch": ["--get-mismatch-metrics"],
        "distillation": ["--use-opd", "--opd-type", "megatron", "--opd-teacher-load", str(directory / "other")],
        "kl": kl,
        "advantages": ["--custom-advantage-function-path", f"{__file__}:nobodys_advantages"],
        "critic": ["--advantage-estimator", "ppo", *kl],
        "postprocess": ["--rollout-data-postprocess-path", f"{__file__}:returned_data"],
        "number": ["--rollout-data-postprocess-path", f"{__file__}:with_a_number"],
    }
    found = {}
    for name, words in beside.items():
        run = Rank(command_line(directory, "--loss-type", "sft_loss", *words))
        run.actor._fetch = lambda shards, run=run: fetch(run)
        try:
            found[name] = {name: value for metrics, _ in run.actor.train(0, []) for name, value in metrics.items()}
            found[name]["columns"] = sorted(run.data)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        run.end()
    return found


def test_imitation_has_no_advantages_whatever_flags_of_theirs_there_are(directory):
    for found in run_distributed(imitation_worker, 2, (directory,), timeout=300):
        told = "test_actor_rank.py:returned_data returned dict for rollout 0; expected None: it changes the columns"
        assert told in found.pop("postprocess")
        assert "test_actor_rank.py:with_a_number left float in rollout_data['mean']" in found.pop("number")
        expected = found["nothing"]
        for name, metrics in found.items():
            assert isinstance(metrics, dict), (name, metrics)
            for metric in ("train/loss", "train/grad_norm"):
                assert metrics[metric] == expected[metric], name
            read = {"advantages", "returns", "kl", "log_probs"} & set(metrics["columns"])
            assert len(read) == (4 if name == "critic" else 0), name


PHASES = ("log_probs", "ref_log_probs", "actor_train")
NOTED = """
import json
from pathlib import Path

def note(args, version_dir, rollout_engines):
    files = sorted(path.name for path in Path(version_dir).glob("*.json"))
    with open(Path(args.update_weight_disk_dir) / "notes", "a") as file:
        file.write(json.dumps([Path(version_dir).name, files, rollout_engines]) + "\\n")
"""


def delta_worker(directory: Path) -> list[dict]:
    """Two pushes of what changed by two tensor-parallel ranks, the second one after a rollout."""
    import torch.distributed as dist

    from slime.weights.local_checkpoint import LocalCheckpoint
    from slime.weights.transports import transport_of

    (directory / "noted.py").write_text(NOTED)
    run = Rank(
        command_line(directory, "--bf16"), update_weight_transport="disk", update_weight_mode="delta",
        update_weight_disk_dir=str(directory / "pushes"), update_weight_local_checkpoint_dir=str(directory / "local"),
        custom_update_weight_post_write_path=f"{directory / 'noted.py'}:note",
    )  # fmt: skip
    assert run.actor.open_weight_push().num_sources == 1
    host = LocalCheckpoint(directory / "local", run.args.hf_checkpoint, 10.0)
    found = []
    for version in (1, 2):
        sent = run.actor.send_weights(0, version)
        dist.barrier()
        run.actor.weights_written(version, ["an engine"])
        weights = run.weights()
        if sent is not None:
            refused = host.bring_to(transport_of(run.args).directory(run.args, version))
            if refused is not None:
                # The checkpoint of this model is float32.
                found.append({"refused": refused})
        # All ranks are told alike.
        again = run.actor.send_weights(0, version, True) if version == 1 else None
        if sent is not None:
            assert host.bring_to(transport_of(run.args).directory(run.args, version)) is None
            sent = again or sent
            found.append({"delta": (sent.delta.changed_bytes, sent.delta.wire_bytes, sent.num_bytes)})
            found.append({"same": same(weights, loaded(directory / "local"))})
        run.actor.weights_pushed(version)
        run.train(version - 1)
    run.end()
    return found


def loaded(directory: Path) -> dict:
    from safetensors.torch import load_file

    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def quantised_worker(directory: Path) -> dict[str, bool]:
    """An export of weights for engines whose checkpoint is FP8, made of the same weights."""
    import torch.distributed as dist

    run = Rank(
        command_line(directory, "--hf-checkpoint", str(directory / "fp8"), "--ref-load", str(directory / "actor"))
    )
    expected = run.actor.open_weight_push().expected_names
    run.actor.export_hf(str(directory / "export"))
    run.end()
    dist.barrier()
    exported, stored = loaded(directory / "export"), loaded(directory / "fp8")
    assert exported.keys() == stored.keys() == expected
    return {name: exported[name].dtype == stored[name].dtype and exported[name].float().equal(stored[name].float())
            for name in stored}  # fmt: skip


def write_fp8(source: Path, target: Path) -> None:
    import shutil

    from safetensors.torch import save_file

    from slime.weights.quantisers import quantise_fp8_blocks

    shutil.copytree(source, target)
    tensors = loaded(source)
    for name in [name for name in tensors if name.endswith(("proj.weight",))]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantise_fp8_blocks(tensors[name], (16, 16))
    for path in target.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16],
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))


def weights_worker(directory: Path) -> tuple[list[dict], dict[str, bool]]:
    return delta_worker(directory), quantised_worker(directory)


@pytest.mark.slow
def test_weights_leave_as_what_changed_and_as_the_engines_have_them(directory):
    write_fp8(directory / "actor", directory / "fp8")
    (first, _), (second, quantised) = run_distributed(weights_worker, 2, (directory,), timeout=300)[:2]
    assert second == [] and "another dtype" in first[0]["refused"]
    whole, same_whole, delta, same_delta = first[1:]
    assert whole["delta"][0] == whole["delta"][2] and all(same_whole["same"].values())
    changed, wire, total = delta["delta"]
    assert 0 < changed < total and 0 < wire < total and all(same_delta["same"].values())
    notes = [json.loads(line) for line in (directory / "pushes" / "notes").read_text().splitlines()]
    index = "model.safetensors.index.json"
    # Of both ranks.
    assert sorted(note[0] for note in notes) == ["weight_v000001"] * 2 + ["weight_v000002"] * 2
    assert all(index in files and engines == ["an engine"] for _, files, engines in notes)
    assert quantised and all(quantised.values())
    assert any(name.endswith("_scale_inv") for name in quantised)
