"""The engines of one served model: Ray actors in placement-group bundles, started side by side.

Everything that can run at the same time does: `start` returns at once, so that router, engines and training ranks come
up together; `wait_ready` joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.observability.logging_utils import configure_logger
from slime.serving.router import RouterHandle
from slime.utils.env import actor_environment

_SHUTDOWN_SECONDS = 30.0
# Between the end of an engine's own time limit and its answer.
_ANSWER_SECONDS = 60.0


class EngineActor(SGLangEngine):
    """An engine in a process of its own, whose log lines have the level of the run."""

    def __init__(self, args: Any, rank: int, log_dir: str | Path):
        configure_logger(args.log_level)
        super().__init__(args, rank, log_dir)


class EngineGroup:
    """`rollout_num_gpus / rollout_num_gpus_per_engine` engines.

    `bundle_indices_and_gpu_ids` lists, in order, the bundle index and the GPU id of every GPU of this group; engine `i`
    takes the `i`-th run of `rollout_num_gpus_per_engine` of them. `gpu_counts[i]` and `gpu_offsets[i]` say how many
    GPUs engine `i` has and where they start in that list.
    """

    def __init__(
        self,
        args: Any,
        placement_group: Any,
        bundle_indices_and_gpu_ids: Sequence[tuple[int, int]],
        log_dir: str | Path,
    ):
        per_engine = args.rollout_num_gpus_per_engine
        self._args = args
        self._placement_group = placement_group
        self._log_dir = Path(log_dir)
        self._places = [tuple(place) for place in bundle_indices_and_gpu_ids][::per_engine]
        self.gpu_counts = [per_engine] * len(self._places)
        self.gpu_offsets = [index * per_engine for index in range(len(self._places))]
        self.engines: list[Any] = []
        self.urls: list[str] = []
        self._started: list[Any] = []

    def start(self) -> None:
        """Create the engine actors and tell them to start their servers; does not wait."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor_class = ray.remote(EngineActor)
        for rank, (bundle_index, _) in enumerate(self._places):
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=self._placement_group,
                placement_group_capture_child_tasks=True,
                placement_group_bundle_index=bundle_index,
            )
            options = {
                "num_cpus": 0.2,
                "num_gpus": 0.2,
                "scheduling_strategy": strategy,
                "runtime_env": {"env_vars": actor_environment()},
                # One watches the server for the whole run; a reader of the log can be served while others wait for it.
                "max_concurrency": 5,
            }
            self.engines.append(actor_class.options(**options).remote(self._args, rank, str(self._log_dir)))
        self._started = [
            engine.init.remote(base_gpu_id=gpu_id)
            for engine, (_, gpu_id) in zip(self.engines, self._places, strict=True)
        ]

    def wait_ready(self) -> None:
        """Return when every server is healthy. Each engine keeps its own time; this gives their answers a moment more.

        Raises:
            RunError: a server failed to start; holds the last lines of its log. All engines are ended.
        """
        from slime.observability.waiting import wait_for_all

        try:
            timeout = self._args.engine_start_timeout + _ANSWER_SECONDS
            self.urls = wait_for_all(
                self._started, "start of the engines", timeout, pending=_name_engines, flag="--engine-start-timeout"
            )
        except BaseException:
            self.shutdown()
            raise

    def register(self, router: RouterHandle, timeout: float = 60.0) -> None:
        """Make the router send requests to these engines, and no others; returns when it calls all of them healthy.

        Raises:
            UserError: the router serves engines of others.
            RunError: an engine was refused or did not become healthy in time.
        """
        router.refuse_other_workers(self.urls)
        router.add_workers(self.urls, timeout, getattr(self._args, "router_api_key", None))

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call `method` of every engine at the same time; the results in engine order.

        Raises:
            RunError: engines failed, died, or did not answer within the longer of the times that requests to them have.
        """
        from slime.observability.waiting import wait_for_all

        timeout = max(self._args.http_control_timeout, self._args.engine_load_timeout) + _ANSWER_SECONDS

        references = [getattr(engine, method).remote(*arguments) for engine in self.engines]
        return wait_for_all(references, f"{method} of the engines", timeout, pending=_name_engines)

    def shutdown(self) -> None:
        """End all servers and actors. Engines that cannot end politely are killed; their servers follow them."""
        import ray

        if not self.engines:
            return
        ended = [engine.shutdown.remote() for engine in self.engines]
        ray.wait(ended, num_returns=len(ended), timeout=_SHUTDOWN_SECONDS)
        for engine in self.engines:
            ray.kill(engine, no_restart=True)
        self.engines, self._started = [], []


def _name_engines(ranks: list[int]) -> str:
    return "engine " + ", ".join(map(str, ranks))
