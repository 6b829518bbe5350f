"""Public import path of the sample hooks; their home is `slime.rollout.custom_generate`."""

from slime.rollout.custom_generate import apply_rollout_sample_hooks as apply_rollout_sample_hooks
