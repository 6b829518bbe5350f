"""Off-policy corrections as the trainer calls them: the shipped functions for `--custom-tis-function-path`, and `--use-opsm`.

A correction takes the loss per token and gives it back weighted. Rejected tokens may be expressed by a weight of zero (as
here) or by smaller masks; either way the denominators of the reduction stay as they were, and metrics are reduced with the
masks that came in: a metric of what was rejected must still see it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slime.algorithms.importance_sampling import (
    icepop_weights,
    importance_weights,
    truncated_weights,
    weighting_metrics,
)
from slime.algorithms.sequence_ratio import off_policy_sequence_mask

Correction = tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]
Weighting = Callable[[torch.Tensor, float, float], torch.Tensor]


def vanilla_tis_function(
    *,
    args: argparse.Namespace,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **kwargs: Any,
) -> Correction:
    """Truncated importance sampling: the loss times w = π_train/π_rollout, moved into [--tis-clip-low, --tis-clip].

    Args:
        pg_loss: float32, flat over the local response tokens of all samples.
        train_log_probs, rollout_log_probs: one tensor per sample, the local part of its response.
        loss_masks: one tensor per sample, the whole response.

    Returns:
        (weighted loss, loss_masks as they came in, metrics per local token: `tis`, `tis_clipfrac`, `tis_abs`).

    Raises:
        ValueError: loss and log-probs are not of the same tokens.
    """
    return _weighted(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, truncated_weights)


def icepop_function(
    *,
    args: argparse.Namespace,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **kwargs: Any,
) -> Correction:
    """Icepop: as `vanilla_tis_function`, but a token whose w lies outside of the bounds loses its loss and its gradient."""
    return _weighted(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, icepop_weights)


def compute_opsm_mask(
    args: argparse.Namespace,
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    advantages: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`off_policy_sequence_mask` with the threshold `args.opsm_delta`: (mask, clipfrac), flat per local token.

    The loss is multiplied by the mask; `clipfrac` goes through the standard reducer.
    """
    return off_policy_sequence_mask(full_log_probs, full_old_log_probs, advantages, loss_masks, args.opsm_delta)


def _weighted(
    args: argparse.Namespace,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    weighting: Weighting,
) -> Correction:
    train, rollout = _flat(train_log_probs, pg_loss), _flat(rollout_log_probs, pg_loss)
    if not train.shape == rollout.shape == pg_loss.shape:
        raise ValueError(
            f"importance weights: {tuple(pg_loss.shape)} losses for {tuple(train.shape)} log-probs of the trainer and "
            f"{tuple(rollout.shape)} of the engine"
        )
    weights = importance_weights(train, rollout)
    applied = weighting(weights, args.tis_clip_low, args.tis_clip)
    # Where the weight is zero the loss may be infinite; their product must not be NaN.
    loss = (pg_loss * applied).masked_fill(applied == 0, 0.0)
    return loss, list(loss_masks), weighting_metrics(weights, applied)


def _flat(rows: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat(list(rows)) if len(rows) else like.new_zeros(0)
