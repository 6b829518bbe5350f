"""Public import path of collective helpers; only re-exports."""

from slime.training.metric_reduction import distributed_masked_whiten
from slime.utils.process_groups import get_gloo_group, init_gloo_group, init_process_group

__all__ = ["distributed_masked_whiten", "get_gloo_group", "init_gloo_group", "init_process_group"]
