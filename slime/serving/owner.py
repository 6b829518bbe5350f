"""The owner of all that serves in a run: the routers, the engines, and what is known of them.

`start` returns at once, so that routers, engines and training ranks come up together; `wait_ready` waits for the first two.
From then on a thread watches over them. With `--use-fault-tolerance` an engine that dies or hangs is replaced: it leaves the
router, a new server starts in its place, gets the weights of the last push, and only then requests. An engine that dies again
and again is given up. A router looks after itself. Any other death ends the run: the future `ended` gets its cause.

Each model has a router of its own. Engines of a frozen model serve what they loaded: no push waits for them or reaches them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from slime.arguments.derivation import FULLY_ASYNC, ROLLOUT_BUFFER
from slime.observability.waiting import wait_for_all
from slime.scheduling.device_turns import Holds
from slime.serving.engines import Engines, outcome_of
from slime.serving.fleet import REPLACEMENTS, EngineName, EngineRecord, EngineState, Fleet, FleetSnapshot, HealthChecks
from slime.serving.model_routers import ModelRouters
from slime.serving.topology import ServedModel
from slime.utils.errors import RunError

logger = logging.getLogger(__name__)

# An engine has time limits of its own; after their end, its answer may still take this long to arrive.
_ANSWER_SECONDS = 60.0
_WATCH_POLL_SECONDS = 0.2
_WATCH_END_SECONDS = 5.0

_Taker = Callable[[EngineName, ray.ObjectRef], None]


def _start_limit(args: argparse.Namespace) -> float:
    # Longer than the engine's own limit: its process can say more about a start that takes too long, so it speaks first.
    return args.engine_start_timeout + _ANSWER_SECONDS


def longest_push_wait(args: argparse.Namespace, num_engines: int) -> float:
    """Seconds that `ServingOwner.begin_push` takes at most: every engine fails, each after the one before it has settled.

    For one engine that is `1 + REPLACEMENTS` times the limit of a start: it is doubted for no longer than that, and then
    replaced up to `REPLACEMENTS` times, each time within that limit, before it is given up.
    """
    return num_engines * (1 + REPLACEMENTS) * _start_limit(args)


class ServingOwner:
    """Routers and engines of a run. Methods may be called from any thread.

    Args:
        engines: those of the run; they may start already.

    Attributes:
        routers: by the name of the model, which users' functions ask for.
        ended: its result is None when `shutdown` was called, and a RunError when something died that nobody replaces.
    """

    def __init__(self, args: argparse.Namespace, engines: Engines, log_dir: str | Path) -> None:
        self._args = args
        self.api_key = engines.api_key
        self.ended: Future[None] = Future()
        self._start_limit = _start_limit(args)
        self._fleet = Fleet(engines.topology.parts, self._start_limit)
        self._engines = engines
        self._topology = engines.topology
        self.routers = ModelRouters(args, engines.topology, log_dir, engines.api_key)
        self._urls: dict[EngineName, str] = {}
        # Engines that their router knows, and those that it is just being told of.
        self._registered, self._admitting = set[EngineName](), set[EngineName]()
        # Engines that are part of the push under way, and those of them that served when it began.
        self._receiving, self._interrupted = set[EngineName](), set[EngineName]()
        # Engines that are being ended, and may still have their devices.
        self._leaving: set[EngineName] = set()
        # What the watch waits for → the method that takes the outcome, and the engine that it is about.
        self._awaited: dict[ray.ObjectRef, tuple[_Taker, EngineName]] = {}
        self._health = HealthChecks(
            interval=args.rollout_health_check_interval,
            timeout=args.rollout_health_check_timeout,
            first_wait=args.rollout_health_check_first_wait,
            work_limit=args.engine_start_timeout,
        )
        self._generations = 0
        # Whether requests go on between two rollouts.
        self._never_stops = args.rollout_function_path.startswith((FULLY_ASYNC, ROLLOUT_BUFFER))
        self._deaths: Counter[str] = Counter()  # by model
        # Whether the engines sleep. Those that die meanwhile get new servers when the others wake.
        self._asleep = False
        self._cleared: list[EngineName] = []
        # Guards all attributes above, and is notified whenever something changes that others wait for.
        self._changed = threading.Condition(threading.RLock())
        self._ending = threading.Event()
        self._watching: threading.Thread | None = None

    def start(self) -> ModelRouters:
        """Start routers and engines; does not wait for them. Returns `routers`."""
        self.routers.start()
        self._engines.start_all()
        return self.routers

    def wait_ready(self) -> None:
        """Return when the routers send requests to all their engines, and to no others. In a run without engines of its own,
        return when one that somebody else has started is registered.

        Raises:
            RunError: a server failed to start; all engines are ended, and the message has the last lines of its log. Or no
                engine has registered in time.
        """
        self.routers.wait_ready()
        names = list(self._engines.starting)
        try:
            urls = wait_for_all(
                list(self._engines.starting.values()),
                "start of the engines",
                self._start_limit,
                pending=lambda positions: "engine " + ", ".join(str(names[p].engine_id) for p in positions),
                flag="--engine-start-timeout",
            )
        except BaseException:
            self._engines.stop()
            raise
        # Nobody sends requests before the first push, so routers may know engines that lack the trainer's weights.
        workers = self._engines.workers(dict(zip(names, urls, strict=True)))
        for lost in workers.values():
            if isinstance(lost, RunError):
                raise lost
        for name, url in zip(names, urls, strict=True):
            self._answers(name, url)
        # Whatever comes of it, a router that was given may have some of them from here on.
        self.routers.open(workers)
        self._registered.update(names)
        self._admit([name for name in names if not self._gets_weights(name)], None)
        self._watching = threading.Thread(target=self._watch, daemon=True, name="serving watch")
        self._watching.start()

    # -- weights ----------------------------------------------------------------------------------------------------

    def begin_push(self) -> FleetSnapshot:
        """The engines that a push goes to, as soon as none is being replaced. Until `end_push` they count as holding the
        weights of no version.

        Raises:
            RunError: something died that nobody replaces, or nothing became of an engine for longer than a start may take.
        """
        with self._changed:
            self._wait_until_settled("weight push", self._gets_weights)
            if self._asleep:
                raise RunError("weight push: the engines sleep, and have no room for weights before they wake")
            return self._taking_weights(EngineState.STALE, EngineState.SERVING)

    def is_settled(self) -> bool:
        """Whether a push need not wait: of the engines that get weights, none is being replaced or in doubt."""
        with self._changed:
            return not self._unsettled(self._gets_weights)

    def _wait_until_settled(self, purpose: str, concerns: Callable[[EngineName], bool]) -> None:
        # Each new server has its own time. So the limit begins anew whenever the state of one of these engines changes.
        while not self.ended.done() and (waiting := self._unsettled(concerns)):
            who = ", ".join(f"{name} is {state.value}" for name, state in waiting)
            logger.info("%s waits: %s", purpose, who)
            if not self._changed.wait_for(
                lambda waiting=waiting: self.ended.done() or self._unsettled(concerns) != waiting, self._start_limit
            ):
                raise RunError(f"{purpose}: {who} after {self._start_limit:.0f} s (--engine-start-timeout)")
        if self.ended.done():
            self.ended.result()

    def _unsettled(self, concerns: Callable[[EngineName], bool]) -> list[tuple[EngineName, EngineState]]:
        """Engines that a push or a sleep would miss now, although they, or their successors, may soon be there."""
        records = self._fleet.records(EngineState.STARTING, EngineState.SUSPECT, EngineState.DEAD)
        return [(record.name, record.state) for record in records if concerns(record.name)]

    def begin_push_to_stale(self) -> FleetSnapshot:
        """The engines that lack the weights of the last push, `version` of the result; the others go on."""
        with self._changed:
            return self._taking_weights(EngineState.STALE)

    def lacks_weights(self) -> bool:
        """Whether an engine waits for the weights of a push that it has missed."""
        with self._changed:
            waiting = {name for name in self._named(EngineState.STALE) if self._gets_weights(name)} - self._receiving
            return self._fleet.version is not None and bool(waiting)

    def end_push(self, names: Sequence[EngineName], version: int, failed: Mapping[int, str]) -> None:
        """The push to `names` is over: those not in `failed` (engine id → reason) hold `version`, the others are given up."""
        # First: until the router forgets them it sends them requests that nobody answers.
        for name in names:
            if name.engine_id in failed:
                self._died(name, RunError(failed[name.engine_id]))
        self._admit([name for name in names if name.engine_id not in failed], version)
        with self._changed:
            self._receiving.difference_update(names)
            self._interrupted.difference_update(names)

    def engines(self) -> FleetSnapshot:
        """All engines that answer."""
        with self._changed:
            return self._snapshot(self._fleet.records(EngineState.STALE, EngineState.SERVING, EngineState.SUSPECT))

    def _taking_weights(self, *states: EngineState) -> FleetSnapshot:
        names = [name for name in self._named(*states) if self._gets_weights(name)]
        self._interrupted.update(name for name in names if self._is(name, EngineState.SERVING))
        for name in names:
            self._fleet.weights_change(name)
        self._receiving.update(names)
        return self._snapshot([self._fleet.record(name.engine_id) for name in names])

    def _snapshot(self, records: Sequence[EngineRecord]) -> FleetSnapshot:
        return self._engines.snapshot(self._fleet.version, records)

    def _named(self, *states: EngineState) -> list[EngineName]:
        return [record.name for record in self._fleet.records(*states)]

    def _model(self, name: EngineName) -> ServedModel:
        return self._topology.find(name.engine_id)[0]

    def _gets_weights(self, name: EngineName) -> bool:
        return self._args.has_trainer and self._model(name).update_weights

    def _sleeps(self, name: EngineName) -> bool:
        return self._topology.find(name.engine_id)[2].sleeps

    def _rests(self, name: EngineName) -> bool:
        # True from the moment at which it is told to sleep: going to sleep may take longer than a check.
        return self._asleep and self._sleeps(name)

    def _admit(self, names: Sequence[EngineName], version: int | None) -> None:
        """Let engines serve that hold `version` whole. Those that took another's place are first registered at their routers,
        all together; one of them that fails there counts as dead."""
        with self._changed:
            # The thread of the watch may be admitting some of these already: engines that started again while the others woke.
            names = [name for name in names if name not in self._admitting]
            new = {name: self._urls[name] for name in names if name in self._urls and name not in self._registered}
            self._serve([name for name in names if name not in new], version)
            self._admitting.update(new)
        if not new:
            return
        lost = self._register(new)
        with self._changed:
            served = self._serve([name for name in new if name not in lost], version)
            self._registered.update(served)
            self._admitting.difference_update(new)
        # Engines that could not serve are taken out again here: `_replace` only takes out those in `_registered`.
        with contextlib.suppress(RunError):
            self.routers.remove({name: url for name, url in new.items() if name not in served})
        for name, error in lost.items():
            self._died(name, error)

    def _register(self, urls: Mapping[EngineName, str]) -> dict[EngineName, RunError]:
        """Tell the routers of engines. Returns why not, for those that they lack."""
        workers = self._engines.workers(urls)
        lost = {name: worker for name, worker in workers.items() if isinstance(worker, RunError)}
        return lost | self.routers.register({name: workers[name] for name in urls if name not in lost})

    def _serve(self, names: Sequence[EngineName], version: int | None) -> list[EngineName]:
        """Those of `names` that wait for weights serve from now on, with `version`. Returns these."""
        served = [name for name in names if self._is(name, EngineState.STALE)]
        for name in served:
            self._fleet.weights_whole(name, version)
        self._changed.notify_all()
        return served

    # -- sleep ------------------------------------------------------------------------------------------------------

    def hold(self, holds: Holds) -> None:
        """Have all engines that ever sleep hold that much of their memory; one that already does is left alone.

        An engine of a frozen model has its weights again when it wakes, and serves as soon as it has caches. One that dies
        asleep is replaced when the others wake: until then its GPUs are the trainer's.

        Raises:
            RunError: an engine failed that nobody replaces; samples are being generated.
        """
        if holds is Holds.NOTHING:
            self._sleep()
        elif holds is Holds.WEIGHTS:
            self._wake()
        else:
            with self._changed:
                names = [name for name in self._named(EngineState.STALE, EngineState.SERVING) if self._sleeps(name)]
            names = [name for name in self._order(names, "wake_caches") if not self._gets_weights(name)]
            with self._changed:
                names = [name for name in names if self._is(name, EngineState.STALE)]
            self._admit(self._order(names, "continue_generation") if names else (), None)

    def _sleep(self) -> None:
        with self._changed:
            if self._generations:
                raise RunError("the engines cannot sleep while samples are generated")
            self._wait_until_settled("sleep of the engines", self._sleeps)
            self._asleep = True
            names = [name for name in self._named(EngineState.STALE, EngineState.SERVING) if self._sleeps(name)]
        for name in self._order(names, "sleep"):
            with self._changed:
                # An engine that obeyed is no longer in doubt, even if a request to it failed meanwhile.
                if self._is(name, EngineState.STALE, EngineState.SERVING, EngineState.SUSPECT):
                    self._fleet.sleep(name)
        with self._changed:
            # One that failed to sleep has its devices until it has ended, and the trainer is about to take them.
            are_free = self._changed.wait_for(
                lambda: self.ended.done() or not any(map(self._sleeps, self._leaving)), self._start_limit
            )
            who = ", ".join(map(str, self._leaving))
        if self.ended.done():
            self.ended.result()
        if not are_free:
            raise RunError(f"sleep of the engines: {who} has not ended after {self._start_limit:.0f} s")

    def _wake(self) -> None:
        with self._changed:
            self._asleep = False
            for name in self._cleared:
                self._start_successor(name, since=time.monotonic())
            self._cleared.clear()
            names = self._named(EngineState.ASLEEP)
        for name in self._order(names, "wake_weights"):
            with self._changed:
                if self._is(name, EngineState.ASLEEP):
                    self._fleet.wake(name)

    def _order(self, names: Sequence[EngineName], method: str) -> list[EngineName]:
        """Call `method` of these engines. Returns those that obeyed; the others count as dead."""
        outcomes = self._engines.order(names, method)
        for name, error in outcomes.items():
            if error is not None:
                self._died(name, error)
        if self.ended.done():
            self.ended.result()
        return [name for name, error in outcomes.items() if error is None]

    # -- requests ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Engines are checked while the block lasts. Blocks may overlap."""
        with self._changed:
            if self._asleep:
                raise RunError("the engines sleep: nothing can be generated before they wake")
            if self._generations == 0:
                self._health.resume(time.monotonic())
            self._generations += 1
        try:
            yield
        finally:
            with self._changed:
                self._generations -= 1

    def is_serving(self, model: str | None = None) -> bool:
        """Whether requests to `model` find an engine of each role; None: to each model that gets the trainer's weights. One
        that served when a push began goes on while files are written, and paused it lets requests wait."""
        trained = [m.name for m in self._topology.models if m.update_weights or not self._args.has_trainer]
        asked, states = trained if model is None else [model], (EngineState.SERVING, EngineState.SUSPECT)
        with self._changed:
            pushed_to = {
                self._topology.parts[name.engine_id] for name in self._interrupted if self._is(name, EngineState.STALE)
            }
            return all(
                part in pushed_to or self._fleet.has(part, *states) for part in self._fleet.parts if part[0] in asked
            )

    def doubt_all(self, model: str, cause: str) -> None:
        """A request to `model` failed, and nobody knows on which engine: all its engines are checked at once, and are in doubt
        until they answer."""
        with self._changed:
            for name in self._named(EngineState.SERVING):
                if self._model(name).name == model:
                    self._fleet.doubt(name, cause)
            self._health.hurry(time.monotonic())

    def is_decided(self, model: str) -> bool:
        """Whether no engine of `model` is doubted: each of them is known to live, or to be dead."""
        with self._changed:
            return not any(self._fleet.has(part, EngineState.SUSPECT) for part in self._fleet.parts if part[0] == model)

    def deaths(self, model: str) -> int:
        """How many engines of `model` have died so far."""
        return self._deaths[model]

    def host_memory_gib(self) -> float | None:
        """As in `Engines`, of the engines that answer: the process of one that still starts would have to be waited for."""
        with self._changed:
            names = self._named(EngineState.STALE, EngineState.SERVING, EngineState.ASLEEP)
        return self._engines.host_memory_gib(names)

    # -- life and death ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._watch_until_the_end()
        except Exception as error:
            logger.debug("the watch over engines and router failed", exc_info=True)
            self._fail(RunError(f"the watch over engines and router failed: {type(error).__name__}: {error}"))

    def _watch_until_the_end(self) -> None:
        while not self._ending.is_set():
            self._begin_checks()
            with self._changed:
                awaited = list(self._awaited)
            if awaited:
                ray.wait(awaited, timeout=_WATCH_POLL_SECONDS)
            # To take the results may last. Whether an engine is late is judged by this moment, at which all that had arrived is
            # seen.
            now = time.monotonic()
            ready = ray.wait(awaited, num_returns=len(awaited), timeout=0)[0] if awaited else []
            for reference in ready:
                with self._changed:
                    take, name = self._awaited.pop(reference)
                take(name, reference)
            with self._changed:
                overdue, late = self._health.overdue(now), self._fleet.late(now)
            for name in overdue:
                silent = f"the process of {name} did not answer a check for {self._health.timeout:g} s"
                self._died(name, RunError(silent))
            for name in late:
                self._died(
                    name,
                    RunError(
                        f"{name} has no new server after {self._start_limit:.0f} s (--engine-start-timeout): Ray has found "
                        "no place for its process (`ray status` shows the nodes that are left), or that does not answer"
                    ),
                )
            for router in self.routers.values():
                if trouble := router.trouble():
                    self._fail(RunError(trouble))
            if self.ended.done() or not awaited:
                self._ending.wait(_WATCH_POLL_SECONDS)

    def _ended(self, name: EngineName, reference: ray.ObjectRef) -> None:
        _, error = outcome_of(reference, str(name))
        if error is not None:
            self._died(name, error)

    def _died(self, name: EngineName, error: RunError) -> None:
        """Take an engine out, and start another in its place; without `--use-fault-tolerance`, end the run.

        If it died too often, none takes its place, and the run goes on without it as long as others do its work.
        """
        with self._changed:
            if self._ending.is_set() or not self._fleet.die(name, str(error), time.monotonic()):
                return
            self._deaths[self._model(name).name] += 1
            self._health.forget(name)
            if not self._args.use_fault_tolerance:
                self._fail(error)
                return
            why = self._engines.why_none_follows(name) or self._fleet.why_give_up(name.engine_id)
            if why:
                self._fleet.give_up(name.engine_id)
                if not self._has_substitutes(name):
                    missing = f"{name} is given up: {why}, and no other engine does its work; the last time: {error}"
                    self._fail(RunError(missing))
                    return
            self._leaving.add(name)
            self._changed.notify_all()
        if why:
            logger.warning("%s is given up: %s. The run goes on without it; the last time: %s", name, why, error)
        else:
            when = " when the others wake" if self._asleep and self._sleeps(name) else ""
            logger.warning("%s\n%s is taken out, and a new server starts in its place%s", error, name, when)
        self._beside(f"replacement of {name}", self._replace, name)

    def _has_substitutes(self, name: EngineName) -> bool:
        """Whether engines of the same model and role are left, or may come back."""
        part = self._topology.parts[name.engine_id]
        return self._fleet.has(part, *(state for state in EngineState if state is not EngineState.GIVEN_UP))

    def _beside(self, what: str, work: Callable[..., None], *arguments: Any) -> None:
        """Do in a thread what may wait for a router or an engine, while the watch goes on; an error ends the run."""

        def do() -> None:
            try:
                work(*arguments)
            except Exception as error:
                logger.debug("%s failed", what, exc_info=True)
                self._fail(error if isinstance(error, RunError) else RunError(f"{what} failed: {error}"))

        threading.Thread(target=do, daemon=True, name=what).start()

    def _replace(self, name: EngineName) -> None:
        """Clear away a dead engine, and start the server of its next life unless it was given up."""
        known = {name: self._urls[name]} if name in self._registered else {}
        # The router may not let go of the engine before its requests have ended, and they end with the engine. So this first
        # attempt is a short one, and the last one comes when the engine has ended.
        with contextlib.suppress(RunError):
            self.routers.remove(known)
        self._engines.stop([name])
        with self._changed:
            self._leaving.discard(name)
            self._changed.notify_all()
        self.routers.remove(known, at_last=True)
        with self._changed:
            self._registered.discard(name)
            self._urls.pop(name, None)
            if self._is(name, EngineState.DEAD) and not self._ending.is_set():
                if self._asleep and self._sleeps(name):
                    self._cleared.append(name)
                else:
                    self._start_successor(name)

    def _start_successor(self, name: EngineName, since: float | None = None) -> None:
        successor = self._fleet.replace(name.engine_id, since)
        self._awaited[self._engines.start(successor)] = (self._replaced, successor)

    def _replaced(self, name: EngineName, reference: ray.ObjectRef) -> None:
        url, error = outcome_of(reference, str(name))
        if error is not None:
            self._died(name, error)
            return
        with self._changed:
            if not self._is(name, EngineState.STARTING):
                # It answers too late: it counts as dead, and is being ended.
                return
            self._answers(name, url)
        logger.info("%s has a new server", name)
        if not self._gets_weights(name):
            self._beside(f"admission of {name}", self._admit, [name], None)

    def _answers(self, name: EngineName, url: str) -> None:
        """The server of a life is healthy; from here on its end is watched."""
        with self._changed:
            self._fleet.ready(name)
            self._urls[name] = url
            self._awaited[self._engines.end_of(name)] = (self._ended, name)
            self._changed.notify_all()

    def _begin_checks(self) -> None:
        """While requests go out all engines are checked, and afterwards those that are doubted."""
        if not self._args.use_fault_tolerance:
            return
        with self._changed:
            asks = self._generations or self._never_stops
            states = (EngineState.SERVING, EngineState.SUSPECT) if asks else (EngineState.SUSPECT,)
            now, names = time.monotonic(), [name for name in self._named(*states) if not self._rests(name)]
            # The version is noted because a push pauses the engine: if one comes during the check, the check says nothing.
            due = {name: self._fleet.record(name.engine_id).weight_version for name in self._health.begin(now, names)}
        # Without the lock, for which every request asks: to speak to hundreds of processes takes a while.
        for name, version in due.items():
            if (reference := self._engines.check(name, self._health.timeout)) is not None:
                with self._changed:
                    self._awaited[reference] = (functools.partial(self._checked, version), name)

    def _checked(self, version: int | None, name: EngineName, reference: ray.ObjectRef) -> None:
        answered, error = outcome_of(reference, str(name))
        with self._changed:
            of_now = version == self._fleet.record(name.engine_id).weight_version and not self._rests(name)
            if not (of_now and self._is(name, EngineState.SERVING, EngineState.SUSPECT)):
                self._health.forget(name)
                return
            if error is None and answered:
                self._health.answered(name, time.monotonic())
                self._fleet.answer(name)
                self._changed.notify_all()
                return
            if error is None:
                silent = self._health.computed(name, time.monotonic())
                if silent is None:
                    self._fleet.doubt(name, "it computes, and does not answer")
                    return
                error = RunError(f"{name} computes, and has not answered for {silent:.0f} s (--engine-start-timeout)")
        self._died(name, error)

    def _is(self, name: EngineName, *states: EngineState) -> bool:
        record = self._fleet.record(name.engine_id)
        return record.name == name and record.state in states

    def _fail(self, error: RunError) -> None:
        with self._changed:
            if not self._ending.is_set() and not self.ended.done():
                self.ended.set_exception(error)
            self._changed.notify_all()

    def leave_given_router(self) -> None:
        """Take our engines out of a router that goes on without us; before they end, or it would send them requests."""
        with self._changed:
            urls = dict(self._urls)
        self.routers.leave_given(urls)

    def shutdown(self) -> None:
        """End the engines, and the routers that this run started."""
        with self._changed:
            self._ending.set()
            if not self.ended.done():
                self.ended.set_result(None)
            self._changed.notify_all()
        if self._watching is not None:
            self._watching.join(_WATCH_END_SECONDS)
        self._engines.stop()
        self.routers.shutdown()
