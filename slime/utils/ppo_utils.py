"""Public import path of the algorithms; only re-exports."""

from slime.algorithms.advantages import get_grpo_returns
from slime.algorithms.kl import compute_approx_kl
from slime.algorithms.policy_loss import compute_policy_loss
from slime.training.log_probs import calculate_log_probs_and_entropy

__all__ = ["calculate_log_probs_and_entropy", "compute_approx_kl", "compute_policy_loss", "get_grpo_returns"]
