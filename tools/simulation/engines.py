"""Engines as a model of time: they decode their requests step by step, and a step takes longer the more requests run.

A step of an engine with n running requests takes `step_seconds + request_seconds · n` and gives each of them a token. So the
clock of an engine is its number of steps: a request that starts at step v with k tokens to go ends at step v + k, whatever
else comes and goes, and only the seconds of a step change. Prompts are read before the first step that follows.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_ROUNDING = 1e-9


@dataclass(frozen=True)
class EngineSpeed:
    """The speed of one engine.

    step_seconds, request_seconds: seconds of a decode step, and of each running request in it.
    prefill_token_seconds: seconds for a token that is read, not written.
    max_running: how many requests run at once; others wait at the engine, first come, first served.
    """

    step_seconds: float
    request_seconds: float
    prefill_token_seconds: float = 0.0
    max_running: int = 2**31

    def decode_seconds(self, running: float) -> float:
        """Seconds of a step with `running` requests."""
        return self.step_seconds + self.request_seconds * running


@dataclass(slots=True, eq=False)
class Request:
    """One answer, `tokens` long in the end, of which `done` are written. `version`: that of its first token's weights."""

    group: Group
    prompt_tokens: int
    tokens: int
    done: int = 0
    version: int | None = None
    first_step: float = 0.0
    is_finished: bool = False


@dataclass(slots=True, eq=False)
class Group:
    """The answers to one prompt. `finished`: a list that gets the group when its last answer is there, `ended` (seconds)."""

    requests: list[Request] = field(default_factory=list)
    unfinished: int = 0
    finished: list[Group] | None = None
    ended: float = 0.0

    @classmethod
    def of(cls, prompt_tokens: int, lengths: Iterable[int]) -> Group:
        """A group with answers of `lengths` tokens, at least 1 each."""
        group = cls()
        group.requests = [Request(group, prompt_tokens, tokens) for tokens in lengths]
        group.unfinished = len(group.requests)
        return group

    @property
    def version(self) -> int:
        """The version of the oldest weights that wrote a token of it. The group must have tokens."""
        return min(request.version for request in self.requests if request.version is not None)

    @property
    def written(self) -> int:
        """How many tokens its answers have so far."""
        return sum(request.done for request in self.requests)

    def start_again(self) -> int:
        """Forget the written tokens. Returns how many they were."""
        lost = self.written
        for request in self.requests:
            request.done, request.version, request.is_finished = 0, None, False
        self.unfinished = len(self.requests)
        return lost


@dataclass
class FleetSeconds:
    """The seconds of the engines by what they did, summed over engines; `tokens`: how many they wrote.

    busy: with at least one request. read: of these, for prompts and contexts; recomputed: of these, for contexts that are read
    again after a push. active: at least one request somewhere, times the number of engines. paused: of these, for pushes.
    """

    busy: float = 0.0
    read: float = 0.0
    recomputed: float = 0.0
    active: float = 0.0
    paused: float = 0.0
    tokens: float = 0.0

    def __sub__(self, other: FleetSeconds) -> FleetSeconds:
        return FleetSeconds(**{name: value - getattr(other, name) for name, value in vars(self).items()})


class _Engine:
    __slots__ = ("clock", "epoch", "running", "steps", "tokens", "waiting")

    def __init__(self) -> None:
        # Everything up to `clock` (seconds) is accounted for; it is ahead of the fleet's time while prompts are read.
        self.clock = 0.0
        self.steps = 0.0
        self.running: list[tuple[float, int, Request]] = []
        self.waiting: deque[Request] = deque()
        # The number of the only entry of this engine among the events that is still valid.
        self.epoch = 0
        self.tokens = 0.0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)


