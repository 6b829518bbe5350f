"""Whole runs whose batches travel from the manager's memory to that of two ranks: they learn as others do, and keep nothing."""

from __future__ import annotations

import pytest

from slime.utils.checkpoint_directory import iteration_directory
from tests.support.processes.train_process import TrainProcess, checkpoint_tensors

pytestmark = pytest.mark.slow

ROLLOUTS = range(4)
BY_NIXL = ["--rollout-data-transport", "nixl"]


def run(task, directory, *words, program="train.py", **given) -> TrainProcess:
    flags = [
        *task.loop_flags, "--num-rollout", len(ROLLOUTS), "--actor-num-gpus-per-node", "2",
        "--save", directory / "checkpoints", "--save-interval", len(ROLLOUTS), *words,
    ]  # fmt: skip
    return TrainProcess(flags, directory, program=program, **given)


def test_ranks_learn_the_same_and_nothing_of_a_trained_batch_is_kept(task, tmp_path):
    by_store = run(task, tmp_path / "store").finish()
    counted = ["--custom-rollout-log-function-path", "tests.support.processes.plug_ins.count_shards"]
    by_nixl = run(task, tmp_path / "nixl", *BY_NIXL, *counted)
    with by_nixl as process:
        process.wait_for_line(r"rollout 1 \(2/4\)", 400)
        listening = process.listening()
        process.wait_for_success(400)
    by_nixl.assert_no_process_left()
    assert listening and {one.address for one in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    # A shard of each rank, and those of the rollout before until the manager has heard that they are not wanted any more.
    kept = by_nixl.scalars("rollout/shards_kept")
    assert sorted(kept) == list(ROLLOUTS) and kept[0] == 2 and max(kept.values()) <= 4
    for tag in ("train/loss", "train/grad_norm", "rollout/raw_reward"):
        assert by_nixl.scalars(tag) == by_store.scalars(tag) != {}, tag
    left, right = (
        checkpoint_tensors(iteration_directory(tmp_path / name / "checkpoints", ROLLOUTS[-1]))
        for name in ("nixl", "store")
    )
    assert left.keys() == right.keys() and [name for name in left if left[name] != right[name]] == []
    assert "NIXL" not in by_nixl.output() and "UCX" not in by_nixl.output()


def test_rollouts_wait_in_the_managers_memory_while_others_are_trained(task, tmp_path):
    counted = ["--custom-rollout-log-function-path", "tests.support.processes.plug_ins.count_shards"]
    ahead = ["--async-buffer-size", "2"]
    process = run(task, tmp_path, *BY_NIXL, *counted, *ahead, program="train_async.py").finish()
    assert sorted(process.scalars("train/loss")) == list(ROLLOUTS)
    # Of the rollout that is trained, two ahead, and one that the manager has not heard of.
    kept = process.scalars("rollout/shards_kept")
    assert sorted(kept) == list(ROLLOUTS) and max(kept.values()) <= 8
