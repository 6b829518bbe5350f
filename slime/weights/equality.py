"""Proof that the engines hold what the trainer has, from checksums per tensor.

Procedure: the engines load the trainer's weights from a scratch checkpoint and report checksums A; their tensors are
overwritten with random numbers; the trainer pushes in the normal way; checksums B must equal A, on every engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime.utils.errors import RunError

ChecksumReport = Mapping[str, str]


def check_equal_checksums(from_disk: Sequence[ChecksumReport], after_push: Sequence[ChecksumReport]) -> None:
    """Compare the reports of all engines (`reports[i]`: tensor name → checksum of engine `i`).

    Raises:
        RunError: engines disagree after loading from disk, or an engine's tensors after the push are not those; names
            the tensors.
    """
    if len(from_disk) != len(after_push):
        raise RunError(f"weight check: {len(from_disk)} engines before the push, {len(after_push)} after it")
    for engine, report in enumerate(from_disk):
        if not report:
            raise RunError(f"weight check: engine {engine} reports no tensors")
        _check(report, from_disk[0], f"engine {engine} and engine 0 differ after loading the same checkpoint")
    for engine, report in enumerate(after_push):
        _check(report, from_disk[engine], f"engine {engine} does not hold the trainer's weights after the push")


def check_all_reset(from_disk: Sequence[ChecksumReport], after_reset: Sequence[ChecksumReport]) -> None:
    """Raises RunError if a tensor survived the reset: then an equal checksum after the push would prove nothing."""
    for engine, (before, after) in enumerate(zip(from_disk, after_reset, strict=True)):
        kept = sorted(name for name in before if after.get(name) == before[name])
        if kept:
            raise RunError(f"weight check: engine {engine} kept tensors through the reset: {_shorten(kept)}")


def differing_tensors(left: ChecksumReport, right: ChecksumReport) -> list[str]:
    """Sorted names whose checksums differ or that only one side has."""
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def _check(report: ChecksumReport, reference: ChecksumReport, message: str) -> None:
    names = differing_tensors(report, reference)
    if names:
        raise RunError(f"weight check: {message}: {len(names)} of {len(reference)} tensors: {_shorten(names)}")


def _shorten(names: Sequence[str], limit: int = 10) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
