#!/usr/bin/env python3
"""Summarise the traces of a profile: the seconds of each phase, and the kernels that took longest.

    python tools/analyze_profile.py --profile-dir outputs/slime/20260101-120000
    python tools/analyze_profile.py --profile-dir outputs/slime/20260101-120000 --all-ranks --top-n 5

The tool finds traces anywhere below the directory: those of training ranks with `--use-pytorch-profiler`, and those of engines
that `tools/profile_rollout.py` has asked for. Phases are nested, and the seconds of a phase include those of the phases in it.
`on device` is the time in which the device computed work that was launched in a phase, even after its end. If no device was
traced, operators of the CPU replace kernels; each has its own time, without that of the operators that it called.
"""

import argparse
import bisect
import gzip
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.observability.timer import RANGE_PREFIX
from slime.utils.errors import UserError
from tools.command_line import run_tool

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# The part of SGLang's trace names that gives the rank of an engine.
_RANK_OF_ENGINE = re.compile(r"TP-(\d+)")
_LONGEST_NAME = 72
_LONGEST_EVENT = 200
_MICROSECOND = 1e-6
# The fields of every event with a duration, and their types.
_FIELDS = {"name": str, "ts": int | float, "dur": int | float, "pid": int | str, "tid": int | str}


@dataclass
class Phase:
    """All ranges with one name.

    Attributes:
        depth: the number of phases around it.
        busy: the seconds in which the device computed work that was launched in it.
    """

    depth: int
    calls: int = 0
    seconds: float = 0.0
    busy: float = 0.0


@dataclass
class Kernel:
    """The seconds of all kernels (or operators) with one name, and their distribution over phases."""

    calls: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    phases: Counter[str] = field(default_factory=Counter)


@dataclass
class Summary:
    """The sum of a rank's traces of one kind of work.

    Attributes:
        what: the kind of work: role and part of a training rank, `engine` for other traces.
        rollouts: the traced rollouts; empty for engines.
        seconds: the time from the first to the last event of each trace, summed.
        on_device: whether kernels were traced.
    """

    what: str
    rank: int
    traces: int = 0
    rollouts: list[int] = field(default_factory=list)
    seconds: float = 0.0
    on_device: bool = False
    phases: dict[str, Phase] = field(default_factory=dict)
    kernels: defaultdict[str, Kernel] = field(default_factory=lambda: defaultdict(Kernel))


@dataclass(frozen=True)
class Span:
    """A named range from `start` to `end`, in microseconds."""

    name: str
    start: float
    end: float


def read_trace(path: Path) -> dict[str, Any]:
    """The content of a trace file.

    Raises:
        UserError: the file is no trace, or an event lacks a field that the tables need.
    """
    import orjson

    try:
        content = path.read_bytes()
        trace = orjson.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
        trace["traceEvents"][:0]
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is no trace, or was not written to its end: {error}") from None
    for number, event in enumerate(trace["traceEvents"]):
        if problem := _problem_of(event):
            raise UserError(f"{path}: event {number} of traceEvents {problem}: {str(event)[:_LONGEST_EVENT]}")
    return trace


def _problem_of(event: Any) -> str | None:
    """What is wrong with an event; None if nothing is. Events without a duration are not checked."""
    if not isinstance(event, dict):
        return "is no object"
    if event.get("ph") != "X":
        return None
    for name, kinds in _FIELDS.items():
        if not isinstance(event.get(name), kinds):
            return f"has no {name}" if name not in event else f"has a {name} of another kind"
    return None if isinstance(event.get("args", {}), dict) else "has args that are no object"


def place_of(path: Path, trace: dict[str, Any]) -> tuple[str, int, int | None]:
    """Returns (kind of work, rank, rollout or None) of a trace."""
    about = trace.get("slime")
    if about is not None:
        return f"{about['role']} {about['part']}", about["rank"], about["rollout"]
    named = _RANK_OF_ENGINE.search(path.name)
    return "engine", int(named[1]) if named else trace.get("distributedInfo", {}).get("rank", 0), None


