"""One training rank: the process that holds a shard of the model, trains it and hands its weights out.

It is a plain class; `slime.ray.train_group` makes a Ray actor of it. All methods that touch the model are collective: the
group calls them on every rank.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch

from slime.arguments.checkpoints import WeightSource, source_of_reference
from slime.arguments.plug_ins import RANK_PLUG_INS, load_plug_ins
from slime.backends.megatron_utils.initialize import init as init_megatron
from slime.observability.logging_utils import LoggedMetrics, configure_logger, drain_outbox, log
from slime.observability.timer import Timer, timer
from slime.training.advantages import compute_advantages_and_returns
from slime.training.data_metrics import rollout_data_metrics
from slime.training.metric_reduction import refresh_mask_sums
from slime.training.model_states import ACTOR, ModelStates
from slime.training.rollout_batch import to_tensors
from slime.training.train_dump import save_train_data
from slime.utils.device import get_accelerator
from slime.utils.misc import Box, load_function
from slime.utils.ports import service_host
from slime.utils.user_code import calling_user_code

logger = logging.getLogger(__name__)

REFERENCE = "ref"


class MegatronTrainActor:
    """A rank of the training group.

    Args:
        rank: position in the world of training ranks.
        local_rank: index of its device on the node.
    """

    def __init__(self, args: argparse.Namespace, rank: int, world_size: int, local_rank: int) -> None:
        configure_logger(args.log_level)
        self.args = args
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank

    def rendezvous_address(self) -> tuple[str, int]:
        """Rank 0 only: open the store at which all ranks meet, and return its address and port."""
        from slime.utils.distributed_utils import create_store

        host = service_host()
        self._store = create_store(host, datetime.timedelta(minutes=self.args.distributed_timeout_minutes))
        return host, self._store.port

    def init(self, rendezvous: tuple[str, int]) -> int:
        """Join the group, build the model, load the weights. Returns the first rollout id to train.

        Args:
            rendezvous: what rank 0's `rendezvous_address` returned.
        """
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

        self.data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        self.model = setup_model(args)
        self.states = ModelStates(self._live_tensors)
        self.optimizer = self.scheduler = None
        self.weight_updater = None
        self._load_reference()
        iteration = self._load_actor()
        return iteration + 1

    def train(self, rollout_id: int, shards: list[Box]) -> list[LoggedMetrics]:
        """Train on this rank's shard of a rollout. Returns what was logged (the same numbers on every rank)."""
        import ray

        with timer("train"):
            with timer("data_preprocess"):
                shard = ray.get(shards[self.data_rank].inner, timeout=self.args.http_control_timeout)
                data = to_tensors(shard, self.device)
            self._prepare(rollout_id, data)
            self._dump(rollout_id, data)
            with timer("actor_train"):
                self._train_steps(rollout_id, data)
        self._log_rollout(rollout_id, data)
        return drain_outbox()

    def save(self, rollout_id: int) -> None:
        """Write the checkpoint of `rollout_id` (and the Hugging Face export, if asked for). It is not yet the newest."""
        from slime.backends.megatron_utils.checkpoint import save_checkpoint

        self.states.require_active(ACTOR)
        save_checkpoint(self.args, rollout_id, self.model, self.optimizer, self.scheduler)
        if self.args.save_hf is not None:
            self.export_hf(self.args.save_hf.format(rollout_id=rollout_id))

    def publish(self, rollout_id: int) -> None:
        """Make the checkpoint of `rollout_id` the newest. Called on rank 0 only, after the data state is on disk."""
        from slime.backends.megatron_utils.checkpoint import publish_checkpoint

        publish_checkpoint(self.args, rollout_id)

    def export_hf(self, directory: str) -> None:
        """Write the live weights as a Hugging Face checkpoint, with config and tokenizer of `--hf-checkpoint`."""
        from slime.backends.megatron_utils.hf_conversion import iter_hf_named_tensors
        from slime.weights.hf_writer import write_hf_checkpoint

        tensors = iter_hf_named_tensors(self.args, self.model)
        if self.rank == 0:
            write_hf_checkpoint(directory, tensors, self.args.hf_checkpoint)
        else:
            for _ in tensors:
                pass  # take part in the gathers
        torch.distributed.barrier()

    def connect_rollout_engines(self, engines: list[Any], gpu_counts: list[int], gpu_offsets: list[int]) -> None:
        """Join the engines' weight-update group (rank 0; the other ranks only gather)."""
        from slime.backends.megatron_utils.hf_conversion import expected_hf_names, iter_hf_buckets
        from slime.weights.process_group import ProcessGroupWeightUpdater

        def buckets() -> Iterator[list[tuple[str, torch.Tensor]]]:
            return iter_hf_buckets(self.args, self.model, self.args.update_weight_buffer_size)

        if self.weight_updater is None:
            self.weight_updater = ProcessGroupWeightUpdater(
                self.args, buckets, self.rank == 0, expected_names=expected_hf_names(self.args.hf_checkpoint)
            )
        self.weight_updater.connect_rollout_engines(engines, None, gpu_counts, gpu_offsets, None)

    def update_weights(self) -> dict[str, float]:
        """Push the actor's weights to all engines. Returns transfer metrics (rank 0)."""
        self.states.require_active(ACTOR)
        if self.data_rank > 0:
            # A replica of what the first data-parallel ranks send; the gathers are among those.
            return {}
        self.weight_updater.update_weights()
        return self.weight_updater.pop_metrics()

    def probe_log_probs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of tokens 1 … n−1 of every sequence at temperature 1, under the live weights."""
        from slime.backends.megatron_utils.train_step import forward_log_probs

        args = copy.copy(self.args)
        args.rollout_temperature = 1.0
        data = {
            "tokens": [torch.tensor(sequence, device=self.device) for sequence in sequences],
            "total_lengths": [len(sequence) for sequence in sequences],
            "response_lengths": [len(sequence) - 1 for sequence in sequences],
            "micro_batch_indices": [list(range(len(sequences)))],
        }
        results = forward_log_probs(args, self.model, data, with_entropy=False)
        return [log_probs.tolist() for log_probs in results["log_probs"]]

    def dispose(self) -> None:
        """Leave the engines' update group and all process groups."""
        from slime.backends.megatron_utils.initialize import destroy

        if self.weight_updater is not None:
            self.weight_updater.disconnect_rollout_engines()
        destroy()

    def _live_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, chunk in enumerate(self.model):
            for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
                yield f"{index}.{name}", tensor

    def _load_reference(self) -> None:
        if self.args.use_kl_loss:
            source = source_of_reference(self.args)
            self._load_weights(source)
            self.states.capture(REFERENCE)
            if self.rank == 0:
                logger.info("reference weights: %s", source)

    def _load_actor(self) -> int:
        """Load the actor's weights and build the optimizer. Returns the last finished rollout, −1 at a new start."""
        from slime.backends.megatron_utils.checkpoint import load_checkpoint
        from slime.backends.megatron_utils.optimizer import build_optimizer_and_scheduler

        args, source = self.args, self.args.initial_weights
        if self.rank == 0:
            logger.info("actor weights: %s%s", source, ", resuming" if source.resume else "")
        if not source.resume:
            self._load_weights(source)
        if args.num_rollout > 0:
            self.optimizer, self.scheduler = build_optimizer_and_scheduler(args, self.model)
        if not source.resume:
            return -1
        with_optimizer = self.optimizer is not None and not args.no_load_optim
        iteration = load_checkpoint(
            args,
            source,
            self.model,
            self.optimizer if with_optimizer else None,
            self.scheduler if with_optimizer else None,
        )
        if self.optimizer is not None:
            self.optimizer.reload_model_params()
        return iteration

    def _load_weights(self, source: WeightSource) -> None:
        from slime.backends.megatron_utils.checkpoint import load_checkpoint
        from slime.backends.megatron_utils.hf_conversion import load_hf_weights

        if source.kind == "hf":
            load_hf_weights(self.args, self.model, source.path)
        elif source.kind == "megatron":
            load_checkpoint(self.args, source, self.model)

    def _prepare(self, rollout_id: int, data: dict[str, Any]) -> None:
        """Log-probs, advantages and the user's last word on the data."""
        from slime.backends.megatron_utils.train_step import forward_log_probs

        args = self.args
        if args.use_kl_loss:
            with timer("ref_log_probs"), self.states(REFERENCE):
                results = forward_log_probs(args, self.model, data, with_entropy=False)
                data["ref_log_probs"] = results["log_probs"]
        if needs_log_prob_pass(args):
            with timer("log_probs"):
                data.update(forward_log_probs(args, self.model, data, with_entropy=args.use_rollout_entropy))
        if args.compute_advantages_and_returns:
            compute_advantages_and_returns(args, data)
        if args.rollout_data_postprocess_path is not None:
            path, flag = args.rollout_data_postprocess_path, "--rollout-data-postprocess-path"
            with calling_user_code(flag, path, f"rollout {rollout_id}"):
                load_function(path, flag=flag)(args, rollout_id, data)
            refresh_mask_sums(data, self.data_group)

    def _dump(self, rollout_id: int, data: dict[str, Any]) -> None:
        from megatron.core import parallel_state

        template = self.args.save_debug_train_data
        # The ranks of a tensor-parallel group hold the same data; one of them is enough.
        if template is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
            save_train_data(template, rollout_id, data, self.data_group, self.data_rank)

    def _train_steps(self, rollout_id: int, data: dict[str, Any]) -> None:
        from slime.backends.megatron_utils.train_step import train_one_step

        steps = len(data["num_microbatches"])
        for step in range(steps):
            metrics = train_one_step(self.args, self.model, self.optimizer, self.scheduler, data, rollout_id, step)
            logged = {f"train/{name}": value for name, value in metrics.items()}
            logged["train/step"] = rollout_id * self.args.num_steps_per_rollout + step
            log(self.args, logged, "train/step")

    def _log_rollout(self, rollout_id: int, data: dict[str, Any]) -> None:
        metrics = rollout_data_metrics(self.args, data, self.data_group)
        logged = {f"rollout/{name}": value for name, value in metrics.items()}
        log(self.args, {**logged, "rollout/step": rollout_id}, "rollout/step")
        seconds = {f"perf/{name}_time": value for name, value in Timer().pop_seconds().items()}
        log(self.args, {**seconds, "rollout/step": rollout_id}, "rollout/step")


def needs_log_prob_pass(args: argparse.Namespace) -> bool:
    """Whether old log-probs must be computed before training.

    With one optimizer step per rollout the policy that trains still is the policy that is asked for, so the training
    forward gives them. Several steps, engine log-probs as the old ones (the trainer's are then reported beside them),
    stored entropies, or plug-ins that may read `log_probs` need the pass. Supervised fine-tuning has no old policy.
    """
    if args.loss_type == "sft_loss":
        return False
    plug_in = (
        args.loss_type == "custom_loss" or args.custom_advantage_function_path or args.rollout_data_postprocess_path
    )
    several = args.num_steps_per_rollout > 1
    return bool(several or plug_in or args.use_rollout_logprobs or args.use_rollout_entropy)
