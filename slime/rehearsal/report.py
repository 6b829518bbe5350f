"""The task of a rehearsed rank, its answer, and the report: plain ASCII text, at most 120 characters wide if words allow.

It does not import torch, which the process of a rank imports late.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.estimates.layout import RankPlace

# If rehearsal and plan differ by more than this share, the line is marked.
_APART = 0.10
_KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "data", "push")
# The phases of the training loop, in which ranks communicate and the host should not wait for the device.
_PHASES = ("log-probs", "values", "step", "metrics", "push")
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(frozen=True)
class Task:
    """What a rank is to rehearse.

    Attributes:
        args: checked arguments of the actor.
        library: the stand-in for CUDA; None: fake CPU tensors.
        micro_batches: the samples of each, as (tokens of the sample, tokens of its response); in a pipeline all have one size.
        answer: the file for the result.
    """

    args: argparse.Namespace
    rank: int
    library: Path | None
    micro_batches: list[list[tuple[int, int]]]
    answer: Path


@dataclass(frozen=True)
class Failure:
    """Why a rehearsal stopped in `phase`. `place`: the innermost line that belongs neither to torch nor to the rehearsal."""

    phase: str
    error: str
    place: str
    trace: str


@dataclass(frozen=True)
class Pushed:
    """A weight push of one stage. `expected`: the names that the pushes of all stages should have together; None: unknown."""

    names: list[str]
    buckets: int
    expected: list[str] | None


@dataclass(frozen=True)
class Saved:
    """A rank's part of a checkpoint. Dicts are by kind, which is "weights", "optimizer" or "weights of STATE".

    Attributes:
        tensors, sizes: the number of tensors and their bytes, including those that replicas of the rank hold too.
        written: bytes that this rank writes; replicas that share the writing write the same number each.
        host: the most bytes of host memory that it takes at once; None: the device's memory is that of the host.
    """

    tensors: dict[str, int]
    sizes: dict[str, int]
    written: dict[str, int]
    host: int | None


@dataclass(frozen=True)
class Rehearsed:
    """The result of a rank's rehearsal, in plain values. Dicts are by phase: "model", "load", "data", "log-probs" (for a critic
    "values"), "first step", "step", "metrics" (of the rollout), "push" and "save".

    Attributes:
        seconds: the seconds that the rehearsal of the phase took.
        peaks: live bytes by kind at the phase's peak.
        operations: how many operations were launched on the device.
        waits: how often the host waited for the device, by cause and place.
        collectives: (group, collective, how many, bytes).
        data_dependent: places where shapes depend on values, and how often.
        pushed: its push; None: it made none.
        not_rehearsed: what was left out, in words.
        saved: its part of a checkpoint; None: none was saved.
    """

    rank: int
    seconds: dict[str, float]
    peaks: dict[str, dict[str, int]]
    operations: dict[str, int]
    waits: dict[str, dict[str, int]]
    collectives: dict[str, list[tuple[str, str, int, int]]]
    data_dependent: dict[str, int]
    pushed: Pushed | None
    not_rehearsed: list[str]
    failure: Failure | None
    saved: Saved | None = None


@dataclass(frozen=True)
class Planned:
    """Bytes that are planned for a rank: `step` by kind, at the moment `moment` of a step; `push` for the buckets of a push;
    and `save` on the host while it saves a checkpoint."""

    step: dict[str, int]
    push: int
    moment: str
    save: int = 0


@dataclass(frozen=True)
class RankReport:
    """A rehearsed rank for the report. `role`: actor or critic; `batches`: the micro-batches that it rehearsed."""

    role: str
    place: RankPlace
    batches: list[list[tuple[int, int]]]
    result: Rehearsed
    planned: Planned

    @property
    def name(self) -> str:
        """The rank's name among the ranks of both roles."""
        return f"{'critic ' if self.role == 'critic' else ''}rank {self.result.rank}"


def render(reports: Sequence[RankReport], push: str, left_out: tuple[str, ...]) -> str:
    """The whole text, without a newline at its end.

    Args:
        push: a text about the weight pushes of all stages together; it may be empty.
        left_out: what no rank rehearsed.
    """
    lines = ["REHEARSAL"]
    for role in dict.fromkeys(report.role for report in reports):
        of_role = [report for report in reports if report.role == role]
        batches = of_role[0].batches
        lines.append(
            f"  {role}: {_many(len(of_role), 'rank')}, {_many(len(batches), 'micro-batch', 'micro-batches')} of "
            f"{sum(total for total, _ in batches[0]):,} tokens in {_many(len(batches[0]), 'sample')} each"
        )
    for report in reports:
        lines += ["", *_rank(report)]
    if push:
        lines += ["", "ALL STAGES", f"  {push}"]
    return "\n".join([*lines, "", "NOT REHEARSED", *(f"  {line}" for line in left_out)])


