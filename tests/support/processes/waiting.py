"""Waits for another process or task with a time limit."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_POLL_SECONDS = 0.02


def wait_until(condition: Callable[[], T], seconds: float = 60.0) -> T:
    """Wait for a true result of `condition` and return it; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"nothing happened within {seconds:g} s"
        time.sleep(_POLL_SECONDS)
    return result


async def until(condition: Callable[[], T], seconds: float = 60.0) -> T:
    """`wait_until` for coroutines: the event loop goes on meanwhile. TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not (result := condition()):
            await asyncio.sleep(_POLL_SECONDS / 4)
    return result
