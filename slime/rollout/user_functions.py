"""Calling functions that users supply, without blocking the event loop and without losing their tracebacks.

- A plain function runs in a daemon thread of its own, so that one that never returns neither fills a pool nor keeps the process
  from ending. A thread cannot be ended: beyond its time limit it is left behind, its slot goes to others, and a function that
  leaves too many behind ends the run. A call that was cancelled within its limit, say at the end of a step, may yet return: if
  too many such calls still run, the next one waits for them.
- A coroutine function is awaited. At its time limit it is cancelled, if it awaits something then. One that blocks holds up the
  event loop and all limits in it, which `async_utils` reports.
- A call can only raise errors: what would end more than the call, say `sys.exit`, is turned into one.

`CallSlots` say how many calls run at a time: there is one for each kind of call, sized by its flag.
"""

import asyncio
import bisect
import contextlib
import contextvars
import enum
import functools
import inspect
import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from slime.utils.async_utils import Slots, run, time_limit
from slime.utils.errors import RunError, UserError
from slime.utils.plugin_loader import (
    containing_endings,
    is_coroutine_function,
    load_function,
    parameters_of,
    user_function_error,
)

logger = logging.getLogger(__name__)

# How many calls of one function may be left behind in their threads: so many times those that may run at a time, and at least
# the second number. Twice, because calls that an abort interrupted may still run when those of the next step meet their limit.
LEFT_BEHIND_PER_SLOT = 2
MIN_LEFT_BEHIND = 64
REPORT_AFTER_S = 30.0


class CallKind(enum.IntEnum):
    """What calls are for, in the order in which one may make another: a generate function asks for rewards."""

    GENERATE = 0
    HOOK = 1
    REWARD = 2


# (level, kind, its slots, the same of the slot that encloses it) of the innermost slot that is held here.
_Held = tuple[int, CallKind, Slots, "_Held | None"]
_held: contextvars.ContextVar[_Held | None] = contextvars.ContextVar("held_slot", default=None)


class CallSlots:
    """Slots for `size` calls of one kind at a time on an event loop; `async with slots:` takes one.

    A call may make others, which need slots too: a generate function asks for rewards, a reward combines others. To rule out
    deadlocks, no call may wait for a slot whose holder waits for this call. So places have an order, by level and then by kind,
    and a call inside another one always takes a later place: a later kind finds it on the same level, the same kind or an
    earlier one finds it one level down, where there are `size` more slots. A context variable tells what encloses a call; it
    goes along with tasks, with the threads of plain functions, and with `slime.utils.async_utils.run`.
    """

    def __init__(self, kind: CallKind, size: int) -> None:
        self.kind = kind
        self.size = size
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, Slots]]
        self._slots = weakref.WeakKeyDictionary()

    async def __aenter__(self) -> None:
        enclosing = _held.get()
        level, slots = self._place_in(enclosing)
        await slots.acquire()
        _held.set((level, self.kind, slots, enclosing))

    async def __aexit__(self, *exc_info: object) -> None:
        _, _, slots, enclosing = _held.get()
        _held.set(enclosing)
        slots.release()

    def locked(self) -> bool:
        """Whether a call that is made here and now would have to wait."""
        return self._place_in(_held.get())[1].locked()

    def _place_in(self, enclosing: _Held | None) -> tuple[int, Slots]:
        """The level of a call inside `enclosing`, and its slots there."""
        level = 0
        if enclosing is not None:
            level = enclosing[0] if self.kind > enclosing[1] else enclosing[0] + 1
        loop = asyncio.get_running_loop()
        try:
            return level, self._slots[loop][level]
        except KeyError:
            return level, self._slots.setdefault(loop, {}).setdefault(level, Slots(self.size))


@functools.cache
def call_slots(kind: CallKind, size: int) -> CallSlots:
    """The slots that all calls of `kind` share in this process."""
    return CallSlots(kind, size)


def is_batch_form(fn: Callable[..., Any]) -> bool:
    """Whether `fn` takes a list of samples: its second parameter is named `samples`."""
    return parameters_of(fn).names[1:2] == ("samples",)


class CallTimedOut(Exception):
    """A user function did not return within the limit we set; a TimeoutError of its own is something else."""


class TooManyLeftBehind(RunError):
    """A plain function did not return from so many calls that no more threads are given to it."""


