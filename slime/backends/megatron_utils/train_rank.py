"""What every training rank does, whatever model it trains: join the groups, build and load the model, take optimizer steps,
leave. The actor's and the critic's ranks are made of it.

Ranks are plain classes; `slime.ray.train_group` makes Ray actors of them. All methods that touch the model are collective:
the group calls them on every rank.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch

from slime.arguments.checkpoints import WeightSource
from slime.arguments.paths import RANK_PLUG_INS, load_plug_ins
from slime.backends.megatron_utils.initialize import context_parallel
from slime.backends.megatron_utils.initialize import init as init_megatron
from slime.observability.logging_utils import configure_logger, log
from slime.observability.timer import Timer
from slime.training.metric_reduction import mean_of_steps
from slime.training.rollout_batch import keep_own_tokens, process_rollout_data
from slime.utils.device import get_accelerator
from slime.utils.misc import Box
from slime.utils.ports import service_host

logger = logging.getLogger(__name__)


class MegatronRank:
    """A rank of a training group.

    Args:
        rank: position in the world of training ranks.
        local_rank: index of its device on the node.

    Attributes:
        role: which of the two models it is, actor or critic.
        metric_prefix: of the metrics of its optimizer steps.
    """

    role = "actor"
    metric_prefix = "train/"

    def __init__(self, args: argparse.Namespace, rank: int, world_size: int, local_rank: int) -> None:
        configure_logger(args.log_level)
        self.args = args
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank

    def rendezvous_address(self) -> tuple[str, int]:
        """Rank 0 only: open the store at which all ranks meet, and return its address and port."""
        from slime.utils.process_groups import create_store

        host = service_host()
        self._store = create_store(host, datetime.timedelta(minutes=self.args.distributed_timeout_minutes))
        return host, self._store.port

    def dispose(self) -> None:
        """Leave all process groups."""
        from slime.backends.megatron_utils.initialize import destroy

        destroy()

    def _join(self, rendezvous: tuple[str, int]) -> None:
        """Join the group and build the model, with weights that do not count yet."""
        args = self.args
        load_plug_ins(args, RANK_PLUG_INS)
        master_address, master_port = rendezvous
        os.environ.update(
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
        init_megatron(args)
        from megatron.core import parallel_state

        from slime.backends.megatron_utils.model_provider import setup_model

        # Samples are dealt to data-parallel ranks; the ranks of a context-parallel group share each sample. What is reduced
        # over tokens, and replicas of weights, go over both.
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.replica_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        self.cp = context_parallel(args)
        self.model = setup_model(args)
        self.optimizer = self.scheduler = None

    def _load_model(self) -> int:
        """Load the model's weights and build the optimizer. Returns the last finished rollout, −1 at a new start."""
        from slime.backends.megatron_utils.checkpoint import load_checkpoint
        from slime.backends.megatron_utils.optimizer import build_optimizer_and_scheduler

        args, source = self.args, self.args.initial_weights
        if self.rank == 0:
            logger.info("%s weights: %s%s", self.role, source, ", resuming" if source.resume else "")
        if not source.resume:
            self._load_weights(source)
        if args.num_rollout > 0:
            self.optimizer, self.scheduler = build_optimizer_and_scheduler(args, self.model)
        if not source.resume:
            return -1
        return load_checkpoint(args, source, self.model, self.optimizer, self.scheduler)

    def _load_weights(self, source: WeightSource) -> None:
        from slime.backends.megatron_utils.checkpoint import load_checkpoint
        from slime.backends.megatron_utils.hf_conversion import load_hf_weights

        if source.kind == "hf":
            load_hf_weights(self.args, self.model, source.path)
        elif source.kind == "megatron":
            load_checkpoint(self.args, source, self.model)

    def _live_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, chunk in enumerate(self.model):
            for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
                yield f"{index}.{name}", tensor

    def _fetch(self, shards: list[Box]) -> dict[str, Any]:
        """This rank's shard of a rollout as tensors on the device."""
        data = process_rollout_data(self.args, shards, self.data_rank, len(shards), self.device)
        keep_own_tokens(data, self.cp)
        return data

    def _train_steps(self, rollout_id: int, data: dict[str, Any]) -> None:
        from slime.backends.megatron_utils.optimizer import reset_optimizer_states
        from slime.backends.megatron_utils.train_step import train_one_step

        steps, announced = len(data["num_microbatches"]), self.args.num_steps_per_rollout
        if steps > announced and self.rank == 0:
            logger.warning(
                "rollout %d brings %d optimizer steps instead of %d: the metrics of the last %d share one number of "
                "train/step, as their mean",
                rollout_id, steps, announced, steps - announced + 1,
            )  # fmt: skip
        last: list[dict[str, float]] = []
        try:
            for step in range(steps):
                metrics = train_one_step(
                    self.args, self.model, self.optimizer, self.scheduler, data, rollout_id, step, role=self.role
                )
                if step < announced - 1:
                    self._log_step(rollout_id, step, metrics)
                else:
                    last.append(metrics)
        finally:
            # Also where a step ends the run: what came before it tells why.
            if last:
                self._log_step(rollout_id, announced - 1, mean_of_steps(last))
        if self.args.reset_optimizer_states:
            reset_optimizer_states(self.optimizer)

    def _log_step(self, rollout_id: int, step: int, metrics: dict[str, float]) -> None:
        logged = {f"{self.metric_prefix}{name}": value for name, value in metrics.items()}
        log(self.args, {**logged, "train/step": rollout_id * self.args.num_steps_per_rollout + step}, "train/step")

    def _log_seconds(self, rollout_id: int) -> None:
        seconds = {f"perf/{name}_time": value for name, value in Timer().pop_seconds().items()}
        log(self.args, {**seconds, "rollout/step": rollout_id}, "rollout/step")
