"""The engines' processes: Ray actors in placement-group bundles. The only holder of their handles.

It carries out what `owner.py` decides: it starts the server of a new life, ends one, and hands out references to what it asked.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.observability.logging_utils import configure_logger
from slime.serving.fleet import EngineName, EngineRecord, EngineSnapshot, FleetSnapshot
from slime.serving.topology import Topology
from slime.utils.env import actor_environment

_SHUTDOWN_SECONDS = 30.0


class EngineActor(SGLangEngine):
    """An engine in a process of its own, whose log lines have the level of the run."""

    def __init__(self, args: Any, rank: int, log_dir: str | Path):
        configure_logger(args.log_level)
        super().__init__(args, rank, log_dir)


class Engines:
    """The actors of a topology. An engine has one at a time; `start` of a new life forgets that of the last one.

    Args:
        args: `router_api_key` is the key that the servers ask for.
    """

    def __init__(self, args: argparse.Namespace, placement_group: Any, topology: Topology, log_dir: str | Path) -> None:
        self._args = args
        self._placement_group = placement_group
        self._topology = topology
        self._log_dir = Path(log_dir)
        self._handles: dict[EngineName, Any] = {}

    def start(self, name: EngineName) -> ray.ObjectRef:
        """Create the actor of a life and tell it to start its server; does not wait.

        Returns:
            A reference to the server's URL, ready when it is healthy; an error when it is not within
            `--engine-start-timeout`.
        """
        _, _, engine = self._topology.find(name.engine_id)
        first = engine.nodes[0][0]
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._placement_group,
            placement_group_capture_child_tasks=True,
            placement_group_bundle_index=first.bundle,
        )
        options = {
            "num_cpus": 0.2,
            "num_gpus": 0.2,
            "scheduling_strategy": strategy,
            # Ray joins them with those of the process that starts the actor, which has them from the driver.
            "runtime_env": {"env_vars": actor_environment()},
            # One watches the server for the whole run; a reader of the log can be served while others wait for it.
            "max_concurrency": 5,
        }
        self._handles = {other: handle for other, handle in self._handles.items() if other.engine_id != name.engine_id}
        actor_class = ray.remote(EngineActor).options(**options)
        self._handles[name] = actor_class.remote(self._args, name.engine_id, str(self._log_dir))
        return self._handles[name].init.remote(base_gpu_id=first.device_id)

    def end_of(self, name: EngineName) -> ray.ObjectRef:
        """A reference that becomes an error when the server dies, and ready when it is shut down."""
        return self._handles[name].wait_for_end.remote()

    def check(self, name: EngineName, timeout: float) -> ray.ObjectRef:
        """A reference to whether the engine answers, False while it computes; an error when it does neither for `timeout` s."""
        return self._handles[name].makes_progress.remote(timeout)

    def snapshot(self, version: int | None, records: Sequence[EngineRecord]) -> FleetSnapshot:
        """The engines of `records` with their handles and devices, under the `version` of the last push."""
        engines = []
        for record in records:
            _, _, spec = self._topology.find(record.name.engine_id)
            handle = self._handles[record.name]
            engines.append(
                EngineSnapshot(record.name, record.state, record.weight_version, handle, spec.num_gpus, spec.gpu_offset)
            )
        return FleetSnapshot(version, tuple(engines))

    def stop(self, names: Iterable[EngineName] | None = None) -> None:
        """End servers and actors; None: all. Those that cannot end politely are killed, and their servers follow them."""
        named = list(self._handles) if names is None else names
        # Several threads may stop an engine: the first one to take its handle does.
        handles = [handle for name in named if (handle := self._handles.pop(name, None)) is not None]
        if not handles:
            return
        ended = [handle.shutdown.remote() for handle in handles]
        ray.wait(ended, num_returns=len(ended), timeout=_SHUTDOWN_SECONDS)
        for handle in handles:
            ray.kill(handle, no_restart=True)
