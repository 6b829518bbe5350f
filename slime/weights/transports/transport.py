"""The interface of transports: connect, begin, send buckets, finish, close; and the orders to engines before and after."""

# ruff: noqa: B027 - most transports have something to do in a few of these methods only

from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slime.utils.device import get_accelerator
from slime.utils.errors import RunError

if TYPE_CHECKING:
    import torch.distributed as dist

    from slime.weights.buckets import NamedTensors

# A method of an engine, and its arguments.
Order = tuple[Any, ...]
# How long requests may take to end before an engine refuses to flush its cache.
FLUSH_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Receiver:
    """An engine as a push sees it.

    `handle` is the Ray handle of an `SGLangEngine`; its `num_gpus` devices begin at `gpu_offset` among those of all engines.
    """

    id: int
    handle: Any
    num_gpus: int
    gpu_offset: int


@dataclasses.dataclass(frozen=True)
class Delta:
    """What a push of changes alone has sent.

    Attributes:
        changed_bytes: bytes of tensors that differ from those of the last push.
        wire_bytes: bytes that travelled for them.
        is_whole: every tensor was sent as it is.
    """

    changed_bytes: int
    wire_bytes: int
    is_whole: bool = False


def naming_engines(ids: Iterable[int]) -> Callable[[Sequence[int]], str]:
    """What a wait on one answer of each of these engines calls those at the positions that are missing."""
    known = list(ids)
    return lambda positions: f"engine {', '.join(str(known[position]) for position in positions)}"


class EnginesFailed(RunError):
    """Engines broke a transfer, and the others have to get everything again.

    Attributes:
        failed: the reason of each of these engines, by id.
        certain: they are dead or hang. If not, they answered with an error, which another engine may have caused.
    """

    def __init__(self, failed: Mapping[int, str], certain: bool) -> None:
        super().__init__("; ".join(dict.fromkeys(failed.values())))
        self.failed, self.certain = dict(failed), certain


