"""Public import path of the sample type and the built-in data sources."""

from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.utils.types import Sample

__all__ = ["RolloutDataSource", "RolloutDataSourceWithBuffer", "Sample"]
