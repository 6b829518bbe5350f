"""Public import path of data sets and of a train rank's data; only re-exports."""

from slime.training.rollout_batch import process_rollout_data
from slime.utils.data_files import read_file
from slime.utils.dataset import Dataset, filter_long_prompt
from slime.utils.packed_sample import get_source

__all__ = ["Dataset", "filter_long_prompt", "get_source", "process_rollout_data", "read_file"]
