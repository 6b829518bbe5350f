"""The training ranks as one object: created, used, disposed of, and created again."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.observability.logging_utils import LoggedMetrics, drain_outbox
from slime.observability.waiting import wait_for, wait_for_all
from slime.ray.rollout_manager import RolloutResult
from slime.utils import env
from slime.utils.errors import RunError
from slime.utils.filesystem import make_scratch_directory, remove_scratch_directory
from slime.utils.plugin_loader import load_function

_MEGATRON_RANK = "slime.backends.megatron_utils.actor.MegatronTrainActor"
_CALL_DEADLINE_SECONDS = 24 * 3600.0
_DISPOSE_DEADLINE_SECONDS = 60.0
_LEFT_METRICS_SECONDS = 3.0

Report = Callable[[list[LoggedMetrics]], None]


class RankProcess:
    """The Ray actor around a rank. The class is imported in the actor's own process, so the driver stays light.

    Args:
        environment: variables that are set before anything of the rank is imported.
        description: the pickled (class or its path, args, rank, further arguments of the class). What args hold may import
            torch, which reads variables when it is imported, so they are read after the environment was set.
    """

    def __init__(self, environment: dict[str, str], description: bytes) -> None:
        os.environ.update(environment)
        actor_cls, args, rank, *arguments = ray.cloudpickle.loads(description)
        self._name = f"{'critic ' if getattr(args, 'role', 'actor') == 'critic' else ''}rank {rank}"
        self._scratch = make_scratch_directory("rank")
        # Writers of checkpoints talk over sockets in a directory of the interpreter, which a killed process would leave behind.
        multiprocessing.current_process()._config["tempdir"] = str(self._scratch)
        rank_class = load_function(actor_cls) if isinstance(actor_cls, str) else actor_cls
        self._rank = rank_class(args, rank, *arguments)

    def __repr__(self) -> str:
        return self._name

    def call(self, method: str, *arguments: Any) -> Any:
        """Call `method` of the rank."""
        return getattr(self._rank, method)(*arguments)

    def take_logged(self) -> list[LoggedMetrics]:
        """What the rank logged and has not handed over."""
        return drain_outbox()

    def leave(self) -> None:
        """End the rank's part in the run; the process is killed next."""
        self._rank.dispose()
        remove_scratch_directory(self._scratch)


