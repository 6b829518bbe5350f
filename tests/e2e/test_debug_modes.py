"""Rollouts alone, and training alone on their dump: the same numbers in every parallel layout."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.models.tiny_task import ROLLOUT_BATCH_SIZE, SAMPLES_PER_PROMPT
from tests.support.processes.train_process import TrainProcess

ROLLOUTS = range(2)
ONE_RANK = ["--actor-num-gpus-per-node", "1"]
TWO_RANKS = ["--actor-num-gpus-per-node", "2"]
LAYOUTS = {
    "two data-parallel ranks": TWO_RANKS,
    "two tensor-parallel ranks": [*TWO_RANKS, "--tensor-model-parallel-size", "2"],
    "two pipeline stages": [*TWO_RANKS, "--pipeline-model-parallel-size", "2"],
    "two context-parallel ranks": [*TWO_RANKS, "--context-parallel-size", "2"],
}
NORM = "norm-{role}-{rollout_id}-{step_id}.json"
# What is added up over ranks before and beside the loss.
OBJECTIVE = ["--normalize-advantages", "--use-tis", "--get-mismatch-metrics"]


@pytest.fixture(scope="module")
def rollouts(task, tmp_path_factory):
    """`--debug-rollout-only` with one engine; the dumps of its rollouts."""
    directory = tmp_path_factory.mktemp("rollout_only")
    flags = [
        *task.rollout_flags, "--debug-rollout-only", "--rollout-num-gpus", "1", "--num-rollout", len(ROLLOUTS),
        "--save-debug-rollout-data", directory / "{rollout_id}.pt",
    ]  # fmt: skip
    process = TrainProcess(flags, directory / "run").finish(200)
    return process, directory


def training(task, dumps, directory, flags):
    """Training on those dumps, with one dump of the train data per rollout."""
    flags = [
        "--hf-checkpoint", task.model, *task.train_flags, *flags, *OBJECTIVE, "--num-rollout", len(ROLLOUTS),
        "--rollout-batch-size", ROLLOUT_BATCH_SIZE, "--n-samples-per-prompt", SAMPLES_PER_PROMPT,
        "--load-debug-rollout-data", dumps / "{rollout_id}.pt",
        "--save-debug-train-data", directory / "train_{rollout_id}.pt",
    ]  # fmt: skip
    return TrainProcess(flags, directory)


@pytest.fixture(scope="module")
def one_rank(task, rollouts, tmp_path_factory):
    directory = tmp_path_factory.mktemp("one_rank")
    return training(task, rollouts[1], directory, [*ONE_RANK, "--ci-save-grad-norm", directory / NORM]).finish(200)


@pytest.fixture(scope="module", params=LAYOUTS)
def other(request, task, rollouts, one_rank, tmp_path_factory):
    flags = [*LAYOUTS[request.param], "--ci-load-grad-norm", one_rank.directory / NORM]
    return training(task, rollouts[1], tmp_path_factory.mktemp("other"), flags).finish(200)


def test_rollouts_alone_start_no_training_rank(rollouts):
    process, _ = rollouts
    assert sorted(process.scalars("rollout/raw_reward")) == list(ROLLOUTS)
    assert not any(tag.startswith("train/") for tag in process.scalar_tags())
    assert "weights version" not in process.output()
    assert "rollout 1 (2/2) | reward" in process.output()


@pytest.mark.slow
def test_training_alone_starts_no_engine(one_rank):
    assert "engines are ready" not in one_rank.output()
    assert not list(one_rank.event_directory.rglob("engine_*.log"))
    assert sorted(one_rank.scalars("train/loss")) == list(ROLLOUTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tag",
    ["train/loss", "train/kl_loss", "train/entropy_loss", "train/grad_norm", "train/tis", "train/mismatch_k3",
     "rollout/advantages"],
)  # fmt: skip
def test_every_layout_learns_the_same(one_rank, other, tag):
    one, found = one_rank.scalars(tag), other.scalars(tag)
    # The first KL is zero in all of them. Whitened advantages cancel: the loss is small beside its terms, which are about 1.
    assert found == pytest.approx(one, rel=1e-5, abs=2e-6 if tag == "train/loss" else 1e-7)
    assert one[1] != 0


@pytest.mark.slow
def test_a_gradient_norm_that_is_not_that_of_the_earlier_run_ends_it(task, rollouts, one_rank, tmp_path):
    earlier = one_rank.directory / "norm-actor-1-0.json"
    norm = json.loads(earlier.read_text())
    assert norm == pytest.approx(one_rank.scalars("train/grad_norm")[1])
    (tmp_path / earlier.name).write_text(str(norm + 0.1))
    (tmp_path / "norm-actor-0-0.json").write_text((one_rank.directory / "norm-actor-0-0.json").read_text())
    with training(task, rollouts[1], tmp_path, [*ONE_RANK, "--ci-load-grad-norm", tmp_path / NORM]) as process:
        assert process.wait(200) == 1
        process.assert_no_process_left()
    assert f"rollout 1, step 0: train/grad_norm is {norm:.6g}, and was {norm + 0.1:.6g}" in process.output()


@pytest.mark.slow
def test_the_worst_tokens_are_told_once_per_rollout(one_rank, other):
    for process in (one_rank, other):
        assert process.scalars("train/whiten_empty") == dict.fromkeys(ROLLOUTS, 0.0)
        told = [
            line.split("tokens with")[0] for line in process.output().splitlines() if "the largest mismatch" in line
        ]
        assert ["rollout 0" in told[0], "rollout 1" in told[1]] == [True, True] and len(told) == 2
        assert process.output().count("response token") == 20


@pytest.mark.slow
def test_the_train_dump_loads_without_pickled_code(one_rank, other, rollouts, request):
    whole, dump = (torch.load(run.directory / "train_1.pt", weights_only=True) for run in (one_rank, other))
    generated = torch.load(rollouts[1] / "1.pt", weights_only=True)["samples"]
    for samples in (whole["samples"], dump["samples"]):
        assert [sample["sample_indices"] for sample in samples] == [sample["index"] for sample in generated]
        for sample, origin, sample_of_one_rank in zip(samples, generated, whole["samples"], strict=True):
            assert torch.equal(sample["tokens"].cpu(), origin["tokens"])
            assert len(sample["ref_log_probs"]) == len(sample["advantages"]) == origin["response_length"]
            torch.testing.assert_close(sample["ref_log_probs"], sample_of_one_rank["ref_log_probs"], rtol=0, atol=1e-5)
    assert len(whole["dp_shards"]) == 1
    assert len(dump["dp_shards"]) == (2 if "data-parallel" in request.node.callspec.id else 1)
