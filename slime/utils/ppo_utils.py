"""Public import path of the algorithms; only re-exports."""

from slime.algorithms.advantages import (
    chunked_discounted_returns,
    chunked_gae,
    get_advantages_and_returns_batch,
    get_grpo_returns,
    get_reinforce_plus_plus_baseline_advantages,
    get_reinforce_plus_plus_returns,
    vanilla_gae,
)
from slime.algorithms.kl import compute_approx_kl
from slime.algorithms.policy_loss import compute_cispo_loss, compute_gspo_kl, compute_policy_loss
from slime.training.custom_functions import compute_opsm_mask
from slime.training.log_probs import calculate_log_probs_and_entropy

__all__ = [
    "calculate_log_probs_and_entropy",
    "chunked_discounted_returns",
    "chunked_gae",
    "compute_approx_kl",
    "compute_cispo_loss",
    "compute_gspo_kl",
    "compute_opsm_mask",
    "compute_policy_loss",
    "get_advantages_and_returns_batch",
    "get_grpo_returns",
    "get_reinforce_plus_plus_baseline_advantages",
    "get_reinforce_plus_plus_returns",
    "vanilla_gae",
]
