"""One background event loop per process, for coroutines started from synchronous code.

The rollout functions are called synchronously and run for minutes with thousands of requests in flight; they all share
this loop, so that one HTTP session and one semaphore serve every call.

Users' coroutines run on it, too. One that blocks holds up all others, with their time limits and reports; a thread beside the
loop then logs where the loop stands. One that calls `sys.exit` does not end the loop.
"""

import asyncio
import functools
import logging
import sys
import sysconfig
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

logger = logging.getLogger(__name__)

# A loop that does not answer for so many seconds is reported; and how often it is asked.
STALL_S = 30.0
ASK_EVERY_S = 5.0
# The wait is divided into so many: in a process that was halted, a single one would be over before the loop could answer.
_WAITS = 10
# One task polls so many times for all that wait for its condition; then another takes over.
_LOOKS = 300
# Functions whose files lie below these directories are no user's.
_NOT_USERS = (
    *(f"{directory}/" for directory in {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}),
    f"{Path(__file__).resolve().parents[1]}/", "<frozen",
)  # fmt: skip

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def get_async_loop() -> asyncio.AbstractEventLoop:
    """The running background loop; started in a daemon thread on the first call."""
    global _loop, _thread
    with _lock:
        if _loop is None or _loop.is_closed() or not _thread.is_alive():
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_run_for_ever, args=(_loop,), name="slime-async-loop", daemon=True)
            _thread.start()
            watching = threading.Thread(target=_watch, args=(_loop, _thread), name="slime-loop-watch", daemon=True)
            watching.start()
        return _loop


def _run_for_ever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            # It comes from a task, which has it as its result as well. The loop goes on, since others depend on it.
            logger.exception("a task wanted to end the process; its event loop goes on")


def _watch(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """While the loop's thread lives, log where it stands if the loop does not answer, once per stall."""
    thread.join(ASK_EVERY_S)
    while thread.is_alive():
        answered, asked_at = threading.Event(), time.monotonic()
        try:
            loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # the loop has been closed
            return
        if not any(answered.wait(STALL_S / _WAITS) for _ in range(_WAITS)) and thread.is_alive():
            stack = traceback.extract_stack(sys._current_frames().get(thread.ident))
            logger.warning(
                "the event loop has been held up for %.0f s: generation, rewards and their time limits wait for what blocks "
                "in %s; await it, or make its function a plain `def`, which gets a thread of its own\n%s",
                time.monotonic() - asked_at, _users_function(stack), "".join(stack.format()).rstrip(),
            )  # fmt: skip
            while not answered.wait(ASK_EVERY_S) and thread.is_alive():
                pass
            logger.warning("the event loop goes on after %.0f s", time.monotonic() - asked_at)
        thread.join(ASK_EVERY_S)


def _users_function(stack: traceback.StackSummary) -> str:
    """The innermost function that belongs neither to us nor to Python or its packages, with its place; else the innermost."""
    others = [frame for frame in stack if not frame.filename.startswith(_NOT_USERS)]
    found = (others or stack)[-1]
    return f"{found.name} ({found.filename}:{found.lineno})"


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


async def turn_of_async_loop() -> None:
    """Return when the background loop has completed a turn, which it cannot while something blocks it."""
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), get_async_loop()))


class time_limit:
    """`asyncio.timeout(seconds)` (None: no limit) for a `with` block: raises TimeoutError if it does not end in time.

    It is for blocks that run by the thousand at a time, and mostly take less time than setting a timer. Blocks with the same
    limit reach it in the order in which they began, so one timer, for the oldest, suffices for all of them.

    Attributes:
        expired: the block was ended because its time was over.
    """

    def __init__(self, seconds: float | None) -> None:
        self.expired = False
        self._seconds = seconds
        self._deadlines: _Deadlines | None = None

    def __enter__(self) -> "time_limit":
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling()
        if self._seconds is not None:
            loop = self._task.get_loop()
            self._deadlines = _Deadlines.of(loop, self._seconds)
            self._deadlines.add(self, loop)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._deadlines is not None:
            self._deadlines.discard(self)
        # A task that was also cancelled for another reason stays cancelled.
        if self.expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        """End the block."""
        self.expired = True
        self._task.cancel()


