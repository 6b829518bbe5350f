"""The loss of one micro-batch: which function gives it, and what holds for all of them.

Parts stand in files of their own: `policy_loss`, `other_losses`, `custom_functions`; what they share in `micro_batch`.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from slime.training.custom_functions import custom_loss_function
from slime.training.micro_batch import Metrics, MicroBatch, make_reducer, without_masked_tokens
from slime.training.other_losses import sft_loss_function, value_loss_function
from slime.training.policy_loss import policy_loss_function


def loss_function(
    args: argparse.Namespace,
    batch: MicroBatch,
    logits: torch.Tensor,
    tensor_group: dist.ProcessGroup | None,
    *,
    role: str = "actor",
) -> tuple[torch.Tensor, Metrics]:
    """The un-normalised loss of a micro-batch and its metrics (without gradient), both sums over its samples.

    Args:
        logits: [T, V / tensor-parallel size] of `batch["stream"]`; for the role "critic", whose loss is that of its values
            whatever `--loss-type` says, [T, 1].
    """
    batch = without_masked_tokens(batch)
    reduce = make_reducer(args, batch)
    is_custom = role == "actor" and args.loss_type == "custom_loss"
    # Made before the loss, so that its backward pass comes after that of the loss and finds the gradient there.
    zero = _NoGradient.apply(logits) if is_custom or _may_leave_logits_out(batch) else None
    if role == "critic":
        loss, metrics = value_loss_function(args, batch, logits, reduce)
    elif is_custom:
        loss, metrics = custom_loss_function(args, batch, logits, reduce)
    elif args.loss_type == "sft_loss":
        loss, metrics = sft_loss_function(args, batch, logits, tensor_group, reduce)
    else:
        loss, metrics = policy_loss_function(args, batch, logits, tensor_group, reduce)
    if zero is not None:
        loss = loss + zero
    return loss, {"loss": loss.detach(), **{name: value.detach() for name, value in metrics.items()}}


def _may_leave_logits_out(batch: MicroBatch) -> bool:
    """Whether the loss may have no path back to this rank's logits, though other ranks wait for its backward pass."""
    stream = batch["stream"]
    return stream.cp.all_gather or sum(stream.local_response_lengths) == 0


class _NoGradient(torch.autograd.Function):
    """0 of any logits, with the gradient 0 for each. Nothing is read: zero times an infinite logit would be NaN."""

    @staticmethod
    def forward(ctx, logits):
        ctx.like = logits.new_zeros(()), logits.shape
        return torch.zeros((), device=logits.device)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        # One zero seen everywhere: a tensor of the logits' size would be a second one beside the gradient of the loss.
        zero, shape = ctx.like
        return zero.expand(shape)
