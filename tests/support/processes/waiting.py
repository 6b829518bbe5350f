"""Waits for another process or task with a time limit."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")
_POLL_SECONDS = 0.02


def wait_until(condition: Callable[[], T], seconds: float = 120.0) -> T:
    """Wait for a true result of `condition` and return it; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"nothing happened within {seconds:g} s"
        time.sleep(_POLL_SECONDS)
    return result


def runs(process: int | psutil.Process) -> bool:
    """Whether a process, or the one of a number, has not ended; one that ended and was not collected does not run (who collects
    orphans is the machine's business)."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        # It may go between any two questions.
        return False


async def until(condition: Callable[[], T], seconds: float = 120.0) -> T:
    """`wait_until` for coroutines: the event loop goes on meanwhile. TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not (result := condition()):
            await asyncio.sleep(_POLL_SECONDS / 4)
    return result
