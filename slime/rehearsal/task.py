"""What a rehearsed rank is asked, and what it answers. Free of torch."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Task:
    """What a rank is to rehearse.

    Attributes:
        args: checked arguments of the actor.
        library: the stand-in for CUDA; None: fake CPU tensors.
        micro_batches: of each its samples, as tokens of the sample and of its response.
        answer: where the result goes.
    """

    args: argparse.Namespace
    rank: int
    library: Path | None
    micro_batches: list[list[tuple[int, int]]]
    answer: Path


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a rehearsal stopped in `phase`; `place`: the innermost line that is neither torch's nor the rehearsal's."""

    phase: str
    error: str
    place: str
    trace: str


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """What a rank did; plain values, by phase: "model", "load", "data", "log-probs", "first step", "step" and "push".

    Attributes:
        seconds: that the rehearsal took.
        peaks: live bytes by kind at the phase's peak.
        operations: launched on the device.
        waits: of the host for the device, by what and where.
        collectives: (group, collective, how many, bytes).
        data_dependent: places whose shapes depend on values.
        pushed: tensors and buckets of the push; None: none was made.
        not_rehearsed: what was left out, in words.
    """

    rank: int
    seconds: dict[str, float]
    peaks: dict[str, dict[str, int]]
    operations: dict[str, int]
    waits: dict[str, dict[str, int]]
    collectives: dict[str, list[tuple[str, str, int, int]]]
    data_dependent: dict[str, int]
    pushed: tuple[int, int] | None
    not_rehearsed: list[str]
    failure: Failure | None
