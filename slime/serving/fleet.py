"""The engine set of a run: which engines there are, what each of them may be asked, and which weights it holds.

A pure state machine: no Ray, no network, no threads, and no clock, since times are given, in seconds. Whoever sees something
happen to an engine tells the fleet as an event, and the fleet says what holds from then on; `owner.py` decides what follows.
Others ask for a snapshot and use it for one operation. `HealthChecks` says when engines are checked and how long one may be
silent, `why_no_router_follows` how often a router may die.

    STARTING ──ready──► STALE ──weights_whole──► SERVING ──doubt──► SUSPECT
                          ▲ ◄──weights_change───┘ │    ▲ ◄──answer───┘
                          └────wake──── ASLEEP ◄──┘sleep (also of one that is doubted)
    each of these ──die──► DEAD ──replace──► STARTING of the next generation
                             └──give_up──► GIVEN_UP
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any


class EngineState(enum.Enum):
    """What an engine is at a moment."""

    # Its server loads and compiles. It is asked nothing, and its silence means nothing: the start has a limit of its own.
    STARTING = "starting"
    # It answers, but its weights are not those of the last push: not yet, no longer, or only in part. It gets weights only.
    STALE = "stale"
    # It holds the current weights, whole. It gets requests.
    SERVING = "serving"
    # It has given up its memory to the trainer. It is asked nothing until it wakes.
    ASLEEP = "asleep"
    # It was serving when a check or a request failed. It keeps its requests; the check under way decides.
    SUSPECT = "suspect"
    # Its process has ended, or is ended. The next generation takes its place, or the run ends.
    DEAD = "dead"
    # It is dead and nobody takes its place: the run goes on without it.
    GIVEN_UP = "given up"


_LIVING = frozenset(EngineState) - {EngineState.DEAD, EngineState.GIVEN_UP}
# Event → the states in which it may happen, and the state that follows.
_TRANSITIONS: dict[str, tuple[Collection[EngineState], EngineState]] = {
    "ready": ({EngineState.STARTING}, EngineState.STALE),
    "weights_change": ({EngineState.STALE, EngineState.SERVING, EngineState.SUSPECT}, EngineState.STALE),
    "weights_whole": ({EngineState.STALE}, EngineState.SERVING),
    "sleep": ({EngineState.STALE, EngineState.SERVING, EngineState.SUSPECT}, EngineState.ASLEEP),
    "wake": ({EngineState.ASLEEP}, EngineState.STALE),
    "doubt": ({EngineState.SERVING, EngineState.SUSPECT}, EngineState.SUSPECT),
    "answer": ({EngineState.SERVING, EngineState.SUSPECT}, EngineState.SERVING),
    "die": (_LIVING, EngineState.DEAD),
    "replace": ({EngineState.DEAD}, EngineState.STARTING),
    "give_up": ({EngineState.DEAD}, EngineState.GIVEN_UP),
}
# How often an engine is replaced within the time of ten starts. What ends it more often than that, say a broken GPU or a full
# disk, a new server does not cure. The time is counted in starts, because an engine that takes long to start dies less often.
REPLACEMENTS = 3
_WINDOW_IN_STARTS = 10
# A router that dies this often within this time does not come back. The time must be long enough to notice as many hangs.
_LAST_DEATH_OF_ROUTER = 3
_ROUTER_WINDOW_SECONDS = 600.0


class IllegalTransition(Exception):
    """An event that cannot happen to an engine in its state: whoever told it is wrong about the engine."""


@dataclasses.dataclass(frozen=True, order=True)
class EngineName:
    """One life of an engine. `engine_id` counts from 0 and stays; each server in its place is a `generation` of its own."""

    engine_id: int
    generation: int = 0

    def __str__(self) -> str:
        return f"engine {self.engine_id}"


@dataclasses.dataclass(frozen=True)
class EngineRecord:
    """What the fleet knows of an engine.

    Attributes:
        weight_version: of the push whose weights it holds whole; None if it holds those of none.
        cause: why it is dead, given up or in doubt; empty in the other states.
    """

    name: EngineName
    state: EngineState
    weight_version: int | None = None
    cause: str = ""


@dataclasses.dataclass(frozen=True)
class EngineSnapshot:
    """An engine as it was when somebody asked.

    Attributes:
        handle: its actor; for the operation that the snapshot was taken for.
        num_gpus: its devices, each a rank of a weight-update group.
        gpu_offset: where its devices begin among those of all engines.
        alike: the first engine that is started with the same settings; one that somebody else started is alike to itself.
        role: the worker type of its group.
    """

    name: EngineName
    state: EngineState
    weight_version: int | None
    handle: Any
    num_gpus: int
    gpu_offset: int
    alike: int
    role: str = "regular"


@dataclasses.dataclass(frozen=True)
class FleetSnapshot:
    """Some of the engines, by id. `version`: that of the last push, None before the first."""

    version: int | None
    engines: tuple[EngineSnapshot, ...]

    @property
    def names(self) -> tuple[EngineName, ...]:
        return tuple(engine.name for engine in self.engines)

    @property
    def handles(self) -> list[Any]:
        return [engine.handle for engine in self.engines]


class Fleet:
    """The states of the engines of a run, all of which are starting at first.

    Events name the life of an engine that they are about. An event about an earlier life comes too late: the method changes
    nothing and returns False. Methods raise IllegalTransition if an event cannot have happened in the engine's state, and
    KeyError for an unknown engine.

    Args:
        parts: by engine id, the model that the engine serves, and its role in that. Those of one part stand in for each other.
        start_limit: seconds that an engine has from its death until a server answers in its place.

    Attributes:
        parts: those of all engines, each once.
        version: that of the last push, None before the first.
    """

    def __init__(self, parts: Mapping[int, tuple[str, str]], start_limit: float) -> None:
        self._part_of = dict(sorted(parts.items()))
        self.parts = tuple(dict.fromkeys(self._part_of.values()))
        self._records: dict[int, EngineRecord] = {}
        # (part, state) → how many engines of that part are in that state. Kept because every request asks for it, and there may
        # be hundreds of engines.
        self._numbers: Counter[tuple[tuple[str, str], EngineState]] = Counter()
        for engine_id in self._part_of:
            self._put(EngineRecord(EngineName(engine_id), EngineState.STARTING))
        self._start_limit = start_limit
        self._deaths: dict[int, list[float]] = {engine_id: [] for engine_id in self._records}
        # Since when no server answers, for engines that are being replaced.
        self._down_since: dict[int, float] = {}
        self.version: int | None = None

    # -- questions --------------------------------------------------------------------------------------------------

    def records(self, *states: EngineState) -> tuple[EngineRecord, ...]:
        """The engines in these states, by id; all engines if none is given."""
        return tuple(record for record in self._records.values() if not states or record.state in states)

    def record(self, engine_id: int) -> EngineRecord:
        return self._records[engine_id]

    def has(self, part: tuple[str, str], *states: EngineState) -> bool:
        """Whether an engine of `part` is in one of these states. The answer takes no longer where there are more engines."""
        return any(self._numbers[part, state] for state in states)

    def is_current(self, name: EngineName) -> bool:
        """Whether this life is the engine's last; it may be over."""
        return self._records[name.engine_id].name == name

    def late(self, now: float) -> list[EngineName]:
        """New lives without a server that answers in time: it does not start, or Ray has no place for it."""
        starting = self.records(EngineState.STARTING)
        began = [(record.name, self._down_since.get(record.name.engine_id, now)) for record in starting]
        return [name for name, since in began if now - since > self._start_limit]

    def why_give_up(self, engine_id: int) -> str:
        """Why another server in the place of a dead engine is not worth its start; empty: it is worth it."""
        deaths, window = self._deaths[engine_id], _WINDOW_IN_STARTS * self._start_limit
        recent = [died for died in deaths if deaths[-1] - died <= window]
        if len(recent) > REPLACEMENTS:
            return f"it died {len(recent)} times within {window:.0f} s"
        if deaths[-1] - self._down_since[engine_id] > self._start_limit:
            return f"no server answered in its place for {self._start_limit:.0f} s"
        return ""

    # -- events -----------------------------------------------------------------------------------------------------

    def ready(self, name: EngineName) -> bool:
        """Its server answers. The weights that it loaded at its start are those of no push."""
        happened = self._happened("ready", name)
        if happened:
            self._down_since.pop(name.engine_id, None)
        return happened

    def weights_change(self, name: EngineName) -> bool:
        """A push to it begins: until that ends, its weights are those of no version."""
        return self._happened("weights_change", name, weight_version=None)

    def weights_whole(self, name: EngineName, version: int | None) -> bool:
        """It holds the weights of `version`, which becomes the current one; None: it serves the weights that it loaded."""
        if self.version is not None and version is not None and version < self.version:
            raise IllegalTransition(
                f"{name} got the weights of version {version}, but {self.version} is pushed already"
            )
        happened = self._happened("weights_whole", name, weight_version=version)
        if happened and version is not None:
            self.version = version
        return happened

    def sleep(self, name: EngineName) -> bool:
        """It gave up its memory, and with it its weights."""
        return self._happened("sleep", name, weight_version=None)

    def wake(self, name: EngineName) -> bool:
        """It has its memory again, but no weights in it that count."""
        return self._happened("wake", name)

    def doubt(self, name: EngineName, cause: str) -> bool:
        """A check or a request of it failed."""
        return self._happened("doubt", name, cause=cause)

    def answer(self, name: EngineName) -> bool:
        """It answered a check."""
        return self._happened("answer", name)

    def die(self, name: EngineName, cause: str, now: float) -> bool:
        """It is gone, or is no longer counted on. Several callers may tell that; only the first one changes something."""
        if self._records[name.engine_id].state not in _LIVING:
            return False
        happened = self._happened("die", name, weight_version=None, cause=cause)
        if happened:
            self._deaths[name.engine_id].append(now)
            self._down_since.setdefault(name.engine_id, now)
        return happened

    def replace(self, engine_id: int, since: float | None = None) -> EngineName:
        """A new server starts in the place of a dead one. Returns the name of its life.

        `since`: when it could start at the earliest, if that was after the death; its time counts from there.
        """
        last = self._records[engine_id].name
        name = EngineName(engine_id, last.generation + 1)
        self._happened("replace", last, name=name)
        if since is not None:
            self._down_since[engine_id] = since
        return name

    def give_up(self, engine_id: int) -> None:
        """Nobody takes the place of a dead one."""
        record = self._records[engine_id]
        self._happened("give_up", record.name, cause=record.cause)

    def _happened(self, event: str, told: EngineName, **changes: Any) -> bool:
        record = self._records[told.engine_id]
        if told.generation < record.name.generation:
            return False
        allowed, state = _TRANSITIONS[event]
        if told != record.name or record.state not in allowed:
            raise IllegalTransition(
                f"{event} of {told} (generation {told.generation}), which is {record.state.value} "
                f"(generation {record.name.generation})"
            )
        self._put(dataclasses.replace(record, **{"state": state, "cause": "", **changes}))
        return True

    def _put(self, record: EngineRecord) -> None:
        """What is known of an engine changes here alone, and with it the numbers."""
        engine_id, part = record.name.engine_id, self._part_of[record.name.engine_id]
        last = self._records.get(engine_id)
        self._records[engine_id] = record
        self._numbers[part, record.state] += 1
        if last is not None:
            self._numbers[part, last.state] -= 1


