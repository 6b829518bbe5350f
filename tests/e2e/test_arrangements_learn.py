"""Every arrangement of the quick start, by the command of its page, learns the toy task as well as the first one does."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models.toy_task import ToyTask
from tests.support.processes.plain_engine import KEY, PlainEngine
from tests.support.processes.quickstart import ARRANGEMENTS
from tests.support.processes.train_process import REPOSITORY, TrainProcess

ROLLOUTS = 15
# Two optimizer steps for each rollout, so that fewer rollouts do.
SHORT = ["--num-steps-per-rollout", "2", "--eval-interval", str(ROLLOUTS)]
# So far a run may fall behind by chance: each of 256 problems is sampled once at temperature 1, engines draw without a seed,
# and two synchronous runs have been 0.07 apart.
SPREAD = 0.15
# What the page's command has for the engine that its reader started.
ENGINE_OF_THE_PAGE = "127.0.0.1:30000"

pytestmark = pytest.mark.learns

SYNCHRONOUS, *OTHERS = ARRANGEMENTS


@pytest.fixture(scope="module")
def toy_task(tmp_path_factory) -> ToyTask:
    task = ToyTask(tmp_path_factory.mktemp("toy"))
    with task.start() as process:
        process.wait_for_success(600)
    return task


def learned(process: TrainProcess) -> tuple[float, float]:
    """Held-out accuracy before and after the run."""
    with process:
        process.wait_for_success(900)
        process.assert_no_process_left()
    accuracy = process.scalars("eval/held_out")
    assert sorted(accuracy) == [0, ROLLOUTS]
    print(f"{process.directory.name}: {accuracy[0]:.3f} -> {accuracy[ROLLOUTS]:.3f} in {process.seconds:.0f} s")
    return accuracy[0], accuracy[ROLLOUTS]


def run_of(toy_task: ToyTask, row: str, directory: Path, engine: PlainEngine | None = None) -> TrainProcess:
    """The command of a row with fewer rollouts, `directory` in place of `outputs` and `engine` in place of the page's."""
    of_the_script, _, flags = ARRANGEMENTS[row].partition(" -- ")
    # The run is not in the repository, where a reader types the command.
    flags = flags.replace("outputs/", f"{directory}/").replace("examples/", f"{REPOSITORY}/examples/")
    if engine is not None:
        flags = f"{flags.replace(ENGINE_OF_THE_PAGE, engine.address)} --router-api-key {KEY}"
    return toy_task.run(
        f"row-{list(ARRANGEMENTS).index(row)}",
        *("--num-rollout", str(ROLLOUTS), *shlex.split(of_the_script), "--", *SHORT, *shlex.split(flags)),
    )


@pytest.fixture(scope="module")
def synchronous(toy_task, tmp_path_factory) -> float:
    before, after = learned(run_of(toy_task, SYNCHRONOUS, tmp_path_factory.mktemp("synchronous")))
    assert before < 0.6 and after > before + 0.2
    return after


@pytest.fixture
def engine(row, toy_task, tmp_path) -> Iterator[PlainEngine | None]:
    """An engine that this test started, if the row trains with one."""
    if ENGINE_OF_THE_PAGE not in ARRANGEMENTS[row]:
        yield None
        return
    engine = PlainEngine(toy_task.model, tmp_path / "engine.log", ())
    yield engine
    engine.end()


@pytest.mark.parametrize("row", OTHERS)
def test_an_arrangement_ends_as_accurate_as_the_first_one(toy_task, synchronous, engine, row, tmp_path):
    before, after = learned(run_of(toy_task, row, tmp_path, engine))
    assert after > max(before + 0.2, synchronous - SPREAD)
