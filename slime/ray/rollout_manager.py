"""The rollout manager, one Ray actor that turns prompts into train batches, and the driver's side of it.

- `RolloutManager` is the actor. It has two parts: `RolloutPipeline`, for data, and `ServingOwner`, for router and engines. Its
  methods are asynchronous and run in concurrency groups, so that it saves and reports progress while it generates; what blocks
  runs in threads.
- `RolloutClient` is what the driver holds. It gives every call a name and a deadline. A rollout and an evaluation take as long
  as they take: it starts them, and the `RunningCall` that it returns waits for the end, draws a progress bar meanwhile, and
  fails if the manager stops saying how far it has come.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup

from slime.arguments.paths import MANAGER_PLUG_INS, load_plug_ins
from slime.observability.console import GenerationBar, StartupClock, evaluation_name, generation_name
from slime.observability.logging_utils import LoggedMetrics, configure_logger
from slime.observability.waiting import name_actors, unwatch, unwatch_actors, wait_for, watch, watch_actors
from slime.plan.placement import sleeping_sides
from slime.ray.driver import RolloutResult, RunLength
from slime.ray.request_actors import RequestActors
from slime.scheduling.device_turns import Holds
from slime.serving.engines import Engines, engines_of_run, have_requests
from slime.serving.fleet import EngineName, FleetSnapshot
from slime.serving.owner import ServingOwner, longest_push_wait
from slime.utils import env
from slime.utils.async_utils import turn_of_async_loop
from slime.utils.errors import RunError
from slime.utils.http_utils import send_through, set_engine_supply
from slime.utils.misc import collect_garbage_rarely
from slime.utils.plugin_loader import containing_endings
from slime.utils.ports import allow_many_connections, host_for_url
from slime.utils.run_values import with_run_values
from slime.weights.transports.process_group import communicator_environment

logger = logging.getLogger(__name__)

# Data are loaded beside the start of the engines. The first time they are also written to a cache, which takes longer.
_DATA_SECONDS = 1200.0
_CONTROL_DEADLINE_SECONDS = 600.0
_SHUTDOWN_DEADLINE_SECONDS = 60.0
# For fetching an answer that Ray says is ready.
_ANSWER_SECONDS = 5.0
# A run with `--ci-test --use-fault-tolerance` kills an engine before this rollout: weights were pushed more than once by then.
_FAULT_AT_ROLLOUT = 2
# How often it looks whether another server has taken that engine's place.
_FAULT_POLL_SECONDS = 0.2


Result = TypeVar("Result")


async def _in_thread(work: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
    """The result of `work(*arguments, **keywords)`, which runs in a thread. Whatever it raises, even a `SystemExit`, the event
    loop goes on: this actor's other calls need it."""
    with containing_endings():
        return await asyncio.to_thread(work, *arguments, **keywords)


class RolloutTurns:
    """Rollouts one at a time, in their order, and pauses between two of them. For coroutines of one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._running = False
        self._pausing = False
        self._finished = -1

    @contextlib.asynccontextmanager
    async def of(self, rollout_id: int, after: int | None) -> AsyncIterator[None]:
        """The turn of a rollout, which begins when that of rollout `after` is over."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: not (self._running or self._pausing) and (after is None or self._finished >= after)
            )
            self._running = True
        try:
            yield
        finally:
            async with self._changed:
                self._running, self._finished = False, rollout_id
                self._changed.notify_all()

    async def pause(self) -> None:
        """Return when no rollout is under way; the next one waits for `go_on`."""
        async with self._changed:
            self._pausing = True
            await self._changed.wait_for(lambda: not self._running)

    async def go_on(self) -> None:
        async with self._changed:
            self._pausing = False
            self._changed.notify_all()


