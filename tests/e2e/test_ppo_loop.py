"""PPO on real parts: the critic learns alone in the first rollout, then both do; checkpoints of both, and a resume."""

from __future__ import annotations

import math
import re
import shutil

import pytest
import torch

from tests.support.models.tiny_checkpoint import make_tiny_checkpoint
from tests.support.processes.train_process import TrainProcess, checkpoint_tensors

KL_COEF = 0.1


@pytest.fixture(scope="module")
def flags(task, tmp_path_factory):
    reference = make_tiny_checkpoint(tmp_path_factory.mktemp("reference") / "model", seed=5)
    return [
        *task.rollout_flags, "--model-args-from-hf", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "256",
        "--data-pad-size-multiplier", "8", "--lr", "1e-3", "--lr-decay-style", "constant",
        "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--advantage-estimator", "ppo",
        "--num-critic-only-steps", "1", "--kl-coef", str(KL_COEF), "--ref-load", str(reference), "--save-interval", "10",
        "--initial-megatron-checkpoint", str(task.model),
        "--rollout-data-postprocess-path", "tests.support.processes.plug_ins.masked_first_token",
    ]  # fmt: skip


def run(flags, directory, rollouts):
    checkpoints = directory / "checkpoints"
    more = ["--num-rollout", rollouts, "--save", checkpoints, "--load", checkpoints]
    more += ["--save-debug-train-data", directory / "dumps" / "{rollout_id}.pt"]
    return TrainProcess([*flags, *more], directory).finish()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("ppo")


@pytest.fixture(scope="module")
def finished(flags, directory):
    return run(flags, directory, 2)


@pytest.fixture(scope="module")
def dumps(finished, directory):
    return [torch.load(directory / "dumps" / f"{i}.pt", weights_only=True)["samples"] for i in range(2)]


def test_the_critic_learns_in_every_rollout_and_the_actor_from_the_second_on(finished):
    for name in ("value_loss", "value_clipfrac", "grad_norm", "lr-pg_0"):
        assert sorted(finished.scalars(f"train/critic-{name}")) == [0, 1], name
    for name in ("loss", "pg_loss", "grad_norm", "lr-pg_0"):
        assert sorted(finished.scalars(f"train/{name}")) == [1], name
    values = finished.scalars("rollout/values")
    assert values[0] == 0 and values[1] != 0
    assert "value_loss" in finished.output()


def test_a_rollout_of_the_critic_alone_leaves_the_actor_as_it_was(dumps, task):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    for sample in dumps[1]:
        with torch.no_grad():
            logits = model(sample["tokens"][None]).logits[0, :-1]
        log_probs = torch.log_softmax(logits, -1).gather(1, sample["tokens"][1:, None])[:, 0]
        torch.testing.assert_close(sample["log_probs"], log_probs[-sample["response_lengths"] :], atol=1e-4, rtol=1e-4)


def test_l8_the_critic_learns_returns_that_hold_the_kl_penalty(finished, dumps):
    for sample in dumps[0]:
        rewards = [-KL_COEF * kl for kl in sample["kl"].tolist()]
        rewards[-1] += sample["rewards"]
        expected = [math.fsum(rewards[t:]) for t in range(len(rewards))]
        assert sample["returns"].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert sample["kl"].abs().max() > 0.01


def test_the_critic_trains_on_the_masks_that_a_user_edited(finished, dumps):
    # Its values are zero in the first rollout, so its loss is made of nothing but the returns.
    squares = []
    for sample in dumps[0]:
        mask = sample["loss_masks"]
        assert mask.tolist() == [0] + [1] * (len(mask) - 1)
        squares.append((sample["returns"] ** 2 * mask).sum().item() / max(len(mask) - 1, 1))
    assert finished.scalars("train/critic-value_loss")[0] == pytest.approx(sum(squares) / len(squares), rel=1e-5)


def test_both_checkpoints_are_there(finished, directory):
    for place in (directory / "checkpoints", directory / "checkpoints" / "critic"):
        assert (place / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
        assert (place / "iter_0000001" / "metadata.json").is_file()


@pytest.mark.slow
def test_models_and_engines_that_take_turns_on_one_device_change_no_number(finished, directory, flags, tmp_path):
    shared = run([*flags, "--colocate"], tmp_path, 2)
    for name in (
        "train/critic-value_loss",
        "train/critic-grad_norm",
        "train/loss",
        "train/grad_norm",
        "rollout/values",
    ):
        assert shared.scalars(name) == finished.scalars(name) != {}, name
    # Both models sleep while the engine generates, and wake when it is done.
    for phase in ("sleep", "wake_up", "critic_sleep", "critic_wake_up"):
        assert sorted(shared.scalars(f"perf/{phase}_time")) == [0, 1], phase
    for role in ("actor", "critic"):
        assert re.search(rf"{role} rank 0: \S+ MiB of resident memory with \w+, \S+ MiB with nothing", shared.output())
    for place in ("", "critic"):
        left, right = (
            checkpoint_tensors(root / "checkpoints" / place / "iter_0000001") for root in (tmp_path, directory)
        )
        assert left.keys() == right.keys() and len(left) > 10
        assert [name for name in left if left[name] != right[name]] == [], place


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_one_that_was_never_interrupted(finished, directory, flags, tmp_path):
    shutil.copytree(directory / "checkpoints", tmp_path / "resumed" / "checkpoints")
    resumed, whole = run(flags, tmp_path / "resumed", 3), run(flags, tmp_path / "whole", 3)
    assert resumed.output().count(", resuming") == 2
    for name in ("critic-value_loss", "critic-grad_norm", "loss", "grad_norm"):
        assert resumed.scalars(f"train/{name}") == {2: whole.scalars(f"train/{name}")[2]}, name
    assert resumed.scalars("rollout/values") == {2: whole.scalars("rollout/values")[2]}


@pytest.mark.slow
def test_checkpoints_of_different_iterations_are_refused(finished, directory, flags, tmp_path):
    checkpoints = shutil.copytree(directory / "checkpoints", tmp_path / "checkpoints")
    (checkpoints / "critic" / "iter_0000001").rename(checkpoints / "critic" / "iter_0000000")
    words = [*flags, "--num-rollout", "3", "--load", checkpoints]
    with TrainProcess(words, tmp_path / "run") as process:
        assert process.wait(60) == 2
    assert "the actor resumes at iteration 1" in process.output() and "it has iter_0000000" in process.output()
