"""The memory of a training rank on one GPU, by phase, beside the plan and the rehearsal of the same step.

    python tools/bench/gpu/memory.py [--shapes qwen3-0.6B qwen3-1.7B] [--tokens 8192] [--rehearsed rehearsed.json]
    python tools/bench/gpu/memory.py --device cpu --tiny

The bench measures the bytes of tensors at the peak of every phase, as the allocator of the device counts them; on the CPU, the
bytes of live tensors (`tools/bench/live_tensors.py`). The plan gives the largest moment of a step and the weight push. Neither
includes what the CUDA context and the allocator take beside the tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from slime.estimates.training_memory import RankMemory, push_buffers, training_memory
from slime.plan.setup import parallel_layout, shape_of, tokens_of_stream, training_setup
from slime.utils.device import get_accelerator
from tools.bench.gpu.common import Report, run
from tools.bench.gpu.measured_rank import (
    Case,
    MeasuredRank,
    add_rehearsal_option,
    make_shape_parser,
    measured_rank,
    of_every_case,
    rehearsed,
)
from tools.bench.live_tensors import LiveTensors

MIB = 2**20
TARGET = 0.10


def main() -> int:
    parser = make_shape_parser(__doc__)
    add_rehearsal_option(parser)
    return run(measure, parser)


def measure(options: argparse.Namespace) -> Report:
    """Measure the peaks of every shape, by phase."""
    notes = ["MiB; measured on the CPU are live tensors" if options.device == "cpu" else "MiB"]

    def of_case(case: Case) -> list[dict[str, Any]]:
        # This comes before the measurement, because it may refuse the file.
        step = rehearsed(case, options.rehearsed)
        with measured_rank(case) as rank:
            plan, found = planned(rank.args, case.micro_batches), _peaks(rank)
        if not step.peaks:
            notes.append(f"{case.name}: {step.why_no_waits}")
        return list(beside(case.name, found, {phase: sum(kinds.values()) for phase, kinds in step.peaks.items()}, plan))

    rows, stopped = of_every_case(options, of_case)
    steps = [row["of the plan"] for row in rows if row["phase"] == "step"]
    met = None if options.tiny or not steps else all(abs(share - 1) <= TARGET for share in steps)
    target = f"the peak of a step within {TARGET:.0%} of the plan"
    return Report("memory", rows, [*notes, *stopped], target, met, failed=bool(stopped))


def _peaks(rank: MeasuredRank) -> dict[str, int]:
    """The bytes at the peak of every phase."""
    found = {}
    with peak_counter() as peak:
        for name, phase in rank.phases().items():
            peak(reset=True)
            phase()
            found[name] = peak()
    return found


@contextlib.contextmanager
def peak_counter() -> Iterator[Any]:
    """Yields a function that returns the peak since its last call with `reset=True`, in bytes of tensors made in the block."""
    accelerator = get_accelerator()
    if accelerator.peak_memory_allocated() is None:
        with LiveTensors() as live:

            def peak_of_live(reset: bool = False) -> int:
                if reset:
                    live.reset_peak()
                return live.peak

            yield peak_of_live
        return
    before = accelerator.memory_allocated()

    def peak(reset: bool = False) -> int:
        if reset:
            accelerator.reset_peak_memory()
        return accelerator.peak_memory_allocated() - before

    yield peak


def planned(args: argparse.Namespace, micro_batches: int) -> dict[str, int]:
    """The planned bytes of tensors by phase: the largest moment of the step, and the weight push."""
    layout, shape = parallel_layout(args), shape_of(args)
    setup = training_setup(args, layout, tokens_of_stream(args, layout), micro_batches)
    (stage,) = setup.stages
    push = push_buffers(shape, setup, stage)
    # A measured rank has only the samples of its micro-batches, so those of a whole rollout are left out.
    (step,) = training_memory(shape, replace(setup, push_bucket=0, overhead=0, rollout_tokens=0))
    return {"step": step.total, "push": _held(step) + push}


def _held(step: RankMemory) -> int:
    return step.weights + step.gradients + step.optimizer


def beside(
    shape: str, found: dict[str, int], expected: dict[str, int], plan: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """Yields a row for every phase; all arguments are bytes by phase."""
    for phase, measured in found.items():
        row = {"shape": shape, "phase": phase, "measured": measured / MIB}
        for name, other in (("rehearsed", expected.get(phase)), ("planned", plan.get(phase))):
            row[name] = None if other is None else other / MIB
        row["of the rehearsal"] = measured / expected[phase] if expected.get(phase) else None
        row["of the plan"] = measured / plan[phase] if phase in plan else None
        yield row


if __name__ == "__main__":
    sys.exit(main())
