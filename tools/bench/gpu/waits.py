"""The number of times that the host waits for one GPU in a step, from torch's profiler, beside the count of a rehearsal.

    python tools/bench/gpu/waits.py --rehearse rehearsed.json      # on a machine with a CPU build of torch
    python tools/bench/gpu/waits.py --rehearsed rehearsed.json     # on the GPU
    python tools/bench/gpu/waits.py --device cpu --tiny

The profiler sees every call of the CUDA runtime: those that wait for a stream, an event or the device, copies that block, and
those by which the allocator gets or frees memory, which wait too. Each call belongs to the innermost function of ours or of
Megatron that was running in its thread. A rehearsal counts waits by line; this bench names the functions of these lines, so
that both counts can stand side by side. A rehearsal only counts waits if torch is a CPU build, so its result travels as a file.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import collections
import functools
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from slime.utils.errors import RunError
from tools.bench.gpu.common import ROOT, Report, enter, run
from tools.bench.gpu.measured_rank import (
    Case,
    add_rehearsal_option,
    cases_of,
    make_shape_parser,
    measured_rank,
    of_every_case,
    rehearsed,
    write_rehearsed,
)

PHASES = ("log-probs", "step", "metrics", "push")
WAITS = {
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpy2D",
    "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize",
    "hipStreamSynchronize", "hipDeviceSynchronize", "hipEventSynchronize", "hipMemcpy", "hipMemcpyWithStream",
}  # fmt: skip
# These calls wait for the device too. After some steps the allocator has all the memory that it needs and makes none of them.
OF_THE_ALLOCATOR = {"cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "hipMalloc", "hipFree"}
BACKWARD = "the backward pass"
_WINDOW = "measured phase"


def main() -> int:
    parser = make_shape_parser(__doc__)
    add_rehearsal_option(parser)
    parser.add_argument("--rehearse", type=Path, metavar="FILE", help="rehearse only, and write what it says to FILE")
    options = parser.parse_args()
    if options.rehearse is not None:
        enter("cpu")
        try:
            write_rehearsed(cases_of(options), options.rehearse)
        except RunError as error:
            parser.error(str(error))
        print(f"{options.rehearse} is what --rehearsed takes on the GPU")
        return 0
    return run(measure, parser)


def measure(options: argparse.Namespace) -> Report:
    """Count the waits of a step of every shape, by function."""
    notes: list[str] = []

    def of_case(case: Case) -> list[dict[str, Any]]:
        # This comes before the measurement, because it may refuse the file.
        expected = rehearsed(case, options.rehearsed)
        found = _counted(case)
        if expected.why_no_waits:
            notes.append(f"the rehearsal counted no waits, because {expected.why_no_waits}; --rehearsed brings them")
        rows = []
        for phase in PHASES:
            known = None if expected.why_no_waits else by_function(expected.waits.get(phase, {}))
            rows += beside(case.name, phase, None if options.device == "cpu" else found[phase], known)
        return rows

    rows, stopped = of_every_case(options, of_case)
    if options.device == "cpu":
        notes.append("a CPU is not waited for: nothing could be measured")
    notes = [*dict.fromkeys(notes), *stopped]
    return Report("waits", rows, notes, "both count the same in every phase", counts_agree(rows), failed=bool(stopped))


def _counted(case: Case) -> dict[str, collections.Counter[str]]:
    with measured_rank(case) as rank:
        rank.run_until("first step")
        phases = rank.phases()
        for phase in PHASES:
            # The second time, the allocator has the memory that it needs.
            phases[phase]()
        return {phase: waits_of(_profiled(phases[phase])) for phase in PHASES}


def _profiled(call: Callable[[], Any]) -> dict[str, Any]:
    """The trace of a call, in Chrome's format. The event `_WINDOW` spans the call."""
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with tempfile.TemporaryDirectory(prefix="slime-profile-") as directory:
        file = Path(directory) / "trace.json"
        with profile(activities=activities, with_stack=True) as profiler, record_function(_WINDOW):
            call()
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text())


def waits_of(trace: Mapping[str, Any]) -> collections.Counter[str]:
    """How often the host waited within `_WINDOW`, by "CALL in FILE: FUNCTION".

    Args:
        trace: a trace of torch's profiler, with stacks.
    """
    events = [event for event in trace["traceEvents"] if "ts" in event and "dur" in event]
    window = next(event for event in events if event["name"] == _WINDOW and event.get("cat") == "user_annotation")
    inside = [event for event in events if _encloses(window, event)]
    frames: dict[Any, list[tuple[float, float, str]]] = collections.defaultdict(list)
    for event in inside:
        if event.get("cat") == "python_function" and (place := place_of_frame(event["name"])):
            frames[event["tid"]].append((event["ts"], event["ts"] + event["dur"], place))
    for of_thread in frames.values():
        of_thread.sort()
    found: collections.Counter[str] = collections.Counter()
    for event in inside:
        # Some CUDA versions add a suffix to the name, such as _v3020 or _ptsz.
        call = event["name"].split("_")[0]
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and call in WAITS | OF_THE_ALLOCATOR:
            found[f"{call} in {_innermost(frames.get(event['tid'], []), event)}"] += 1
    return found


