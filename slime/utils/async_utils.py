"""One background event loop per process, for coroutines started from synchronous code.

The rollout functions are called synchronously and run for minutes with thousands of requests in flight; they all share
this loop, so that one HTTP session and one semaphore serve every call.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any
from weakref import WeakKeyDictionary

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def get_async_loop() -> asyncio.AbstractEventLoop:
    """The running background loop; started in a daemon thread on the first call."""
    global _loop, _thread
    with _lock:
        if _loop is None or _loop.is_closed() or not _thread.is_alive():
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="slime-async-loop", daemon=True)
            _thread.start()
        return _loop


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """Run `coro` on the background loop and return its result; its exceptions are raised here.

    When the waiting thread is interrupted (Ctrl-C) the coroutine is cancelled.

    Raises:
        RuntimeError: when called from the background loop itself, where waiting would never end.
    """
    loop = get_async_loop()
    if threading.current_thread() is _thread:
        coro.close()
        raise RuntimeError("run() was called from the background event loop; await the coroutine instead")
    future = asyncio.run_coroutine_threadsafe(coro, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class SingleFlight:
    """Whoever asks while an answer is under way in the same event loop gets that answer, or its failure."""

    def __init__(self) -> None:
        self._under_way: dict[asyncio.AbstractEventLoop, asyncio.Task[Any]] = {}

    async def join(self, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What `ask` returned or raised, for all that waited for it. It goes on when one of them is cancelled."""
        loop = asyncio.get_running_loop()
        task = self._under_way.get(loop)
        if task is None:
            task = self._under_way[loop] = loop.create_task(ask())
            task.add_done_callback(lambda _: self._under_way.pop(loop))
        return await asyncio.shield(task)


# Per event loop, because a semaphore belongs to one; they go with it.
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] = WeakKeyDictionary()


def slots(name: str, at_a_time: int) -> asyncio.Semaphore:
    """What lets `at_a_time` of the coroutines of this event loop that ask by `name` go on; the first who asks says how many."""
    return _slots.setdefault(asyncio.get_running_loop(), {}).setdefault(name, asyncio.Semaphore(at_a_time))


def stop_async_loop(timeout: float = 5.0) -> None:
    """End the background loop and its thread; the next `run` starts a new one."""
    global _loop, _thread
    with _lock:
        if _loop is None:
            return
        _loop.call_soon_threadsafe(_loop.stop)
        _thread.join(timeout)
        if not _thread.is_alive():
            _loop.close()
        _loop = _thread = None
