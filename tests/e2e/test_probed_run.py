"""A run with the memory probe: every number is that of a run without it; and what a run says whose memory does not suffice."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.support.models.tiny_task import PLUG_INS, TinyTask
from tests.support.processes.train_process import SavingRun, TrainProcess, checkpoint_tensors

pytestmark = pytest.mark.slow

ROLLOUTS = range(2)
TWO_RANKS = ["--actor-num-gpus-per-node", "2", "--rollout-max-prompt-len", "64"]


def run_of(task: TinyTask, directory: Path, *words: object) -> SavingRun:
    checkpoints = directory / "checkpoints"
    flags = [
        *task.rollout_flags, *task.train_flags, *TWO_RANKS, "--colocate", "--rollout-num-gpus", "1", "--num-rollout",
        len(ROLLOUTS), "--check-weight-update-equal", "--save", checkpoints, "--load", checkpoints, "--save-interval", "2",
        *words,
    ]  # fmt: skip
    return SavingRun(TrainProcess(flags, directory), checkpoints)


def test_a_probe_changes_no_number(task, tmp_path):
    plain, probed = (
        run_of(task, tmp_path / "plain").finish(),
        run_of(task, tmp_path / "probed", "--memory-probe").finish(),
    )
    for tag in ("train/loss", "train/grad_norm", "train/kl_loss", "train/lr-pg_0", "rollout/raw_reward"):
        assert probed.process.scalars(tag) == plain.process.scalars(tag) != {}, tag
    iteration = f"iter_{ROLLOUTS[-1]:07d}"
    left, right = (checkpoint_tensors(run.checkpoints / iteration) for run in (probed, plain))
    assert left.keys() == right.keys() and len(left) > 10
    assert [name for name in left if left[name] != right[name]] == []
    # 256 tokens hold three samples of 64 + 12, and one more of 28.
    line = (
        r"memory probe of the actor, 2 micro-batches of 256 tokens \(4 samples, the longest 76\): rank \d: the device counts "
        r"no peaks of tensors; planned \S+ GiB; free at least \S+ of \S+ GiB on the device of a rank"
    )
    assert len(re.findall(line, probed.process.output())) == 1
    assert "memory probe" not in plain.process.output()


def test_a_run_ends_at_once_where_the_memory_of_one_rank_does_not_suffice(task, tmp_path):
    flags = [
        *task.rollout_flags, *task.train_flags, *TWO_RANKS, "--debug-train-only", "--num-rollout", 2, "--memory-probe",
        "--custom-megatron-init-path", f"{PLUG_INS}:without_memory_on_rank_1",
    ]  # fmt: skip
    began = time.monotonic()
    with TrainProcess(flags, tmp_path) as process:
        assert process.wait(400) == 2
        process.assert_no_process_left(60)
    assert time.monotonic() - began < 500
    output = process.output()
    said = re.findall(
        r"--memory-probe: memory ran out on actor rank 1 in a step, with 2 micro-batches of 256 tokens.*", output
    )
    assert len(said) == 1 and "Lower --max-tokens-per-gpu; or give a larger --context-parallel-size" in said[0]
    assert said[0].endswith("(CUDA out of memory. Tried to allocate 9.00 GiB)")
    assert "Traceback" not in output
