"""Public import path of the dynamic sampling filters that are shipped; their home is `base_types`."""

from slime.rollout.filter_hub.base_types import check_reward_nonzero_std, check_reward_nonzero_std_with_fallback  # noqa: F401
