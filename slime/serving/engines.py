"""The engines' processes: Ray actors in placement-group bundles. Nobody else holds their handles.

`Engines` carries out what `owner.py` decides: it starts the server of a new life of an engine, ends one, and hands out
references to answers. The first lives are the exception: the driver starts them before there is an owner, because a start waits
longest for their servers.
"""

from __future__ import annotations

import argparse
import datetime
import os
import secrets
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from slime.arguments.config_files.serving_config import arguments_of_group
from slime.backends.sglang_utils.external import ExternalEngine, ExternalEngineInfo
from slime.backends.sglang_utils.server_arguments import EnginePart
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.backends.sglang_utils.worker_watch import host_memory_gib
from slime.observability.logging_utils import configure_logger
from slime.observability.waiting import wait_for, wait_for_all, wait_for_each
from slime.serving.fleet import EngineName, EngineRecord, EngineSnapshot, EngineState, FleetSnapshot
from slime.serving.router import Worker
from slime.serving.topology import Topology, topology_of
from slime.utils import env
from slime.utils.bundles import are_consecutive, locate_bundles, nodes_of_bundles
from slime.utils.errors import RunError
from slime.utils.ports import host_for_url, service_host
from slime.utils.run_values import with_run_values
from slime.weights.transports.transport import naming_engines

_SHUTDOWN_SECONDS = 30.0
_ORDER_SECONDS = 180.0
# For a short question to an engine's process.
_ANSWER_SECONDS = 10.0
# For fetching what a finished call returned: Ray says that it is there, but a busy node may be slow.
_OUTCOME_SECONDS = 60.0
# How long the other parts of an engine may take to say how much they have computed.
_MEASURE_SECONDS = 5.0


class EngineActor(SGLangEngine):
    """An engine in a process of its own, whose log lines have the level of the run; of one over several nodes, each part."""

    def __init__(self, args: Any, rank: int, log_dir: str | Path, role: str = "regular", threads: int | None = None):
        configure_logger(args.log_level)
        super().__init__(args, rank, log_dir, role, threads)
        # In the part that serves: the other parts, and a reference to each that becomes an error when the part fails.
        self._helpers: list[Any] = []
        self._of_helpers: list[ray.ObjectRef] = []
        self._store: Any = None

    def init_over_nodes(self, base_gpu_ids: Sequence[int], helpers: Sequence[Any]) -> str:
        """Start the engine as the first of its parts, and `helpers`, actors on the other nodes, as the rest.

        Args:
            base_gpu_ids: the first GPU of each part.

        Returns:
            The URL of the server, which speaks for all parts.

        Raises:
            RunError: a part did not start within `--engine-start-timeout`.
        """
        from slime.utils.process_groups import create_store

        host, limit = service_host(), self._args.engine_start_timeout
        self._store = create_store(host, datetime.timedelta(seconds=limit))
        meeting_point = f"{host_for_url(host)}:{self._store.port}"
        shared = (meeting_point, self.reserve_bootstrap_port(host), self.reserve_first_port(host))
        parts = [EnginePart(len(base_gpu_ids), node_rank, *shared) for node_rank in range(len(base_gpu_ids))]
        self._helpers = list(helpers)
        self._of_helpers = [
            helper.init.remote(base_gpu_id=gpu, part=part)
            for helper, gpu, part in zip(helpers, base_gpu_ids[1:], parts[1:], strict=True)
        ]
        url = self.init(base_gpu_id=base_gpu_ids[0], part=parts[0])
        wait_for_all(self._of_helpers, f"the other parts of engine {self.rank}", limit, flag="--engine-start-timeout")
        self._of_helpers = [helper.wait_for_end.remote() for helper in self._helpers]
        return url

    def init_where_it_is(self, group: Any, nodes: Sequence[Sequence[int]], helpers: Sequence[Any]) -> str:
        """Start the engine, with `helpers` as `init_over_nodes`, on the devices that its bundles are by now.

        Args:
            nodes: the bundles of each part, as indices in the placement group.

        Raises:
            RunError: as `init`; or Ray has moved the bundles, and a part would be on several nodes, or on devices whose ids do
                not follow each other.
        """
        bundles, limit = [index for part in nodes for index in part], self._args.engine_start_timeout
        found = dict(zip(bundles, locate_bundles(group, bundles, limit), strict=True))
        for part in nodes:
            devices = [found[index] for index in part]
            if not are_consecutive(devices):
                places = ", ".join(f"{address} GPU {device}" for address, device in devices)
                raise RunError(
                    f"engine {self.rank}: a node was lost, and Ray has moved the engine to the devices {places}; it needs "
                    "consecutive devices of one node. Start the run again when there are whole nodes"
                )
        first_gpus = [found[part[0]][1] for part in nodes]
        return self.init_over_nodes(first_gpus, helpers) if helpers else self.init(base_gpu_id=first_gpus[0])

    def _computing_seconds(self) -> float | None:
        asked = [helper.computing_seconds.remote() for helper in self._helpers]
        others = wait_for_each(asked, f"the other parts of engine {self.rank}", _MEASURE_SECONDS) if asked else []
        if any(isinstance(other, RunError) for other in others):
            # A busy node may be late, which says nothing. If a part has ended, its reference in `_of_helpers` tells.
            return None
        parts = [self.computing_seconds(), *others]
        # The sum, since one part may compile while the others wait for it. A part that was stopped reports 0, and without it
        # the engine gives no answer, whatever the others compute.
        return sum(parts) if all(parts) else 0.0

    def crash(self) -> None:
        """End the server as a fault does: nobody is told."""
        os.kill(self.server_pid(), signal.SIGKILL)

    def host_memory_gib(self) -> float | None:
        """What the server of this part has of its host's memory; None before `init`."""
        pid = self.server_pid()
        return None if pid is None else host_memory_gib(pid)

    def computing_seconds(self) -> float:
        """Processor seconds of this part alone, for the one that serves."""
        return super()._computing_seconds()

    def fetch_weights(self, published: str) -> str | None:
        """As in every engine, on the hosts of all its parts: each server reads the directory of its own host."""
        others = [helper.fetch_weights.remote(published) for helper in self._helpers]
        reasons = [super().fetch_weights(published)]
        name, limit = f"the other parts of engine {self.rank}", self._args.engine_load_timeout + _ANSWER_SECONDS
        reasons += wait_for_all(others, name, limit, flag="--engine-load-timeout") if others else []
        return next((reason for reason in reasons if reason is not None), None)

    def _raise_if_another_part_failed(self) -> None:
        ended, _ = (
            ray.wait(self._of_helpers, num_returns=len(self._of_helpers), timeout=0) if self._of_helpers else ([], [])
        )
        for reference in ended:
            # Raises what the part failed with. A reference may also be ready because the part has started.
            wait_for(reference, f"a part of engine {self.rank}", _ANSWER_SECONDS)


