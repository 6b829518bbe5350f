"""The whole loop with a trainer of two pipeline stages, and its checkpoint in another layout."""

from __future__ import annotations

import re

import pytest
from safetensors.torch import load_file

from tests.support.train_process import TrainProcess

ROLLOUTS = range(3)
PLUG_INS = "tests.support.plug_ins"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def flags(task, directory):
    return [
        *task.loop_flags, "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1", "--check-weight-update-equal",
        "--custom-advantage-function-path", f"{PLUG_INS}.noted_advantages",
        "--rollout-data-postprocess-path", f"{PLUG_INS}.noted_postprocess",
        "--save", directory / "checkpoints", "--load", directory / "checkpoints", "--save-interval", "3",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def finished(flags, directory):
    notes = directory / "notes"
    notes.mkdir()
    more = ["--pipeline-model-parallel-size", "2", "--num-rollout", len(ROLLOUTS), "--save-hf", directory / "hf"]
    with TrainProcess([*flags, *more], directory / "run", {"E2E_NOTES": str(notes)}) as process:
        process.wait_for_success(500)
        process.assert_no_process_left()
    return process


@pytest.mark.slow
def test_engines_hold_the_weights_of_both_stages(finished):
    assert re.search(r"weight check: \d+ tensors equal on 1 engines", finished.output())
    differences = finished.scalars("train/train_rollout_logprob_abs_diff")
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
def test_the_checkpoint_goes_on_with_tensor_parallelism(finished, flags, directory):
    notes = directory / "notes_of_resume"
    notes.mkdir()
    more = ["--tensor-model-parallel-size", "2", "--num-rollout", len(ROLLOUTS) + 1]
    with TrainProcess([*flags, *more], directory / "resumed", {"E2E_NOTES": str(notes)}) as process:
        process.wait_for_success(500)
        process.assert_no_process_left()
    assert list(process.scalars("train/loss")) == [len(ROLLOUTS)]
    assert process.scalars("train/train_rollout_logprob_abs_diff")[len(ROLLOUTS)] <= 1e-5
