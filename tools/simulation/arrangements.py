"""Runs as a model of time: trainer and engines in the orders that `train.py` and `train_async.py` keep.

`replay` goes through a run rollout by rollout, as the driver does: it waits for the samples, trains while the engines go on
(or do not), and pushes. What the engines do meanwhile is `Fleet`; what the trainer needs for a batch is `Speeds`.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tools.simulation.engines import EngineSpeed, Fleet, FleetSeconds, Group


@dataclass(frozen=True)
class Speeds:
    """Measured times, in seconds, and the sizes of the trainer and the engines on which they were measured.

    decode_step_seconds, decode_request_seconds: of a decode step of one engine, and of each request that runs in it.
    prefill_token_seconds: of a prompt token, on one engine.
    rollout_fixed_seconds: of a rollout call beside its engines: prompts, rewards, the train batch.
    log_probs_fixed_seconds, log_probs_token_seconds: of the passes before training; the latter are seconds of one device for
        a token of prompt and response. train_fixed_seconds, train_token_seconds: the same of training.
    push_seconds: of a push. switch_seconds: of sleeping and waking in a colocated step.
    step_fixed_seconds: what is left of a step.
    engine_devices, replica_devices: of an engine, and of a data-parallel replica of the trainer.
    max_running_requests: of an engine.
    """

    decode_step_seconds: float
    decode_request_seconds: float
    train_token_seconds: float
    prefill_token_seconds: float = 0.0
    rollout_fixed_seconds: float = 0.0
    log_probs_fixed_seconds: float = 0.0
    log_probs_token_seconds: float = 0.0
    train_fixed_seconds: float = 0.0
    push_seconds: float = 0.0
    switch_seconds: float = 0.0
    step_fixed_seconds: float = 0.0
    engine_devices: int = 1
    replica_devices: int = 1
    max_running_requests: int = 256

    @property
    def engine(self) -> EngineSpeed:
        return EngineSpeed(
            self.decode_step_seconds,
            self.decode_request_seconds,
            self.prefill_token_seconds,
            self.max_running_requests,
        )

    def trainer_seconds(self, totals: Sequence[int], devices: int) -> tuple[float, float]:
        """(seconds of the passes before training, seconds of training) for samples of `totals` tokens.

        Samples are dealt to the replicas evenly, but no sample is cut: the busiest replica has the mean or the longest sample.
        """
        replicas = max(1, devices // self.replica_devices)
        tokens = max(sum(totals) / replicas, max(totals)) / self.replica_devices
        log_probs = self.log_probs_fixed_seconds + self.log_probs_token_seconds * tokens
        return log_probs, self.train_fixed_seconds + self.train_token_seconds * tokens


@dataclass(frozen=True)
class Work:
    """The work of a run; names are those of its flags.

    draw: gives, from a generator, the lengths of the answers of some prompts: integers [prompts, n_samples_per_prompt].
    """

    draw: Callable[[np.random.Generator, int], np.ndarray]
    rollout_batch_size: int
    prompt_tokens: int = 0
    over_sampling_batch_size: int | None = None
    async_buffer_size: int = 1
    update_weights_interval: int = 1
    max_weight_staleness: int | None = None


@dataclass(frozen=True)
class Arrangement:
    """One way to run.

    colocated: trainer and engines take turns on all devices. ahead: rollouts are generated while others are trained.
    in_flight: a push swaps the weights under running requests. resumes: more prompts than needed are started, and what is
    left over is aborted and goes on in the next rollout.
    """

    name: str
    colocated: bool = False
    ahead: bool = False
    in_flight: bool = False
    resumes: bool = False


ARRANGEMENTS = (
    Arrangement("colocated", colocated=True),
    Arrangement("sync"),
    Arrangement("partial", resumes=True),
    Arrangement("async", ahead=True),
    Arrangement("in_flight", ahead=True, in_flight=True),
)


@dataclass(frozen=True)
class Split:
    """How many devices the trainer has, and how many engines there are; colocated ones overlap."""

    devices: int
    trainer_devices: int
    engines: int


@dataclass(frozen=True)
class Span:
    """`phase` of a rollout, seconds from the start of the run."""

    phase: str
    rollout_id: int
    start: float
    end: float


@dataclass
class _Call:
    """A rollout call from `start` to `ready`, in seconds. `kept`: those of the finished groups that are trained."""

    rollout_id: int
    start: float
    groups: list[Group]
    finished: list[Group] = field(default_factory=list)
    kept: list[Group] = field(default_factory=list)
    ready: float = math.inf


@dataclass
class Replay:
    """The results of a run, which count the rollouts after the first `warm_up`, over `seconds`.

    ends: of the steps, seconds. rollout_seconds: of the rollout calls. staleness: per trained sample, in weight versions.
    trained_tokens: of responses. wasted_tokens: written and thrown away. phases: seconds of the trainer, by phase.
    curve: (seconds, running requests) after every change.
    """

    arrangement: Arrangement
    split: Split
    speeds: Speeds
    warm_up: int
    seconds: float = 0.0
    ends: list[float] = field(default_factory=list)
    rollout_seconds: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    trained_tokens: int = 0
    wasted_tokens: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    engines: FleetSeconds = field(default_factory=FleetSeconds)
    peak: int = 0
    spans: list[Span] = field(default_factory=list)
    curve: list[tuple[float, int]] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """Mean seconds of the counted steps."""
        return self.seconds / (len(self.ends) - self.warm_up)

    @property
    def steps_per_hour(self) -> float:
        return 3600.0 / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.trained_tokens / self.seconds

    @property
    def training_seconds(self) -> float:
        """Mean seconds in which a step trains, including the passes before training."""
        return (self.phases["log_probs"] + self.phases["train"]) / (len(self.ends) - self.warm_up)

    @property
    def trainer_busy(self) -> float:
        """Share of the time in which the trainer computes."""
        return self.training_seconds / self.step_seconds

    @property
    def engines_busy(self) -> float:
        """Share of the engines' time in which they have a request."""
        return self.engines.busy / (self.seconds * self.split.engines)

    @property
    def wasted_share(self) -> float:
        """Tokens that are written again, as a share of those that are trained."""
        return self.wasted_tokens / self.trained_tokens

    @property
    def lost(self) -> dict[str, float]:
        """The time in which devices neither train nor fill an engine, by cause, as shares of the seconds of all devices.

        stragglers: engines that are idle, or emptier than at their fullest, while a rollout is generated. samples: the
        trainer waits for them. trainer: engines wait for it. push: pushes, and contexts that are read again after them.
        other: switches, and what rollout calls and steps have beside.
        """
        arrangement, split, engines = self.arrangement, self.split, self.engines
        pushes, other = self.phases["push"], self.phases["switch"] + self.phases["other"]
        full = engines.tokens * self.speeds.engine.decode_seconds(self.peak) / self.peak + engines.read
        stragglers = engines.active - engines.paused - full
        if arrangement.colocated:
            devices_of_engine, devices_of_driver = split.devices / split.engines, split.devices
            samples = trainer = 0.0
            pushed = pushes * (split.devices - split.trainer_devices) / devices_of_engine
        else:
            devices_of_engine, devices_of_driver = self.speeds.engine_devices, split.trainer_devices
            samples = (self.seconds * (1 - self.trainer_busy) - pushes - other) * split.trainer_devices
            pushed = engines.paused + engines.recomputed if arrangement.in_flight else pushes * split.engines
            idle = self.seconds * split.engines - engines.active
            if not arrangement.in_flight:
                idle -= pushed
            if not arrangement.ahead:
                idle -= other * split.engines
                devices_of_driver = split.devices
            trainer = idle * devices_of_engine
        found = {
            "stragglers": stragglers * devices_of_engine,
            "samples": samples,
            "trainer": trainer,
            "push": pushed * devices_of_engine + pushes * split.trainer_devices,
            "other": other * devices_of_driver,
        }
        return {name: max(0.0, value) / (self.seconds * split.devices) for name, value in found.items()}


