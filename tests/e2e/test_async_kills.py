"""Asynchronous runs that are killed at events of chance, and started again with the same command until they are through."""

from __future__ import annotations

import random
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.models.tiny_task import ROLLOUT_BATCH_SIZE, SAMPLES_PER_PROMPT, TinyTask
from tests.support.processes.train_process import TrainProcess
from tests.support.processes.waiting import wait_until

ROLLOUTS = range(12)
PROMPTS = 14
BOUND = 2
KILLS = 2

pytestmark = pytest.mark.slow

LOOPS = {
    "rollouts in turn": ["--async-buffer-size", "2"],
    "generation that never stops": [
        "--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout",
        # Two groups more than a rollout takes are in flight.
        "--sglang-server-concurrency", "12",
    ],
}  # fmt: skip


def run_loop(task: TinyTask, directory: Path, flags: list[str]) -> TrainProcess:
    checkpoints = directory / "checkpoints"
    return TrainProcess(
        [
            *task.loop_flags, "--num-rollout", len(ROLLOUTS), "--save", checkpoints, "--load", checkpoints,
            "--save-interval", "1", "--keep-last", "2", "--max-weight-staleness", BOUND, "--update-weights-in-flight",
            "--rollout-max-response-len", 100, "--max-tokens-per-gpu", 512,
            "--save-debug-rollout-data", directory / "{rollout_id}.pt", *flags,
        ],
        directory, program="train_async.py",
    )  # fmt: skip


def last_checkpoint(process: TrainProcess) -> int:
    pointer = process.directory / "checkpoints/latest_checkpointed_iteration.txt"
    return int(pointer.read_text()) if pointer.is_file() else -1


def done_of(rollout_id: int, process: TrainProcess) -> dict[str, bool]:
    """What is done of a rollout, in its order. Others go on beside it: each event is some moment of theirs."""
    checkpoints = process.directory / "checkpoints"
    return {
        "samples": (process.directory / f"{rollout_id}.pt").is_file(),
        "a checkpoint that is begun": any(checkpoints.glob(f"*iter_{rollout_id:07d}*")),
        "data state": (checkpoints / f"rollout/global_dataset_state_dict_{rollout_id}").is_dir(),
        "a checkpoint": last_checkpoint(process) >= rollout_id,
        "all": re.search(rf"rollout {rollout_id} \(", process.output()) is not None,
    }


def kill_at_some_event(process: TrainProcess, chance: random.Random) -> None:
    """Of a rollout of which nothing is there when the run starts."""
    drawn_before = max((int(dump.stem) for dump in process.directory.glob("*.pt")), default=-1)
    rollout_id = drawn_before + chance.randint(1, 2)
    event = chance.choice(list(done_of(rollout_id, process)))
    print(f"killed when of rollout {rollout_id} this is done: {event}")
    # Without any checkpoint the next start would be another run.
    wait_until(
        lambda: (last_checkpoint(process) >= 0 and done_of(rollout_id, process)[event]) or process.has_ended(), 300
    )
    process.send_signal_to_driver(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL, process.output()[-4000:]
    process.assert_no_process_left(60)


@pytest.fixture(scope="module", params=LOOPS)
def survived(request, task, tmp_path_factory) -> tuple[TrainProcess, list[list[dict]]]:
    """The last process, and the samples that each rollout was trained on in the end."""
    directory = tmp_path_factory.mktemp("kills")
    chance = random.Random()
    for _ in range(KILLS):
        with run_loop(task, directory, LOOPS[request.param]) as process:
            kill_at_some_event(process, chance)
    process = run_loop(task, directory, LOOPS[request.param]).finish()
    return process, [torch.load(directory / f"{r}.pt", weights_only=True)["samples"] for r in ROLLOUTS]


def test_counted_from_the_checkpoints_no_prompt_is_lost_and_none_comes_twice(survived):
    _, rollouts = survived
    groups = [
        samples[first]["group_index"] for samples in rollouts for first in range(0, len(samples), SAMPLES_PER_PROMPT)
    ]
    assert len(groups) == len(ROLLOUTS) * ROLLOUT_BATCH_SIZE and len(set(groups)) == len(groups)
    # What is in flight at the end is all that may be missing among those that were drawn.
    assert max(groups) < len(groups) + 8
    seen = Counter(samples[first]["metadata"]["number"] for samples in rollouts for first in range(0, len(samples), 4))
    assert set(seen) == set(range(PROMPTS)) and max(seen.values()) - min(seen.values()) <= 2


def test_the_bound_on_staleness_holds_over_every_start(survived):
    _, rollouts = survived
    for rollout_id, samples in enumerate(rollouts):
        # A push before the first rollout and one behind each, whoever was killed meanwhile.
        ages = [rollout_id + 1 - int(version) for s in samples for version, _, _ in s["weight_version_spans"]]
        assert min(ages) >= 0 and max(ages) <= BOUND


def test_metric_axes_go_on(survived):
    process, _ = survived
    for tag in ("rollout/raw_reward", "rollout/staleness/max", "train/loss", "perf/train_time"):
        assert sorted(process.scalars(tag)) == list(ROLLOUTS), tag
