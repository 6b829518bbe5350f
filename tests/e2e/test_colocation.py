"""Trainer and engines that share their devices and sleep in turn: every number is that of a run in which nobody sleeps."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.support.models.tiny_task import PLUG_INS, TinyTask
from tests.support.processes.train_process import SavingRun, TrainProcess, checkpoint_tensors

pytestmark = pytest.mark.slow

ROLLOUTS = range(3)
APART = ["--rollout-num-gpus", "2"]
# Two engines, of which one shares the device of the only rank, and the other has one of its own.
SHARED = ["--colocate", "--rollout-num-gpus", "2"]


def run_of(task: TinyTask, directory: Path, *words: object) -> SavingRun:
    checkpoints = directory / "checkpoints"
    flags = [
        *task.rollout_flags, *task.train_flags, "--actor-num-gpus-per-node", "1", "--num-rollout", len(ROLLOUTS),
        "--check-weight-update-equal", "--save", checkpoints, "--load", checkpoints, "--save-interval", "2",
        "--eval-interval", "2", "--eval-prompt-data", "held_out", task.evaluation, *words,
    ]  # fmt: skip
    return SavingRun(TrainProcess(flags, directory), checkpoints)


@pytest.fixture(scope="module")
def apart(task, tmp_path_factory) -> SavingRun:
    return run_of(task, tmp_path_factory.mktemp("apart"), *APART).finish()


@pytest.fixture(scope="module")
def shared(task, tmp_path_factory) -> SavingRun:
    return run_of(task, tmp_path_factory.mktemp("shared"), *SHARED).finish()


def assert_same(run: SavingRun, other: SavingRun) -> None:
    """Every number of training and evaluation, and every tensor of the last checkpoint."""
    for tag in ("train/loss", "train/grad_norm", "train/kl_loss", "rollout/raw_reward", "eval/held_out"):
        assert run.process.scalars(tag) == other.process.scalars(tag) != {}, tag
    iteration = f"iter_{ROLLOUTS[-1]:07d}"
    left, right = (checkpoint_tensors(r.checkpoints / iteration) for r in (run, other))
    assert left.keys() == right.keys() and len(left) > 10
    assert [name for name in left if left[name] != right[name]] == []


def test_sides_that_sleep_in_turn_change_no_number(apart, shared):
    assert_same(shared, apart)
    # One GPU less, and the metrics of both directions in every step but the first wake, which nobody slept before.
    assert sorted(shared.process.scalars("perf/sleep_time")) == list(ROLLOUTS)
    assert sorted(shared.process.scalars("perf/wake_up_time")) == list(ROLLOUTS)
    assert apart.process.scalars("perf/sleep_time") == {}


def test_the_memory_that_left_is_told_once(shared):
    output = shared.process.output()
    found = re.findall(r"actor rank 0: (\S+) MiB of resident memory with weights, (\S+) MiB with nothing", output)
    assert len(found) == 1
    assert len(re.findall("SGLang gives it back on CUDA only", output)) == 1
    assert len(re.findall(r"starting Ray on this machine: 2 logical GPUs", output)) == 1


@pytest.mark.parametrize(
    ("words", "sleeps"), [(["--no-offload-rollout"], True), (["--no-offload-train"], False)], ids=["trainer", "engines"]
)
def test_each_side_may_sleep_alone(task, apart, tmp_path, words, sleeps):
    run = run_of(task, tmp_path, *SHARED, *words).finish()
    assert_same(run, apart)
    assert (run.process.scalars("perf/sleep_time") != {}) == sleeps
    assert ("SGLang gives it back" in run.process.output()) == (not sleeps)


def test_a_run_that_is_killed_while_engines_sleep_goes_on(task, apart, tmp_path):
    killed = run_of(task, tmp_path, *SHARED)
    with killed.process as process:
        process.wait_for_line(r"rollout 1 \(2/3\)", 400)
        process.send_signal_to_driver(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        process.assert_no_process_left(60)
    resumed = run_of(task, tmp_path, *SHARED).finish()
    iteration = f"iter_{ROLLOUTS[-1]:07d}"
    left, right = (checkpoint_tensors(run.checkpoints / iteration) for run in (resumed, apart))
    assert [name for name in right if left[name] != right[name]] == []


# Holds the first training of a run until the test lets it go on.
HOLD = """
import pathlib, time

def hold(args, rollout_id, data):
    if rollout_id == 0:
        print("holding the training", flush=True)
        deadline = time.monotonic() + 600
        while not pathlib.Path({go!r}).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
"""


@pytest.mark.parametrize("moment", ["asleep", "generating"])
def test_an_engine_that_is_killed_is_replaced_when_the_others_wake(task, tmp_path, moment):
    """Asleep, it is replaced for the next push; generating, it gets the last weights of a trainer that sleeps."""
    go = tmp_path / "go"
    (tmp_path / "hold.py").write_text(HOLD.format(go=str(go)))
    dumps = tmp_path / "dumps"
    held = {
        "asleep": ["--rollout-data-postprocess-path", f"{tmp_path / 'hold.py'}:hold"],
        "generating": ["--custom-generate-function-path", f"{PLUG_INS}:marked_generate"],
    }[moment]
    flags = [
        *task.rollout_flags, *task.train_flags, "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--colocate",
        "--num-rollout", "2", "--use-fault-tolerance", "--rollout-health-check-interval", "1",
        "--rollout-health-check-timeout", "900", "--save-debug-rollout-data", dumps / "{rollout_id}.pt", *held,
    ]  # fmt: skip
    with TrainProcess(flags, tmp_path, {"E2E_HOLD_ROLLOUT": "1"}) as process:
        process.wait_for_line("holding the training" if moment == "asleep" else "holding rollout 1", 600)
        (scheduler,) = process.schedulers()
        os.kill(scheduler, signal.SIGKILL)
        process.wait_for_line("a new server starts in its place", 300)
        if moment == "asleep":
            assert not process.schedulers(), "its device is the trainer's"
        go.touch()
        process.wait_for_line("engine 0 has a new server", 600)
        if moment == "generating":
            process.wait_for_line("engine 0: weights of version 2", 600)
        process.wait_for_success(600)
        process.assert_no_process_left()
    assert "Traceback" not in process.output()
    for rollout_id in range(2):
        samples = torch.load(dumps / f"{rollout_id}.pt", weights_only=True)["samples"]
        assert {version for sample in samples for version in sample["weight_versions"]} == {str(rollout_id + 1)}
    differences = process.scalars("train/train_rollout_logprob_abs_diff")
    assert sorted(differences) == [0, 1] and all(0 < value <= 1e-5 for value in differences.values())
