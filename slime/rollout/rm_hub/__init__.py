"""Rewards: built-in graders by name, and the user's own by path."""

from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.grading import async_rm, batched_async_rm
from slime.rollout.rm_hub.math_utils import grade_answer_verl

__all__ = ["async_rm", "batched_async_rm", "get_deepscaler_rule_based_reward", "grade_answer_verl"]
