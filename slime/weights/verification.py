"""Checks of a push: its names are those of the engines' checkpoint, and the engines then hold the trainer's weights.

The second is proved by checksums per tensor. The engines load the trainer's weights from a scratch checkpoint and report
checksums A; their tensors are overwritten with random numbers; the trainer pushes in the normal way; checksums B must equal A
on every engine.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence

from slime.utils.errors import RunError

# `{rank of the engine}/{tensor name}` → checksum of what the rank holds of the tensor.
ChecksumReport = Mapping[str, str]

# A message lists so many names of tensors, and counts the others.
_NAMES_SHOWN = 10


class NamesDiffer(RunError):
    """The tensors of a push are not those that the engines' checkpoint has."""


class PushedNames:
    """Compares the names of a push with those of the engines' checkpoint, since engines silently accept any names.

    `check_bucket` refuses a bucket before it is sent; `check_complete` is called when all buckets were sent.
    """

    def __init__(self, expected: set[str] | None):
        self._expected = expected
        self._pushed: set[str] = set()

    def check_bucket(self, names: Iterable[str]) -> None:
        """Raises NamesDiffer for a name that is unknown or was pushed before."""
        counts = collections.Counter(names)
        repeated = sorted(name for name, count in counts.items() if count > 1 or name in self._pushed)
        if repeated:
            raise NamesDiffer(f"weight push: sent twice: {_shorten(repeated)}")
        self._pushed.update(counts)
        # Names of earlier buckets have been checked already.
        surplus = [] if self._expected is None else sorted(name for name in counts if name not in self._expected)
        if surplus:
            raise NamesDiffer(
                f"weight push: {len(surplus)} tensors that the checkpoint of the engines does not have: "
                f"{_shorten(surplus)}. The conversion of the model and --hf-checkpoint do not fit together"
            )

    def check_complete(self) -> None:
        """Raises NamesDiffer if an expected tensor was not pushed."""
        missing = sorted(self._expected - self._pushed) if self._expected is not None else []
        if missing:
            raise NamesDiffer(
                f"weight push: {len(missing)} tensors of the checkpoint of the engines were not sent: "
                f"{_shorten(missing)}. The conversion of the model and --hf-checkpoint do not fit together"
            )


def check_equal_checksums(
    from_disk: Mapping[int, ChecksumReport], after_push: Mapping[int, ChecksumReport], alike: Mapping[int, int]
) -> None:
    """Compare the reports of all engines (engine id → tensor name → checksum).

    Args:
        alike: for every engine, a representative that is started in the same way. Engines that are started in another way hold
            other parts of the tensors, or have them in another dtype.

    Raises:
        RunError: engines that are started alike disagree after loading from disk, or an engine's tensors after the push differ
            from these. The message names the tensors.
    """
    if from_disk.keys() != after_push.keys():
        raise RunError(f"weight check: {len(from_disk)} engines before the push, {len(after_push)} after it")
    firsts: dict[int, int] = {}
    for engine, report in sorted(from_disk.items()):
        if not report:
            raise RunError(f"weight check: engine {engine} reports no tensors")
        first = firsts.setdefault(alike[engine], engine)
        message = f"engine {engine} and engine {first} differ after loading the same checkpoint"
        _check(report, from_disk[first], message)
    for engine, report in after_push.items():
        _check(report, from_disk[engine], f"engine {engine} does not hold the trainer's weights after the push")


def check_all_reset(from_disk: Mapping[int, ChecksumReport], after_reset: Mapping[int, ChecksumReport]) -> None:
    """Raises RunError if a tensor survived the reset: then an equal checksum after the push would prove nothing."""
    for engine, before in from_disk.items():
        kept = sorted(name for name in before if after_reset[engine].get(name) == before[name])
        if kept:
            raise RunError(f"weight check: engine {engine} kept tensors through the reset: {_shorten(kept)}")


def differing_tensors(left: ChecksumReport, right: ChecksumReport) -> list[str]:
    """Sorted names whose checksums differ or that only one side has."""
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def _check(report: ChecksumReport, reference: ChecksumReport, message: str) -> None:
    names = differing_tensors(report, reference)
    if names:
        raise RunError(f"weight check: {message}: {len(names)} of {len(reference)} tensors: {_shorten(names)}")


def _shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