def _encloses(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def _innermost(frames: list[tuple[float, float, str]], event: Mapping[str, Any]) -> str:
    """The place of the frame that runs when `event` begins and began last. `frames` are sorted by their start."""
    for start in range(bisect.bisect_right(frames, (event["ts"], float("inf"), "")) - 1, -1, -1):
        if frames[start][1] >= event["ts"] + event["dur"]:
            return frames[start][2]
    return BACKWARD


def place_of_frame(name: str) -> str | None:
    """ "FILE: FUNCTION" of a profiler's frame if it is ours or Megatron's; None for other frames and for comprehensions."""
    file, _, rest = name.partition("(")
    function = rest.partition("): ")[2]
    place = _known_file(file)
    return f"{place}: {function}" if place and function and not function.startswith("<") else None


def _known_file(file: str) -> str | None:
    """The path from the package on; None if the file is neither ours nor Megatron's."""
    for package in ("megatron", "slime"):
        parts = Path(file).parts
        if package in parts[:-1] and "torch" not in parts:
            return "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :])
    return None


def by_function(places: Mapping[str, int]) -> collections.Counter[str]:
    """Regroups waits of a rehearsal from "WHAT at FILE:LINE" to "WHAT in FILE: FUNCTION"."""
    found: collections.Counter[str] = collections.Counter()
    for place, count in places.items():
        what, _, where = place.rpartition(" at ")
        file, _, line = where.rpartition(":")
        found[f"{what} in {_function_at(file, int(line)) if line.isdigit() else where}"] += count
    return found


@functools.cache
def _function_at(file: str, line: int) -> str:
    """ "FILE: FUNCTION" of a line of ours or of Megatron."""
    path = ROOT / file
    if not path.is_file():
        spec = importlib.util.find_spec(file.split("/")[0])
        roots = [Path(root).parent for root in spec.submodule_search_locations or ()] if spec else []
        path = next((root / file for root in roots if (root / file).is_file()), path)
    if not path.is_file():
        return f"{file}:{line}"
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno <= line <= node.end_lineno
    ]
    return f"{file}: {max(functions, key=lambda node: node.lineno).name if functions else '<module>'}"


def beside(
    shape: str, phase: str, measured: Mapping[str, int] | None, expected: Mapping[str, int] | None
) -> Iterator[dict[str, Any]]:
    """Yields rows by function, those with most waits first, and at the end the sum of the phase; None: not counted.

    A rehearsal has no calls of the allocator: they are shown, but are no part of the sum.
    """
    named: dict[str, tuple[list[str], list[str]]] = collections.defaultdict(lambda: ([], []))
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for side, waits in enumerate((measured, expected)):
        for name, count in (waits or {}).items():
            what, _, place = name.partition(" in ")
            named[place][side].append(f"{count} {what}")
            counts[place][side] += 0 if what in OF_THE_ALLOCATOR else count
    for place in sorted(counts, key=lambda place: (-max(counts[place]), place)):
        texts = [", ".join(side) for side in named[place]]
        yield _row(shape, phase, place, counts[place], texts, measured is None, expected is None)
    sums = [sum(count[side] for count in counts.values()) for side in (0, 1)]
    yield _row(shape, phase, "all", sums, ["", ""], measured is None, expected is None)


def counts_agree(rows: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether measured and rehearsed sums are equal in all phases; None: one of them was not counted."""
    sums = [(row["measured"], row["rehearsed"]) for row in rows if row["function"] == "all"]
    return (
        None
        if not sums or any(None in pair for pair in sums)
        else all(measured == expected for measured, expected in sums)
    )


def _row(
    shape: str, phase: str, place: str, counts: list[int], texts: list[str], unmeasured: bool, unrehearsed: bool
) -> dict[str, Any]:
    return {
        "shape": shape,
        "phase": phase,
        "function": place,
        "measured": None if unmeasured else counts[0],
        "rehearsed": None if unrehearsed else counts[1],
        "calls": texts[0],
        "rehearsed as": texts[1],
    }


if __name__ == "__main__":
    sys.exit(main())
