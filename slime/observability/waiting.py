"""The driver's waits: each has a name and a deadline, and says after 30 s what it waits for.

A wait on several results ends with the first error among them: when one training rank fails, the others hang in a
collective, so waiting for all of them first would hide the cause. And every wait ends when something dies that this
process watches (`watch`): what is awaited may go on trying for long, or have nothing to do with it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from slime.utils.errors import RunError, UserError

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_REPORT_AFTER_SECONDS = 30.0
_DEATH_SECONDS = 5.0
_WATCHED_SECONDS = 1.0

# References whose error ends every wait of this process.
_watched: list[ray.ObjectRef] = []


def watch(refs: Sequence[ray.ObjectRef]) -> None:
    """End every wait of this process, from now on, with the error of the first of `refs` that has one.

    A reference without an error says that what it stood for ended as it should.
    """
    _watched.extend(refs)


def unwatch(refs: Sequence[ray.ObjectRef]) -> None:
    """Undo `watch`."""
    gone = set(refs)
    _watched[:] = [ref for ref in _watched if ref not in gone]


def wait_for_all(
    refs: Sequence[ray.ObjectRef],
    name: str,
    timeout_s: float,
    *,
    pending: Callable[[list[int]], str] | None = None,
    on_poll: Callable[[], None] | None = None,
    flag: str | Callable[[list[int]], str | None] | None = None,
) -> list[Any]:
    """The results of `refs`, in order.

    Args:
        name: what is awaited, for messages: "training step 3".
        timeout_s: deadline, in seconds.
        pending: describes the positions in `refs` that are still missing.
        on_poll: called several times a second, to draw progress.
        flag: the one that sets the deadline, or says which would give the positions that are missing more time.

    Raises:
        UserError, RunError: raised by the awaited process, without the remote traceback.
        RunError: the deadline passed, or a process died, of those that are watched too.
    """
    started = time.monotonic()
    report_at = _REPORT_AFTER_SECONDS
    remaining = {ref: position for position, ref in enumerate(refs)}
    results: list[Any] = [None] * len(refs)
    while remaining:
        ready, _ = ray.wait([*remaining, *_watched], num_returns=1, timeout=_POLL_SECONDS)
        for ref in ready:
            if ref not in remaining:
                unwatch([ref])
                _get(ref, name, others=[])
                continue
            results[remaining.pop(ref)] = _get(ref, name, others=list(remaining))
        if on_poll is not None:
            on_poll()
        waited = time.monotonic() - started
        if remaining and waited > timeout_s:
            named = flag(sorted(remaining.values())) if callable(flag) else flag
            limit = f"{timeout_s:.0f} s" + (f" ({named})" if named else "")
            raise RunError(f"{name}: no answer within {limit} from {_describe(remaining, pending)}")
        if remaining and waited > report_at:
            logger.info("%s: waiting for %.0f s for %s", name, waited, _describe(remaining, pending))
            report_at *= 2
    return results


def wait_for(ref: ray.ObjectRef, name: str, timeout_s: float, **options: Any) -> Any:
    """`wait_for_all` of one reference."""
    return wait_for_all([ref], name, timeout_s, **options)[0]


def _describe(remaining: dict[ray.ObjectRef, int], pending: Callable[[list[int]], str] | None) -> str:
    positions = sorted(remaining.values())
    return pending(positions) if pending is not None else f"{len(positions)} process(es)"


def _get(ref: ray.ObjectRef, name: str, others: Sequence[ray.ObjectRef]) -> Any:
    try:
        return ray.get(ref, timeout=60)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UserError):
            raise cause from None
        _raise_if_watched_died(name)
        if isinstance(cause, RunError):
            raise cause from None
        if isinstance(cause, OSError):
            raise RunError(f"{name}: {cause}") from None
        _raise_if_one_died(others, name)
        raise
    except RayActorError as error:
        raise RunError(f"{name}: a process of the run died. {_death_cause(error)}") from None
    except GetTimeoutError:
        raise RunError(f"{name}: the result is ready but could not be fetched within 60 s") from None


def _raise_if_one_died(others: Sequence[ray.ObjectRef], name: str) -> None:
    """When a process dies, its peers' lost connections are often heard of first: look for the death behind an error."""
    ready, _ = ray.wait(list(others), num_returns=len(others), timeout=_DEATH_SECONDS) if others else ([], [])
    for ref in ready:
        try:
            ray.get(ref, timeout=60)
        except RayActorError as error:
            raise RunError(f"{name}: a process of the run died. {_death_cause(error)}") from None
        except RayTaskError:
            continue


def _raise_if_watched_died(name: str) -> None:
    """Whoever talks to a dead process fails too, and may be heard of first: its error says less than the death."""
    ready, _ = ray.wait(_watched, num_returns=1, timeout=_WATCHED_SECONDS) if _watched else ([], [])
    unwatch(ready)
    for ref in ready:
        _get(ref, name, others=[])


def _death_cause(error: RayActorError) -> str:
    hint = "If memory ran out, the kernel's log (dmesg) names the process; lower --max-tokens-per-gpu or the engines' cache."
    return f"{str(error).strip()}\n{hint}"
