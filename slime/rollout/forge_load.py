"""Public import path of replayed rollouts; their home is `slime.rollout.rollout_dump`."""

from slime.rollout.rollout_dump import replay_rollout as generate_rollout  # noqa: F401
