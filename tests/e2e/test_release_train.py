"""A trainer that ends while engines generate: every number is that of a run in which it stays.

As a rule bit for bit. On a machine with many more processes than cores a run differed once by what float32 rounds, so that much
is allowed; an optimizer, a learning rate or a reference that was lost changes numbers by a thousand times as much.
The number of threads does not: one and two train this model on given rollouts to the same bits.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from slime.utils.checkpoint_directory import iteration_directory
from tests.support.models.tiny_task import PLUG_INS, TinyTask
from tests.support.processes.train_process import SavingRun, TrainProcess, checkpoint_tensors

pytestmark = pytest.mark.slow

ROLLOUTS = range(3)
LAST = ROLLOUTS[-1]
# Of the largest element of a tensor, and of a metric; a step of the optimizer moves weights by 3e-3 of it.
ROUNDING = 5e-6


def run_of(task: TinyTask, directory: Path, *words: object, env: dict[str, str] | None = None) -> SavingRun:
    checkpoints = directory / "checkpoints"
    flags = [
        # The refreshed reference is part of the checkpoint that the next ranks start from.
        *task.rollout_flags, *task.train_flags, "--ref-update-interval", "2", "--actor-num-gpus-per-node", "1",
        "--num-rollout", len(ROLLOUTS), "--save", checkpoints, "--load", checkpoints, "--save-interval", "1",
        "--update-weight-transport", "disk", "--update-weight-disk-dir", directory / "pushes", "--dump-details",
        directory / "details", *words,
    ]  # fmt: skip
    return SavingRun(TrainProcess(flags, directory, env or {}), checkpoints)


@pytest.fixture(scope="module")
def stays(task, tmp_path_factory) -> SavingRun:
    return run_of(task, tmp_path_factory.mktemp("stays"), "--rollout-num-gpus", "2").finish()


def assert_same_end(run: SavingRun, other: SavingRun) -> None:
    left, right = (checkpoint_tensors(iteration_directory(r.checkpoints, LAST)) for r in (run, other))
    assert left.keys() == right.keys() and len(left) > 10
    for name in left:
        if left[name] != right[name]:
            first, second = (np.frombuffer(tensors[name], dtype=np.float32) for tensors in (left, right))
            assert np.abs(first - second).max() <= ROUNDING * np.abs(first).max(), name
    versions = [iteration_directory(r.checkpoints, LAST) / "weight_version.json" for r in (run, other)]
    assert len({json.loads(path.read_text())["weight_version"] for path in versions}) == 1


@pytest.mark.parametrize("colocate", [False, True], ids=["apart", "shared"])
def test_a_trainer_that_ends_in_every_step_changes_no_number(task, stays, tmp_path, colocate):
    copies = ["--update-weight-local-checkpoint-dir", tmp_path / "local"]
    place = ["--colocate"] if colocate else copies
    words = ["--release-train", "--rollout-num-gpus", "2", "--check-weight-update-equal", *place]
    run = run_of(task, tmp_path, *words).finish()
    for tag in ("train/loss", "train/grad_norm", "train/kl_loss", "train/lr-pg_0", "rollout/raw_reward"):
        assert sorted(stays.process.scalars(tag)) == list(ROLLOUTS), tag
        assert run.process.scalars(tag) == pytest.approx(stays.process.scalars(tag), rel=ROUNDING, abs=0), tag
    assert_same_end(run, stays)
    for tag in ("perf/start_trainer_time", "perf/end_trainer_time"):
        seconds = run.process.scalars(tag)
        assert sorted(seconds) == list(ROLLOUTS) and all(value > 0 for value in seconds.values()), tag
    # Only the last files are there: those of engines that would come back.
    assert [path.name for path in (tmp_path / "pushes").glob("weight_v*")] == [f"weight_v{len(ROLLOUTS) + 1:06d}"]
    assert "training ranks started again" not in stays.process.output()


def ranks(process: TrainProcess) -> list[str]:
    return [command for command in process.processes().values() if "RankProcess" in command]


def test_an_engine_that_comes_back_finds_its_weights_while_no_trainer_lives_and_a_killed_run_goes_on(
    task, stays, tmp_path
):
    words = [
        "--release-train", "--rollout-num-gpus", "2", "--use-fault-tolerance", "--rollout-health-check-interval", "1",
        "--rollout-health-check-timeout", "900", "--custom-generate-function-path", f"{PLUG_INS}:marked_generate",
    ]  # fmt: skip
    held = run_of(task, tmp_path, *words, env={"E2E_HOLD_ROLLOUT": "1"})
    with held.process as process:
        process.wait_for_line("actor weights", 400)
        assert ranks(process) != []
        process.wait_for_line("holding rollout 1", 400)
        assert ranks(process) == []
        os.kill(min(process.schedulers()), signal.SIGKILL)
        process.wait_for_line(r"engine \d: weights of version 2", 400)
        assert ranks(process) == []
        (process.directory / "go").touch()
        process.wait_for_line(r"rollout 1 \(2/3\)", 400)
        process.send_signal_to_driver(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        process.assert_no_process_left(60)
    samples = torch.load(tmp_path / "details" / "rollout_data" / "1.pt", weights_only=True)["samples"]
    assert {version for sample in samples for version in sample["weight_versions"]} == {"2"}
    assert_same_end(run_of(task, tmp_path, *words).finish(), stays)
