"""Public import path of the check of what a rollout function returned."""

from slime.ray.rollout_pipeline import flatten_rollout_output as flatten_rollout_output
