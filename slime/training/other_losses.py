"""Losses beside that of the policy: a critic's values, and supervised fine-tuning."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from slime.algorithms.value_loss import compute_value_loss
from slime.training.micro_batch import (
    Metrics,
    MicroBatch,
    Reducer,
    per_token_column,
    response_log_probs,
    response_values,
    where_trained,
)


def value_loss_function(
    args: argparse.Namespace, batch: MicroBatch, outputs: torch.Tensor, reduce: Reducer
) -> tuple[torch.Tensor, Metrics]:
    """The clipped squared error of a critic against the returns.

    Args:
        batch: `values` are those from before the step, `returns` what is aimed at.
        outputs: [T, 1], of the critic's head.

    Returns:
        (loss, {`value_loss`, `value_clipfrac`}): sums over this rank's tokens.
    """
    old_values = per_token_column(batch, "values", "the value loss")
    returns = per_token_column(batch, "returns", "the value loss")
    (values,) = where_trained(batch, response_values(batch["stream"], outputs))
    loss, clipped = compute_value_loss(values, old_values, returns, args.value_clip)
    reduced = reduce(loss)
    return reduced, {"value_loss": reduced, "value_clipfrac": reduce(clipped)}


def sft_loss_function(
    args: argparse.Namespace,
    batch: MicroBatch,
    logits: torch.Tensor,
    tensor_group: dist.ProcessGroup | None,
    reduce: Reducer,
) -> tuple[torch.Tensor, Metrics]:
    """Negative log-likelihood of the trained tokens, at temperature 1: they are data, not samples of a rollout."""
    log_probs, _ = response_log_probs(args, batch, logits, tensor_group, with_entropy=False, temperature=1.0)
    return -reduce(*where_trained(batch, log_probs)), {}
