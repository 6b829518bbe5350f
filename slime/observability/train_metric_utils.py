"""Public import path of what is told of a rollout's data, and of engine and trainer compared; only re-exports."""

from slime.training.reports import mismatch_of_step, rollout_data_metrics  # noqa: F401
