"""Public import path of collective helpers; only re-exports."""

from slime.training.whitening import distributed_masked_whiten
from slime.utils.process_groups import init_process_group

__all__ = ["distributed_masked_whiten", "init_process_group"]
