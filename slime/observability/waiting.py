"""The driver's waits. Each has a name and a deadline, and logs after 30 s, and again later, what it waits for.

A wait for several results ends with the first error among them: if one training rank fails, the others hang in a collective,
and waiting for all of them would hide the cause. And every wait ends when something that this process watches (`watch`) dies,
since the awaited work may go on trying for long, or may not even depend on it.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from slime.utils.errors import RunError, UserError

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_REPORT_AFTER_SECONDS = 30.0
_DEATH_SECONDS = 5.0
# For fetching a result that Ray says is ready.
_FETCH_SECONDS = 60.0
_WATCHED_SECONDS = 1.0
_ASK_SECONDS = 1.0


@dataclasses.dataclass
class _Asked:
    """A watched actor: the open question whether it lives (None: answered), when it was asked, and how long it may go without
    an answer."""

    silence_s: float
    question: ray.ObjectRef | None = None
    asked_at: float = 0.0


# References whose error ends every wait of this process.
_watched: list[ray.ObjectRef] = []
# Actors whose death ends every wait.
_asked: dict[Any, _Asked] = {}
# What the error that tells of an actor's death calls it.
_names: dict[Any, str] = {}
# Ids of the actors whose death was told.
_told: set[str | None] = set()


def watch(refs: Sequence[ray.ObjectRef]) -> None:
    """End every wait of this process, from now on, with the error of the first of `refs` that has one.

    A reference that gets a result without an error is no longer watched.
    """
    _watched.extend(refs)


def unwatch(refs: Sequence[ray.ObjectRef]) -> None:
    """Undo `watch`."""
    gone = set(refs)
    _watched[:] = [ref for ref in _watched if ref not in gone]


def watch_actors(actors: Sequence[Any], silence_s: float = math.inf) -> None:
    """End every wait of this process, from now on, when one of `actors` dies, whatever is awaited.

    They are asked once a second whether they live. A busy actor answers when it is done, and counts as alive until then. One
    whose methods are coroutines answers beside its work: if it does not for `silence_s` seconds, it counts as dead.
    """
    _asked.update({actor: _Asked(silence_s) for actor in actors})


def name_actors(names: Mapping[Any, str]) -> None:
    """From now on, have the error that tells of the death of one of these actors say which one it was.

    Args:
        names: actor → what messages call it. Ray itself tells the number of its process and the address of its node.
    """
    _names.update(names)


def unwatch_actors(actors: Sequence[Any]) -> None:
    """Undo `watch_actors` and `name_actors`."""
    for actor in actors:
        _asked.pop(actor, None)
        _names.pop(actor, None)


def watch_nothing() -> None:
    """Undo every `watch`, `watch_actors` and `name_actors`, at the end of Ray. A new Ray refuses the old handles, and that
    error would end the first wait of a run that starts again."""
    _watched.clear()
    _asked.clear()
    _names.clear()
    _told.clear()


def wait_for_all(
    refs: Sequence[ray.ObjectRef],
    name: str,
    timeout_s: float,
    *,
    pending: Callable[[list[int]], str] | None = None,
    on_poll: Callable[[], None] | None = None,
    flag: str | Callable[[list[int]], str | None] | None = None,
    report_s: float | None = None,
) -> list[Any]:
    """The results of `refs`, in order.

    Args:
        name: what is awaited, for messages: "training step 3".
        timeout_s: deadline, in seconds.
        pending: describes the positions in `refs` that are still missing.
        on_poll: called several times a second, to draw progress.
        flag: the flag that sets the deadline, or a function from the missing positions to the flag that would give them more
            time.
        report_s: seconds between two lines about what is missing; None: 30 s for the first line, then twice as long each time.

    Raises:
        UserError, RunError: raised by the awaited process, without the remote traceback.
        RunError: the deadline passed, or an awaited or watched process died.
    """
    results: list[Any] = [None] * len(refs)
    patience = _Patience(name, timeout_s, pending, flag, report_s)
    for ref, position, others in _arriving(refs, patience, on_poll):
        results[position] = _get(ref, name, others)
    return results


def wait_for_each(
    refs: Sequence[ray.ObjectRef],
    name: str,
    timeout_s: float,
    *,
    pending: Callable[[list[int]], str] | None = None,
    flag: str | None = None,
) -> list[Any]:
    """As `wait_for_all`, but a failure of one of `refs` does not end the wait: its RunError stands in place of its result.

    Raises:
        UserError: raised by the awaited process.
        RunError: a watched process died.
    """
    results: list[Any] = [None] * len(refs)
    missing = set(range(len(refs)))
    try:
        for ref, position, _ in _arriving(refs, _Patience(name, timeout_s, pending, flag)):
            missing.remove(position)
            try:
                results[position] = _get(ref, name, others=[])
            except _WatchedDied:
                raise
            except RunError as error:
                results[position] = error
    except _DeadlinePassed as error:
        for position in missing:
            results[position] = error
    return results


class _DeadlinePassed(RunError):
    pass


class _WatchedDied(RunError):
    """Something that this process watches has failed, not what was awaited."""


class _Patience:
    """How long a wait may go on, and how often it says what it waits for; the arguments are those of `wait_for_all`."""

    def __init__(
        self,
        name: str,
        timeout_s: float,
        pending: Callable[[list[int]], str] | None = None,
        flag: str | Callable[[list[int]], str | None] | None = None,
        report_s: float | None = None,
    ) -> None:
        self.name = name
        self._timeout_s, self._pending, self._flag, self._report_s = timeout_s, pending, flag, report_s
        self._started = time.monotonic()
        self._report_at = report_s or _REPORT_AFTER_SECONDS

    def go_on(self, missing: Iterable[int]) -> None:
        """Report the missing positions if it is time to. Raises _DeadlinePassed if it is too late."""
        waited = time.monotonic() - self._started
        if waited > self._timeout_s:
            named = self._flag(sorted(missing)) if callable(self._flag) else self._flag
            limit = f"{self._timeout_s:.0f} s" + (f" ({named})" if named else "")
            raise _DeadlinePassed(f"{self.name}: no answer within {limit} from {self._describe(missing)}")
        if waited > self._report_at:
            logger.info("%s: waiting for %.0f s for %s", self.name, waited, self._describe(missing))
            self._report_at += self._report_s or self._report_at

    def _describe(self, missing: Iterable[int]) -> str:
        positions = sorted(missing)
        return self._pending(positions) if self._pending is not None else f"{len(positions)} process(es)"


def _arriving(
    refs: Sequence[ray.ObjectRef], patience: _Patience, on_poll: Callable[[], None] | None = None
) -> Iterator[tuple[ray.ObjectRef, int, list[ray.ObjectRef]]]:
    """Each of `refs` when it is ready, with its position and the list of those that are not ready."""
    remaining = {ref: position for position, ref in enumerate(refs)}
    while remaining:
        questions = _open_questions()
        awaited = [*remaining, *_watched, *questions]
        ready, _ = ray.wait(awaited, num_returns=1, timeout=_POLL_SECONDS)
        if ready and len(awaited) > 1:
            # All that are there: to ask for each anew would take time by the square of their number.
            ready = ray.wait(awaited, num_returns=len(awaited), timeout=0)[0] or ready
        for ref in ready:
            if ref in questions:
                _asked[questions[ref]].question = None
                _get(ref, patience.name, others=[], is_watched=True)
            elif ref not in remaining:
                unwatch([ref])
                _get(ref, patience.name, others=[], is_watched=True)
            else:
                position = remaining.pop(ref)
                yield ref, position, list(remaining)
        if on_poll is not None:
            on_poll()
        if remaining:
            _raise_if_one_is_silent(patience.name)
            patience.go_on(remaining.values())


def wait_for(ref: ray.ObjectRef, name: str, timeout_s: float, **options: Any) -> Any:
    """`wait_for_all` of one reference."""
    return wait_for_all([ref], name, timeout_s, **options)[0]


def _get(ref: ray.ObjectRef, name: str, others: Sequence[ray.ObjectRef], is_watched: bool = False) -> Any:
    """The result of `ref`, which is ready. None if it `is_watched` and tells of a death that was told before: an actor dies for
    every call of it, and what is awaited next, to save work, may not need this actor."""
    try:
        return ray.get(ref, timeout=_FETCH_SECONDS)
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
        if is_watched and error.actor_id in _told:
            return None
        raise _death(error, name) from None
    except GetTimeoutError:
        raise RunError(f"{name}: the result is ready but could not be fetched within {_FETCH_SECONDS:g} s") from None


def _open_questions() -> dict[ray.ObjectRef, Any]:
    """The questions that watched actors have not answered, after asking those whose turn it is: question → actor."""
    now = time.monotonic()
    for actor, asked in _asked.items():
        if asked.question is None and now - asked.asked_at > _ASK_SECONDS:
            asked.question, asked.asked_at = actor.__ray_ready__.remote(), now
    return {asked.question: actor for actor, asked in _asked.items() if asked.question is not None}


def _raise_if_one_is_silent(name: str) -> None:
    for actor, asked in _asked.items():
        if asked.question is not None and time.monotonic() - asked.asked_at > asked.silence_s:
            who = _names.get(actor, "a process of the run")
            # It is told once, like other deaths: what is awaited next, to save work, may not need this actor.
            unwatch_actors([actor])
            raise _WatchedDied(
                f"{name}: {who} has answered nothing for {asked.silence_s:.0f} s: its process was stopped, or a function in it "
                "keeps Python from running"
            )


def _raise_if_one_died(others: Sequence[ray.ObjectRef], name: str) -> None:
    """Look for a death behind an error: when a process dies, errors of its peers, which lost their connection, often come
    first."""
    ready, _ = ray.wait(list(others), num_returns=len(others), timeout=_DEATH_SECONDS) if others else ([], [])
    for ref in ready:
        try:
            ray.get(ref, timeout=_FETCH_SECONDS)
        except RayActorError as error:
            raise _death(error, name) from None
        except RayTaskError:
            continue


def _raise_if_watched_died(name: str) -> None:
    """Look for a watched death behind an error: a process that talks to a dead one fails too, and its error, which says less,
    may come first."""
    ready, _ = ray.wait(_watched, num_returns=1, timeout=_WATCHED_SECONDS) if _watched else ([], [])
    unwatch(ready)
    for ref in ready:
        try:
            _get(ref, name, others=[], is_watched=True)
        except RunError as error:
            raise _WatchedDied(str(error)) from None


def _death(error: RayActorError, name: str) -> RunError:
    _told.add(error.actor_id)
    hint = "If memory ran out, the kernel's log (dmesg) names the process; lower --max-tokens-per-gpu or the engines' cache."
    # Ray hands out the id of an actor as text here, and tells what it is a class of: all ranks are of the same.
    named = (name for actor, name in _names.items() if actor._actor_id.hex() == error.actor_id)
    who = next((f"It was {name}. " for name in named), "")
    return RunError(f"{name}: a process of the run died. {who}{str(error).strip()}\n{hint}")