def apart(rehearsed: int, planned: int) -> float:
    """The difference of the two as a share of the plan; infinite if nothing is planned."""
    if rehearsed == planned:
        return 0.0
    return abs(rehearsed - planned) / planned if planned else float("inf")


def _rank(report: RankReport) -> Iterator[str]:
    result, place = report.result, report.place
    yield (
        f"{report.name.upper()}: tensor {place.tensor}, context {place.context}, data {place.data}, pipeline {place.pipeline}; "
        f"rehearsed in {sum(result.seconds.values()):.0f} s"
    )
    if result.failure is not None:
        yield f"  STOPPED in the phase {result.failure.phase}, at {result.failure.place}: {result.failure.error}"
    if "step" in result.peaks:
        yield f"  memory of a step at its peak    rehearsed      planned ({report.planned.moment})"
        yield from _memory(result.peaks["step"], report.planned.step)
    if result.pushed is not None:
        yield f"  weight push: {_many(len(result.pushed.names), 'tensor')} in {_many(result.pushed.buckets, 'bucket')}"
        yield from _memory({"push": result.peaks["push"].get("push", 0)}, {"push": report.planned.push})
    if result.saved is not None:
        # Without a gather the save takes nothing on the device, so there may be no peak.
        yield from _saved(result.saved, result.peaks.get("save", {}).get("save", 0), report.planned.save)
    yield "  operations launched"
    yield from (f"    {count:>9,}  {phase}" for phase, count in result.operations.items())
    for phase, waits in result.waits.items():
        if phase in _PHASES and waits:
            yield f"  the host waits for the device in the phase {phase}: {sum(waits.values())}"
            yield from _counted(waits)
    if result.data_dependent:
        yield "  shapes that depend on values"
        yield from _counted(result.data_dependent)
    for phase, collectives in result.collectives.items():
        if phase in _PHASES:
            yield f"  collectives in the phase {phase}"
            yield from (
                f"    {count:>9,}  {_bytes(size):>10}  {name} over {group.lower().removesuffix('_group')}"
                for group, name, count, size in sorted(collectives, key=lambda entry: -entry[3])
            )
    if result.not_rehearsed:
        yield "  not rehearsed"
        yield from (f"    {line}" for line in result.not_rehearsed)


def _saved(saved: Saved, on_device: int, planned: int) -> Iterator[str]:
    yield f"  checkpoint: {_bytes(sum(saved.written.values()))} are written by this rank"
    for kind, count in saved.tensors.items():
        size, written = _bytes(saved.sizes[kind]), saved.written[kind]
        share = f", of which it writes {_bytes(written)}" if written != saved.sizes[kind] else ""
        yield f"    {count:>9,}  {size:>10}  {kind}{share}"
    if saved.host is not None:
        yield _compared("on the device", on_device, 0, False)
        yield _compared("on the host", saved.host, planned, True)


def _memory(rehearsed: dict[str, int], planned: dict[str, int]) -> Iterator[str]:
    for kind in _KINDS:
        found, expected = rehearsed.get(kind, 0), planned.get(kind, 0)
        if found or expected:
            yield _compared(kind, found, expected, kind in planned)
    if len(planned) > 1:
        yield _compared("together", sum(rehearsed.values()), sum(planned.values()), True)


def _compared(name: str, rehearsed: int, planned: int, is_planned: bool) -> str:
    line = f"    {name:<24}{_bytes(rehearsed):>13}{_bytes(planned) if is_planned else '-':>13}"
    share = apart(rehearsed, planned)
    if not is_planned or share <= _APART:
        return line
    return f"{line}   apart by {share:.0%}" if planned else f"{line}   not planned"


def _counted(places: dict[str, int]) -> Iterator[str]:
    return (f"    {count:>9,}  {place}" for place, count in sorted(places.items(), key=lambda entry: -entry[1]))


def _bytes(size: int) -> str:
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


def _many(count: int, one: str, more: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"