def why_no_router_follows(deaths: Sequence[float]) -> str:
    """Why no other router should take the place of one that died at these moments, the last of which is now; empty if one
    should."""
    recent = [died for died in deaths if deaths[-1] - died <= _ROUTER_WINDOW_SECONDS]
    if len(recent) < _LAST_DEATH_OF_ROUTER:
        return ""
    return f"it died {len(recent)} times within {_ROUTER_WINDOW_SECONDS:.0f} s"


# -- checks -------------------------------------------------------------------------------------------------------------

# How much longer than its own limit a check may take: for a first token, for what is computed around it, and for its answer.
_ANSWER_SECONDS = 25.0


@dataclasses.dataclass
class _Course:
    """The checks of one engine.

    Attributes:
        due: when the next check is to begin.
        began: when the check under way began; None if there is none.
        silent_since: when the first of the checks in a row began that found it computing without an answer.
    """

    due: float
    began: float | None = None
    silent_since: float | None = None


class HealthChecks:
    """The checks of all engines.

    A check asks whether the engine makes progress: it answers, or at least computes. An engine that compiles or loads answers
    nobody for long, but computes; one that hangs does neither, and its check fails. Checks run side by side, each with its own
    limit, so that an engine that hangs does not delay those of the others.

    Args:
        interval: pause between two checks of an engine.
        timeout: of one check.
        first_wait: grace after `resume`, before the first check.
        work_limit: an engine that computes without an answer for that long is dead: no compilation takes longer.
    """

    def __init__(self, *, interval: float, timeout: float, first_wait: float, work_limit: float) -> None:
        self.timeout = timeout
        self._interval = interval
        self._first_wait = first_wait
        self._work_limit = work_limit
        self._courses: dict[EngineName, _Course] = {}
        self._first_due = 0.0

    def resume(self, now: float) -> None:
        """Generation begins."""
        self._first_due = now + self._first_wait
        for course in self._courses.values():
            course.due = self._first_due

    def hurry(self, now: float) -> None:
        """A request failed: check all engines at once, within the grace too."""
        self._first_due = min(self._first_due, now)
        for course in self._courses.values():
            course.due = min(course.due, now)

    def begin(self, now: float, names: Iterable[EngineName]) -> list[EngineName]:
        """Those of `names` whose check is due; from now on it is under way."""
        found = []
        for name in names:
            course = self._courses.setdefault(name, _Course(self._first_due))
            if course.began is None and now >= course.due:
                course.began = now
                found.append(name)
        return found

    def answered(self, name: EngineName, now: float) -> None:
        """The check of `name` ended well."""
        course = self._courses[name]
        course.began = course.silent_since = None
        course.due = now + self._interval

    def computed(self, name: EngineName, now: float) -> float | None:
        """The check of `name` found that it computes and does not answer. It is checked again at once.

        Returns:
            For how long it has been silent, when that is too long; else None.
        """
        course = self._courses[name]
        course.silent_since = course.began if course.silent_since is None else course.silent_since
        course.began, course.due = None, now
        silent = now - course.silent_since
        return silent if silent > self._work_limit else None

    def overdue(self, now: float) -> list[EngineName]:
        """Engines whose actor did not even say in time how the check went."""
        limit = self.timeout + _ANSWER_SECONDS
        courses = self._courses.items()
        return [name for name, course in courses if course.began is not None and now - course.began > limit]

    def forget(self, name: EngineName) -> None:
        """Nothing is known of `name` any more: it is dead, or got other weights while it was checked."""
        self._courses.pop(name, None)
