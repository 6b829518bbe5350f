"""The training ranks of a model as one object, which the driver calls; each rank lives in a Ray actor of its own.

`TrainGroup` starts the ranks, calls all of them together, and ends them. `EndingTrainGroup` (`--release-train`) also ends them
whenever engines need their memory, and starts them again from the last checkpoint. Errors name the ranks that are late.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.arguments.checkpoints import WeightSource
from slime.observability.logging_utils import LoggedMetrics, drain_outbox, logged_pairs
from slime.observability.waiting import name_actors, unwatch_actors, wait_for, wait_for_all, watch_actors
from slime.ray.driver import RolloutResult, log_probe
from slime.scheduling.device_turns import Holds
from slime.utils import env
from slime.utils.bundles import Whereabouts
from slime.utils.checkpoint_directory import is_megatron_checkpoint, latest_iteration
from slime.utils.errors import RunError
from slime.utils.filesystem import make_scratch_directory, remove_scratch_directory
from slime.utils.misc import no_garbage_collection
from slime.utils.plugin_loader import load_function
from slime.utils.run_values import with_run_values
from slime.weights.publication import PushDirectory
from slime.weights.push import Opening
from slime.weights.source import Connected, Sent
from slime.weights.transports import Receiver
from slime.weights.transports.process_group import communicator_environment

_ACTOR_RANK = "slime.training.actor_rank.ActorRank"
CALL_DEADLINE_SECONDS = 24 * 3600.0
_DISPOSE_DEADLINE_SECONDS = 60.0
_LEFT_METRICS_SECONDS = 3.0
_CORES_SECONDS = 300.0
# A process's time of creation is computed from the system's clock, and moves by so much when that is set meanwhile.
_CLOCK_SECONDS = 1.0
_START_SECONDS, _END_SECONDS = "perf/start_trainer_time", "perf/end_trainer_time"

logger = logging.getLogger(__name__)

Report = Callable[[list[LoggedMetrics]], None]


class RankProcess:
    """The Ray actor around a rank. The class is imported in the actor's own process, so the driver stays light.

    Args:
        environment: variables that are set before anything of the rank is imported.
        description: the pickled (class or its path, args, rank, further arguments of the class). It comes as bytes, because to
            unpickle args may import torch, which reads some of these variables when it is imported.
    """

    # Ray asks for the `repr` even if the class of the rank cannot be loaded.
    _name = "a rank"

    def __init__(self, environment: dict[str, str], description: bytes) -> None:
        os.environ.update(environment)
        # What follows mostly imports modules, whose objects all stay.
        with no_garbage_collection():
            actor_cls, args, rank, *arguments = ray.cloudpickle.loads(description)
            self._name = f"{'critic ' if args.role == 'critic' else ''}rank {rank}"
            self._scratch = make_scratch_directory("rank")
            # Writers of checkpoints open sockets in it. If this process is killed, a later run sweeps them away.
            multiprocessing.current_process()._config["tempdir"] = str(self._scratch)
            rank_class = load_function(actor_cls) if isinstance(actor_cls, str) else actor_cls
            self._rank = rank_class(with_run_values(args, rank=rank), rank, *arguments)

    def __repr__(self) -> str:
        return self._name

    def call(self, method: str, *arguments: Any) -> Any:
        """Call `method` of the rank."""
        return getattr(self._rank, method)(*arguments)

    def call_after(self, awaited: Any, method: str, *arguments: Any) -> Any:
        """`call`, as soon as `awaited` is there: Ray waits for a reference that is given as an argument."""
        return self.call(method, *arguments)

    def identity(self) -> tuple[int, float]:
        """(process id, time of creation in seconds of the epoch) of this process; both together are unique on its node."""
        return os.getpid(), psutil.Process().create_time()

    def take_logged(self) -> list[LoggedMetrics]:
        """What the rank logged in work that failed, and so has not handed over."""
        if hasattr(self._rank, "take_logged"):
            return self._rank.take_logged()
        # A user's own class of ranks need not inherit from ours; what its functions log lies in this process.
        return drain_outbox()

    def leave(self) -> None:
        """End the rank's part in the run; the process is killed next."""
        self._rank.dispose()
        remove_scratch_directory(self._scratch)


