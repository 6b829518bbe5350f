"""Weights that correct for tokens having been sampled by the engine, whose numerics are not the trainer's.

w = π_train/π_rollout per token, before the policy moves. Truncated importance sampling (E. Ionides, "Truncated Importance
Sampling", 2008; here per token and with a lower bound too) moves w into a range; icepop (arXiv 2510.18855) drops tokens whose w
is outside of it. Weights are constants: no gradient flows through them.
"""

import torch

from slime.algorithms.ratios import saturated


def importance_weights(train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor) -> torch.Tensor:
    """w = e^{train − rollout} per token, float32 without gradient, in the shape of the arguments."""
    return torch.exp(saturated(train_log_probs.detach().float() - rollout_log_probs.detach().float()))


def truncated_weights(weights: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """`weights`, moved into [low, high]."""
    return weights.clamp(low, high)


def icepop_weights(weights: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """`weights` where they lie in [low, high], else 0."""
    return weights.masked_fill((weights < low) | (weights > high), 0.0)


def weighting_metrics(weights: torch.Tensor, applied: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per token, to be reduced: `tis` is w, `tis_clipfrac` tells where another weight is applied, `tis_abs` is |w − 1|."""
    return {"tis": weights, "tis_clipfrac": (applied != weights).float(), "tis_abs": (weights - 1.0).abs()}
