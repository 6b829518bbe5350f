"""Waits for what another process or task does, as soon as it is done and no longer than a limit."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_POLL_SECONDS = 0.02


def wait_until(condition: Callable[[], T], seconds: float = 60.0) -> T:
    """The first result of `condition` that is true; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"nothing happened within {seconds:g} s"
        time.sleep(_POLL_SECONDS)
    return result


async def until(condition: Callable[[], T], seconds: float = 60.0) -> T:
    """`wait_until` in a coroutine, whose event loop goes on meanwhile; TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not (result := condition()):
            await asyncio.sleep(_POLL_SECONDS / 4)
    return result