class TrainGroup:
    """All ranks of one model, rank r on the r-th device.

    Args:
        places: (bundle index, device id) per rank.
        actor_cls: class of a rank, or the path of one; None takes the trainer's own.
    """

    # What messages call one of these ranks.
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
        self._actor_cls = actor_cls or _ACTOR_RANK
        self._actors: list[Any] = []
        self._starting: list[ray.ObjectRef] = []
        # Counted because each rollout changes the weights: whoever pushes them remembers the number at the push.
        self.rollouts_trained = 0

    @property
    def lives(self) -> bool:
        """Whether there are ranks."""
        return bool(self._actors)

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

    def start(self, after: ray.ObjectRef | None = None) -> None:
        """Start all ranks without waiting for them; they build their model when `after` is ready."""
        world_size = len(self._places)
        remote_class = ray.remote(RankProcess)
        at_start, inside = self._environments()
        for rank, ((bundle, device), threads) in enumerate(zip(self._places, self._threads, strict=True)):
            options = {
                "num_cpus": 0.4,
                "num_gpus": 0.4,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle),
                "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads), **at_start}},
            }
            description = ray.cloudpickle.dumps((self._actor_cls, self._args, rank, world_size, device))
            self._actors.append(remote_class.options(**options).remote(inside, description))
        name_actors({actor: self._name_ranks([rank]) for rank, actor in enumerate(self._actors)})
        # Ray hands the address to every rank as soon as rank 0 knows it; nobody waits here.
        address = self._actors[0].call.remote("rendezvous_address")
        self._starting = [actor.call_after.remote(after, "init", address) for actor in self._actors]

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
        # From here on a rank that dies ends whatever the driver waits for, even if the ranks have nothing to do.
        watch_actors(self._actors)
        if len(set(first_ids)) != 1:
            raise RunError(f"the {self.rank_name}s loaded different iterations: {first_ids}")
        return first_ids[0]

    def optimizer_bytes_to_come(self) -> int:
        """Bytes that the first update will take on a device, for what the optimizer remembers; those of the rank with most."""
        return max(self._call_all("optimizer_bytes_to_come"))

    def probe_memory(self, beside: int = 0) -> None:
        """Have all ranks go through a step of the longest micro-batches that leaves no trace, and log what it took. Another
        model will take `beside` bytes on the same devices.

        Raises:
            UserError: memory ran out on a rank; the others may hang in a collective.
        """
        log_probe(self._args, lambda batches: self._call_all("probe_memory", batches, beside))

    def train(self, rollout_id: int, rollout: RolloutResult, report: Report) -> None:
        """Train on a rollout. `report` gets the metrics of rank 0 (all ranks log the same), after an error those until then."""
        self.rollouts_trained += 1
        with self._reporting_errors(report):
            logged = self._call_all("train", rollout_id, rollout.shards)[0]
        report(logged_pairs(logged, self.rank_name, self._actor_cls))

    def hold(self, holds: Holds) -> None:
        """Have all ranks hold that much of their memory on the devices."""
        self._call_each("hold", holds)

    def save(self, rollout_id: int) -> None:
        """Write the checkpoint of `rollout_id`; `publish` makes it the newest. With `--async-save` only `finish_save` waits
        until it is written; ranks may train meanwhile."""
        self._call_all("save", rollout_id)

    def save_has_ended(self, limit: float | None = None) -> bool:
        """Whether no rank writes its part of the last `save` any more.

        Raises:
            RunError: a rank did not say so within `limit` seconds, or cannot.
        """
        return all(self._call_all("save_has_ended", limit=limit))

    def finish_save(self, limit: float | None = None) -> None:
        """Wait until the checkpoint of the last `save` is written.

        Raises:
            RunError: a rank could not write its part, or `limit` seconds passed.
        """
        self._call_all("finish_save", limit=limit)

    def publish(self, rollout_id: int) -> None:
        """Make the checkpoint of `rollout_id` the one that a resume takes."""
        self._call_first("publish", rollout_id)

    def open_weight_push(self) -> Opening:
        """Make the ranks ready for pushes of their weights."""
        return self._call_all("open_weight_push")[0]

    def connect_engines(self, source: int, engines: Sequence[Receiver]) -> Connected:
        """Connect a source of weights to `engines`."""
        return _only_answer(self._call_all("connect_engines", source, engines))

    def send_weights(self, source: int, version: int, whole: bool = False) -> Sent:
        """Send the weights of a source to the engines that it is connected to, as `version`; `whole`: leave nothing out."""
        return _only_answer(self._call_all("send_weights", source, version, whole))

    def weights_written(self, version: int, engines: Sequence[Any]) -> None:
        """Tell all ranks that files of weights are on the disk; returns when the user's functions for that have returned."""
        self._call_all("weights_written", version, engines)

    def weights_pushed(self, version: int) -> None:
        """Tell all ranks that engines serve their weights as `version`."""
        self._call_each("weights_pushed", version)

    def weights_settled(self) -> None:
        """Tell all ranks that engines which had missed the last push have its weights now, under its version."""
        self._call_each("weights_settled")

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
        unwatch_actors(actors)
        leaving = [actor.leave.remote() for actor in actors]
        ray.wait(leaving, num_returns=len(leaving), timeout=_DISPOSE_DEADLINE_SECONDS)
        for actor in actors:
            ray.kill(actor, no_restart=True)

    def kill(self) -> None:
        """End all ranks at once, without leaving their groups: the way out after an error."""
        actors, self._actors, self._starting = self._actors, [], []
        unwatch_actors(actors)
        for actor in actors:
            ray.kill(actor, no_restart=True)

    def _call_all(self, method: str, *arguments: Any, limit: float | None = None, flag: str | None = None) -> list[Any]:
        refs = [actor.call.remote(method, *arguments) for actor in self._actors]
        seconds = CALL_DEADLINE_SECONDS if limit is None else limit
        return wait_for_all(refs, f"{method} on the {self.rank_name}s", seconds, pending=self._name_ranks, flag=flag)

    def _call_each(self, method: str, *arguments: Any) -> list[Any]:
        """`_call_all` for what each rank does by itself with what it holds. No collective tells of one that hangs there, so
        they have about as long as for loading it."""
        limit = self._args.train_start_timeout + 60.0 * self._args.distributed_timeout_minutes
        return self._call_all(method, *arguments, limit=limit, flag="--train-start-timeout")

    @contextlib.contextmanager
    def _reporting_errors(self, report: Report) -> Iterator[None]:
        """When a call of the ranks in the block fails, `report` what they logged before: it may tell why."""
        try:
            yield
        except Exception:
            report(self._logged_before_error())
            raise

    def _logged_before_error(self) -> list[LoggedMetrics]:
        """What the first rank to answer logged. Ranks that died, or hang in a collective, do not answer in time."""
        waiting = [actor.take_logged.remote() for actor in self._actors]
        deadline = time.monotonic() + _LEFT_METRICS_SECONDS
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            for ref in ready:
                with contextlib.suppress(RayError):
                    return ray.get(ref, timeout=_LEFT_METRICS_SECONDS)
        return []

    def _call_first(self, method: str, *arguments: Any) -> Any:
        """Call rank 0 only, for work on whole checkpoints (to publish or to delete them), which has a limit of its own."""
        ref = self._actors[0].call.remote(method, *arguments)
        name, limit = f"{method} on {self.rank_name} 0", self._args.checkpoint_publish_timeout
        return wait_for(ref, name, limit, flag="--checkpoint-publish-timeout")

    def _name_ranks(self, ranks: Sequence[int]) -> str:
        return f"{self.rank_name} {', '.join(map(str, ranks))}"

    @functools.cached_property
    def _threads(self) -> list[int]:
        """How many threads each rank computes with: as many as the user gave the driver, else its share of its node's cores."""
        ranks, typed = min(len(self._places), self._args.actor_num_gpus_per_node), env.threads_of_user()
        if typed is not None:
            return [typed] * len(self._places)
        if env.ray_address() is None:
            return [max(1, _cores() // ranks)] * len(self._places)
        node_of = placement_group_table(self._group)["bundles_to_node_id"]
        first = {node_of[bundle]: bundle for bundle, _ in reversed(self._places)}
        asked = [ray.remote(_cores).options(**_beside(self._group, bundle)).remote() for bundle in first.values()]
        cores = dict(zip(first, wait_for_all(asked, "cores of the nodes", _CORES_SECONDS), strict=True))
        return [max(1, cores[node_of[bundle]] // ranks) for bundle, _ in self._places]

    def _environments(self) -> tuple[dict[str, str], dict[str, str]]:
        """(Variables that a rank's process starts with, those that it sets itself before it imports the rank).

        Ray writes the first kind into logs that everybody on the machine may read, and `--train-env-vars` may hold secrets:
        only those that a process reads as it starts are among the first kind.
        """
        has_queues = self._args.overlap_moe_expert_parallel_comm or self._args.train_backend != "megatron"
        typed = {name: str(value) for name, value in self._args.train_env_vars.items()}
        early = {name: value for name, value in typed.items() if env.is_read_at_process_start(name)}
        at_start = {
            **env.actor_environment(),
            **env.allocator_of_ranks(),
            # Transformer Engine then scales FP8 blocks by any float32, as the engines do, and not by powers of two alone.
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
            # A ring adds in one fixed order. Sums that NVSwitch computes (NVLS) have no fixed order.
            **({"NCCL_ALGO": "Ring"} if self._args.deterministic_mode else {}),
            **env.library_environment(),
            "NCCL_CUMEM_ENABLE": "0",
            **communicator_environment(self._args),
            # In one queue kernels begin in program order, by which sequence parallelism overlaps its messages. But what travels
            # to experts would wait there for all kernels before it, those of the other micro-batch too; so would the weights of
            # the next layer, which FSDP gathers ahead. Read when CUDA starts.
            "CUDA_DEVICE_MAX_CONNECTIONS": "32" if has_queues else "1",
            # Transformer Engine reads it when it is imported, and Megatron-Core refuses its attention without it.
            **({"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"} if self._args.deterministic_mode else {}),
            **early,
        }
        return at_start, typed


def _only_answer(answers: list[Any]) -> Any:
    """That of the one rank which has something to answer; the others return None."""
    return next(answer for answer in answers if answer is not None)


def _cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


class EndingTrainGroup(TrainGroup):
    """Ranks that end when they are to hold nothing, and are created again when they are to hold something: `--release-train`.

    They are created from the checkpoint of the last rollout; before there is one, from what the first ranks started from.
    No other run may take the directory of pushes while no rank lives, so a process on the node of rank 0 holds its lock.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        group: PlacementGroup,
        places: Sequence[tuple[int, int]],
        actor_cls: type | str | None = None,
    ) -> None:
        super().__init__(_with_fixed_iterations(args), group, places, actor_cls)
        # A node of a cluster that the run joined may die while no rank lives.
        self._whereabouts = Whereabouts(group) if env.ray_address() is not None else None
        # The rollout that they train next; None before the first of them are ready.
        self._next: int | None = None
        # (version, chain) of the last push, which may be one of ranks that have ended; None before the first.
        self._pushed: tuple[int, str] | None = None
        # What the living ranks hold.
        self._holds = Holds.ALL
        # The process that holds the lock on the directory of pushes; None before the first push.
        self._directory: Any = None
        # What ranks had not handed over when they ended, and how long their end and a new start took, since the last training.
        self._logged: list[LoggedMetrics] = []
        self._seconds: dict[str, float] = collections.defaultdict(float)

    def wait_ready(self) -> int:
        """As in every group.

        Raises:
            RunError: also if these ranks would not go on where those before them ended.
        """
        first = super().wait_ready()
        if self._next not in (None, first):
            raise RunError(
                f"the {self.rank_name}s that were started again would train rollout {first}, and rollout {self._next} is next: "
                f"{self._args.initial_weights} is not what it was; start the run again, and it goes on from its last checkpoint"
            )
        self._next = first
        return first

    def hold(self, holds: Holds) -> None:
        """Have all ranks hold that much of their memory on the devices; to hold nothing, they end."""
        # What ranks have given up they cannot load again; new ranks can, from the checkpoint.
        if holds is Holds.NOTHING or (self.lives and holds > self._holds):
            with self._timed(_END_SECONDS):
                self._end()
        if holds is Holds.NOTHING:
            return
        if not self.lives:
            with self._timed(_START_SECONDS):
                self._create_again()
            logger.info("training ranks started again in %.1f s", self._seconds[_START_SECONDS])
        # Only engines on the same devices need the memory of the optimizer.
        if self._args.colocate:
            super().hold(holds)
            self._holds = holds

    def train(self, rollout_id: int, rollout: RolloutResult, report: Report) -> None:
        """As in every group; `report` also gets what earlier ranks had not handed over, and how long it took to start these."""
        if self._seconds:
            self._logged.append(({**self._seconds, "rollout/step": rollout_id}, "rollout/step"))
        report(self._logged)
        self._logged = []
        self._seconds.clear()
        super().train(rollout_id, rollout, report)

    def publish(self, rollout_id: int) -> None:
        """Make the checkpoint of `rollout_id` the one that a resume takes, and that ranks are created from."""
        super().publish(rollout_id)
        self._next = rollout_id + 1
        source = WeightSource("megatron", self._args.save, rollout_id, resume=True)
        # These flags are about the start of the run, which is over: ranks to come take all of the checkpoint.
        of_start = {"no_load_optim": False, "no_load_rng": False, "finetune": False}
        self._args = argparse.Namespace(**{**vars(self._args), **of_start, "initial_weights": source})

    def weights_pushed(self, version: int) -> None:
        """Tell all ranks that engines serve their weights as `version`."""
        self._pushed = version, _only_answer(self._call_each("weights_pushed", version))

    def open_weight_push(self) -> Opening:
        """Make the ranks ready for pushes of their weights.

        Raises:
            UserError: another run has the directory of pushes.
        """
        if self._directory is None:
            self._directory = self._claim_directory()
        return super().open_weight_push()

    def require_files(self) -> None:
        """Raise RunError unless the files of this run's last push are still there."""
        self._ask_directory(self._directory, "require", *self._pushed)

    def dispose(self) -> None:
        """End all ranks, and give the directory of pushes back."""
        self._give_directory_back()
        super().dispose()

    def kill(self) -> None:
        """As `dispose`, at once."""
        self._give_directory_back()
        super().kill()

    def _claim_directory(self) -> Any:
        bundle, _ = self._places[0]
        holder = ray.remote(PushDirectory).options(**_beside(self._group, bundle))
        directory = holder.remote(self._args.update_weight_disk_dir)
        self._ask_directory(directory, "claim")
        # If it died, nobody would hold the lock.
        watch_actors([directory])
        return directory

    def _ask_directory(self, directory: Any, method: str, *arguments: Any) -> None:
        answer, limit = getattr(directory, method).remote(*arguments), 60.0 * self._args.distributed_timeout_minutes
        wait_for(answer, f"{method} of the directory of pushes", limit, flag="--distributed-timeout-minutes")

    def _give_directory_back(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            unwatch_actors([directory])
            ray.kill(directory, no_restart=True)

    def _end(self) -> None:
        """End all ranks; returns when their processes are gone, and with them what they had on the devices."""
        if not self.lives:
            return
        limit = _DISPOSE_DEADLINE_SECONDS
        # From rank 0 alone: all ranks log the same, and what users' functions log must count once.
        self._logged += wait_for(self._actors[0].take_logged.remote(), f"metrics of {self.rank_name} 0", limit)
        asked = [actor.identity.remote() for actor in self._actors]
        processes = wait_for_all(asked, "ids of the ranks' processes", limit, pending=self._name_ranks)
        super().dispose()
        gone = [
            ray.remote(_wait_until_gone)
            .options(**_beside(self._group, bundle))
            .remote(self._name_ranks([rank]), process, limit)
            for rank, (process, (bundle, _)) in enumerate(zip(processes, self._places, strict=True))
        ]
        # Twice the limit: the process that looks has to start before its own limit begins.
        wait_for_all(gone, f"end of the {self.rank_name}s", 2 * limit, pending=self._name_ranks)

    def _create_again(self) -> None:
        self._holds = Holds.ALL
        bundles = [bundle for bundle, _ in self._places]
        if self._whereabouts and (moved := self._whereabouts.moved(bundles, self._args.train_start_timeout)):
            self._places = [(bundle, device) for bundle, (_, device) in zip(bundles, moved, strict=True)]
            # The ranks of a node share its cores.
            vars(self).pop("_threads", None)
            found = ", ".join(f"{address} GPU {device}" for address, device in moved)
            logger.warning("a node was lost; the devices of the %ss are %s from here on", self.rank_name, found)
        self.create()
        if self._pushed is None:
            self.open_weight_push()
        else:
            self._call_all("continue_weight_pushes", *self._pushed)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started


def _with_fixed_iterations(args: argparse.Namespace) -> argparse.Namespace:
    """A copy that names the iterations to load, where flags only say "the latest": later that may be another one."""
    fixed: dict[str, Any] = {}
    source = args.initial_weights
    if source.kind == "megatron" and source.step is None:
        fixed["initial_weights"] = dataclasses.replace(source, step=latest_iteration(source.path))
    models = [
        ("ref_ckpt_step", args.ref_ckpt_step, args.ref_load),
        ("opd_teacher_ckpt_step", args.opd_teacher_ckpt_step, args.opd_teacher_load),
    ]
    for name, step, directory in models:
        if step is None and directory is not None and is_megatron_checkpoint(directory):
            fixed[name] = latest_iteration(directory)
    return argparse.Namespace(**{**vars(args), **fixed})


def _beside(group: PlacementGroup, bundle: int) -> dict[str, Any]:
    """Ray options of a process on the node of a bundle that takes none of the bundle's resources."""
    return {
        "num_cpus": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
        "runtime_env": {"env_vars": env.actor_environment()},
    }


def _wait_until_gone(rank: str, identity: tuple[int, float], seconds: float) -> None:
    """Return when a process of this node, named by its `RankProcess.identity`, has ended.

    Raises:
        RunError: it has not after `seconds`.
    """
    process_id, created = identity
    try:
        process = psutil.Process(process_id)
        if abs(process.create_time() - created) <= _CLOCK_SECONDS:
            process.wait(seconds)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired as error:
        raise RunError(
            f"{rank} has been killed, and {seconds:g} s later its process {process_id} is still there, with what it has on its "
            "device: the driver of the device, or a disk, keeps it (/proc tells where it waits). When it is gone, start the "
            "run again: it goes on from its last checkpoint"
        ) from error
