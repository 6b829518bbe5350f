"""Asynchronous runs that are killed in the middle of something, and started again by the same command until they end."""

from __future__ import annotations

import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slime.utils.checkpoint_directory import iteration_directory
from slime.weights.push import read_weight_version
from tests.support.models.tiny_task import TinyTask
from tests.support.oracles.drawn_groups import assert_in_turn, assert_none_is_lost
from tests.support.processes.train_process import TrainProcess
from tests.support.processes.waiting import wait_until

ROLLOUTS = range(10)
PROMPTS = 14
BOUND = 2
SEED = 12

pytestmark = pytest.mark.slow

_NEVER_STOPS = [
    "--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
    "--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout",
    # Two groups more than a rollout takes are in flight.
    "--sglang-server-concurrency", "12",
]  # fmt: skip
# The flags of a loop, and when it is killed, start by start.
LOOPS = {
    "rollouts in turn": (["--async-buffer-size", "2"], ["before the first checkpoint", "pushing", "saving"]),
    "rollouts in turn, a push every two and a checkpoint every three": (
        ["--async-buffer-size", "2", "--update-weights-interval", "2", "--save-interval", "3", "--keep-last", "1"],
        ["pushing", "saving"],
    ),
    "rollouts in turn, weights in flight": (
        ["--async-buffer-size", "2", "--update-weights-in-flight"], ["pushing", "an event"],
    ),
    "generation that never stops": (
        [*_NEVER_STOPS, "--update-weights-in-flight"], ["before the first checkpoint", "saving", "pushing", "an event"],
    ),
}  # fmt: skip


def run_loop(task: TinyTask, directory: Path, flags: list[str]) -> TrainProcess:
    checkpoints = directory / "checkpoints"
    return TrainProcess(
        [
            *task.loop_flags, "--num-rollout", len(ROLLOUTS), "--save", checkpoints, "--load", checkpoints,
            "--save-interval", "1", "--keep-last", "2", "--max-weight-staleness", BOUND, "--sglang-log-level", "info",
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


def pauses(process: TrainProcess) -> dict[str, int]:
    """By engine: how often it was told to pause, and not to go on, over all starts."""
    logs = {path.name: path.read_text(errors="replace") for path in process.event_directory.glob("logs/engine_*.log")}
    return {
        name: log.count("POST /pause_generation") - log.count("POST /continue_generation") for name, log in logs.items()
    }


def is_saving(process: TrainProcess) -> bool:
    """Whether a checkpoint is being written that a resume does not take yet."""
    return any((process.directory / "checkpoints").glob(".iter_*.writing"))


def some_event(process: TrainProcess, chance: random.Random) -> Callable[[], bool]:
    """One of a rollout of which nothing is there when the run starts."""
    drawn_before = max((int(dump.stem) for dump in process.directory.glob("*.pt")), default=-1)
    rollout_id = drawn_before + chance.randint(1, 2)
    event = chance.choice(list(done_of(rollout_id, process)))
    print(f"of rollout {rollout_id} this is done: {event}")
    return lambda: last_checkpoint(process) >= 0 and done_of(rollout_id, process)[event]


def kill_when(moment: str, process: TrainProcess, chance: random.Random) -> None:
    """The driver, at the moment itself. But for the first of them there is a checkpoint, from which the next start goes on."""
    before, paused = last_checkpoint(process), pauses(process)
    has_come: Callable[[], bool] = {
        "before the first checkpoint": lambda: done_of(0, process)["samples"],
        "pushing": lambda: (
            last_checkpoint(process) > before
            and any(number > paused.get(engine, 0) for engine, number in pauses(process).items())
        ),
        "saving": lambda: last_checkpoint(process) > max(before, 0) and is_saving(process),
    }.get(moment) or some_event(process, chance)
    wait_until(lambda: has_come() or process.has_ended(), 300)
    process.send_signal_to_driver(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL, process.output()[-4000:]
    process.assert_no_process_left(60)
    if moment == "before the first checkpoint":
        assert last_checkpoint(process) == -1
        # Whoever starts next is another run, with metrics of its own.
        shutil.rmtree(process.event_directory)


class Survived:
    """What a loop of `LOOPS` left in the end."""

    def __init__(self, name: str, task: TinyTask, directory: Path) -> None:
        flags, moments = LOOPS[name]
        chance = random.Random(SEED)
        # By rollout: the version that engines had of the weights that were trained on it.
        self.version_when_trained: dict[int, int] = {}
        for moment in moments:
            with run_loop(task, directory, flags) as process:
                self._note_versions(process)
                kill_when(moment, process, chance)
        # The process that came to the end, and the samples that each rollout was trained on.
        self.process = run_loop(task, directory, flags)
        self._note_versions(self.process)
        self.process.finish()
        self.rollouts = [torch.load(directory / f"{r}.pt", weights_only=True)["samples"] for r in ROLLOUTS]

    def _note_versions(self, process: TrainProcess) -> None:
        """A start pushes what it has loaded, whichever version that was saved as; then the loop pushes at its interval."""
        loaded, interval = last_checkpoint(process), 1
        if "--update-weights-interval" in process.flags:
            interval = int(process.flags[process.flags.index("--update-weights-interval") + 1])
        version = 1 + read_weight_version(iteration_directory(process.directory / "checkpoints", loaded))
        for rollout_id in ROLLOUTS[loaded + 1 :]:
            self.version_when_trained[rollout_id] = version
            version += (rollout_id + 1) % interval == 0


@pytest.fixture(scope="module", params=LOOPS)
def survived(request, task, tmp_path_factory) -> Survived:
    return Survived(request.param, task, tmp_path_factory.mktemp("kills"))


def test_counted_from_the_checkpoints_no_prompt_is_lost_and_none_comes_twice(survived):
    process, rollouts = survived.process, survived.rollouts
    assert_none_is_lost(rollouts, process.directory / "checkpoints")
    if "--rollout-function-path" not in process.flags:
        assert_in_turn(rollouts)
    seen = Counter(samples[first]["metadata"]["number"] for samples in rollouts for first in range(0, len(samples), 4))
    assert set(seen) == set(range(PROMPTS)) and max(seen.values()) - min(seen.values()) <= 2


def test_the_bound_on_staleness_holds_over_every_start(survived):
    for rollout_id, samples in enumerate(survived.rollouts):
        trained_as = survived.version_when_trained[rollout_id]
        ages = [trained_as - int(version) for s in samples for version, _, _ in s["weight_version_spans"]]
        assert min(ages) >= 0 and max(ages) <= BOUND


def test_metric_axes_go_on(survived):
    process = survived.process
    for tag in ("rollout/raw_reward", "rollout/staleness/max", "train/loss", "perf/train_time"):
        assert sorted(process.scalars(tag)) == list(ROLLOUTS), tag
