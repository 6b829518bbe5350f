"""The asynchronous modes learn the toy task of the quick start as well as the synchronous one, from the same start."""

from __future__ import annotations

import pytest

from tests.support.models.toy_task import ToyTask
from tests.support.processes.train_process import TrainProcess

ROLLOUTS = 15
# Two optimizer steps for each rollout, so that fewer rollouts do.
SHORT = ["--num-steps-per-rollout", "2", "--eval-interval", str(ROLLOUTS)]
# So far a run may fall behind by chance: each of 256 problems is sampled once at temperature 1, engines draw without a seed,
# and two synchronous runs have been 0.07 apart.
SPREAD = 0.15

pytestmark = pytest.mark.slow

MODES = {
    "rollouts in turn": [],
    "generation that never stops": [
        "--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout",
        "--max-weight-staleness", "2", "--use-tis",
    ],
}  # fmt: skip


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


@pytest.fixture(scope="module")
def synchronous(toy_task) -> float:
    before, after = learned(toy_task.run("synchronous", "--num-rollout", str(ROLLOUTS), "--", *SHORT))
    assert before < 0.6 and after > before + 0.2
    return after


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_ends_as_accurate_as_the_synchronous_one(toy_task, synchronous, mode):
    process = toy_task.run(
        mode.replace(" ", "-"), "--num-rollout", str(ROLLOUTS), "--async", "--", *SHORT, *MODES[mode]
    )
    assert process.program == "train_async.py"
    before, after = learned(process)
    assert after > max(before + 0.2, synchronous - SPREAD)