class Transport(abc.ABC):
    """Carries buckets from one source, a training rank, to engines.

    Sources take turns: one has finished before the next one connects or begins. Nothing waits without a deadline.

    Args:
        args: of the run.
        source: position of this source among the `num_sources` that a model has.
    """

    # The bucket size that is fastest where weights lie in host memory: there the order to take a bucket costs as much as the
    # copy of some megabytes.
    host_bucket_bytes: ClassVar[int | None] = None
    # How long a source takes to find out which engines have missed a bucket.
    giving_up_seconds: ClassVar[float] = 60.0

    @abc.abstractmethod
    def __init__(self, args: Any, source: int, num_sources: int) -> None: ...

    @classmethod
    def opening_order(cls, args: Any, version: int) -> Order | None:
        """The order to all engines before the first source begins; None: there is none."""
        return ("begin_weight_update",)

    @classmethod
    def directory(cls, args: Any, version: int) -> Path | None:
        """The directory into which all sources together write weights `version`, for engines to read later. None for a
        transport that feeds engines.

        Engines go on generating while files are written, and are paused afterwards. Engines that are fed are paused before.
        """
        return None

    @classmethod
    def fetching_order(cls, args: Any, version: int) -> Order | None:
        """What engines are told to do with the directory before they are paused. They answer None, or why they cannot do it."""
        return None

    @classmethod
    def placing_order(cls, args: Any, version: int) -> Order:
        """What all engines are told when all sources have finished: to put what they got in place, as weights `version`."""
        return ("end_weight_update",)

    @classmethod
    def longest_wait(cls, args: Any) -> float:
        """Seconds that a source takes at most between two buckets: the limit of one bucket, that of a tensor behind it which is
        larger than a bucket, and the time to give up engines that missed them."""
        return 2 * 60.0 * args.distributed_timeout_minutes + cls.giving_up_seconds

    @classmethod
    def takes_every_rank(cls, args: Any) -> bool:
        """Whether every training rank takes part: the ranks of all copies `help` to carry each bucket of their source, and
        `follow` those of other sources."""
        return False

    @classmethod
    def bucket_bytes(cls, args: Any) -> int:
        """The most bytes that a bucket holds; a larger tensor is a bucket of its own."""
        sizes = [args.update_weight_buffer_size]
        if cls.host_bucket_bytes is not None and get_accelerator().shares_host_memory:
            sizes.append(cls.host_bucket_bytes)
        return min(sizes)

    def connect(self, engines: Sequence[Receiver]) -> None:
        """Connect to `engines`, and to no others. A working connection to the same engines is kept.

        Raises:
            EnginesFailed: they cannot be reached.
        """

    def assist(self, engines: Sequence[Receiver]) -> None:
        """`connect`, on a rank that sends nothing itself."""

    def begin(self, version: int) -> None:
        """Start to send the tensors of weights `version`, of which engines hear with them; an unfinished transfer is
        forgotten."""

    def carry_all(self) -> None:
        """In the next push leave nothing out that engines had before: they have lost it, or to read all is less work for
        them."""

    def delta(self) -> Delta | None:
        """After `finish`, what was sent of changes alone; None if tensors travel as they are."""
        return None

    @abc.abstractmethod
    def send(self, bucket: NamedTensors) -> None:
        """Start to carry a bucket. Returns as soon as the one before it has arrived, or lies ready at the engines, so that the
        next can be made while this one travels.

        Raises:
            EnginesFailed: engines broke the transfer, of this bucket or of one before.
        """

    def help(self, bucket: NamedTensors) -> None:
        """Take part in what all ranks of a source do for a bucket that another rank sends, or that nobody sends any more."""

    def relay_over(self, group: dist.ProcessGroup) -> None:
        """Ranks of other sources need each bucket too. `group` has one rank of each source, those in the place of this rank,
        in the order of the sources. Called first of all, if the transport `takes_every_rank` and there are several sources."""

    def follow(self, source: int) -> None:
        """Take part in all buckets of another source, whose tensors this rank does not have, until that one's `end_walk`."""

    def end_walk(self) -> None:
        """The ranks of this source, whether they send or help, have no further bucket."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Return when all buckets have arrived.

        Raises:
            EnginesFailed: engines broke the transfer of the last one.
        """

    def discard(self) -> None:
        """Drop what was sent, because the push has failed and no engine is to blame. Errors are ignored."""

    def settle(self) -> None:
        """Free buffers and files, because the engines have the weights in place."""

    def chain(self) -> str | None:
        """An id that tells the pushes of this run from those of others, on the source that publishes files; else None."""
        return None

    def continue_from(self, version: int, chain: str) -> None:
        """Go on where the transport of a process that has ended left off: engines have the weights `version` that it sent.

        Raises:
            RunError: the files that it left are not there, or are another run's.
        """

    def close(self) -> None:
        """Leave the engines. Errors are ignored: they may be gone."""


class Background:
    """A function on a daemon thread, which does not keep the process from ending even if it never returns (say, a collective
    without peers)."""

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self.result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), name=name, daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self.result = function()
        except BaseException as error:
            # Without its traceback, whose frames would keep a failed process group (and its connections) alive.
            self._error = error.with_traceback(None)

    def raise_error(self) -> None:
        """Raise what the function raised, if it did."""
        if self._error is not None:
            raise RunError(f"{self._thread.name} failed: {self._error}") from self._error

    def ended_within(self, timeout: float) -> bool:
        """Wait for the end, at most `timeout` seconds, whatever the outcome."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def wait(self, timeout: float, late: str) -> None:
        """Wait for the end, at most `timeout` seconds.

        Raises:
            RunError: the function raised something; or, with the message `late`, it has not ended.
        """
        if not self.ended_within(timeout):
            raise RunError(late)
        self.raise_error()