class _Driver:
    """One run, as its driver sees it: rollout calls take turns, and training and pushes come in between or beside them."""

    def __init__(
        self, arrangement: Arrangement, split: Split, speeds: Speeds, work: Work, seed: int, rollouts: int, warm_up: int
    ) -> None:
        self.speeds, self.work, self.rollouts = speeds, work, rollouts
        self.generator = np.random.default_rng(seed)
        self.fleet = Fleet(speeds.engine, split.engines)
        self.replay = Replay(arrangement, split, speeds, warm_up, curve=self.fleet.curve)
        self.replay.phases = dict.fromkeys(("log_probs", "train", "push", "switch", "other"), 0.0)
        # Rollouts below this one may start, in their order and one at a time, unless they are halted.
        self.allowed = 0
        self.started = 0
        self.halted = False
        self.current: _Call | None = None
        self.generated: deque[_Call] = deque()
        # Groups that were interrupted.
        self.left_over: list[Group] = []

    def run(self) -> Replay:
        replay, arrangement = self.replay, self.replay.arrangement
        ahead = self.work.async_buffer_size if arrangement.ahead else 0
        start, before = 0.0, FleetSeconds()
        for rollout_id in range(self.rollouts):
            if rollout_id == replay.warm_up:
                start, before = self.fleet.now, self.fleet.seconds()
            # Rollouts after the last one are generated too, because the counted ones are a piece of a longer run.
            self.allowed = rollout_id + 1 + ahead
            call = self._take()
            self._train(call)
            if not arrangement.ahead or (rollout_id + 1) % self.work.update_weights_interval == 0:
                self._push(call)
            replay.ends.append(self.fleet.now)
        replay.seconds = self.fleet.now - start
        replay.engines = self.fleet.seconds() - before
        replay.peak = self.fleet.peak
        return replay

    def _take(self) -> _Call:
        """Wait for the samples of the next rollout."""
        while not self.generated:
            self._let_pass(math.inf)
        call = self.generated.popleft()
        if not self.replay.arrangement.ahead and self._counts:
            # In other arrangements engines may work beside it, and it is part of the trainer's wait for samples.
            self.replay.phases["other"] += self.speeds.rollout_fixed_seconds
        return call

    def _train(self, call: _Call) -> None:
        replay, speeds = self.replay, self.speeds
        colocated = replay.arrangement.colocated
        samples = [request for group in call.kept for request in group.requests]
        replay.spans.append(Span("rollout", call.rollout_id, call.start, call.ready))
        if self._counts:
            replay.rollout_seconds.append(call.ready - call.start)
            replay.staleness += [self.fleet.version - request.version for request in samples]
            replay.trained_tokens += sum(request.tokens for request in samples)
        totals = [request.prompt_tokens + request.tokens for request in samples]
        log_probs, train = speeds.trainer_seconds(totals, replay.split.trainer_devices)
        if colocated:
            self._pass("switch", call, speeds.switch_seconds)
        self._pass("log_probs", call, log_probs)
        self._pass("train", call, train)
        self._pass("other", call, speeds.step_fixed_seconds)

    def _push(self, call: _Call) -> None:
        if self.replay.arrangement.in_flight:
            self.fleet.pause(self.speeds.push_seconds)
        self.halted = not self.replay.arrangement.in_flight
        while self.halted and self.current is not None:
            self._let_pass(math.inf)
        self.fleet.version += 1
        self._pass("push", call, self.speeds.push_seconds)
        self.halted = False

    @property
    def _counts(self) -> bool:
        return len(self.replay.ends) >= self.replay.warm_up

    def _pass(self, phase: str, call: _Call, seconds: float) -> None:
        """Let `seconds` pass, in which the trainer is busy with `phase`."""
        if seconds <= 0:
            return
        start = self.fleet.now
        while self.fleet.now < start + seconds:
            self._let_pass(start + seconds)
        self.replay.spans.append(Span(phase, call.rollout_id, start, self.fleet.now))
        if self._counts:
            self.replay.phases[phase] += seconds

    def _let_pass(self, until: float) -> None:
        """Let time pass up to `until`, or up to the end of the rollout call that is under way."""
        if self.current is None and self.started < self.allowed and not self.halted:
            self._start_call()
        call, wanted = self.current, self.work.rollout_batch_size
        if call is None:
            self.fleet.run(until)
            return
        if not call.kept:
            if not self.fleet.run(until, lambda: len(call.finished) >= wanted):
                return
            self._end_generation(call)
        self.fleet.run(min(until, call.ready))
        if call.ready <= until:
            self.generated.append(call)
            self.current = None

    def _start_call(self) -> None:
        work = self.work
        wanted = work.rollout_batch_size
        if self.replay.arrangement.resumes:
            wanted = work.over_sampling_batch_size or wanted
        resumed, self.left_over = self.left_over[:wanted], self.left_over[wanted:]
        for group in resumed:
            bound = work.max_weight_staleness
            if bound is not None and group.written and self.fleet.version - group.version > bound:
                self._waste(group)
        lengths = work.draw(self.generator, wanted - len(resumed)).tolist()
        groups = resumed + [Group.of(work.prompt_tokens, of_prompt) for of_prompt in lengths]
        self.current = call = _Call(self.started, self.fleet.now, groups)
        self.started += 1
        for group in groups:
            group.finished = call.finished
        self.fleet.submit(groups)

    def _end_generation(self, call: _Call) -> None:
        """End a call for which enough groups are finished: the first are kept, and the others start again or are resumed."""
        wanted = self.work.rollout_batch_size
        call.kept, surplus = call.finished[:wanted], call.finished[wanted:]
        call.ready = call.kept[-1].ended + self.speeds.rollout_fixed_seconds
        if self.replay.arrangement.resumes:
            self.fleet.abort()
            for group in surplus:
                self._waste(group)
            self.left_over = surplus + [group for group in call.groups if group.unfinished and group not in surplus]

    def _waste(self, group: Group) -> None:
        lost = group.start_again()
        if self._counts:
            self.replay.wasted_tokens += lost


