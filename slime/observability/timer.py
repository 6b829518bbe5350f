"""Seconds and memory per phase of a process, collected under the phase's name and read once per rollout.

While the process is traced by a profiler, every phase is a range of that trace too.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from slime.utils.device import get_accelerator
from slime.utils.misc import SingletonMeta

# Prefix of the name that a phase's range has in a trace.
RANGE_PREFIX = "phase "


class Timer(metaclass=SingletonMeta):
    """Sums the seconds of every phase since the last `pop_seconds()`.

    Attributes:
        range_of: opens a range of a given name in the trace that is being recorded; None while there is none.
    """

    def __init__(self) -> None:
        self.range_of: Callable[[str], contextlib.AbstractContextManager] | None = None
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def pop_seconds(self) -> dict[str, float]:
        """Seconds per phase since the last call; the sums start again from zero."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds


class PeakMemory(metaclass=SingletonMeta):
    """The peak of tensor memory, in bytes, on the device within every phase since the last `pop_bytes()`.

    Phases may be nested, and all are in one thread. If the device does not count peaks there are none.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}
        # For each phase under way, outermost first, its peak so far. The device's one counter begins anew with an inner phase,
        # and forgets the peaks of the outer ones.
        self._under_way: list[int] = []

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Count the block as a phase `name`, even if it raises. The device's own counter begins anew."""
        accelerator = get_accelerator()
        before = accelerator.peak_memory_allocated()
        if before is None:
            yield
            return
        self._raise_outer(before)
        self._under_way.append(0)
        accelerator.reset_peak_memory()
        try:
            yield
        finally:
            peak = max(self._under_way.pop(), accelerator.peak_memory_allocated())
            self._peaks[name] = max(self._peaks.get(name, 0), peak)
            self._raise_outer(peak)

    def pop_bytes(self) -> dict[str, int]:
        """Bytes per phase since the last call, the largest of several phases of one name."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def _raise_outer(self, peak: int) -> None:
        if self._under_way:
            self._under_way[-1] = max(self._under_way[-1], peak)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """`timer` for work on the device, which also records its peak of memory."""
    with timer(name), PeakMemory().within(name):
        yield


@contextlib.contextmanager
def timer(name: str) -> Iterator[None]:
    """Add the time spent in the block to the phase `name`, also when the block raises."""
    range_of, start = Timer().range_of, time.perf_counter()
    try:
        if range_of is None:
            yield
        else:
            with range_of(f"{RANGE_PREFIX}{name}"):
                yield
    finally:
        Timer().add(name, time.perf_counter() - start)


@contextlib.contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Leave the time spent in the block out of the phase `name`, whose block encloses it."""
    start = time.perf_counter()
    try:
        yield
    finally:
        Timer().add(name, start - time.perf_counter())


def with_defer(deferred: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that calls `deferred` when the function has returned or raised."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                deferred()

        return called

    return decorate