class TrainGroup:
    """All ranks of one model, rank r on the r-th device.

    Args:
        places: (bundle index, device id) per rank.
        actor_cls: class of a rank, or the path of one; None takes the Megatron rank.
    """

    # What messages call a rank.
    rank_name = "training rank"

    def __init__(
        self,
        args: argparse.Namespace,
        group: PlacementGroup,
        places: Sequence[tuple[int, int]],
        actor_cls: type | str | None = None,
    ) -> None:
        self._args = args
        self._group = group
        self._places = places
        self._actor_cls = actor_cls or _MEGATRON_RANK
        self._actors: list[Any] = []
        self._starting: list[ray.ObjectRef] = []

    @property
    def starting(self) -> list[ray.ObjectRef]:
        """A reference per rank that is ready when the rank is."""
        return self._starting

    def name_starting(self, positions: Sequence[int]) -> str:
        """What to call the ranks at these positions of `starting`."""
        return self._name_ranks(positions)

    def create(self) -> int:
        """`start` and `wait_ready` in one call."""
        self.start()
        return self.wait_ready()

    def start(self) -> None:
        """Start all ranks without waiting for them."""
        world_size = len(self._places)
        remote_class = ray.remote(RankProcess)
        at_start, inside = self._environments()
        for rank, (bundle, device) in enumerate(self._places):
            options = {
                "num_cpus": 0.4,
                "num_gpus": 0.4,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle),
                "runtime_env": {"env_vars": at_start},
            }
            description = ray.cloudpickle.dumps((self._actor_cls, self._args, rank, world_size, device))
            self._actors.append(remote_class.options(**options).remote(inside, description))
        # Ray hands the address to every rank as soon as rank 0 knows it; nobody waits here.
        address = self._actors[0].call.remote("rendezvous_address")
        self._starting = [actor.call.remote("init", address) for actor in self._actors]

    def wait_ready(self) -> int:
        """Wait until every rank holds its model. Returns the first rollout id to train.

        Raises:
            RunError: the ranks disagree about it.
        """
        first_ids = wait_for_all(
            self._starting,
            f"start of the {self.rank_name}s",
            self._args.train_start_timeout,
            pending=self._name_ranks,
            flag="--train-start-timeout",
        )
        if len(set(first_ids)) != 1:
            raise RunError(f"the {self.rank_name}s loaded different iterations: {first_ids}")
        return first_ids[0]

    def train(self, rollout_id: int, rollout: RolloutResult, report: Report) -> None:
        """Train on a rollout; `report` gets rank 0's metrics (all ranks log the same), after an error those before it."""
        with self._reporting_errors(report):
            logged = self._call_all("train", rollout_id, rollout.shards)[0]
        report(logged)

    def save(self, rollout_id: int) -> None:
        """Write the checkpoint of `rollout_id`; `publish` makes it the newest."""
        self._call_all("save", rollout_id)

    def publish(self, rollout_id: int) -> None:
        """Make the checkpoint of `rollout_id` the one that a resume takes."""
        self._call_first("publish", rollout_id)

    def connect_rollout_engines(self, engines: list[Any], gpu_counts: list[int], gpu_offsets: list[int]) -> None:
        """Join the engines' weight-update group."""
        self._call_all("connect_rollout_engines", engines, gpu_counts, gpu_offsets)

    def update_weights(self) -> dict[str, float]:
        """Push the weights to the engines; returns transfer metrics."""
        return self._call_all("update_weights")[0]

    def export_hf(self, directory: str) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        self._call_all("export_hf", directory)

    def probe_log_probs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of tokens 1 … n−1 of every sequence, at temperature 1."""
        return self._call_all("probe_log_probs", sequences)[0]

    def dispose(self) -> None:
        """End all ranks; they leave no process and no group behind. The group may be created again."""
        actors, self._actors, self._starting = self._actors, [], []
        if not actors:
            return
        leaving = [actor.leave.remote() for actor in actors]
        ray.wait(leaving, num_returns=len(leaving), timeout=_DISPOSE_DEADLINE_SECONDS)
        for actor in actors:
            ray.kill(actor, no_restart=True)

    def kill(self) -> None:
        """End all ranks at once, without leaving their groups: the way out after an error."""
        actors, self._actors, self._starting = self._actors, [], []
        for actor in actors:
            ray.kill(actor, no_restart=True)

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        refs = [actor.call.remote(method, *arguments) for actor in self._actors]
        return wait_for_all(
            refs, f"{method} on the {self.rank_name}s", _CALL_DEADLINE_SECONDS, pending=self._name_ranks
        )

    @contextlib.contextmanager
    def _reporting_errors(self, report: Report) -> Iterator[None]:
        """When a call of the ranks in the block fails, `report` what they logged before: it may tell why."""
        try:
            yield
        except Exception:
            report(self._logged_before_error())
            raise

    def _logged_before_error(self) -> list[LoggedMetrics]:
        """The account of the first rank that gives one; those that died or hang in a collective do not."""
        waiting = [actor.take_logged.remote() for actor in self._actors]
        deadline = time.monotonic() + _LEFT_METRICS_SECONDS
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            for ref in ready:
                with contextlib.suppress(RayError):
                    return ray.get(ref, timeout=_LEFT_METRICS_SECONDS)
        return []

    def _call_first(self, method: str, *arguments: Any) -> Any:
        """Call rank 0 only, with something that moves or deletes whole checkpoints."""
        ref = self._actors[0].call.remote(method, *arguments)
        name, limit = f"{method} on {self.rank_name} 0", self._args.checkpoint_publish_timeout
        return wait_for(ref, name, limit, flag="--checkpoint-publish-timeout")

    def _name_ranks(self, ranks: Sequence[int]) -> str:
        return f"{self.rank_name} {', '.join(map(str, ranks))}"

    def _environments(self) -> tuple[dict[str, str], dict[str, str]]:
        """Variables that a rank's process starts with, and those that it sets itself before it imports the rank.

        Ray writes the first kind into logs that everybody on the machine may read, so of `--train-env-vars`, which may
        hold secrets, only those are among them that would come too late otherwise.
        """
        ranks = min(len(self._places), self._args.actor_num_gpus_per_node)
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        typed = {name: str(value) for name, value in self._args.train_env_vars.items()}
        early = {name: value for name, value in typed.items() if env.is_read_at_process_start(name)}
        at_start = {
            **env.actor_environment(),
            "OMP_NUM_THREADS": str(threads),
            "NCCL_CUMEM_ENABLE": "0",
            # Kernels are launched in program order, which sequence parallelism relies on; read when CUDA starts.
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            **early,
        }
        return at_start, typed