class RolloutManager:
    """Prompts in, train batches out."""

    def __init__(self, args: argparse.Namespace) -> None:
        configure_logger(args.log_level)
        collect_garbage_rarely()
        allow_many_connections()
        self.args = args
        self._pipeline: Any = None
        self._serving: ServingOwner | None = None
        self._request_actors: RequestActors | None = None
        self._turns = RolloutTurns()
        self._has_killed_an_engine = False

    def __repr__(self) -> str:
        return "manager"

    @ray.method(concurrency_group="control")
    async def start(self, engines: Engines | None) -> RunLength:
        """Start the router, and engines that were not told to start yet; load the data meanwhile. Returns how long the run is,
        which the data may decide."""
        return await _in_thread(self._start, engines)

    @ray.method(concurrency_group="control")
    async def load(self, rollout_id: int) -> None:
        """Restore the data state saved after rollout `rollout_id`; nothing for −1."""
        if self._pipeline.states is not None:
            await _in_thread(self._pipeline.states.load, rollout_id)

    @ray.method(concurrency_group="control")
    async def save(self, rollout_id: int) -> None:
        """Write the data state as it was after rollout `rollout_id` had drawn its prompts."""
        if self._pipeline.states is not None:
            await _in_thread(self._pipeline.states.save, rollout_id)

    @ray.method(concurrency_group="control")
    async def progress(self, name: str) -> tuple[str, int, int] | None:
        """(description, done, total) of what the call with this name generates (`generation_name`, `evaluation_name`).

        The answer comes from the event loop in which all calls generate. If something blocks that loop, none comes: the time
        limits of the calls do not act then either, and the driver has to notice.
        """
        await turn_of_async_loop()
        return self._pipeline.progress(name)

    @ray.method(concurrency_group="generate")
    async def generate(self, rollout_id: int, after: int | None = None, trained_as: int | None = None) -> RolloutResult:
        """Run the rollout function for one step, when rollout `after` is over, and build the shards of its train batch.

        `trained_as`: the version of the weights that it will train.
        """
        async with self._turns.of(rollout_id, after):
            with self._checked_engines():
                await _in_thread(self._kill_an_engine, rollout_id)
                return await _in_thread(self._pipeline.generate, rollout_id, trained_as)

    @ray.method(concurrency_group="generate")
    async def pause_between_rollouts(self) -> None:
        """Return when no rollout is under way; the next one waits for `go_on_with_rollouts`."""
        await self._turns.pause()

    @ray.method(concurrency_group="generate")
    async def go_on_with_rollouts(self) -> None:
        """Undo `pause_between_rollouts`."""
        await self._turns.go_on()

    @ray.method(concurrency_group="evaluate")
    async def evaluate(self, rollout_id: int, *, before: bool = False) -> list[LoggedMetrics]:
        """Evaluate all data sets, `before` training on `rollout_id` or after it, and return what was logged."""
        with self._checked_engines():
            return await _in_thread(self._pipeline.evaluate, rollout_id, before=before)

    @ray.method(concurrency_group="control")
    async def wait_for_death(self) -> None:
        """Return when `shutdown` is called. Raises RunError when an engine or the router has died that nobody replaces."""
        if self._serving is not None:
            await asyncio.wrap_future(self._serving.ended)

    @ray.method(concurrency_group="control")
    async def hold(self, holds: Holds) -> None:
        """Have the engines hold that much of their memory; see `ServingOwner`."""
        await _in_thread(self._serving.hold, holds)

    @ray.method(concurrency_group="control")
    async def begin_push(self) -> FleetSnapshot:
        """The engines that a push goes to; see `ServingOwner`."""
        return await _in_thread(self._serving.begin_push)

    @ray.method(concurrency_group="control")
    async def begin_push_to_stale(self) -> FleetSnapshot:
        """The engines that lack the weights of the last push; see `ServingOwner`."""
        return self._serving.begin_push_to_stale()

    @ray.method(concurrency_group="control")
    async def lacks_weights(self) -> bool:
        """Whether an engine waits for the weights of a push that it has missed."""
        return self._serving is not None and self._serving.lacks_weights()

    @ray.method(concurrency_group="control")
    async def is_working(self) -> bool:
        """Whether requests find an engine of each kind, or an engine has some that it will finish, or one is being replaced."""
        return self._serving is not None and await _in_thread(self._is_working)

    @ray.method(concurrency_group="control")
    async def end_push(self, names: Sequence[EngineName], version: int, failed: Mapping[int, str]) -> None:
        """The push to `names` is over; see `ServingOwner`."""
        await _in_thread(self._serving.end_push, names, version, failed)

    @ray.method(concurrency_group="control")
    async def shutdown(self) -> None:
        """Stop the engines and the router that this run started."""
        await _in_thread(self._shutdown, silent=True)

    def _checked_engines(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._serving is None else self._serving.generating()

    # The methods from here on run in threads, so they may block.

    def _start(self, engines: Engines | None) -> RunLength:
        try:
            if engines is not None:
                self._start_serving(engines)
                if self.args.use_distributed_post:
                    self._request_actors = RequestActors(self.args.num_gpus_per_node)
            load_plug_ins(self.args, MANAGER_PLUG_INS)
            # The driver imports this module, and has no use for torch, which the pipeline needs.
            from slime.ray.rollout_pipeline import RolloutPipeline

            self._pipeline = RolloutPipeline(self.args)
            if self._serving is not None:
                self._pipeline.engine_memory = self._serving.host_memory_gib
                self._serving.wait_ready()
                if sleeping_sides(self.args).engines:
                    # Training ranks come next.
                    self._serving.hold(Holds.NOTHING)
            if self._request_actors is not None:
                send_through(self._request_actors.wait_ready())
        except BaseException:
            self._shutdown()
            raise
        return self._pipeline.length

    def _start_serving(self, engines: Engines) -> None:
        self._serving = ServingOwner(self.args, engines, self.args.log_dir)
        routers = self._serving.start()
        addresses = {model: (host_for_url(router.ip), router.port) for model, router in routers.items()}
        first_host, first_port = next(iter(addresses.values()))
        self.args = with_run_values(
            self.args,
            router_api_key=self._serving.api_key,
            sglang_router_ip=first_host,
            sglang_router_port=first_port,
            sglang_model_routers=addresses,
        )
        # Engines that register by themselves (`--rollout-num-gpus 0`) are not ours to look after, so requests that fail there
        # do not ask what became of them.
        if self.args.use_fault_tolerance and (self.args.rollout_external or self.args.rollout_num_gpus):
            for model, router in routers.items():
                set_engine_supply(router.url, _EnginesOfModel(self._serving, model))

    def _kill_an_engine(self, rollout_id: int) -> None:
        """With `--ci-test` and `--use-fault-tolerance`: kill the first engine, once, and wait for a server in its place.

        Raises:
            RunError: none came, or the run ends.
        """
        args, owner = self.args, self._serving
        wanted = args.ci_test and args.use_fault_tolerance and not args.rollout_external and owner is not None
        if not wanted or self._has_killed_an_engine or rollout_id < _FAULT_AT_ROLLOUT:
            return
        for victim in owner.engines().engines[:1]:
            self._has_killed_an_engine = True
            logger.warning("--ci-test: %s is killed, for --use-fault-tolerance to replace it", victim.name)
            wait_for(victim.handle.crash.remote(), f"the end of {victim.name}", _CONTROL_DEADLINE_SECONDS)
            limit = longest_push_wait(args, 1)
            deadline, next_engine = time.monotonic() + limit, EngineName(victim.name.engine_id + 1)
            while not any(victim.name < life < next_engine for life in owner.engines().names):
                if time.monotonic() > deadline:
                    raise RunError(f"--ci-test: nothing took the place of {victim.name} within {limit:.0f} s")
                with contextlib.suppress(TimeoutError):
                    owner.ended.result(_FAULT_POLL_SECONDS)
                    return

    def _is_working(self) -> bool:
        # Engines that are being replaced count: a push now would wait for them, and then cut off requests that others have got
        # meanwhile. With `--max-weight-staleness` no such push follows: the run ends, and need not wait.
        replaces = self.args.max_weight_staleness is None and not self._serving.is_settled()
        return self._serving.is_serving() or replaces or have_requests(self._serving.engines())

    def _shutdown(self, *, silent: bool = False) -> None:
        if self._serving is not None:
            self._serving.leave_given_router()
        if silent:
            # From here on requests lose their engines and groups are given up, which would fill the log and tells nothing.
            logging.disable(logging.CRITICAL)
        if self._request_actors is not None:
            send_through(None)
            self._request_actors.end()
        if self._serving is not None:
            for router in self._serving.routers.values():
                set_engine_supply(router.url, None)
            self._serving.shutdown()


@dataclasses.dataclass(frozen=True)
class _EnginesOfModel:
    """Router and engines of `model`, as requests to it see them (`EngineSupply`)."""

    owner: ServingOwner
    model: str

    def is_serving(self) -> bool:
        """Whether requests find an engine."""
        return self.has_router() and self.owner.is_serving(self.model)

    def has_router(self) -> bool:
        """Whether there is a router that has its engines."""
        return self.owner.routers[self.model].serves()

    def doubt_all(self, cause: str) -> None:
        """A request failed: look after the engines."""
        self.owner.doubt_all(self.model, cause)

    def is_decided(self) -> bool:
        """Whether no engine is doubted, and there is a router."""
        return self.has_router() and self.owner.is_decided(self.model)

    def deaths(self) -> int:
        """How many engines, and routers, have died so far."""
        return self.owner.deaths(self.model) + self.owner.routers[self.model].deaths


class RunningCall(Generic[Result]):
    """A rollout or an evaluation that is under way in the manager, perhaps beside others.

    Args:
        name: what the manager and messages call it.
        limit: seconds that the manager may take, each time that it is asked how far the call has come.
        has_engines: whether samples are generated, so that the first one is worth a line in the log.
        on_poll: called several times a second while `result` waits.
    """

    def __init__(
        self,
        manager: Any,
        ref: ray.ObjectRef,
        name: str,
        limit: float,
        has_engines: bool,
        on_poll: Callable[[], None],
    ) -> None:
        self._manager = manager
        self._ref = ref
        self._name = name
        self._limit = limit
        self._has_engines = has_engines
        self._on_poll = on_poll
        self._bar = GenerationBar()
        # The question how far the call has come: one reference until it is answered, then empty. And when it was asked.
        self._question: list[ray.ObjectRef] = []
        self._asked_at = 0.0
        # The last answer that held numbers.
        self._snapshot: tuple[str, int, int] | None = None

    def result(self) -> Result:
        """Wait for the end of the call, and draw its progress meanwhile.

        The call itself has no deadline: each of its parts has one, or the user gave it none.

        Raises:
            UserError, RunError: what ended the call; or the manager did not say within the limit how far it has come.
        """
        try:
            result = wait_for(self._ref, self._name, math.inf, on_poll=self._poll)
        finally:
            self._bar.close()
        self._report_start()
        return result

    def _poll(self) -> None:
        self._on_poll()
        if not self._question:
            self._question.append(self._manager.progress.remote(self._name))
            self._asked_at = time.monotonic()
        snapshot = _answer(self._question)
        if self._question and time.monotonic() - self._asked_at > self._limit:
            raise RunError(self._no_answer())
        self._snapshot = snapshot or self._snapshot
        self._bar.show(snapshot)
        if snapshot is not None and snapshot[1] > 0:
            self._report_start()

    def _no_answer(self) -> str:
        done = "" if self._snapshot is None else f", when {self._snapshot[1]} of {self._snapshot[2]} samples were there"
        return (
            f"{self._name}: the rollout manager has not said for {self._limit:.0f} s how far it has come{done}. Something "
            "blocks its event loop, an `async` function of yours say: a plain one may block, it is called in a thread. If it "
            "needs so long, raise --http-request-timeout"
        )

    def _report_start(self) -> None:
        line = StartupClock().close("first sample")
        # Without engines nothing is generated, and there is no first sample that the line could tell of.
        if line is not None and self._has_engines:
            self._bar.close()
            logger.info("%s", line)


def _answer(question: list[ray.ObjectRef]) -> Any:
    """The answer to the one question in the list, which is emptied then; None while there is no answer yet.

    The death of the manager is no error here: whoever polls is waiting for a call of it, and that wait names the death.
    """
    ready, _ = ray.wait(question, timeout=0)
    if not ready:
        return None
    question.clear()
    with contextlib.suppress(RayActorError):
        return ray.get(ready[0], timeout=_ANSWER_SECONDS)
    return None


class RolloutClient:
    """The driver's side of the manager: makes its actor, calls it, and ends it. `starting` is ready when the manager is."""

    def __init__(
        self, args: argparse.Namespace, group: PlacementGroup | None, places: Sequence[tuple[int, int]]
    ) -> None:
        self._args = args
        # Seconds until engines, router and data have to be there.
        self.start_deadline = args.engine_start_timeout + _DATA_SECONDS
        # An upper bound alone: the manager keeps the limits of its engines itself, and its death ends every wait. There are at
        # most as many engines as devices, or as addresses of engines that others started.
        engines = max(len(places), len(args.rollout_external_engine_infos or ()))
        self._push_deadline = longest_push_wait(args, engines) + _CONTROL_DEADLINE_SECONDS
        # Room for the rollout under way, those that wait for their turn, and a request for a pause between two of them.
        groups = {"generate": args.async_buffer_size + 3, "evaluate": 1, "control": 8}
        if args.rollout_data_transport == "nixl":
            # Ray's direct transport frees memory in this group. `enable_tensor_transport` makes it too, but imports torch.
            groups["_ray_system"] = 1
        remote_class = ray.remote(concurrency_groups=groups)(RolloutManager)
        environment = {**env.actor_environment(), **env.library_environment(), **communicator_environment(args)}
        options = {"num_cpus": 1, "num_gpus": 0, "runtime_env": {"env_vars": environment}}
        self._manager = remote_class.options(**options).remote(args)
        self._engines: Engines | None = None
        if args.has_engines:
            self._engines = engines_of_run(args, group, places, args.log_dir, environment)
        if args.has_engines and not args.rollout_external:
            # Their servers take longest of all that a start waits for, so they do not wait for the manager's process. Engines
            # that others started are reached from that process, so it has to be there first.
            self._engines.start_all()
        self.starting = self._manager.start.remote(self._engines)
        self._length: RunLength | None = None
        # The last rollout that was asked for.
        self._last_rollout: int | None = None
        # The weight version of the last push.
        self._version: int | None = None
        self._death: list[ray.ObjectRef] = []
        self._bring_weights: Callable[[], None] | None = None
        # The question whether an engine lacks weights: one reference until it is answered, then empty.
        self._lacking: list[ray.ObjectRef] = []

    def wait_ready(self) -> RunLength:
        """Wait until data source, engines and router are there. Returns how long the run is."""
        if self._length is None:
            # The message names no flag: engines that are late end the run before, by their own limit. So data are late.
            self._length = wait_for(self.starting, "start of engines, router and data", self.start_deadline)
            # Whatever the driver waits for, be it a call of others, ends when something dies there that nobody replaces.
            self._death = [self._manager.wait_for_death.remote()]
            watch(self._death)
            # Waits for engines and for users' functions are long. A process that stands still need not be waited for so long.
            name_actors({self._manager: "the rollout manager"})
            watch_actors([self._manager], _CONTROL_DEADLINE_SECONDS)
        return self._length

    def hold(self, holds: Holds) -> None:
        """Have all engines hold that much of their memory on the devices."""
        ref = self._manager.hold.remote(holds)
        wait_for(ref, f"engines that are to hold {holds.name.lower()} of their memory", self._push_deadline)

    def begin_push(self) -> FleetSnapshot:
        """The engines that a push goes to. Until `end_push` they count as having the weights of no version."""
        return wait_for(self._manager.begin_push.remote(), "the engines for a push", self._push_deadline)

    def end_push(self, names: Sequence[EngineName], version: int, failed: Mapping[int, str]) -> None:
        """The push to `names` is over: those not in `failed` (engine id → reason) hold `version`; the others count as dead."""
        self._control("end_push", "the end of a push", names, version, failed)
        self._version = version

    def begin_push_to_stale(self) -> FleetSnapshot:
        """The engines that lack the weights of the last push, `version` of the result; the others go on."""
        return self._control("begin_push_to_stale", "the engines that lack weights")

    def is_working(self) -> bool:
        """Whether requests find an engine of each kind, or an engine has some that it will finish, or one is being replaced."""
        return self._control("is_working", "the engines that serve")

    def bring_weights_by(self, bring: Callable[[], None]) -> None:
        """From now on call `bring`, while a rollout or an evaluation is awaited, if an engine lacks the last push's weights."""
        self._bring_weights = bring

    def _look_after_engines(self) -> None:
        """Bring weights to engines that lack them; called several times a second while a call is awaited."""
        if not self._args.use_fault_tolerance or self._bring_weights is None:
            return
        if not self._lacking:
            self._lacking.append(self._manager.lacks_weights.remote())
        if _answer(self._lacking):
            self._bring_weights()

    def load(self, rollout_id: int) -> None:
        """Restore the data state saved after rollout `rollout_id`; nothing for −1."""
        self._control("load", "load of the data state", rollout_id)

    def generate(self, rollout_id: int, pushes_ahead: int = 0) -> RunningCall[RolloutResult]:
        """Start one rollout, which begins when the one that was started before is over. Its result: a shard per data-parallel
        rank, and metrics.

        `pushes_ahead`: how many pushes there will be before it is trained.
        """
        after, self._last_rollout = self._last_rollout, rollout_id
        trained_as = None if self._version is None else self._version + pushes_ahead
        return self._running(self._manager.generate.remote(rollout_id, after, trained_as), generation_name(rollout_id))

    @contextlib.contextmanager
    def between_rollouts(self) -> Iterator[None]:
        """Wait for the rollout that is under way, if any; until the end of the block none begins."""
        self._running(self._manager.pause_between_rollouts.remote(), "the rollout under way, before a push").result()
        try:
            yield
        finally:
            self._manager.go_on_with_rollouts.remote()

    def evaluate(self, rollout_id: int, *, before: bool = False) -> RunningCall[list[LoggedMetrics]]:
        """Start the evaluation of all data sets, `before` training on `rollout_id` or after it. Its result: metrics."""
        ref = self._manager.evaluate.remote(rollout_id, before=before)
        return self._running(ref, evaluation_name(rollout_id, before=before))

    def save(self, rollout_id: int) -> None:
        """Write the data state as it was after the prompts of `rollout_id` were drawn."""
        self._control("save", "save of the data state", rollout_id)

    def dispose(self) -> None:
        """Stop engines and router, then the manager."""
        unwatch(self._death)
        unwatch_actors([self._manager])
        ray.wait([self._manager.shutdown.remote()], timeout=_SHUTDOWN_DEADLINE_SECONDS)
        ray.kill(self._manager, no_restart=True)

    def _control(self, method: str, name: str, *arguments: Any) -> Any:
        return wait_for(getattr(self._manager, method).remote(*arguments), name, _CONTROL_DEADLINE_SECONDS)

    def _running(self, ref: ray.ObjectRef, name: str) -> RunningCall[Any]:
        # Users' `async` functions may block the event loop for a while, several of them one after the other. So the manager
        # gets as long for an answer as several requests may take.
        limit = 4 * self._args.http_request_timeout + _CONTROL_DEADLINE_SECONDS
        return RunningCall(self._manager, ref, name, limit, self._args.has_engines, self._look_after_engines)
