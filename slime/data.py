"""Public import path of the sample type and the built-in data sources."""

from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, Sample  # noqa: F401
