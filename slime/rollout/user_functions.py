"""Calling functions that users supply: without blocking the event loop, without losing their tracebacks.

A coroutine function is awaited, a plain one runs in a daemon thread of its own, so that one that never returns neither
fills a pool nor keeps the process from ending. Both obey a time limit (a thread cannot be ended, it is left behind).
"""

import asyncio
import contextvars
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from slime.utils.errors import UserError

# Plain functions that run at the same time; more threads only compete for the interpreter.
MAX_THREADS = 128

_thread_slots: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = weakref.WeakKeyDictionary()


def parameter_names(fn: Callable[..., Any]) -> list[str]:
    """Names of the parameters of `fn` (without self); empty for callables that do not tell."""
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return []


def is_batch_form(fn: Callable[..., Any]) -> bool:
    """Whether `fn` takes a list of samples: its second parameter is named `samples`."""
    return parameter_names(fn)[1:2] == ["samples"]


def accepted_keywords(fn: Callable[..., Any], candidates: dict[str, Any]) -> dict[str, Any]:
    """The entries of `candidates` that `fn` can be given by name."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return {}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(candidates)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind in by_name}
    return {name: value for name, value in candidates.items() if name in names}


def is_coroutine_function(fn: Callable[..., Any]) -> bool:
    """Whether calling `fn` gives an awaitable, also for objects with an async `__call__`."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


class CallTimedOut(Exception):
    """A user function did not return within the limit we set; a TimeoutError of its own is something else."""


async def call_user_function(
    fn: Callable[..., Any], *args: Any, timeout: float | None = None, keywords: dict[str, Any] | None = None
) -> Any:
    """The result of `fn(*args, **keywords)`, which may be plain or async.

    Raises:
        CallTimedOut: no result within `timeout` seconds, counted from when the call starts to run.
    """
    keywords = keywords or {}
    if is_coroutine_function(fn):
        return await _within(timeout, fn(*args, **keywords))
    async with _thread_slot():
        result = await _within(timeout, run_in_daemon_thread(fn, *args, **keywords))
    # A plain function may still hand out an awaitable (functools.partial, decorators).
    return await _within(timeout, result) if inspect.isawaitable(result) else result


async def _within(timeout: float | None, awaitable: Awaitable[Any]) -> Any:
    scope = asyncio.timeout(timeout)
    try:
        async with scope:
            return await awaitable
    except TimeoutError as error:
        if scope.expired():
            raise CallTimedOut(f"no result within {timeout:g} s") from error
        raise


def _thread_slot() -> asyncio.Semaphore:
    return _thread_slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_THREADS))


def run_in_daemon_thread(fn: Callable[..., Any], *args: Any, **keywords: Any) -> "asyncio.Future[Any]":
    """Start `fn` in a new daemon thread; the future belongs to the running loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            setter(value)

    def work() -> None:
        try:
            outcome = (future.set_result, context.run(fn, *args, **keywords))
        except BaseException as error:
            outcome = (future.set_exception, _as_exception(error))
        # The loop may be closed already when a call that was given up comes back.
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name=f"slime-{getattr(fn, '__name__', 'call')}", daemon=True).start()
    return future


def _as_exception(error: BaseException) -> BaseException:
    """Futures refuse StopIteration, and SystemExit in a thread must not end the event loop."""
    if isinstance(error, StopIteration | SystemExit | KeyboardInterrupt):
        wrapped = RuntimeError(f"the function raised {type(error).__name__}")
        wrapped.__cause__ = error
        return wrapped
    return error


def wrong_result_error(flag: str, path: str, subject: str, result: Any, expected: str) -> UserError:
    """The error for a plug-in that returned something unusable."""
    return UserError(
        f"{flag} {path} returned {_shortened(result)} ({type(result).__name__}) for {subject}; expected {expected}"
    )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def describe_samples(samples: list[Any]) -> str:
    """`sample 7` or `samples 8, 9, 10`, at most five of them."""
    indices = ", ".join(str(sample.index) for sample in samples[:5])
    if len(samples) == 1:
        return f"sample {indices}"
    return f"samples {indices}{', …' if len(samples) > 5 else ''}"