def replay(
    arrangement: Arrangement, split: Split, speeds: Speeds, work: Work, *, seed: int, rollouts: int, warm_up: int
) -> Replay:
    """Go through a run of `rollouts` rollouts; the first `warm_up` of them are not counted.

    Raises:
        ValueError: nothing is left to count, or the run can not keep its bound of staleness.
    """
    if not 0 <= warm_up < rollouts:
        raise ValueError(f"{rollouts} rollouts, {warm_up} of them not counted: at least one must be left")
    return _Driver(arrangement, split, speeds, work, seed, rollouts, warm_up).run()


def splits(devices: int, arrangement: Arrangement, speeds: Speeds, trainer_devices: int | None = None) -> list[Split]:
    """The ways to share `devices` between trainer and engines that are worth a try: whole replicas, whole engines.

    `trainer_devices`: how many devices the trainer has, if that is decided. The list is empty if there are too few devices.
    """
    if arrangement.colocated:
        replicas, engines = devices // speeds.replica_devices, devices // speeds.engine_devices
        return [Split(devices, replicas * speeds.replica_devices, engines)] if replicas and engines else []
    if trainer_devices is None:
        shares = [devices * eighth // 8 // speeds.replica_devices for eighth in range(1, 8)]
        tried = sorted({max(1, replicas) * speeds.replica_devices for replicas in shares})
    else:
        tried = [trainer_devices]
    found = [Split(devices, trainer, (devices - trainer) // speeds.engine_devices) for trainer in tried]
    return [split for split in found if split.engines > 0]


def best_replay(
    arrangement: Arrangement,
    candidates: Sequence[Split],
    speeds: Speeds,
    work: Work,
    *,
    seed: int,
    rollouts: int,
    warm_up: int,
    tried_rollouts: int = 3,
) -> Replay:
    """The replay of the split with the most steps per hour, which short replays of all candidates choose.

    Raises:
        ValueError: there is no candidate.
    """
    if not candidates:
        raise ValueError(f"{arrangement.name}: no candidates")
    short = min(tried_rollouts, rollouts)

    @functools.cache
    def tried(number: int) -> float:
        found = replay(arrangement, candidates[number], speeds, work, seed=seed, rollouts=short, warm_up=1)
        return found.steps_per_hour

    # Climb from the middle: more devices for one side help until everything waits for the other one.
    best = len(candidates) // 2
    if len(candidates) > 1 and short > 1:
        while True:
            near = max(range(max(0, best - 1), min(len(candidates), best + 2)), key=tried)
            if tried(near) <= tried(best):
                break
            best = near
    return replay(arrangement, candidates[best], speeds, work, seed=seed, rollouts=rollouts, warm_up=warm_up)