def add_trace(summary: Summary, events: Sequence[dict[str, Any]]) -> None:
    """Add the events of one trace to `summary`."""
    spans = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
    if not spans:
        return
    summary.seconds += _MICROSECOND * (
        max(event["ts"] + event["dur"] for event in spans) - min(event["ts"] for event in spans)
    )
    phases = [
        _span(event, event["name"].removeprefix(RANGE_PREFIX))
        for event in spans
        if event.get("cat") == "user_annotation" and event["name"].startswith(RANGE_PREFIX) and event["dur"] > 0
    ]
    around = _Around(phases)
    for phase in sorted(phases, key=lambda phase: (phase.start, -phase.end)):
        found = summary.phases.setdefault(phase.name, Phase(around(phase.start).index(phase.name)))
        found.calls += 1
        found.seconds += (phase.end - phase.start) * _MICROSECOND
    kernels = [event for event in spans if event.get("cat") in _ON_DEVICE]
    if kernels:
        summary.on_device = True
        launches = {
            event["args"]["correlation"]: event["ts"]
            for event in spans
            if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
        }
        work = []
        for event in kernels:
            launched = launches.get(event.get("args", {}).get("correlation"), event["ts"])
            work.append((launched, _span(event), event["dur"]))
        busy = [(launched, span) for launched, span, _ in work]
    else:
        operators = [event for event in spans if event.get("cat") == "cpu_op"]
        work = [(span.start, span, own) for span, own in own_times(operators)]
        busy = [(span.start, span) for _, span, _ in work]
    for launched, span, own in work:
        kernel = summary.kernels[span.name]
        kernel.calls += 1
        kernel.seconds += own * _MICROSECOND
        kernel.longest = max(kernel.longest, own * _MICROSECOND)
        kernel.phases[next(reversed(around(launched)), "")] += own
    within = defaultdict(list)
    for launched, span in busy:
        for name in around(launched):
            within[name].append(span)
    for name, covered in within.items():
        summary.phases[name].busy += length_of_union(covered) * _MICROSECOND


class _Around:
    """Called with a moment, it returns the phases that are under way then, the outermost first."""

    def __init__(self, phases: Iterable[Span]) -> None:
        self._moments: list[float] = []
        self._names: list[tuple[str, ...]] = []
        # At one moment, phases end before others begin, inner ones end first, and outer ones begin first.
        changes = [(phase.start, 1, -phase.end, phase.name) for phase in phases]
        changes += [(phase.end, 0, -phase.start, phase.name) for phase in phases]
        under_way: list[str] = []
        for moment, begins, _, name in sorted(changes):
            if begins:
                under_way.append(name)
            else:
                del under_way[len(under_way) - 1 - under_way[::-1].index(name)]
            self._moments.append(moment)
            self._names.append(tuple(under_way))

    def __call__(self, moment: float) -> tuple[str, ...]:
        index = bisect.bisect_right(self._moments, moment) - 1
        return self._names[index] if index >= 0 else ()


def own_times(operators: Iterable[dict[str, Any]]) -> Iterable[tuple[Span, float]]:
    """Each operator with its own microseconds: without those of the operators that it called in its thread."""
    of_thread = defaultdict(list)
    for event in operators:
        of_thread[event["pid"], event["tid"]].append(_span(event))
    for spans in of_thread.values():
        spans.sort(key=lambda span: (span.start, -span.end))
        own = [span.end - span.start for span in spans]
        callers: list[int] = []
        for position, span in enumerate(spans):
            while callers and spans[callers[-1]].end <= span.start:
                callers.pop()
            if callers:
                own[callers[-1]] -= span.end - span.start
            callers.append(position)
        yield from zip(spans, own, strict=True)


def length_of_union(spans: Iterable[Span]) -> float:
    """The microseconds in which at least one of the spans is under way."""
    length, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        length += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return length


def _span(event: dict[str, Any], name: str | None = None) -> Span:
    return Span(event["name"] if name is None else name, event["ts"], event["ts"] + event["dur"])


def summaries_of(directory: Path, rank: int | None, *, all_ranks: bool) -> list[Summary]:
    """A summary for each kind of work and each wanted rank, sorted by kind.

    Args:
        rank: the wanted rank; None: the first one with traces.

    Raises:
        UserError: there are no traces, or none of that rank.
    """
    paths = sorted(path for path in directory.rglob("*.trace.json*") if path.name.endswith((".json", ".json.gz")))
    if not paths:
        raise UserError(f"--profile-dir {directory}: there is no trace (*.trace.json.gz) in it or below it")
    found: dict[tuple[str, int], Summary] = {}
    for number, path in enumerate(paths, 1):
        print(f"[{number}/{len(paths)}] {path}", file=sys.stderr)
        trace = read_trace(path)
        what, of_rank, rollout = place_of(path, trace)
        summary = found.setdefault((what, of_rank), Summary(what, of_rank))
        if not all_ranks and rank not in (None, of_rank):
            continue
        summary.traces += 1
        if rollout is not None:
            summary.rollouts.append(rollout)
        add_trace(summary, trace["traceEvents"])
    there = sorted({of_rank for _, of_rank in found})
    if rank is not None and rank not in there:
        raise UserError(f"--rank {rank}: there are traces of {', '.join(map(str, there))}")
    wanted = there if all_ranks else [there[0] if rank is None else rank]
    return [found[key] for key in sorted(found) if key[1] in wanted]


