"""The whole loop with a trainer of two pipeline stages, and its checkpoint in another layout."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_weight_transports import DELTAS
from tests.support.processes.train_process import TrainProcess

ROLLOUTS = range(3)
PLUG_INS = "tests.support.processes.plug_ins"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def flags(task, directory):
    return [
        *task.loop_flags, "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1", "--check-weight-update-equal",
        "--sglang-log-level", "info",
        "--custom-advantage-function-path", f"{PLUG_INS}.noted_advantages",
        "--rollout-data-postprocess-path", f"{PLUG_INS}.noted_postprocess",
        "--save", directory / "checkpoints", "--load", directory / "checkpoints", "--save-interval", "3",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def finished(flags, directory):
    notes = directory / "notes"
    notes.mkdir()
    more = ["--pipeline-model-parallel-size", "2", "--num-rollout", len(ROLLOUTS), "--save-hf", directory / "hf"]
    return TrainProcess([*flags, *more], directory / "run", {"E2E_NOTES": str(notes)}).finish(500)


@pytest.mark.slow
def test_engines_hold_the_weights_of_both_stages(finished):
    assert re.search(r"weight check: \d+ tensors equal on 1 engines", finished.output())
    differences = finished.scalars("train/train_rollout_logprob_abs_diff")
    assert sorted(differences) == list(ROLLOUTS)
    assert all(0 < difference <= 1e-5 for difference in differences.values()), differences


@pytest.mark.slow
def test_every_stage_feeds_the_engine_through_a_group_of_its_own(finished):
    (log,) = finished.directory.rglob("engine_0.log")
    joined = re.findall(
        r"init custom process group: .*world_size=2, group_name=(\S+?),", log.read_text(errors="replace")
    )
    assert joined == ["slime-pp_0", "slime-pp_1"]


ENGINE_OF_STAGES = ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--sglang-pp-size", "2"]
WAYS = {
    "apart": ["--pipeline-model-parallel-size", "2"],
    "together": ["--pipeline-model-parallel-size", "2", "--colocate"],
    "deltas": DELTAS,
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_of_two_stages_holds_the_weights_of_both_stages_of_the_trainer(task, tmp_path, way):
    of_way = [word.replace("outputs/", f"{tmp_path}/") for word in WAYS[way]]
    more = [
        *task.loop_flags, "--actor-num-gpus-per-node", "2", *ENGINE_OF_STAGES, *of_way, "--num-rollout",
        len(ROLLOUTS), "--check-weight-update-equal",
    ]  # fmt: skip
    process = TrainProcess(more, tmp_path / "run").finish(500)
    assert re.search(r"weight check: \d+ tensors equal on 1 engines", process.output())
    differences = process.scalars("train/train_rollout_logprob_abs_diff")
    assert sorted(differences) == list(ROLLOUTS)
    assert all(0 < difference <= 1e-5 for difference in differences.values()), differences


@pytest.mark.slow
def test_rank_zero_reports_what_the_last_stage_knows(finished):
    for tag in (
        "train/loss",
        "train/grad_norm",
        "train/kl_loss",
        "train/ppo_kl",
        "rollout/advantages",
        "rollout/log_probs",
    ):
        assert sorted(finished.scalars(tag)) == list(ROLLOUTS), tag


@pytest.mark.slow
def test_hooks_run_where_their_data_is(finished, directory):
    notes = {path.name: path.read_text().splitlines() for path in (directory / "notes").iterdir()}
    assert notes == {
        "rank0": ["postprocess"] * len(ROLLOUTS),
        "rank1": ["advantages", "postprocess with advantages"] * len(ROLLOUTS),
    }


@pytest.mark.slow
def test_the_export_is_whole(finished, task, directory):
    shards = sorted((directory / "hf").glob("*.safetensors"))
    exported = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    original = load_file(task.model / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all((exported[name] != original[name]).any() for name in original if "proj" in name)


@pytest.mark.slow
def test_the_checkpoint_goes_on_with_tensor_parallelism_and_a_transport_through_files(finished, flags, directory):
    notes = directory / "notes_of_resume"
    notes.mkdir()
    pushes, dump = directory / "pushes", directory / "resumed.pt"
    more = [
        "--tensor-model-parallel-size", "2", "--num-rollout", len(ROLLOUTS) + 1, "--update-weight-transport", "disk",
        "--update-weight-disk-dir", pushes, "--update-weight-disk-keep-files", "--save-debug-rollout-data", dump,
    ]  # fmt: skip
    process = TrainProcess([*flags, *more], directory / "resumed", {"E2E_NOTES": str(notes)}).finish(500)
    assert list(process.scalars("train/loss")) == [len(ROLLOUTS)]
    assert process.scalars("train/train_rollout_logprob_abs_diff")[len(ROLLOUTS)] <= 1e-5
    # Four pushes before the end of the first start: one before each rollout, and one after the last.
    samples = torch.load(dump, weights_only=True)["samples"]
    assert {tuple(sample["weight_versions"]) for sample in samples} == {("4",)}
    assert sorted(path.name for path in pushes.iterdir()) == [".lock", "weight_v000004", "weight_v000005"]
