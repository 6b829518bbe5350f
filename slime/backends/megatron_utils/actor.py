"""A rank of the actor: it holds a shard of the policy, trains it and hands its weights out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from slime.arguments.checkpoints import OLD_ACTOR, TEACHER
from slime.backends.megatron_utils.column_exchange import ColumnPart, fetch_column, send_columns
from slime.backends.megatron_utils.train_rank import MegatronRank
from slime.observability.logging_utils import LoggedMetrics, drain_outbox, log
from slime.observability.timer import timer
from slime.training.advantages import compute_advantages_and_returns
from slime.training.checkpoint_publication import publish_checkpoint
from slime.training.context_parallel import gather_responses
from slime.training.data_metrics import rollout_data_metrics
from slime.training.metric_reduction import refresh_mask_sums
from slime.training.model_states import ACTOR, REFERENCE, ModelStates, StateSchedule
from slime.training.rollout_batch import with_full_responses
from slime.training.step_statistics import needs_log_prob_pass, worst_token_lines
from slime.training.train_dump import save_train_data
from slime.utils.misc import Box
from slime.utils.plugin_loader import calling_user_code, load_function
from slime.utils.processing_utils import load_tokenizer

logger = logging.getLogger(__name__)


class MegatronTrainActor(MegatronRank):
    """A rank of the actor's group."""

    def init(self, rendezvous: tuple[str, int]) -> int:
        """Join the group, build the model, load the weights. Returns the first rollout id to train.

        Args:
            rendezvous: what rank 0's `rendezvous_address` returned.
        """
        self._join(rendezvous)
        from slime.backends.megatron_utils.replaying_router import attach_routing_replay

        self.routing_replay = attach_routing_replay(self.args, self.model)
        tell = logger.info if self.rank == 0 else lambda line: None
        self.states = ModelStates(self._live_tensors)
        self.state_schedule = StateSchedule(self.args, self.states, tell)
        self.weight_updater = None
        self.tokenizer: Any = None
        self.state_schedule.load(self._load_weights, self._load_stored)
        iteration = self._load_model()
        self.state_schedule.start()
        return iteration + 1

    def train(self, rollout_id: int, shards: list[Box]) -> list[LoggedMetrics]:
        """Train on this rank's shard of a rollout. Returns what was logged (the same numbers on every rank)."""
        self._train(rollout_id, shards, ())
        return drain_outbox()

    def train_on_values(
        self, rollout_id: int, shards: list[Box], values: Sequence[ColumnPart]
    ) -> tuple[list[LoggedMetrics], ColumnPart | None]:
        """`train` with the critic's values of all samples; the first `--num-critic-only-steps` rollouts train nothing here.

        Returns:
            What was logged, and this rank's part of what the critic is to learn, if it is the one that tells: the returns, and
            the masks where `--rollout-data-postprocess-path` may have changed them.
        """
        from slime.backends.megatron_utils.pipeline_stages import is_last_stage

        data = self._train(rollout_id, shards, values)
        names = ["returns"] if self.args.rollout_data_postprocess_path is None else ["returns", "loss_masks"]
        return drain_outbox(), send_columns(data, names, self.cp) if is_last_stage() else None

    def save(self, rollout_id: int) -> None:
        """Write the checkpoint of `rollout_id` (and the Hugging Face export, if asked for). It is not yet the newest."""
        from slime.backends.megatron_utils.checkpoint import save_checkpoint

        self.states.require_active(ACTOR)
        stored = self.state_schedule.stored()
        save_checkpoint(self.args, rollout_id, self.model, self.optimizer, self.scheduler, self.states, stored)
        if self.args.save_hf is not None:
            self.export_hf(self.args.save_hf.format(rollout_id=rollout_id))

    def publish(self, rollout_id: int) -> None:
        """Make the checkpoint of `rollout_id` the newest. Called on rank 0 only, after the data state is on disk."""
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
        metrics: dict[str, float] = {}
        # The others hold replicas of what the first data-parallel ranks send; the gathers are among those.
        if self.replica_rank == 0:
            self.weight_updater.update_weights()
            metrics = self.weight_updater.pop_metrics()
        self.state_schedule.after_push()
        return metrics

    def probe_log_probs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of tokens 1 … n−1 of every sequence at temperature 1, under the live weights."""
        from slime.backends.megatron_utils.forward_passes import forward_log_probs
        from slime.backends.megatron_utils.pipeline_stages import broadcast_from_last_stage

        args = copy.copy(self.args)
        args.rollout_temperature = 1.0
        data = {
            "tokens": [torch.tensor(sequence, device=self.device) for sequence in sequences],
            "total_lengths": [len(sequence) for sequence in sequences],
            "response_lengths": [len(sequence) - 1 for sequence in sequences],
            "micro_batch_indices": [list(range(len(sequences)))],
        }
        results = forward_log_probs(args, self.model, data, with_entropy=False)
        full = gather_responses(results.get("log_probs", ()), data["total_lengths"], data["response_lengths"], self.cp)
        return broadcast_from_last_stage([log_probs.tolist() for log_probs in full])

    def dispose(self) -> None:
        """Leave the engines' update group and all process groups."""
        if self.weight_updater is not None:
            self.weight_updater.disconnect_rollout_engines()
        super().dispose()

    def _load_stored(self, name: str) -> bool:
        """Load the state `name` out of the checkpoint that the run resumes from; False where there is none."""
        from slime.backends.megatron_utils.checkpoint import load_stored_state

        source = self.args.initial_weights
        return source.resume and load_stored_state(self.args, source, name, self.model)

    def _train(self, rollout_id: int, shards: list[Box], values: Sequence[ColumnPart]) -> dict[str, Any]:
        """Returns the data with everything that was computed for it."""
        from slime.backends.megatron_utils.pipeline_stages import is_last_stage

        self.state_schedule.before_rollout(rollout_id)
        with timer("train"):
            with timer("data_preprocess"):
                data = self._fetch(shards)
                if values and is_last_stage():
                    data["values"] = fetch_column(values, "values", data, self.cp, self.args.http_control_timeout)
            self._prepare(rollout_id, data)
            self._dump(rollout_id, data)
            if rollout_id >= self.args.num_critic_only_steps:
                with timer("actor_train"), self.routing_replay.training():
                    self._train_steps(rollout_id, data)
            else:
                self.routing_replay.clear()
        self.state_schedule.after_rollout(rollout_id)
        self._log_rollout(rollout_id, data)
        return data

    def _prepare(self, rollout_id: int, data: dict[str, Any]) -> None:
        """Log-probs, advantages (both on the last pipeline stage) and the user's last word on the data (on every rank)."""
        from slime.backends.megatron_utils.forward_passes import forward_log_probs
        from slime.backends.megatron_utils.pipeline_stages import is_last_stage

        args = self.args
        for state in (REFERENCE, TEACHER):
            if state in self.states:
                with timer(f"{state}_log_probs"), self.states(state):
                    results = forward_log_probs(args, self.model, data, with_entropy=False)
                data.update({f"{state}_{name}": column for name, column in results.items()})
        if needs_log_prob_pass(args, steps=len(data["num_microbatches"])):
            state = OLD_ACTOR if args.keep_old_actor else ACTOR
            with timer("log_probs"), self.states(state), self.routing_replay.log_prob_pass():
                data.update(forward_log_probs(args, self.model, data, with_entropy=args.use_rollout_entropy))
        if args.compute_advantages_and_returns:
            self._compute_advantages(rollout_id, data)
        if args.rollout_data_postprocess_path is not None:
            from megatron.core import parallel_state

            path, flag = args.rollout_data_postprocess_path, "--rollout-data-postprocess-path"
            with calling_user_code(flag, path, f"rollout {rollout_id}"):
                load_function(path, flag=flag)(args, rollout_id, data)
            refresh_mask_sums(data, parallel_state.get_data_parallel_group())
        if args.get_mismatch_metrics and is_last_stage():
            self._tell_worst_tokens(rollout_id, data)

    def _compute_advantages(self, rollout_id: int, data: dict[str, Any]) -> None:
        """Advantages and returns on the last pipeline stage; what is to be said about them, on all."""
        from slime.backends.megatron_utils.pipeline_stages import broadcast_from_last_stage, is_last_stage

        metrics = compute_advantages_and_returns(self.args, data, self.cp, self.data_group) if is_last_stage() else None
        if self.args.normalize_advantages:
            logged = {f"train/{name}": value for name, value in broadcast_from_last_stage(metrics).items()}
            logged["train/step"] = rollout_id * self.args.num_steps_per_rollout
            log(self.args, logged, "train/step")

    def _tell_worst_tokens(self, rollout_id: int, data: dict[str, Any]) -> None:
        """Log the tokens on which engine and trainer differ most; from one of the ranks that know all of them."""
        from megatron.core import parallel_state

        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.args.hf_checkpoint, self.args.trust_remote_code)
        lines = worst_token_lines(data, self.tokenizer.decode, self.cp, self.data_group)
        if self.replica_rank == 0 and parallel_state.get_tensor_model_parallel_rank() == 0:
            logger.info("rollout %d, tokens with the largest mismatch:\n  %s", rollout_id, "\n  ".join(lines))

    def _dump(self, rollout_id: int, data: dict[str, Any]) -> None:
        from megatron.core import parallel_state

        from slime.backends.megatron_utils.pipeline_stages import is_last_stage

        template = self.args.save_debug_train_data
        if template is None or not is_last_stage():
            return
        data = with_full_responses(data, self.cp)
        # The ranks of a tensor-parallel and a context-parallel group then hold the same data; one of them is enough.
        if parallel_state.get_tensor_model_parallel_rank() == 0 and self.cp.rank == 0:
            save_train_data(template, rollout_id, data, parallel_state.get_data_parallel_group(), self.data_rank)

    def _log_rollout(self, rollout_id: int, data: dict[str, Any]) -> None:
        from slime.backends.megatron_utils.pipeline_stages import broadcast_from_last_stage, is_last_stage

        metrics = rollout_data_metrics(self.args, data, self.data_group, self.cp) if is_last_stage() else None
        metrics = broadcast_from_last_stage(metrics)
        logged = {f"rollout/{name}": value for name, value in metrics.items()}
        log(self.args, {**logged, "rollout/step": rollout_id}, "rollout/step")
        self._log_seconds(rollout_id)