class Fleet:
    """Equal engines behind a router that gives a request to the one with the fewest.

    Attributes:
        now: seconds. version: of the weights that the engines have.
        running: requests that run now. peak: the most that ran on one engine so far.
    """

    def __init__(self, speed: EngineSpeed, engines: int) -> None:
        self.speed = speed
        self.now = 0.0
        self.version = 0
        self.running = 0
        self._engines = [_Engine() for _ in range(engines)]
        self._events: list[tuple[float, int, int]] = []
        self._order = 0
        self._unfinished = 0
        self._active_since = 0.0
        self.peak = 0
        self._done = FleetSeconds()
        # (seconds, running requests) after every change.
        self.curve: list[tuple[float, int]] = []

    def submit(self, groups: Iterable[Group]) -> None:
        """Start the unfinished answers of `groups` now."""
        requests = [request for group in groups for request in group.requests if not request.is_finished]
        if not requests:
            return
        if not self._unfinished:
            self._active_since = self.now
        self._unfinished += len(requests)
        loads = [(engine.load, number) for number, engine in enumerate(self._engines)]
        heapq.heapify(loads)
        touched = set()
        for request in requests:
            load, number = loads[0]
            self._engines[number].waiting.append(request)
            heapq.heapreplace(loads, (load + 1, number))
            touched.add(number)
        for number in sorted(touched):
            self._advance(self._engines[number], self.now)
            self._admit(number)
        self.curve.append((self.now, self.running))

    def run(self, until: float = math.inf, enough: Callable[[], bool] | None = None) -> bool:
        """Let time pass up to `until` (seconds), or up to the moment when `enough` holds, which finished groups change.

        Returns whether `enough` holds. Without `enough` and with an infinite `until`, all requests are finished.
        """
        if enough is not None and enough():
            return True
        engines, events = self._engines, self._events
        while events and events[0][0] <= until:
            time, epoch, number = heapq.heappop(events)
            engine = engines[number]
            if epoch != engine.epoch:
                continue
            self.now = max(self.now, time)
            self._advance(engine, time)
            # Rounding must not leave a request just short of its end.
            end = engine.steps = engine.running[0][0]
            found = False
            while engine.running and engine.running[0][0] <= end:
                found |= self._finish(heapq.heappop(engine.running)[2])
            self._admit(number)
            self.curve.append((self.now, self.running))
            if found and enough is not None and enough():
                return True
        if until < math.inf:
            self.now = max(self.now, until)
        return False

    def pause(self, seconds: float) -> None:
        """Halt all engines for a push from now on. Running requests are read again after it, since their cache is outdated."""
        for number, engine in enumerate(self._engines):
            self._advance(engine, self.now)
            engine.clock += seconds
            again = sum(entry[2].prompt_tokens + self._written(engine, entry[2]) for entry in engine.running)
            recomputed = again * self.speed.prefill_token_seconds
            engine.clock += recomputed
            self._done.busy += recomputed
            self._done.read += recomputed
            self._done.recomputed += recomputed
            self._schedule(number)
        if self._unfinished:
            self._done.paused += seconds * len(self._engines)

    def abort(self) -> None:
        """End all running and waiting requests, which keep their finished tokens."""
        for engine in self._engines:
            self._advance(engine, self.now)
            for _, _, request in engine.running:
                request.done = self._written(engine, request)
            # Prompts that were not read to their end.
            unread = engine.clock - self.now
            self._done.busy -= unread
            self._done.read -= unread
            engine.running.clear()
            engine.waiting.clear()
            engine.clock = self.now
            engine.epoch += 1
        self.running = 0
        self._leave(self._unfinished)
        self.curve.append((self.now, self.running))

    def seconds(self) -> FleetSeconds:
        """The seconds up to now, which must not be within a pause."""
        for engine in self._engines:
            self._advance(engine, self.now)
        done = FleetSeconds(**vars(self._done))
        done.tokens = sum(engine.tokens for engine in self._engines)
        # A prompt that is being read counts as far as it is read.
        unread = sum(engine.clock - self.now for engine in self._engines)
        done.busy -= unread
        done.read -= unread
        if self._unfinished:
            done.active += (self.now - self._active_since) * len(self._engines)
        return done

    def _finish(self, request: Request) -> bool:
        """Finish a request. Returns whether its group is finished with it."""
        request.done, request.is_finished = request.tokens, True
        self.running -= 1
        self._leave(1)
        group = request.group
        group.unfinished -= 1
        if group.unfinished:
            return False
        group.ended = self.now
        if group.finished is not None:
            group.finished.append(group)
        return True

    def _leave(self, requests: int) -> None:
        self._unfinished -= requests
        if requests and not self._unfinished:
            self._done.active += (self.now - self._active_since) * len(self._engines)

    def _advance(self, engine: _Engine, time: float) -> None:
        passed = time - engine.clock
        if passed <= 0:
            return
        engine.clock = time
        running = len(engine.running)
        if running:
            steps = passed / self.speed.decode_seconds(running)
            engine.steps += steps
            engine.tokens += steps * running
            self._done.busy += passed

    def _admit(self, number: int) -> None:
        """Start waiting requests of the engine as far as there is room, and note when it finishes the next one."""
        engine = self._engines[number]
        while engine.waiting and len(engine.running) < self.speed.max_running:
            request = engine.waiting.popleft()
            read = (request.prompt_tokens + request.done) * self.speed.prefill_token_seconds
            engine.clock += read
            self._done.busy += read
            self._done.read += read
            if request.version is None:
                request.version = self.version
            request.first_step = engine.steps - request.done
            self._order += 1
            self.running += 1
            heapq.heappush(engine.running, (request.first_step + request.tokens, self._order, request))
        self.peak = max(self.peak, len(engine.running))
        self._schedule(number)

    def _schedule(self, number: int) -> None:
        engine = self._engines[number]
        engine.epoch += 1
        if engine.running:
            steps = max(0.0, engine.running[0][0] - engine.steps)
            time = engine.clock + steps * self.speed.decode_seconds(len(engine.running))
            heapq.heappush(self._events, (time, engine.epoch, number))

    def _written(self, engine: _Engine, request: Request) -> int:
        return min(request.tokens, math.floor(engine.steps - request.first_step + _ROUNDING))
