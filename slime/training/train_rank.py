"""`TrainRank` is what every training rank does, whatever model it trains: join the groups, build and load the model, take
optimizer steps, leave. `CriticRank` is a rank of the critic. Ranks of the actor do more: see `slime.training.actor_rank`.

Ranks are plain classes; `slime.ray.train_group` makes Ray actors of them. All methods that touch the model are collective:
the group calls them on every rank.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from slime.arguments.paths import LOADED_BY_RANKS, load_plug_ins
from slime.observability.logging_utils import (
    LoggedMetrics,
    collected_metrics,
    configure_logger,
    drain_outbox,
    logged_beside,
)
from slime.observability.timer import PeakMemory, Timer, phase
from slime.plan.longest_batch import Lengths, ProbedMemory
from slime.scheduling.device_turns import Holds
from slime.training.backend import RankGroups, UnfinishedSave, make_backend
from slime.training.batch_transport import open_transport
from slime.training.checkpoint_publication import forget_checkpoints, show_checkpoint
from slime.training.column_exchange import ColumnPart, fetch_column, send_columns
from slime.training.memory_probe import probe_memory
from slime.training.metric_reduction import mean_of_steps
from slime.training.profiling import Part, Records, records_of
from slime.training.resident_memory import ResidentMemory, Residents
from slime.training.rollout_batch import process_rollout_data
from slime.training.rollout_data import RolloutData, refresh_mask_sums
from slime.training.train_step import forward_values, train_one_step
from slime.utils.device import get_accelerator
from slime.utils.errors import RunError
from slime.utils.misc import Box, host_memory_gib, no_garbage_collection
from slime.utils.ports import group_environment, service_host
from slime.utils.process_groups import patient_groups

logger = logging.getLogger(__name__)

# These flags look at the metrics of single steps. Steps that share one number are reported by their mean, in which one bad step
# may not show.
_CHECKS_OF_STEPS = {
    "--ci-test": "ci_test", "--ci-save-grad-norm": "ci_save_grad_norm", "--ci-load-grad-norm": "ci_load_grad_norm",
}  # fmt: skip


class TrainRank:
    """A rank of a training group.

    Args:
        rank: position in the world of training ranks.
        local_rank: index of its device on the node.

    Attributes:
        role: which of the two models it is, actor or critic.
        metric_prefix: what the metrics of its optimizer steps begin with.
        phase_prefix: what the names of those phases begin with that both models have.
    """

    role = "actor"
    metric_prefix = "train/"
    phase_prefix = ""
    # What the rank records about itself, once it has joined; None: nothing.
    _records: Records | None = None

    def __init__(self, args: argparse.Namespace, rank: int, world_size: int, local_rank: int) -> None:
        configure_logger(args.log_level)
        self.args = args
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.backend = make_backend(args)
        self.memory = ResidentMemory(self.residents, ends=args.release_train)
        self._has_slept = False
        self._unfinished: UnfinishedSave | None = None
        # Metrics of the work on a rollout that is under way, or that failed.
        self._not_handed_over: list[LoggedMetrics] = []

    @property
    def groups(self) -> RankGroups:
        """This rank's place among the others, once it has joined."""
        return self.backend.groups

    def rendezvous_address(self) -> tuple[str, int]:
        """Rank 0 only: open the store at which all ranks meet, and return its address and port."""
        from slime.utils.process_groups import create_store

        host = service_host()
        self._store = create_store(host, datetime.timedelta(minutes=self.args.distributed_timeout_minutes))
        return host, self._store.port

    def take_logged(self) -> list[LoggedMetrics]:
        """The metrics of work on a rollout that failed, up to the failure. Such work has not returned them."""
        return [*self._not_handed_over, *drain_outbox()]

    def hold(self, holds: Holds) -> None:
        """Have that much of the model on the device, and no more.

        Raises:
            RunError: there is no room for what has to go.
        """
        if holds is self.memory.holds:
            return
        accelerator, before = get_accelerator(), self.memory.holds
        bytes_before = accelerator.memory_allocated()
        with phase(f"{self.phase_prefix}{'wake_up' if holds > before else 'sleep'}"):
            self.memory.hold(holds)
        # Only the first time is worth a line at info level, and that of one rank.
        is_news = not (self._has_slept or self.rank or self.args.release_train)
        level = logging.INFO if is_news else logging.DEBUG
        logger.log(
            level,
            "%s rank %d: %.1f MiB of %s memory with %s, %.1f MiB with %s",
            self.role, self.rank, bytes_before / 2**20, "resident" if accelerator.shares_host_memory else "device",
            before.name.lower(), accelerator.memory_allocated() / 2**20, holds.name.lower(),
        )  # fmt: skip
        self._has_slept = self._has_slept or holds is Holds.NOTHING

    def require(self, holds: Holds, work: str) -> None:
        """Raise RunError unless that much of the model is on the device; `work`, which needs it, would read freed memory."""
        if self.memory.holds < holds:
            raise RunError(f"{self.role} rank {self.rank} has given its memory back: it must wake up before {work}")

    def residents(self) -> Residents:
        """What the rank has on its device between two steps."""
        return self.backend.residents()

    def optimizer_bytes_to_come(self) -> int:
        """What the first update will take on this rank's device."""
        return self.backend.optimizer_bytes_to_come()

    def probe_memory(self, batches: Sequence[Lengths], beside: int) -> ProbedMemory:
        """Go through a step of the longest micro-batches, and leave no trace of it; see `slime.training.memory_probe`."""
        self.require(Holds.ALL, "the memory probe")
        return probe_memory(self.args, self.backend, self.rank, batches, beside)

    def save_has_ended(self) -> bool:
        """Whether `finish_save` would not wait for this rank's own part."""
        return self._unfinished.has_ended()

    def finish_save(self) -> None:
        """Wait until the checkpoint of the last `save` is on the disk. It is not yet the newest, and may be asked about again.

        Raises:
            RunError: a rank could not write it; on all ranks.
        """
        with patient_groups(self.args.checkpoint_write_timeout):
            self._unfinished.finish()

    def dispose(self) -> None:
        """Leave all process groups."""
        if self._records is not None:
            self._records.close()
        self.backend.close()

    def _join(self, rendezvous: tuple[str, int]) -> None:
        """Join the group and build the model, with weights that do not count yet."""
        args = self.args
        load_plug_ins(args, LOADED_BY_RANKS)
        master_address, master_port = rendezvous
        # Engines that the run did not start join a group with this rank too, and may be on other machines.
        host = service_host(info.url for info in args.rollout_external_engine_infos or ())
        os.environ.update(
            group_environment(host),
            MASTER_ADDR=master_address,
            MASTER_PORT=str(master_port),
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            # The store is there already: torch must not have rank 0 open a second one, which would listen everywhere.
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        self.device = get_accelerator().device(self.local_rank)
        get_accelerator().set_device(self.local_rank)
        # Before the model is built, so that its memory is recorded too.
        self._records = records_of(args, self.rank)
        # Before Gloo starts its threads. Not beside engines that generate: they would miss the cores on which threads spin.
        if not args.asynchronous:
            get_accelerator().compute_in_this_thread()
        # Most of the time goes into imports, whose objects all stay.
        with no_garbage_collection():
            self.backend.place()
            open_transport(args)

    def _load_model(self) -> int:
        """Load the model's weights and build the optimizer. Returns the last finished rollout, −1 at a new start."""
        source = self.args.initial_weights
        if self.rank == 0:
            logger.info("%s weights: %s%s", self.role, source, ", resuming" if source.resume else "")
        iteration = self.backend.load(source)
        # Only now: memory that loading has freed is not needed again, and must go back to the system.
        get_accelerator().keep_freed_memory()
        return iteration

    def _begin_save(self, rollout_id: int, *states: Any) -> None:
        """Begin with the checkpoint of `rollout_id`; `finish_save` waits for it.

        Args:
            states: further arguments of the backend's `save`.
        """
        with patient_groups(self.args.checkpoint_write_timeout):
            self._unfinished = self.backend.save(rollout_id, *states)
        if self.args.async_save and not self.rank:
            size = self._unfinished.bytes_on_host / 2**20
            logger.info(
                "%s rank 0 writes %.1f MiB of rollout %d in the background, and holds them in host memory until then",
                self.role,
                size,
                rollout_id,
            )

    def _fetch(self, shards: list[Box]) -> RolloutData:
        """This rank's shard of a rollout as tensors on the device."""
        ranks = dist.get_world_size(self.groups.sample_group)
        data = process_rollout_data(self.args, shards, self.groups.data_rank, ranks, self.device)
        return RolloutData.of_rank(data, self.groups.cp)

    def _recorded(self, part: Part, rollout_id: int) -> contextlib.AbstractContextManager:
        """In the block the rank records itself, if flags ask for that at this part of the work on the rollout."""
        return contextlib.nullcontext() if self._records is None else self._records.within(part, rollout_id)

    @contextlib.contextmanager
    def _collected(self) -> Iterator[list[LoggedMetrics]]:
        """The block is work on one rollout. Gives the list of its metrics, into which the user's functions log too."""
        with collected_metrics() as self._not_handed_over:
            yield self._not_handed_over
        # A user's own threads have no context, so what they log belongs to no work. It leaves with the next work that ends.
        self._not_handed_over += drain_outbox()
        # The driver takes what rank 0 logs, and some of a user's functions are called on the last pipeline stage alone.
        of_last_stage = self.backend.broadcast(self._not_handed_over)
        self._not_handed_over += logged_beside(self._not_handed_over, of_last_stage)
        self._not_handed_over = []

    def _train_steps(self, rollout_id: int, data: RolloutData, logged: list[LoggedMetrics]) -> None:
        """Take the optimizer steps of a rollout; `logged` gets the metrics of each when it ends.

        Raises:
            RunError: there are more steps than announced, and a flag looks at the numbers of each.
        """
        steps, announced = len(data["num_microbatches"]), self.args.num_steps_per_rollout
        if steps > announced and (checks := [flag for flag, name in _CHECKS_OF_STEPS.items() if vars(self.args)[name]]):
            raise RunError(
                f"rollout {rollout_id} brings {steps} optimizer steps instead of {announced}, and {checks[0]} looks at the "
                f"numbers of {announced} only; give a --rollout-batch-size that counts all that --rollout-function-path "
                f"returns, or leave {' and '.join(checks)} out"
            )
        if steps > announced and self.rank == 0:
            logger.warning(
                "rollout %d brings %d optimizer steps instead of %d: the metrics of the last %d share one number of "
                "train/step, as their mean",
                rollout_id, steps, announced, steps - announced + 1,
            )  # fmt: skip
        last: list[dict[str, float]] = []
        try:
            for step in range(steps):
                metrics = train_one_step(self.args, self.backend, data, rollout_id, step, role=self.role)
                if step < announced - 1:
                    logged.append(self._step_metrics(rollout_id, step, metrics))
                else:
                    last.append(metrics)
        finally:
            # Even if a step ends the run: the steps before it may tell why.
            if last:
                logged.append(self._step_metrics(rollout_id, announced - 1, mean_of_steps(last)))
        if self.args.reset_optimizer_states:
            self.backend.reset_optimizer()

    def _step_metrics(self, rollout_id: int, step: int, metrics: dict[str, float]) -> LoggedMetrics:
        named = {f"{self.metric_prefix}{name}": value for name, value in metrics.items()}
        return {**named, "train/step": rollout_id * self.args.num_steps_per_rollout + step}, "train/step"

    def _phase_metrics(self, rollout_id: int) -> LoggedMetrics:
        """What each phase since the last call took: seconds, and memory where the device counts it. And the memory that this
        process has of its host."""
        seconds = {f"perf/{name}_time": value for name, value in Timer().pop_seconds().items()}
        memory = {f"perf/{name}_memory_gib": peak / 2**30 for name, peak in PeakMemory().pop_bytes().items()}
        memory[f"perf/{self.phase_prefix}rank_host_memory_gib"] = host_memory_gib()
        return {**seconds, **memory, "rollout/step": rollout_id}, "rollout/step"


class CriticRank(TrainRank):
    """A rank of the critic: it says what every response token is worth, and learns the returns that the actor computed.

    Its `args` are those of `slime.arguments.config_files.role_config.critic_args`. A rollout takes two calls, `values` before
    the actor's work and `train` after it; the data stay on the rank in between. Then the actor tells `returns` and
    `loss_masks`, where `--rollout-data-postprocess-path` has changed them, so that both models train on the same tokens. A
    critic has one set of weights, and pushes none.
    """

    role = "critic"
    metric_prefix = "train/critic-"
    phase_prefix = "critic_"
    # What the user's functions logged in the last `values`; `train` hands it over.
    _logged_with_values: Sequence[LoggedMetrics] = ()

    def init(self, rendezvous: tuple[str, int]) -> int:
        """Join the group, build the model, load the weights. Returns the first rollout id to train.

        Args:
            rendezvous: what rank 0's `rendezvous_address` returned.
        """
        self._join(rendezvous)
        self._rollout_id: int | None = None
        self._data = RolloutData()
        return self._load_model() + 1

    def values(self, rollout_id: int, shards: list[Box]) -> ColumnPart | None:
        """Values of this rank's samples, under the weights before training. One rank of those that have the same samples
        returns them."""
        self.require(Holds.ALL, "it computes values")
        self._rollout_id, self._data = rollout_id, RolloutData()
        with self._collected() as logged, self._recorded(Part.VALUES, rollout_id), phase("critic_values"):
            data = self._fetch(shards)
            data.update(forward_values(self.args, self.backend, data))
            part = send_columns(data, ["values"], self.groups) if self.groups.is_last_stage else None
        self._data, self._logged_with_values = data, logged
        return part

    def train(self, rollout_id: int, parts: Sequence[ColumnPart]) -> list[LoggedMetrics]:
        """Train on the samples of the last `values`. Returns what was logged (the same numbers on every rank).

        Args:
            parts: what the actor's ranks say about these samples.

        Raises:
            RunError: the last call of `values` was for another rollout.
        """
        if rollout_id != self._rollout_id:
            raise RunError(f"the critic was asked for values of rollout {self._rollout_id}, not of {rollout_id}")
        data, self._data, self._rollout_id = self._data, RolloutData(), None
        with self._collected() as logged:
            logged += self._logged_with_values
            self._logged_with_values = ()
            with self._recorded(Part.OVERALL, rollout_id), phase("critic_train"):
                if self.groups.is_last_stage:
                    data["returns"] = fetch_column(parts, "returns", data, self.args.http_control_timeout)
                if any("loss_masks" in part.boxes for part in parts):
                    take_masks(parts, data, self.groups.sample_group, self.args.http_control_timeout)
                self._train_steps(rollout_id, data, logged)
            logged.append(self._phase_metrics(rollout_id))
        return logged

    def take_logged(self) -> list[LoggedMetrics]:
        """As on every rank; includes what `values` logged, in case the actor's work failed between the two calls."""
        return [*self._logged_with_values, *super().take_logged()]

    def save(self, rollout_id: int) -> None:
        """Write the checkpoint of `rollout_id`, with `--async-save` up to what `finish_save` waits for."""
        self.require(Holds.ALL, "a save")
        self._begin_save(rollout_id)
        if not self.args.async_save:
            self.finish_save()

    def publish(self, rollout_id: int) -> None:
        """Make the checkpoint of `rollout_id` the newest, and keep older ones: the actor's newest may be one of those.

        Called on rank 0 only.
        """
        show_checkpoint(self.args, rollout_id)

    def forget(self, rollout_id: int) -> None:
        """Delete the checkpoints that `--keep-last` lets go. Called on rank 0 only, when the actor's is published."""
        forget_checkpoints(self.args, rollout_id)


def take_masks(parts: Sequence[ColumnPart], data: RolloutData, sample_group: dist.ProcessGroup, timeout: float) -> None:
    """Put the actor's masks in place of the rollout's, with what follows from them. Called on every rank."""
    data["loss_masks"] = fetch_column(parts, "loss_masks", data, timeout)
    refresh_mask_sums(data, sample_group)
