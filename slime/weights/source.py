"""The side of a push that every training rank plays: make the buckets, and send them where the rank is a source.

All ranks of a source walk through all of its buckets, because making one is collective: what goes wrong on one of them is
told when the walk is over, and leaves no other in a gather.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from slime.weights.transports import EnginesFailed, Receiver, Transport
from slime.weights.verification import NamesDiffer, PushedNames

if TYPE_CHECKING:
    from slime.weights.buckets import NamedTensors


@dataclasses.dataclass(frozen=True)
class Sent:
    """What a source has sent, and why it stopped, if it did.

    `failed`: engines that broke the transfer, with the reason of each; `certain`: see `EnginesFailed`. `refusal`: what is
    wrong with the tensors' names.
    """

    names: list[str]
    num_bytes: int
    num_buckets: int
    failed: dict[int, str]
    certain: bool
    refusal: str | None


class WeightSource:
    """A rank of one source of weights.

    Args:
        buckets: a fresh iterator over lists of (HF name, tensor) for each push, the same on every rank of the source.
        transport: carries the buckets; None on ranks that only help to make them.
        expected_names: names of the engines' checkpoint; None skips the comparison.
    """

    def __init__(
        self,
        buckets: Callable[[], Iterable[NamedTensors]],
        transport: Transport | None,
        expected_names: set[str] | None = None,
    ) -> None:
        self._buckets = buckets
        self._transport = transport
        self._expected_names = expected_names

    @property
    def only_helps(self) -> bool:
        """Whether another rank sends the buckets that this one helps to make."""
        return self._transport is None

    def connect(self, engines: Sequence[Receiver]) -> dict[int, str]:
        """Connect to `engines`. Returns those that broke it, with the reason of each."""
        try:
            if self._transport is not None:
                self._transport.connect(engines)
        except EnginesFailed as error:
            return error.failed
        return {}

    def send(self, version: int) -> Sent | None:
        """Make all buckets, and send them as weights `version`; None from a rank that only helps.

        Raises:
            RunError: the transport failed, and no engine is to blame.
        """
        buckets = iter(self._buckets())
        names = PushedNames(self._expected_names)
        sent: list[str] = []
        num_bytes = num_buckets = 0
        failed: dict[int, str] = {}
        certain, refusal = False, None
        try:
            if self._transport is None:
                return None
            self._transport.begin(version)
            for bucket in filter(None, buckets):
                names.check_bucket(name for name, _ in bucket)
                self._transport.send(bucket)
                sent += [name for name, _ in bucket]
                num_bytes, num_buckets = num_bytes + sum(tensor.nbytes for _, tensor in bucket), num_buckets + 1
                # The transport has what it still needs; the next bucket is made where this one was.
                del bucket
            self._transport.finish()
        except EnginesFailed as error:
            failed, certain = error.failed, error.certain
        except NamesDiffer as error:
            refusal = str(error)
            self._transport.discard()
        except Exception:
            self._transport.discard()
            raise
        finally:
            # Holds none of them while the next one is made.
            collections.deque(buckets, maxlen=0)
        return Sent(sent, num_bytes, num_buckets, failed, certain, refusal)

    def settle(self) -> None:
        """The engines have in place what was sent."""
        if self._transport is not None:
            self._transport.settle()

    def close(self) -> None:
        """Leave the engines."""
        if self._transport is not None:
            self._transport.close()
