"""The training ranks of a run with a critic as one object: those of two models.

Both models live on the same devices and take turns. A rollout has one order, with and without a KL penalty: the critic's
values; the actor's log-probs, advantages, returns and training; the critic's training on these very returns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import ray

from slime.arguments.config_files.role_config import critic_args
from slime.ray.driver import RolloutResult
from slime.ray.train_group import Report, TrainGroup
from slime.scheduling.device_turns import Holds
from slime.utils.errors import RunError

_CRITIC_RANK = "slime.training.critic_rank.CriticRank"


class ActorCritic(TrainGroup):
    """The actor's ranks, which are what the arguments speak of, with a critic's beside them on the same devices."""

    @functools.cached_property
    def _critic(self) -> _CriticGroup:
        return _CriticGroup(critic_args(self._args), self._group, self._places, _CRITIC_RANK)

    @property
    def starting(self) -> list[ray.ObjectRef]:
        """A reference per rank of both models that is ready when the rank is."""
        return [*super().starting, *self._critic.starting]

    def name_starting(self, positions: Sequence[int]) -> str:
        """What to call the ranks at these positions of `starting`."""
        ranks = len(super().starting)
        actor, critic = [p for p in positions if p < ranks], [p - ranks for p in positions if p >= ranks]
        parts = [super().name_starting(actor)] if actor else []
        return ", ".join([*parts, self._critic.name_starting(critic)] if critic else parts)

    def start(self, after: ray.ObjectRef | None = None) -> None:
        """Start all ranks of both models without waiting for them; they build them when `after` is ready."""
        super().start(after)
        self._critic.start(after)

    def wait_ready(self) -> int:
        """Wait until every rank holds its model. Returns the first rollout id to train.

        Raises:
            RunError: the ranks of a model, or the two models, disagree about it.
        """
        first, of_critic = super().wait_ready(), self._critic.wait_ready()
        if self._critic.resumes and of_critic != first:
            raise RunError(
                f"the actor's checkpoint continues with rollout {first}, the critic's with rollout {of_critic}; load both "
                "from the same iteration"
            )
        return first

    def train(self, rollout_id: int, rollout: RolloutResult, report: Report) -> None:
        """Train both models on a rollout; `report` gets the metrics of each, after an error those before it."""
        self.rollouts_trained += 1
        # The critic has not handed over what it logged with the values, whichever of the two fails.
        with self._critic._reporting_errors(report):
            values = self._critic.values(rollout_id, rollout.critic_shards)
            with self._reporting_errors(report):
                results = self._call_all("train_on_values", rollout_id, rollout.shards, values)
        report(results[0][0])
        self._critic.learn(rollout_id, [part for _, part in results if part is not None], report)

    def hold(self, holds: Holds) -> None:
        """Have all ranks of both models hold that much of their memory on the devices; nobody pushes a critic's weights."""
        self._critic.hold(Holds.NOTHING if holds is Holds.WEIGHTS else holds)
        super().hold(holds)

    def save(self, rollout_id: int) -> None:
        """Write the checkpoints of `rollout_id`; `publish` makes them the newest."""
        self._critic.save(rollout_id)
        super().save(rollout_id)

    def publish(self, rollout_id: int) -> None:
        """Make the checkpoints of `rollout_id` those that a resume takes.

        The actor's pointer decides for both; whenever the run ends, the critic has the checkpoint that belongs to it.
        """
        self._critic.publish(rollout_id)
        super().publish(rollout_id)
        self._critic.forget(rollout_id)

    def dispose(self) -> None:
        """End all ranks of both models; they leave no process and no group behind."""
        self._critic.dispose()
        super().dispose()

    def kill(self) -> None:
        """End all ranks of both models at once."""
        self._critic.kill()
        super().kill()


class _CriticGroup(TrainGroup):
    """The critic's ranks."""

    rank_name = "critic rank"

    @property
    def resumes(self) -> bool:
        return self._args.initial_weights.resume

    def values(self, rollout_id: int, shards: list) -> list:
        """The parts of the column `values`."""
        return [part for part in self._call_all("values", rollout_id, shards) if part is not None]

    def learn(self, rollout_id: int, parts: list, report: Report) -> None:
        """Train on the samples of the last `values`, given what the actor's ranks say about them."""
        with self._reporting_errors(report):
            logged = self._call_all("train", rollout_id, parts)[0]
        report(logged)

    def forget(self, rollout_id: int) -> None:
        """Delete the checkpoints up to `rollout_id` that `--keep-last` lets go."""
        self._call_first("forget", rollout_id)