class _Deadlines:
    """The deadlines of an event loop's blocks with the same limit, in the order in which they began."""

    # Weak, so that a loop is not kept in memory.
    _known: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, "_Deadlines"]] = WeakKeyDictionary()

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop, seconds: float) -> "_Deadlines":
        try:
            return cls._known[loop][seconds]
        except KeyError:
            return cls._known.setdefault(loop, {}).setdefault(seconds, cls(seconds))

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends: dict[time_limit, float] = {}
        self._timer_is_set = False

    def add(self, block: time_limit, loop: asyncio.AbstractEventLoop) -> None:
        self._ends[block] = end = loop.time() + self._seconds
        if not self._timer_is_set:
            self._timer_is_set = True
            loop.call_at(end, self._expire, loop)

    def discard(self, block: time_limit) -> None:
        self._ends.pop(block, None)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the blocks whose time is over, and set the timer for the next one."""
        now, due = loop.time(), []
        for block, end in self._ends.items():
            if end > now:
                loop.call_at(end, self._expire, loop)
                break
            due.append(block)
        else:
            self._timer_is_set = False
        for block in due:
            del self._ends[block]
            block.expire()


class SingleFlight:
    """Shares one call among callers of the same event loop: a caller that comes while it runs gets its result, or failure."""

    def __init__(self) -> None:
        self._under_way: dict[asyncio.AbstractEventLoop, asyncio.Task[Any]] = {}

    async def join(self, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The result or error of `ask`, which runs once for all that wait. It goes on if one of them is cancelled."""
        loop = asyncio.get_running_loop()
        task = self._under_way.get(loop)
        if task is None:
            task = self._under_way[loop] = loop.create_task(ask())
            task.add_done_callback(lambda _: self._under_way.pop(loop))
        return await asyncio.shield(task)


# One shared task for each condition that is waited for.
_looking = defaultdict[Callable[[], bool], SingleFlight](SingleFlight)


async def until_true(condition: Callable[[], bool], every: float) -> None:
    """Return when `condition()` is true. One task of this event loop checks it every `every` seconds for all that wait for it;
    if it raises they all do."""
    while not condition():
        await _looking[condition].join(functools.partial(_look_for, condition, every))


async def _look_for(condition: Callable[[], bool], every: float) -> None:
    # Not for ever, since all that wait may be gone.
    for _ in range(_LOOKS):
        await asyncio.sleep(every)
        if condition():
            return


class Slots:
    """As `asyncio.Semaphore`, for one event loop on which thousands wait. They go on in the order in which they came.

    asyncio's own goes, at each release, through all waiters that it has let go on in the same turn of the loop, and answers
    arrive by the hundred.
    """

    def __init__(self, at_a_time: int) -> None:
        self._free = at_a_time
        self._waiting: deque[asyncio.Future[None]] = deque()

    def locked(self) -> bool:
        """Whether a caller would have to wait now."""
        return not self._free

    async def acquire(self) -> None:
        """Take a slot, as soon as there is one."""
        if self._free:
            # A free slot means that nobody else waits for one.
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Hand the slot to the next one that was not cancelled."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    __aenter__ = acquire

    async def __aexit__(self, *exc_info: object) -> None:
        self.release()


# Slots belong to an event loop, and are freed with it.
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Slots]] = WeakKeyDictionary()


def slots(name: str, at_a_time: int) -> Slots:
    """The slots `name` of this event loop, which let `at_a_time` coroutines go on; the first call sets the number."""
    return _slots.setdefault(asyncio.get_running_loop(), {}).setdefault(name, Slots(at_a_time))


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
