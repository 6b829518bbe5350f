"""A rank of the critic: it says what every response token is worth, and learns the returns that the actor computed.

A rollout takes two calls: `values` before the actor's work, `train` after it. The data stay on the rank in between. Of what
`--rollout-data-postprocess-path` does on the actor's side the critic sees `returns` and `loss_masks`: both models train on the
same tokens. A critic has no other set of weights and pushes none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slime.backends.megatron_utils.column_exchange import ColumnPart, fetch_column, send_columns
from slime.backends.megatron_utils.train_rank import MegatronRank
from slime.observability.logging_utils import LoggedMetrics, drain_outbox
from slime.observability.timer import timer
from slime.training.checkpoint_publication import forget_checkpoints, show_checkpoint
from slime.training.context_parallel import ContextParallel
from slime.training.metric_reduction import refresh_mask_sums
from slime.utils.errors import RunError
from slime.utils.misc import Box


class MegatronCriticActor(MegatronRank):
    """A rank of the critic's group; its `args` are those of `slime.arguments.critic_arguments.critic_args`."""

    role = "critic"
    metric_prefix = "train/critic-"

    def init(self, rendezvous: tuple[str, int]) -> int:
        """Join the group, build the model, load the weights. Returns the first rollout id to train.

        Args:
            rendezvous: what rank 0's `rendezvous_address` returned.
        """
        self._join(rendezvous)
        self._rollout_id: int | None = None
        self._data: dict[str, Any] = {}
        return self._load_model() + 1

    def values(self, rollout_id: int, shards: list[Box]) -> ColumnPart | None:
        """Values of this rank's samples, under the weights before training. One rank of those that have the same samples
        returns them."""
        from slime.backends.megatron_utils.pipeline_stages import is_last_stage

        self._rollout_id, self._data = rollout_id, {}
        with timer("critic_values"):
            data = self._fetch(shards)
            data.update(forward_values(self.args, self.model, data))
            self._data = data
            return send_columns(data, ["values"], self.cp) if is_last_stage() else None

    def train(self, rollout_id: int, parts: Sequence[ColumnPart]) -> list[LoggedMetrics]:
        """Train on the samples of the last `values`. Returns what was logged (the same numbers on every rank).

        Args:
            parts: what the actor's ranks say about these samples.

        Raises:
            RunError: the last call of `values` was for another rollout.
        """
        from slime.backends.megatron_utils.pipeline_stages import is_last_stage

        if rollout_id != self._rollout_id:
            raise RunError(f"the critic was asked for values of rollout {self._rollout_id}, not of {rollout_id}")
        data, self._data, self._rollout_id = self._data, {}, None
        with timer("critic_train"):
            if is_last_stage():
                data["returns"] = fetch_column(parts, "returns", data, self.cp, self.args.http_control_timeout)
            if any("loss_masks" in part.boxes for part in parts):
                take_masks(parts, data, self.cp, self.args.http_control_timeout)
            self._train_steps(rollout_id, data)
        self._log_seconds(rollout_id)
        return drain_outbox()

    def save(self, rollout_id: int) -> None:
        """Write the checkpoint of `rollout_id`. It is not yet the newest."""
        from slime.backends.megatron_utils.checkpoint import save_checkpoint

        save_checkpoint(self.args, rollout_id, self.model, self.optimizer, self.scheduler)

    def publish(self, rollout_id: int) -> None:
        """Make the checkpoint of `rollout_id` the newest, and keep older ones: the actor's newest may be one of those.

        Called on rank 0 only.
        """
        show_checkpoint(self.args, rollout_id)

    def forget(self, rollout_id: int) -> None:
        """Delete the checkpoints that `--keep-last` lets go. Called on rank 0 only, when the actor's is published."""
        forget_checkpoints(self.args, rollout_id)


def take_masks(parts: Sequence[ColumnPart], data: dict[str, Any], cp: ContextParallel, timeout: float) -> None:
    """Put the actor's masks in place of the rollout's, with what follows from them. Called on every rank."""
    from megatron.core import parallel_state

    data["loss_masks"] = fetch_column(parts, "loss_masks", data, cp, timeout)
    refresh_mask_sums(data, parallel_state.get_data_parallel_group())


def forward_values(args: Any, model: list[Any], rollout_data: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """Values of every response token under the live weights, without gradient and without dropout.

    Returns:
        On the last pipeline stage `values`: one float32 tensor per sample, in the order of the data, for the response tokens
        that this context-parallel rank owns. On other stages nothing.
    """
    from slime.backends.megatron_utils.forward_passes import forward_per_sample
    from slime.training.micro_batch import MicroBatch, response_values

    def make(batch: MicroBatch) -> Callable[..., dict[str, list[torch.Tensor]]]:
        stream = batch["stream"]

        def collect(output: torch.Tensor, non_loss_data: bool = True) -> dict[str, list[torch.Tensor]]:
            return {"values": stream.split(response_values(stream, output.squeeze(0)))}

        return collect

    return forward_per_sample(args, model, rollout_data, make)
