"""The loss of one micro-batch: which function gives it, and what holds for all of them.

A user's own functions are called from `custom_functions`; what all of them read stands in `micro_batch`.

Each term of the policy loss (objective, corrections, entropy and KL) is one number per token, then reduced. A correction may
reject tokens. They leave the loss altogether (its policy-gradient, entropy and KL terms are summed with the smaller masks), but
neither what the sums are divided by nor what is reported: metrics, those of the rejection first of all, speak of all trained
tokens. Only `pg_loss` is the term as it enters the loss.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from slime.algorithms import policy_loss as objectives
from slime.algorithms.estimators import estimator
from slime.algorithms.kl import compute_approx_kl
from slime.algorithms.policy_loss import (
    compute_gspo_kl,
    compute_value_loss,
    importance_ratio,
)
from slime.training.context_parallel import gather_responses
from slime.training.custom_functions import (
    compute_opsm_mask,
    custom_correction,
    custom_loss_function,
    policy_gradient_reducer,
)
from slime.training.micro_batch import (
    Metrics,
    MicroBatch,
    Reducer,
    make_reducer,
    per_token_column,
    response_log_probs,
    response_values,
    where_trained,
    without_masked_tokens,
)


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


def policy_loss_function(
    args: argparse.Namespace,
    batch: MicroBatch,
    logits: torch.Tensor,
    tensor_group: dist.ProcessGroup | None,
    reduce: Reducer,
) -> tuple[torch.Tensor, Metrics]:
    """Policy gradient − entropy_coef·entropy + kl_loss_coef·KL(policy, reference); sums over this rank's tokens.

    Old log-probs are the engine's with `use_rollout_logprobs`, else those of the log-prob pass, else (one step per rollout: the
    policy has not moved) the new ones without gradient.

    Raises:
        UserError: the batch lacks a column that a flag needs, or a function of the user's returned something unusable.
    """
    log_probs, entropy = response_log_probs(
        args, batch, logits, tensor_group, with_entropy=True, with_entropy_grad=args.entropy_coef != 0
    )
    log_probs, entropy = where_trained(batch, log_probs, entropy)
    old_log_probs = _old_log_probs(args, batch, log_probs)
    pg_loss, metrics = _objective(args, batch, log_probs, old_log_probs, reduce)
    masks = batch["loss_masks"]
    if args.use_tis:
        train = per_token_column(batch, "log_probs", "") if "log_probs" in batch else log_probs.detach()
        pg_loss, masks, of_tokens = custom_correction(args, batch, pg_loss, train)
        metrics |= {name: reduce(values) for name, values in of_tokens.items()}
    is_rejecting = any(new is not old for new, old in zip(masks, batch["loss_masks"], strict=True))
    loss_reduce = make_reducer(args, batch, masks) if is_rejecting else reduce

    metrics["pg_loss"] = policy_gradient_reducer(args, batch, masks, loss_reduce)(pg_loss)
    metrics["entropy_loss"] = reduce(entropy)
    loss = metrics["pg_loss"] - args.entropy_coef * (loss_reduce(entropy) if is_rejecting else metrics["entropy_loss"])
    if args.use_kl_loss:
        kl = _reference_kl(args, batch, log_probs, old_log_probs)
        metrics["kl_loss"] = reduce(kl)
        loss = loss + args.kl_loss_coef * (loss_reduce(kl) if is_rejecting else metrics["kl_loss"])
    metrics |= _comparisons(args, batch, log_probs, old_log_probs, reduce)
    return loss, metrics


def _objective(
    args: argparse.Namespace,
    batch: MicroBatch,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    reduce: Reducer,
) -> tuple[torch.Tensor, Metrics]:
    """The policy-gradient loss per token, without what corrections do to it but that of `--use-opsm`; and its metrics."""
    advantages = per_token_column(batch, "advantages", "--loss-type policy_loss")
    row = estimator(args.advantage_estimator)
    full_log_probs, full_old = (), ()
    if row.ratio_of_sequence:
        full_log_probs, full_old = _full(batch, log_probs), _full(batch, old_log_probs)
        local = batch["stream"].split(log_probs)
        ppo_kl = compute_gspo_kl(full_log_probs, full_old, local, batch["loss_masks"]).to(log_probs.device)
    else:
        ppo_kl = old_log_probs - log_probs
    eps = (args.eps_clip, args.eps_clip_high, args.eps_clip_c)
    loss, clipped = getattr(objectives, row.objective)(ppo_kl, log_probs, advantages, eps)
    metrics = {"pg_clipfrac": reduce(clipped), "ppo_kl": reduce(ppo_kl)}
    if args.use_tis:
        metrics["ois"] = reduce(importance_ratio(ppo_kl.detach()))
    if args.use_opsm:
        if not row.ratio_of_sequence:
            full_log_probs, full_old = _full(batch, log_probs.detach()), _full(batch, old_log_probs)
        kept, rejected = compute_opsm_mask(
            args, full_log_probs, full_old, batch["stream"].split(advantages), batch["loss_masks"]
        )
        loss = loss.masked_fill(kept.to(loss.device) == 0, 0.0)
        metrics["opsm_clipfrac"] = reduce(rejected)
    return loss, metrics


def _full(batch: MicroBatch, per_token: torch.Tensor) -> list[torch.Tensor]:
    """Whole responses from this rank's tokens of all of them; differentiable, and collective under context parallelism."""
    stream = batch["stream"]
    return gather_responses(stream.split(per_token), batch["total_lengths"], batch["response_lengths"], stream.cp)


def _old_log_probs(args: argparse.Namespace, batch: MicroBatch, log_probs: torch.Tensor) -> torch.Tensor:
    if args.use_rollout_logprobs:
        return per_token_column(batch, "rollout_log_probs", "--use-rollout-logprobs")
    if "log_probs" in batch:
        return per_token_column(batch, "log_probs", "")
    return log_probs.detach()


def _reference_kl(
    args: argparse.Namespace, batch: MicroBatch, log_probs: torch.Tensor, old_log_probs: torch.Tensor
) -> torch.Tensor:
    reference = per_token_column(batch, "ref_log_probs", "--use-kl-loss")
    # Of the token itself, whatever ratio the objective takes.
    ratio = importance_ratio(old_log_probs - log_probs) if args.use_unbiased_kl else None
    return compute_approx_kl(log_probs, reference, args.kl_loss_type, ratio)


def _comparisons(
    args: argparse.Namespace, batch: MicroBatch, log_probs: torch.Tensor, old_log_probs: torch.Tensor, reduce: Reducer
) -> Metrics:
    """Metrics of the policy against the engine and the teacher, where the batch has theirs."""
    metrics = {}
    if "rollout_log_probs" in batch:
        trainer = log_probs.detach() if args.use_rollout_logprobs else old_log_probs
        difference = (trainer - per_token_column(batch, "rollout_log_probs", "")).abs()
        metrics["train_rollout_logprob_abs_diff"] = reduce(difference)
    if "opd_reverse_kl" in batch:
        metrics["opd_reverse_kl"] = reduce(per_token_column(batch, "opd_reverse_kl", ""))
    return metrics
