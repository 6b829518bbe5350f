"""Every way in which weights travel, in whole runs: engines hold what the trainer has, and all runs learn the same."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import pytest

from slime.utils.checkpoint_directory import iteration_directory
from tests.support.models.tiny_task import TinyTask
from tests.support.processes.quickstart import WEIGHT_COMMANDS
from tests.support.processes.train_process import SavingRun, TrainProcess, checkpoint_tensors
from tests.support.tables.metrics_page import unnamed

pytestmark = pytest.mark.slow

ROLLOUTS = range(3)


THROUGH_DISK = ["--update-weight-transport", "disk", "--update-weight-disk-dir", "outputs/pushes"]
DELTAS = [
    *THROUGH_DISK, "--update-weight-mode", "delta", "--update-weight-delta-encoding", "xor",
    "--update-weight-local-checkpoint-dir", "outputs/local",
]  # fmt: skip
WAYS = {
    "shared handles": ["--colocate", "--rollout-num-gpus", "1"],
    # One of the engines is beside the rank's device.
    "shared handles and a process group": ["--colocate"],
    "disk, on shared devices": [*THROUGH_DISK, "--colocate"],
    # Of the page on the toy run: all files, copied ones, and what changed in either encoding.
    **{row: shlex.split(words.removeprefix(" -- ")) for row, words in WEIGHT_COMMANDS.items()},
}


def run_of(task: TinyTask, directory: Path, words: list[str]) -> SavingRun:
    """The run of `words`, whose directories below `outputs` lie in `directory`."""
    checkpoints = directory / "checkpoints"
    words = [word.replace("outputs/", f"{directory}/") for word in words]
    flags = [
        *task.loop_flags, "--num-rollout", len(ROLLOUTS), "--check-weight-update-equal", "--save", checkpoints,
        "--load", checkpoints, "--save-interval", "1", "--sglang-log-level", "info", *words,
    ]  # fmt: skip
    return SavingRun(TrainProcess(flags, directory), checkpoints)


@pytest.fixture(scope="module")
def process_group(task, tmp_path_factory) -> SavingRun:
    return run_of(task, tmp_path_factory.mktemp("process_group"), []).finish()


def assert_engines_held_the_weights(run: SavingRun, engines: int = 2) -> None:
    output = run.process.output()
    assert len(re.findall(rf"weight check: \d+ tensors equal on {engines} engines", output)) == 1
    differences = run.process.scalars("train/train_rollout_logprob_abs_diff")
    assert differences and all(value <= 1e-5 for value in differences.values())


def brought_by(run: SavingRun) -> list[set[str]]:
    """Of each engine: what fed it."""
    logs = sorted(run.process.event_directory.glob("logs/engine_*.log"))
    return [
        set(re.findall(r"POST /update_weights_from_(tensor|distributed) ", log.read_text(errors="replace")))
        for log in logs
    ]


def assert_same_end(run: SavingRun, other: SavingRun) -> None:
    left, right = (checkpoint_tensors(iteration_directory(r.checkpoints, ROLLOUTS[-1])) for r in (run, other))
    assert left.keys() == right.keys() and len(left) > 10
    assert [name for name in left if left[name] != right[name]] == []


def test_the_process_group_gives_engines_what_the_trainer_has(process_group):
    assert_engines_held_the_weights(process_group)
    assert brought_by(process_group) == [{"distributed"}, {"distributed"}]
    assert sorted(process_group.process.scalars("train/loss")) == list(ROLLOUTS)


@pytest.mark.parametrize("way", WAYS)
def test_every_other_way_learns_the_same(task, process_group, tmp_path, way):
    run = run_of(task, tmp_path, WAYS[way]).finish()
    fed = {"shared handles": [{"tensor"}], "shared handles and a process group": [{"tensor"}, {"distributed"}]}
    assert brought_by(run) == fed.get(way, [set(), set()])
    assert_engines_held_the_weights(run, len(brought_by(run)))
    for tag in ("train/loss", "train/grad_norm", "rollout/raw_reward"):
        assert run.process.scalars(tag) == process_group.process.scalars(tag) != {}, tag
    assert_same_end(run, process_group)
    # The push before the first rollout belongs to no step.
    density = run.process.scalars("perf/update_weights_density")
    assert sorted(density) == (list(ROLLOUTS) if "delta" in WAYS[way] else [])
    assert all(0 < share <= 1 for share in density.values())
    assert unnamed(run.process.scalar_tags()) == []


def test_ranks_of_two_stages_give_all_weights_to_the_engines_on_their_devices(task, tmp_path):
    """Two nodes, by the flags; both are this machine. So each rank shares the tensors of both stages."""
    shared = ["--colocate", "--rollout-num-gpus", "2", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1"]
    run = run_of(task, tmp_path, [*shared, "--pipeline-model-parallel-size", "2"]).finish()
    assert brought_by(run) == [{"tensor"}, {"tensor"}]
    assert_engines_held_the_weights(run)
    assert sorted(run.process.scalars("train/loss")) == list(ROLLOUTS)


def test_a_killed_run_that_pushes_deltas_goes_on_with_new_ones(task, process_group, tmp_path):
    """What it left, in both directories, is of another trainer's life."""
    killed = run_of(task, tmp_path, DELTAS)
    with killed.process as process:
        process.wait_for_line(r"rollout 1 \(2/3\)", 400)
        process.send_signal_to_driver(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        process.assert_no_process_left(60)
    assert sorted(path.name for path in (tmp_path / "pushes").glob("weight_v*")) != []
    resumed = run_of(task, tmp_path, DELTAS).finish()
    assert_engines_held_the_weights(resumed)
    assert_same_end(resumed, process_group)
