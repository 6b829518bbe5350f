"""The driver's side of the rollout manager: calls with names and deadlines, and the progress bar."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from slime.observability.console import GenerationBar, StartupClock, evaluation_name
from slime.observability.logging_utils import LoggedMetrics
from slime.observability.waiting import unwatch, wait_for, watch
from slime.ray.rollout_manager import RolloutManager, RolloutResult, ServingInfo
from slime.utils import env

logger = logging.getLogger(__name__)

# Beside the start of the engines: data are loaded and, the first time, cached.
_DATA_SECONDS = 1200.0
_CONTROL_DEADLINE_SECONDS = 600.0
_SHUTDOWN_DEADLINE_SECONDS = 60.0


class RolloutClient:
    """Owns the manager's actor, which starts when this object is made; `starting` is ready when it is."""

    def __init__(
        self, args: argparse.Namespace, group: PlacementGroup | None, places: Sequence[tuple[int, int]]
    ) -> None:
        self._args = args
        self._bar = GenerationBar()
        # A generation call may take as long as one request may, several turns of it.
        self._generate_deadline = 4 * args.http_request_timeout
        # Seconds until engines, router and data have to be there.
        self.start_deadline = args.engine_start_timeout + _DATA_SECONDS
        remote_class = ray.remote(concurrency_groups={"generate": 2, "control": 8})(RolloutManager)
        options = {"num_cpus": 1, "num_gpus": 0, "runtime_env": {"env_vars": env.actor_environment()}}
        self._manager = remote_class.options(**options).remote(args)
        self.starting = self._manager.start.remote(group, list(places))
        self.serving: ServingInfo | None = None
        self._ends_of_engines: list[ray.ObjectRef] = []

    def wait_ready(self) -> None:
        """Wait until data source, engines and router are there. Fills in `args.num_rollout`."""
        if self.serving is None:
            # No flag is named: engines that take too long for theirs end the run before, so what is late are data.
            self.serving = wait_for(self.starting, "start of engines, router and data", self.start_deadline)
            self._args.rollouts_per_epoch = self.serving.rollouts_per_epoch
            # An engine that dies ends whatever the driver waits for, also while nobody talks to it.
            self._ends_of_engines = [engine.wait_for_end.remote() for engine in self.serving.engines]
            watch(self._ends_of_engines)
            if self._args.num_rollout is None:
                self._args.num_rollout = self._args.num_epoch * self.serving.rollouts_per_epoch

    def load(self, rollout_id: int) -> None:
        """Restore the data state saved after rollout `rollout_id`; nothing for −1."""
        self._control("load", rollout_id)

    def generate(self, rollout_id: int) -> RolloutResult:
        """One rollout step: a shard per data-parallel rank, and metrics."""
        return self._watch(self._manager.generate.remote(rollout_id), f"generation of rollout {rollout_id}")

    def evaluate(self, rollout_id: int, *, before: bool = False) -> list[LoggedMetrics]:
        """Evaluate all data sets, `before` training on `rollout_id` or after it; returns metrics."""
        ref = self._manager.evaluate.remote(rollout_id, before=before)
        return self._watch(ref, evaluation_name(rollout_id, before=before))

    def save(self, rollout_id: int) -> None:
        """Write the data state as it was after the prompts of `rollout_id` were drawn."""
        self._control("save", rollout_id)

    def dispose(self) -> None:
        """Stop engines and router, then the manager."""
        self._bar.close()
        unwatch(self._ends_of_engines)
        ray.wait([self._manager.shutdown.remote()], timeout=_SHUTDOWN_DEADLINE_SECONDS)
        ray.kill(self._manager, no_restart=True)

    def _control(self, method: str, *arguments: Any) -> Any:
        ref = getattr(self._manager, method).remote(*arguments)
        return wait_for(ref, f"{method} of the data state", _CONTROL_DEADLINE_SECONDS)

    def _watch(self, ref: ray.ObjectRef, name: str) -> Any:
        """Wait for a call that generates samples, with its progress drawn meanwhile."""
        try:
            result = wait_for(ref, name, self._generate_deadline, on_poll=self._progress_poller())
        finally:
            self._bar.close()
        self._report_start()
        return result

    def _progress_poller(self) -> Callable[[], None]:
        pending: list[ray.ObjectRef] = []

        def poll() -> None:
            if not pending:
                pending.append(self._manager.progress.remote())
            ready, _ = ray.wait(pending, timeout=0)
            if ready:
                pending.clear()
                snapshot = ray.get(ready[0], timeout=5)
                self._bar.show(snapshot)
                if snapshot is not None and snapshot[1] > 0:
                    self._report_start()

        return poll

    def _report_start(self) -> None:
        line = StartupClock().close("first sample")
        # Without engines nothing is generated, and the line would speak of something else.
        if line is not None and self._args.has_engines:
            self._bar.close()
            logger.info("%s", line)