class ExternalEngineActor(ExternalEngine):
    """An engine that somebody else started: this process only speaks to it."""

    def __init__(self, args: Any, rank: int, log_dir: str, info: ExternalEngineInfo):
        configure_logger(args.log_level)
        super().__init__(args, rank, log_dir, info)


class Engines:
    """The actors of a topology. An engine has one at a time: `start` of a new life forgets the actor of the last one.

    The driver makes this object and hands it to the manager's process, which goes on with it. An actor lives no longer than the
    process that started it.

    Args:
        args: `router_api_key` is the key that the servers ask for.
        environment: the variables of their processes.

    Attributes:
        starting: what `start` returned for the first life of each engine; empty before `start_all`.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        placement_group: Any,
        topology: Topology,
        log_dir: str | Path,
        environment: Mapping[str, str],
    ) -> None:
        self._args = args
        self._placement_group = placement_group
        self.topology = topology
        self.starting: dict[EngineName, ray.ObjectRef] = {}
        self._log_dir = Path(log_dir)
        self._environment = dict(environment)
        # A Ray that the run starts has one node, which no bundle leaves.
        joined = env.ray_address() is not None and placement_group is not None
        self._nodes = nodes_of_bundles(placement_group) if joined else None
        # Read here, in the driver: in the processes that Ray starts it sets the variable itself, if the user did not.
        self._threads = env.threads_of_user()
        self._handles: dict[EngineName, Any] = {}
        # The actors of an engine over several nodes that only compute.
        self._helpers: dict[EngineName, list[Any]] = {}

    @property
    def api_key(self) -> str:
        """What the servers ask for."""
        return self._args.router_api_key

    def start_all(self) -> None:
        """Tell all engines to start, if they were not told yet; does not wait."""
        if not self.starting:
            names = [EngineName(engine.engine_id) for engine in self.topology.engines]
            self.starting = {name: self.start(name) for name in names}

    def start(self, name: EngineName) -> ray.ObjectRef:
        """Create the actor of a life and tell it to start its server; does not wait.

        Returns:
            A reference to the server's URL, ready when it is healthy; an error when it is not within
            `--engine-start-timeout`.
        """
        _, group, engine = self.topology.find(name.engine_id)
        # A copy of the keys: other threads may start or stop other engines meanwhile.
        for last in [life for life in list(self._handles) if life.engine_id == name.engine_id]:
            self._handles.pop(last, None)
        common = {
            "runtime_env": {"env_vars": self._environment},
            # One call watches the server for the whole run, so others need room beside it.
            "max_concurrency": 5,
        }
        if engine.external is not None:
            # On the node of this process, where the router runs too: the engine has to be reached from there.
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            actor_class = ray.remote(ExternalEngineActor).options(num_cpus=0, scheduling_strategy=here, **common)
            self._handles[name] = actor_class.remote(self._args, name.engine_id, str(self._log_dir), engine.external)
            return self._handles[name].init.remote()
        args = self._args
        if group.settings is not None:
            args = arguments_of_group(args, group.settings, sleeps=engine.sleeps)
        parts = []
        for devices in engine.nodes:
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=self._placement_group,
                placement_group_capture_child_tasks=True,
                placement_group_bundle_index=devices[0].bundle,
            )
            options = {"num_cpus": 0.2, "num_gpus": 0.2, "scheduling_strategy": strategy, **common}
            actor_class = ray.remote(EngineActor).options(**options)
            parts.append(actor_class.remote(args, name.engine_id, str(self._log_dir), group.role, self._threads))
        self._handles[name], *helpers = parts
        if helpers:
            self._helpers[name] = helpers
        bundles = [[device.bundle for device in devices] for devices in engine.nodes]
        if name.generation > 0 and self._have_moved(bundles):
            return self._handles[name].init_where_it_is.remote(self._placement_group, bundles, helpers)
        first_gpus = [devices[0].device_id for devices in engine.nodes]
        if not helpers:
            return self._handles[name].init.remote(base_gpu_id=first_gpus[0])
        return self._handles[name].init_over_nodes.remote(first_gpus, helpers)

    def _have_moved(self, bundles: Sequence[Sequence[int]]) -> bool:
        """Whether a node of these bundles was lost. Otherwise their devices are those from before, and are not looked for:
        ranks of actor and critic, and an engine, may leave nothing of a device to whoever would look."""
        if self._nodes is None:
            return False
        nodes = nodes_of_bundles(self._placement_group)
        return any(nodes.get(index) != self._nodes.get(index) for part in bundles for index in part)

    def workers(self, urls: Mapping[EngineName, str]) -> dict[EngineName, Worker | RunError]:
        """The engines, whose servers answer at `urls`, as their routers are told of them; an error where an engine's process is
        gone, or does not answer."""
        roles = {name: self.topology.find(name.engine_id)[1].role for name in urls}
        asked = {name: self._handles.get(name) for name, role in roles.items() if role == "prefill"}
        ports: dict[EngineName, int | RunError | None] = {
            name: RunError(f"{name} was ended") for name, handle in asked.items() if handle is None
        }
        living = {name: handle.bootstrap_port.remote() for name, handle in asked.items() if handle is not None}
        if living:
            pending = naming_engines(name.engine_id for name in living)
            told = wait_for_each(list(living.values()), "ports of the engines", _ANSWER_SECONDS, pending=pending)
            ports |= dict(zip(living, told, strict=True))
        found = {name: Worker(url, roles[name], ports.get(name)) for name, url in urls.items()}
        return found | {name: port for name, port in ports.items() if isinstance(port, RunError)}

    def why_none_follows(self, name: EngineName) -> str:
        """Why no other server can be started in the place of a dead engine; empty: one can."""
        external = self.topology.find(name.engine_id)[2].external
        return f"this run did not start {external.url}, and starts none in its place" if external else ""

    def end_of(self, name: EngineName) -> ray.ObjectRef:
        """A reference that becomes an error when the server dies, and ready when it is shut down."""
        return self._handles[name].wait_for_end.remote()

    def check(self, name: EngineName, timeout: float) -> ray.ObjectRef | None:
        """A reference to whether the engine answers, False while it computes; an error when it does neither for `timeout` s.
        None: it was ended meanwhile."""
        handle = self._handles.get(name)
        return None if handle is None else handle.makes_progress.remote(timeout)

    def order(self, names: Sequence[EngineName], method: str) -> dict[EngineName, RunError | None]:
        """Call a method of these engines at the same time. Returns what went wrong with each, None where nothing did."""
        found: dict[EngineName, RunError | None] = {name: RunError(f"{name} was ended") for name in names}
        handles = {name: handle for name in names if (handle := self._handles.get(name)) is not None}
        refs = [getattr(handle, method).remote() for handle in handles.values()]
        # Longer than the engine's own limits: a minute in which requests may end, and those of its questions to its server.
        limit = 4 * self._args.http_control_timeout + _ORDER_SECONDS
        pending = naming_engines(name.engine_id for name in handles)
        outcomes = wait_for_each(refs, f"{method} of the engines", limit, pending=pending)
        for name, outcome in zip(handles, outcomes, strict=True):
            found[name] = outcome if isinstance(outcome, RunError) else None
        return found

    def host_memory_gib(self, names: Iterable[EngineName]) -> float | None:
        """GiB of host memory that the processes of an engine have on one host; the largest number of all these engines. None
        if no server of ours tells."""
        ours = [name for name in names if not self.why_none_follows(name)]
        servers = [handle for name in ours if (handle := self._handles.get(name)) is not None]
        servers += [handle for name in ours for handle in self._helpers.get(name, ())]
        asked = [handle.host_memory_gib.remote() for handle in servers]
        found = wait_for_each(asked, "host memory of the engines", _ANSWER_SECONDS) if asked else []
        return max((gib for gib in found if isinstance(gib, float)), default=None)

    def snapshot(self, version: int | None, records: Sequence[EngineRecord]) -> FleetSnapshot:
        """The engines of `records` with their handles and devices, under the `version` of the last push."""
        engines = []
        for record in records:
            _, group, spec = self.topology.find(record.name.engine_id)
            place = (self._handles[record.name], spec.num_gpus, spec.gpu_offset)
            alike = spec.engine_id if spec.external else group.engines[0].engine_id
            engines.append(EngineSnapshot(record.name, record.state, record.weight_version, *place, alike, group.role))
        return FleetSnapshot(version, tuple(engines))

    def stop(self, names: Iterable[EngineName] | None = None) -> None:
        """End servers and actors; None: all. Those that cannot end politely are killed, and their servers follow them."""
        named = list(self._handles) if names is None else names
        # Several threads may want to stop an engine: the one that takes its handle out does it.
        handles = [handle for name in named if (handle := self._handles.pop(name, None)) is not None]
        handles += [handle for name in named for handle in self._helpers.pop(name, ())]
        if not handles:
            return
        ended = [handle.shutdown.remote() for handle in handles]
        ray.wait(ended, num_returns=len(ended), timeout=_SHUTDOWN_SECONDS)
        for handle in handles:
            ray.kill(handle, no_restart=True)


def engines_of_run(
    args: argparse.Namespace,
    placement_group: Any,
    places: Sequence[tuple[int, int]],
    log_dir: str | Path,
    environment: Mapping[str, str],
) -> Engines:
    """The engines that the flags ask for, none of which was told to start.

    Args:
        placement_group, places: where they may live: (bundle index, device id) of every GPU for them, in order.
        environment: as of `Engines`.
    """
    # One key per run keeps other users of the machine out.
    args = with_run_values(args, router_api_key=args.router_api_key or secrets.token_urlsafe(32))
    return Engines(args, placement_group, topology_of(args, places), log_dir, environment)


def have_requests(fleet: FleetSnapshot) -> bool:
    """Whether engines that serve have requests that they will finish. Engines that prefill are not asked: they finish none by
    themselves. One that does not answer counts as having some; whether it lives is not decided here."""
    serving = [engine for engine in fleet.engines if engine.state in (EngineState.SERVING, EngineState.SUSPECT)]
    asked = [engine.handle.has_requests.remote() for engine in serving if engine.role != "prefill"]
    return any(answer is not False for answer in wait_for_each(asked, "requests of the engines", _ANSWER_SECONDS))


def outcome_of(reference: ray.ObjectRef, who: str) -> tuple[Any, RunError | None]:
    """The result of the finished `reference`, or what it failed with."""
    try:
        return ray.get(reference, timeout=_OUTCOME_SECONDS), None
    except RayTaskError as error:
        return None, error.cause if isinstance(error.cause, RunError) else RunError(f"{who}: {error.cause}")
    except RayError as error:
        return None, RunError(f"the process of {who} died: {str(error).strip()}")
