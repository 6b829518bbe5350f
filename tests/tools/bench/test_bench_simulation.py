"""The comparison of predicted and measured steps, on runs whose phases take what the model says."""

from pathlib import Path

import numpy as np
import pytest

from tests.tools.simulation.test_measured import ARGUMENTS, write_run
from tests.tools.test_report import write_events
from tools.bench.bench_simulation import compare, overlap

SIZES = {
    "rollout_batch_size": 8, "over_sampling_batch_size": 8, "n_samples_per_prompt": 4, "sglang_max_running_requests": 64,
}  # fmt: skip


def numbers(line: str) -> tuple[int, float, float]:
    """Of a line of the table: steps, predicted and measured seconds. Its verdict fits its difference."""
    _, _, steps, predicted, found, difference, verdict, _ = (cell.strip() for cell in line.split("|"))
    assert verdict == ("met" if abs(float(difference.removesuffix("%"))) <= 15 else "missed")
    return int(steps), float(predicted), float(found.split(" ")[0])


def test_steps_that_were_not_read_are_predicted(tmp_path: Path):
    lengths = np.random.default_rng(0).integers(5, 60, (40, 8, 4))
    # The first step, which nobody reads.
    lengths[0] = 600
    run = write_run(tmp_path / "sync", {**ARGUMENTS, **SIZES}, lengths.tolist())
    line = compare("sync", run, run, "sync")
    steps, predicted, found = numbers(line)
    # The steps 2, 4, … 38. What saving took is in neither number.
    assert steps == 19 and predicted == pytest.approx(found, rel=0.03) and line.endswith(" met |")


def test_another_run_is_predicted_from_the_synchronous_one(tmp_path: Path):
    generator = np.random.default_rng(0)
    sync = write_run(tmp_path / "sync", {**ARGUMENTS, **SIZES}, generator.integers(5, 60, (20, 8, 4)).tolist())
    other = write_run(tmp_path / "async", {**ARGUMENTS, **SIZES}, generator.integers(5, 60, (6, 8, 4)).tolist())
    line = compare("async", other, sync, "async")
    steps, predicted, found = numbers(line)
    # The run that was written does not overlap, and the prediction does.
    assert steps == 5 and predicted < 0.8 * found and line.endswith(" missed |")


def test_the_gain_of_a_run_that_overlaps_is_a_share_of_what_the_phases_of_the_other_allow(tmp_path: Path):
    """Phases of 4 s and 3 s and 1 s besides: 8 s apart and 5 s at best. Of the first steps, which take longer, none counts."""
    apart = {"rollout": 4.0, "train": 3.0, "step": 8.0}
    for name, seconds in (("sync", apart), ("async", {**apart, "step": 5.6})):
        scalars = [
            (f"perf/{phase}_time", 100.0 if step < 2 else value, step)
            for step in range(6)
            for phase, value in seconds.items()
        ]
        write_events(tmp_path / name, scalars)
    _, name, *cells, _ = (cell.strip() for cell in overlap("async", tmp_path / "async", tmp_path / "sync").split("|"))
    # The last step has no rollout after it.
    assert name == "async" and cells == ["3", "8.00", "5.60", "3.00", "2.40", "80%"]
