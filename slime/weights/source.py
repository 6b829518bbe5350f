"""A training rank's part in a push: it makes the buckets, and sends them if it is a source.

All ranks of a source walk through all of its buckets, because making a bucket is collective. So a failure on one rank is
reported only after the walk, and leaves no other rank waiting in a gather. If a transport takes every rank, those of other
sources follow: they make no buckets, but help to carry each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from slime.utils.device import get_accelerator
from slime.weights.buckets import bytes_of, names_of
from slime.weights.transports import Delta, EnginesFailed, Receiver, Transport
from slime.weights.verification import NamesDiffer, PushedNames

if TYPE_CHECKING:
    from slime.weights.buckets import NamedTensors


@dataclasses.dataclass(frozen=True)
class Connected:
    """`failed`: engines that could not be reached, with the reason of each; `certain`: see `EnginesFailed`."""

    failed: dict[int, str]
    certain: bool


@dataclasses.dataclass(frozen=True)
class Sent:
    """The tensors that a source has sent, and why it stopped, if it did.

    `failed`: engines that broke the transfer, with the reason of each; `certain`: see `EnginesFailed`. `refusal`: the error in
    the tensors' names. `delta`: see `Transport.delta`.
    """

    names: list[str]
    num_bytes: int
    num_buckets: int
    failed: dict[int, str]
    certain: bool
    refusal: str | None
    delta: Delta | None = None


class WeightSource:
    """A rank of one source of weights.

    Args:
        buckets: a fresh iterator over lists of (HF name, tensor) for each push, the same on every rank of the source.
        transport: carries the buckets; None on ranks that only help to make them.
        expected_names: names of the engines' checkpoint; None skips the comparison.
        sends: whether this rank is the source; otherwise it only takes part because its transport takes every rank.
    """

    def __init__(
        self,
        buckets: Callable[[], Iterable[NamedTensors]],
        transport: Transport | None,
        expected_names: set[str] | None = None,
        sends: bool = True,
    ) -> None:
        self._buckets = buckets
        self._transport = transport
        self._expected_names = expected_names
        self.only_helps = not sends or transport is None

    def connect(self, engines: Sequence[Receiver]) -> Connected | None:
        """Connect to `engines`; None from a rank that only helps."""
        if self.only_helps:
            if self._transport is not None:
                self._transport.assist(engines)
            return None
        try:
            self._transport.connect(engines)
        except EnginesFailed as error:
            return Connected(error.failed, error.certain)
        return Connected({}, certain=False)

    def follow(self, source: int) -> None:
        """Help with all buckets of another source, which is connected to the same engines."""
        self._transport.follow(source)

    def send(self, version: int, whole: bool = False) -> Sent | None:
        """Make all buckets, and send them as weights `version`; None from a rank that only helps.

        Args:
            whole: see `Transport.carry_all`.

        Raises:
            RunError: the transport failed, and no engine is to blame.
        """
        buckets = self._walk()
        names = PushedNames(self._expected_names)
        sent: list[str] = []
        num_bytes = num_buckets = 0
        failed: dict[int, str] = {}
        certain, refusal, delta = False, None, None
        waits_for_help = None
        try:
            if self.only_helps:
                return None
            if whole:
                self._transport.carry_all()
            self._transport.begin(version)
            for bucket in buckets:
                waits_for_help = bucket
                names.check_bucket(names_of(bucket))
                waits_for_help = None
                self._transport.send(bucket)
                sent += names_of(bucket)
                num_bytes, num_buckets = num_bytes + bytes_of(bucket), num_buckets + 1
                # The transport keeps what it still needs. Freeing the bucket makes room for the next one.
                del bucket
            self._transport.finish()
            delta = self._transport.delta()
        except EnginesFailed as error:
            failed, certain = error.failed, error.certain
        except NamesDiffer as error:
            refusal = str(error)
            self._transport.discard()
        except Exception:
            self._transport.discard()
            raise
        finally:
            if waits_for_help is not None:
                self._transport.help(waits_for_help)
            del waits_for_help
            self._walk_on(buckets)
        return Sent(sent, num_bytes, num_buckets, failed, certain, refusal, delta)

    def _walk(self) -> Iterator[NamedTensors]:
        """All buckets. If one cannot be made the error is raised here at once; ranks that follow do not hear of it."""
        yield from filter(None, self._buckets())
        if self._transport is not None:
            self._transport.end_walk()

    def _walk_on(self, buckets: Iterator[NamedTensors]) -> None:
        """Make the buckets that are left, and help to carry them. No bucket is held while the next one is made."""
        for bucket in buckets:
            if self._transport is not None:
                self._transport.help(bucket)
            del bucket
            # A GPU's host waits for no gather. It would queue those of the whole push, and NCCL's watchdog measures from when
            # a collective was queued.
            get_accelerator().mark()()

    def continue_from(self, version: int, chain: str) -> None:
        """Continue after a source that has ended; see `Transport.continue_from`."""
        if self._transport is not None:
            self._transport.continue_from(version, chain)

    def settle(self) -> str | None:
        """Called when engines have put the sent weights in place. Returns `Transport.chain`."""
        if self._transport is None:
            return None
        self._transport.settle()
        return self._transport.chain()

    def close(self) -> None:
        """Leave the engines."""
        if self._transport is not None:
            self._transport.close()