async def call_user_function(
    fn: Callable[..., Any],
    *args: Any,
    source: str,
    at_a_time: int,
    timeout: float | None = None,
    keywords: dict[str, Any] | None = None,
) -> Any:
    """The result of `fn(*args, **keywords)`, which may be plain or async.

    Args:
        source: flag and path of the function, for messages; what it leaves behind is counted under this name.
        at_a_time: how many calls of it may run at a time; bounds what it may leave behind.

    Raises:
        CallTimedOut: no result within `timeout` seconds, counted from when the call starts to run.
        TooManyLeftBehind: too many earlier calls are beyond their time limit and still occupy their threads.
        EndingRaised: it raised what is no `Exception`, or a CancelledError although nobody cancels this call.
        RunError: the machine gives us no further thread.
    """
    keywords = keywords or {}
    if is_coroutine_function(fn):
        return await _within(timeout, fn(*args, **keywords))
    await _wait_for_room(source, at_a_time)
    call = _ThreadCall(fn, args, keywords)
    # A call without a limit is overdue as soon as nobody waits for it.
    overdue_at = time.monotonic() + (timeout or 0.0)
    try:
        result = await _within(timeout, call.future)
    except CallTimedOut:
        overdue_at = 0.0
        raise
    finally:
        call.leave_behind(source, overdue_at)
    # A plain function may still hand out an awaitable (functools.partial, decorators).
    return await _within(timeout, result) if inspect.isawaitable(result) else result


async def call_within_request_time(
    args: Any,
    flag: str,
    path: str,
    subject: str,
    fn: Callable[..., Any],
    *arguments: Any,
    at_a_time: int = 1,
    keywords: dict[str, Any] | None = None,
) -> Any:
    """The result of `fn(*arguments, **keywords)`, a user's function at `path` that looks at what was generated. It may take as
    long as a request.

    Args:
        subject: what it is called for, for messages: `rollout 3`.

    Raises:
        UserError: it raised, or did not return within `--http-request-timeout`.
        RunError: as `call_user_function`.
    """
    limit = args.http_request_timeout
    options = {"source": f"{flag} {path}", "at_a_time": at_a_time, "timeout": limit, "keywords": keywords}
    try:
        return await call_user_function(fn, *arguments, **options)
    except CallTimedOut as error:
        late = f"{flag} {path} did not return within --http-request-timeout {limit:g} s; it was called for {subject}"
        raise UserError(late) from error
    except Exception as error:
        raise user_function_error(flag, path, subject, error) from error


def call_for_step(args: Any, flag: str, path: str, subject: str, *arguments: Any) -> Any:
    """`call_within_request_time` for the function at `path`, from a thread. Nothing else of the step goes on meanwhile, so a
    line says every 30 s what it waits for."""
    call = call_within_request_time(args, flag, path, subject, load_function(path, flag=flag), *arguments)
    return run(_telling(f"{flag} {path}, called for {subject},", call))


async def _telling(who: str, call: Awaitable[Any]) -> Any:
    async def tell() -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(REPORT_AFTER_S)
            logger.info("%s has not returned for %.0f s; the step waits for it", who, time.monotonic() - started)

    telling = asyncio.create_task(tell())
    try:
        return await call
    finally:
        telling.cancel()


async def _within(timeout: float | None, awaitable: Awaitable[Any]) -> Any:
    limit = time_limit(timeout)
    try:
        with limit, containing_endings():
            return await awaitable
    except TimeoutError as error:
        if limit.expired:
            raise CallTimedOut(f"no result within {timeout:g} s") from error
        raise


def run_in_daemon_thread(fn: Callable[..., Any], *args: Any, **keywords: Any) -> "asyncio.Future[Any]":
    """Start `fn` in a new daemon thread; the future belongs to the running loop.

    Raises:
        RunError: the machine gives us no further thread.
    """
    return _ThreadCall(fn, args, keywords).future


def left_behind(source: str) -> int:
    """Calls of `source` that were given up and still run."""
    with _left_behind_lock:
        return len(_left_behind[source].overdue_at)


class _LeftBehind:
    """The calls of one source that were given up and still run; read and changed under `_left_behind_lock`."""

    def __init__(self) -> None:
        # Each call → the `time.monotonic()` from which on it is beyond its time limit.
        self.overdue_at: dict[_ThreadCall, float] = {}
        # The events of those who wait for fewer calls; set whenever `overdue_at` changes.
        self.watchers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def tell_watchers(self) -> None:
        for loop, changed in self.watchers:
            # A loop that was stopped without ending its tasks leaves its watchers here.
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)


_left_behind: defaultdict[str, _LeftBehind] = defaultdict(_LeftBehind)
_left_behind_lock = threading.Lock()
# Per event loop and source: whose turn it is to wait until fewer calls are left behind.
_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, defaultdict[str, asyncio.Lock]]
_turns = weakref.WeakKeyDictionary()


