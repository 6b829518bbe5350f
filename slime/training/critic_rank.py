"""A rank of the critic: it says what every response token is worth, and learns the returns that the actor computed.

A rollout takes two calls: `values` before the actor's work, `train` after it. The data stay on the rank in between. Of what
`--rollout-data-postprocess-path` does on the actor's side the critic sees `returns` and `loss_masks`: both models train on the
same tokens. A critic has no other set of weights and pushes none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from slime.observability.logging_utils import LoggedMetrics
from slime.observability.timer import timer
from slime.scheduling.device_turns import Holds
from slime.training.checkpoint_publication import forget_checkpoints, show_checkpoint
from slime.training.column_exchange import ColumnPart, fetch_column, send_columns
from slime.training.passes import forward_values
from slime.training.rollout_data import RolloutData, refresh_mask_sums
from slime.training.train_rank import TrainRank
from slime.utils.errors import RunError
from slime.utils.misc import Box
from slime.utils.process_groups import patient_groups


class CriticRank(TrainRank):
    """A rank of the critic's group; its `args` are those of `slime.arguments.config_files.role_config.critic_args`."""

    role = "critic"
    metric_prefix = "train/critic-"
    phase_prefix = "critic_"
    # What functions of a user's logged in the last `values`, until `train` hands it over.
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
        with self._collected() as logged, timer("critic_values"):
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
            with timer("critic_train"):
                if self.groups.is_last_stage:
                    data["returns"] = fetch_column(parts, "returns", data, self.args.http_control_timeout)
                if any("loss_masks" in part.boxes for part in parts):
                    take_masks(parts, data, self.groups.sample_group, self.args.http_control_timeout)
                self._train_steps(rollout_id, data, logged)
            logged.append(self._seconds(rollout_id))
        return logged

    def take_logged(self) -> list[LoggedMetrics]:
        """As of every rank; the actor's work may have failed between the two calls."""
        return [*self._logged_with_values, *super().take_logged()]

    def save(self, rollout_id: int) -> None:
        """Write the checkpoint of `rollout_id`. It is not yet the newest."""
        self.require(Holds.ALL, "a save")
        with patient_groups(self.args.checkpoint_write_timeout):
            self.backend.save(rollout_id)

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
