"""Event loops whose clock a test controls, so that time limits end after an event, however slow the machine is."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NobodyWaits(selectors.DefaultSelector):
    """A selector that does not wait for the next timer but moves the clock to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += timeout or 0.0
        return super().select(timeout and 0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _NobodyWaits()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_in_no_time(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that only sleeps and sets time limits, without threads or sockets. Sleeps take no real time."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(coroutine)


class LeapingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock leaps ahead once, by `seconds`, as soon as `when(loop)` holds; it checks this often."""

    def __init__(self, when: Callable[[asyncio.AbstractEventLoop], bool], seconds: float) -> None:
        self._when, self._seconds, self._leapt = when, seconds, 0.0
        super().__init__()

    def time(self) -> float:
        return super().time() + self._leapt

    def _look(self) -> None:
        if self._when(self):
            self._leapt = self._seconds
        else:
            self.call_later(0.01, self._look)

    def run_forever(self) -> None:
        self.call_soon(self._look)
        super().run_forever()


def has_ended(name: str) -> Callable[[asyncio.AbstractEventLoop], bool]:
    """A condition for `LeapingLoop`: a task of that name has existed and has ended."""
    seen = []

    def ended(loop: asyncio.AbstractEventLoop) -> bool:
        alive = any(task.get_name() == name for task in asyncio.all_tasks(loop))
        seen.extend([True] if alive else [])
        return bool(seen) and not alive

    return ended