class _ThreadCall:
    """One call in a daemon thread of its own."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self._ended = False
        self._left_by: str | None = None
        work = functools.partial(contextvars.copy_context().run, fn, *args, **keywords)
        name = getattr(fn, "__name__", "call")
        try:
            threading.Thread(target=self._run, args=(work,), name=f"slime-{name}", daemon=True).start()
        except RuntimeError as error:
            raise RunError(
                f"no thread could be started for {name}: {error}; {threading.active_count()} are running. A plain function "
                "occupies one per call: write it as `async def`, lower --sglang-server-concurrency or --rm-concurrency, or "
                "raise the limit of processes (ulimit -u)"
            ) from None

    def leave_behind(self, source: str, overdue_at: float) -> None:
        """Nobody waits for the call any more: count it until it ends, unless it has ended already."""
        with _left_behind_lock:
            if self._ended:
                return
            self._left_by = source
            left = _left_behind[source]
            left.overdue_at[self] = overdue_at
            left.tell_watchers()
            count = len(left.overdue_at)
        # A line at 1, 2, 4, 8, …
        if count & (count - 1) == 0:
            logger.warning("%d calls of %s were given up and still run in their threads", count, source)

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            with containing_endings():
                outcome = (self.future.set_result, work())
        except StopIteration as error:
            # A future refuses this exception.
            wrapped = RuntimeError("the function raised StopIteration")
            wrapped.__cause__ = error
            outcome = (self.future.set_exception, wrapped)
        except BaseException as error:
            outcome = (self.future.set_exception, error)
        with _left_behind_lock:
            self._ended = True
            if self._left_by is not None:
                left = _left_behind[self._left_by]
                del left.overdue_at[self]
                left.tell_watchers()
        # The loop may be closed already when a call that was given up comes back.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, *outcome)

    def _settle(self, setter: Callable[[Any], None], value: Any) -> None:
        if not self.future.done():
            setter(value)


async def _wait_for_room(source: str, at_a_time: int) -> None:
    """Return when fewer calls than the limit are left behind. If so many are beyond their time limits, that is an error: they
    will not return."""
    limit = max(MIN_LEFT_BEHIND, LEFT_BEHIND_PER_SLOT * at_a_time)
    if left_behind(source) < limit:
        return
    loop, changed, told = asyncio.get_running_loop(), asyncio.Event(), False
    # Only one of the calls that wait looks at the others. Otherwise every thread that ends would wake all of them.
    async with _turns.setdefault(loop, defaultdict(asyncio.Lock))[source]:
        with _left_behind_lock:
            _left_behind[source].watchers.add((loop, changed))
        try:
            while True:
                changed.clear()
                with _left_behind_lock:
                    overdue_at = sorted(_left_behind[source].overdue_at.values())
                if len(overdue_at) < limit:
                    return
                now = time.monotonic()
                if overdue_at[limit - 1] <= now:
                    raise TooManyLeftBehind(
                        f"{bisect.bisect(overdue_at, now)} calls of {source} were given up and never returned; each still "
                        "occupies a thread, and no more are given to it. Give everything that it waits for a time limit of "
                        "its own, or write it as `async def`, which can be cancelled"
                    )
                if not told:
                    logger.warning(
                        "a call of %s waits for one of the %d that were cancelled and still run", source, limit
                    )
                    told = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(overdue_at[limit - 1] - now):
                        await changed.wait()
        finally:
            with _left_behind_lock:
                _left_behind[source].watchers.remove((loop, changed))


def wrong_result_error(flag: str, path: str, subject: str, result: Any, expected: str) -> UserError:
    """The error for a plug-in that returned something unusable."""
    return UserError(
        f"{flag} {path} returned {_shortened(result)} ({type(result).__name__}) for {subject}; expected {expected}"
    )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


@contextlib.contextmanager
def naming_makers(args: Any) -> Iterator[None]:
    """Add to an error about samples, which the block raises, the functions of the user's that made them."""
    try:
        yield
    except (UserError, ValueError) as error:
        given = {
            "--custom-generate-function-path": [args.custom_generate_function_path],
            "--rollout-sample-hook-path": args.rollout_sample_hook_path or [],
            "--custom-rm-path": [args.custom_rm_path],
        }
        made_by = ", ".join(f"{flag} {path}" for flag, paths in given.items() for path in paths if path)
        if not made_by:
            raise
        raise UserError(f"{error}; the samples were made by {made_by}") from error


def describe_samples(samples: list[Any]) -> str:
    """`sample 7` or `samples 8, 9, 10`, at most five of them."""
    indices = ", ".join(str(sample.index) for sample in samples[:5])
    if len(samples) == 1:
        return f"sample {indices}"
    return f"samples {indices}{', …' if len(samples) > 5 else ''}"
