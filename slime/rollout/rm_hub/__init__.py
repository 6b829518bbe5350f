"""Rewards: built-in graders by name, and the user's own by path."""

from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.grading import async_rm, batched_async_rm
from slime.rollout.rm_hub.ifbench import compute_ifbench_reward
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.rollout.rm_hub.remote import remote_rm
from slime.utils.processing_utils import without_end_mark

__all__ = [
    "async_rm",
    "batched_async_rm",
    "compute_gpqa_reward",
    "compute_ifbench_reward",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
    "remote_rm",
    "without_end_mark",
]