def show(summaries: Sequence[Summary], top: int) -> None:
    """Print the tables of one kind of work, for one rank or for all ranks together."""
    first = summaries[0]
    ranks = ", ".join(str(summary.rank) for summary in summaries)
    rollouts = ", ".join(map(str, sorted({rollout for summary in summaries for rollout in summary.rollouts})))
    seconds = sum(summary.seconds for summary in summaries)
    traces = sum(summary.traces for summary in summaries)
    print(f"{first.what}, rank {ranks}" + (f", rollout {rollouts}" if rollouts else ""))
    print(f"{traces} trace{'s' if traces > 1 else ''} of {seconds:.6f} s")
    phases = {name: phase for summary in summaries for name, phase in summary.phases.items()}
    if phases:
        rows = [_row_of_phase(name, phase.depth, summaries) for name, phase in phases.items()]
        spread = ["least", "most", "of rank"] if len(summaries) > 1 else []
        computing = "on device" if first.on_device else "in operators"
        print(_table(["phase", "calls", "seconds", computing, *spread], rows))
    else:
        print("\nThese traces hold no phases of a training rank.")
    kernels: defaultdict[str, Kernel] = defaultdict(Kernel)
    for summary in summaries:
        for name, kernel in summary.kernels.items():
            found = kernels[name]
            found.calls += kernel.calls
            found.seconds += kernel.seconds
            found.longest = max(found.longest, kernel.longest)
            found.phases.update(kernel.phases)
    total = sum(kernel.seconds for kernel in kernels.values())
    longest = sorted(kernels.items(), key=lambda item: (-item[1].seconds, item[0]))[:top]
    rows = [_row_of_kernel(name, kernel, total) for name, kernel in longest]
    kind = "kernel" if first.on_device else "operator"
    print(_table([kind, "calls", "seconds", "share", "mean µs", "longest µs", "mostly in"], rows))
    if len(kernels) > len(longest):
        rest = total - sum(kernel.seconds for _, kernel in longest)
        print(f"and {len(kernels) - len(longest)} others, {rest:.6f} s (--top-n)")


def _row_of_kernel(name: str, kernel: Kernel, total: float) -> list[str]:
    shown = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
    share = f"{kernel.seconds / total:.1%}" if total else ""
    mean, longest = kernel.seconds / kernel.calls / _MICROSECOND, kernel.longest / _MICROSECOND
    phase, _ = kernel.phases.most_common(1)[0]
    return [shown, str(kernel.calls), f"{kernel.seconds:.6f}", share, f"{mean:.1f}", f"{longest:.1f}", phase]


def _row_of_phase(name: str, depth: int, summaries: Sequence[Summary]) -> list[str]:
    """A row of the table of phases. With several ranks: means, the least and most seconds, and the rank with the most."""
    having = [(summary.phases[name], summary.rank) for summary in summaries if name in summary.phases]
    calls, seconds, busy = (
        sum(getattr(phase, of) for phase, _ in having) / len(having) for of in ("calls", "seconds", "busy")
    )
    row = [f"{'  ' * depth}{name}", f"{calls:g}", f"{seconds:.6f}", f"{busy:.6f}"]
    if len(summaries) == 1:
        return row
    least = min(phase.seconds for phase, _ in having)
    most, rank = max((phase.seconds, rank) for phase, rank in having)
    return [*row, f"{least:.6f}", f"{most:.6f}", str(rank)]


def _table(titles: list[str], rows: list[list[str]]) -> str:
    """Text in columns. The first column and `mostly in` are aligned to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = []
    for row in (titles, *rows):
        cells = [
            cell.ljust(width) if title == "mostly in" or not position else cell.rjust(width)
            for position, (cell, width, title) in enumerate(zip(row, widths, titles, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n" + "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--profile-dir", type=Path, required=True, help="where the traces are, or a directory above")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, help="of which rank; unset: the first that there is")
    which.add_argument("--all-ranks", action="store_true", help="all ranks together: means of phases, sums of kernels")
    parser.add_argument("--top-n", type=int, default=20, help="kernels that are shown (default: %(default)s)")
    args = parser.parse_args(words)
    if args.top_n < 1:
        parser.error(f"--top-n {args.top_n}: must be at least 1")
    if not args.profile_dir.is_dir():
        raise UserError(f"--profile-dir {args.profile_dir} is no directory")
    by_kind = defaultdict(list)
    for summary in summaries_of(args.profile_dir, args.rank, all_ranks=args.all_ranks):
        by_kind[summary.what].append(summary)
    for number, summaries in enumerate(by_kind.values()):
        if number:
            print()
        show(summaries, args.top_n)
    return 0


if __name__ == "__main__":
    run_tool(main)
