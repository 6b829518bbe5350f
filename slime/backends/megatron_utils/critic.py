"""A rank of the critic: it says what every response token is worth, and learns the returns that the actor computed.

A rollout takes two calls: `values` before the actor's work, `train` after it. The data stay on the rank in between. They are
as the rollout gave them: what `--rollout-data-postprocess-path` does to masks on the actor's side is not seen here, what it
does to `returns` is. A critic has no other set of weights and pushes none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slime.backends.megatron_utils.column_exchange import ColumnPart, fetch_column, send_column
from slime.backends.megatron_utils.train_rank import MegatronRank
from slime.observability.logging_utils import LoggedMetrics, drain_outbox
from slime.observability.timer import timer
from slime.utils.errors import RunError
from slime.utils.misc import Box


class MegatronCriticActor(MegatronRank):
    """A rank of the critic's group; its `args` are those of `slime.arguments.critic.critic_args`."""

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
            return send_column(data, "values", self.cp) if is_last_stage() else None

    def train(self, rollout_id: int, returns: Sequence[ColumnPart]) -> list[LoggedMetrics]:
        """Train on the samples of the last `values`. Returns what was logged (the same numbers on every rank).

        Raises:
            RunError: the last call of `values` was for another rollout.
        """
        from slime.backends.megatron_utils.pipeline_stages import is_last_stage

        if rollout_id != self._rollout_id:
            raise RunError(f"the critic was asked for values of rollout {self._rollout_id}, not of {rollout_id}")
        data, self._data, self._rollout_id = self._data, {}, None
        with timer("critic_train"):
            if is_last_stage():
                data["returns"] = fetch_column(returns, data, self.cp, self.args.http_control_timeout)
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
        from slime.backends.megatron_utils.checkpoint import show_checkpoint

        show_checkpoint(self.args, rollout_id)

    def forget(self, rollout_id: int) -> None:
        """Delete the checkpoints that `--keep-last` lets go. Called on rank 0 only, when the actor's is published."""
        from slime.backends.megatron_utils.checkpoint import forget_checkpoints

        forget_checkpoints(self.args, rollout_id)


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
            return {"values": stream.split(response_values(stream, output[0]))}

        return collect

    return forward_per_sample(args, model, rollout_data, make)
