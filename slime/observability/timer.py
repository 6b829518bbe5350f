"""Seconds per phase of a process, collected under the phase's name and read once per rollout."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from slime.utils.misc import SingletonMeta


class Timer(metaclass=SingletonMeta):
    """Sums the seconds of every phase since the last `pop_seconds()`."""

    def __init__(self) -> None:
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


@contextlib.contextmanager
def timer(name: str) -> Iterator[None]:
    """Add the time spent in the block to the phase `name`, also when the block raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        Timer().add(name, time.perf_counter() - start)


@contextlib.contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Leave the time spent in the block out of the phase `name`, in whose own block it stands."""
    start = time.perf_counter()
    try:
        yield
    finally:
        Timer().add(name, start - time.perf_counter())


def with_defer(deferred: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: `deferred` is called when the function has returned or raised."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                deferred()

        return called

    return decorate
