"""The loss of one micro-batch: which function gives it, what holds for all of them, and what they are made of.

`custom_functions` calls those that a user writes.

Each term of the policy loss (objective, corrections, entropy and KL) is first one number per token, and then reduced. A
correction may reject tokens. Rejected tokens leave the loss: its policy-gradient, entropy and KL terms are summed with smaller
masks. They change neither what these sums are divided by nor what is reported: metrics speak of all trained tokens, so that the
rejection itself shows in them. Only `pg_loss` is reported as it enters the loss.

Masked tokens hold 0 in everything that a loss is made of, from the columns of the batch to the new log-probs. So no ratio or
weight is formed of what was there, and a NaN or an infinity at such a token reaches neither the value nor the gradient.

Per rollout, a term is reduced to the sum over samples of masked means with the denominators of whole executions; per token, to
the masked sum. The caller divides by the step's denominator (rollouts, or trained tokens) and by nothing else, so splitting a
step over micro-batches and ranks changes neither loss nor gradient.
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
    off_policy_sequence_mask,
)
from slime.algorithms.reduction import masked_sum, token_weights, zero_masked_tokens
from slime.training.columns import Kind, names_of
from slime.training.custom_functions import (
    copied_masks,
    custom_correction,
    custom_loss_function,
    policy_gradient_reducer,
)
from slime.training.keep_set import kept_tokens
from slime.training.log_probs import calculate_log_probs_and_entropy
from slime.training.packed_stream import PackedStream, Rows
from slime.training.rollout_batch import correction_flag
from slime.training.rollout_data import Metrics, MicroBatch, Reducer


def rows_of_logits(args: argparse.Namespace, stream: PackedStream) -> Rows | None:
    """The rows of a rank's stream whose logits a pass makes; None: all, as a user's loss may read any."""
    return None if args.loss_type == "custom_loss" else stream.predicting_rows.one_at_least()


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
        logits: [T, V / tensor-parallel size] of `batch.stream`, as a custom loss gets them, or of the rows alone that
            `rows_of_logits` names; for the role "critic", whose loss is that of its values whatever `--loss-type` says, [T, 1].
    """
    reduce = make_reducer(args, batch)
    # Only our own columns: what a user's own column means at a masked token is not known.
    per_token = {name: batch[name] for name in names_of(Kind.RESPONSE_PART) if name in batch}
    zeroed = zero_masked_tokens(per_token, batch.local_masks)
    batch = batch.with_columns(**zeroed)
    is_custom = role == "actor" and args.loss_type == "custom_loss"
    # A loss without a path back to the logits would have no backward pass on this rank, and other ranks wait for that. So a
    # zero that depends on the logits is added. It is made before the loss, so that its backward pass comes after that of the
    # loss, and its zeros are added to a gradient that is there.
    stream = batch.stream
    may_leave_logits_out = is_custom or stream.cp.all_gather or sum(stream.local_response_lengths) == 0
    zero = _NoGradient.apply(logits) if may_leave_logits_out else None
    if role == "critic":
        loss, metrics = value_loss_function(args, batch, logits, reduce)
    elif is_custom:
        # The user's function may edit these masks. It gets a copy, so that the step keeps its own, also when the loss is made
        # once more (`--recompute-loss-function`). The tokens have a second name for it, that of the argument of
        # `get_log_probs_and_entropy` and `get_values`.
        batch = batch.with_columns(loss_masks=copied_masks(batch["loss_masks"]), unconcat_tokens=batch["tokens"])
        # The reducer is made when it is called, from the masks as they are then.
        loss, metrics = custom_loss_function(args, batch, logits, lambda values: make_reducer(args, batch)(values))
    elif args.loss_type == "sft_loss":
        loss, metrics = sft_loss_function(args, batch, logits, tensor_group, reduce)
    else:
        loss, metrics = policy_loss_function(args, batch, logits, tensor_group, reduce)
    if zero is not None:
        loss = loss + zero
    return loss, {"loss": loss.detach(), **{name: value.detach() for name, value in metrics.items()}}


class _NoGradient(torch.autograd.Function):
    """0 for any logits, with a gradient of 0. The logits are not read: zero times an infinite logit would be NaN."""

    @staticmethod
    def forward(ctx, logits):
        ctx.like = logits.new_zeros(()), logits.shape
        return torch.zeros((), device=logits.device)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        # One zero, expanded: a tensor of the logits' size would take as much memory as the gradient of the loss.
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
    old_values = batch.flat("values", "the value loss")
    returns = batch.flat("returns", "the value loss")
    (values,) = where_trained(batch, response_values(batch.stream, outputs))
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
    """Negative log-likelihood of the trained tokens in the whole vocabulary, at temperature 1: they are data, whoever sampled
    them."""
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
    stored_log_probs = batch.flat("log_probs") if "log_probs" in batch else log_probs.detach()
    old_log_probs = stored_log_probs
    if args.use_rollout_logprobs:
        old_log_probs = batch.flat("rollout_log_probs", "--use-rollout-logprobs")
    pg_loss, metrics = _objective(args, batch, log_probs, old_log_probs, reduce)
    masks = batch["loss_masks"]
    if correction_flag(args):
        pg_loss, masks, of_tokens = custom_correction(args, batch, pg_loss, stored_log_probs)
        metrics |= {name: reduce(values) for name, values in of_tokens.items()}
    pg_reduce = policy_gradient_reducer(args, batch, masks)
    is_rejecting = any(new is not old for new, old in zip(masks, batch["loss_masks"], strict=True))
    loss_reduce = make_reducer(args, batch.with_columns(loss_masks=masks)) if is_rejecting else reduce

    metrics["pg_loss"] = (pg_reduce or loss_reduce)(pg_loss)
    metrics["entropy_loss"] = reduce(entropy)
    loss = metrics["pg_loss"] - args.entropy_coef * (loss_reduce(entropy) if is_rejecting else metrics["entropy_loss"])
    if args.use_kl_loss:
        reference = batch.flat("ref_log_probs", "--use-kl-loss")
        # The ratio of the token itself, even if the objective takes that of the sequence.
        ratio = importance_ratio(old_log_probs - log_probs) if args.use_unbiased_kl else None
        kl = compute_approx_kl(log_probs, reference, args.kl_loss_type, ratio)
        metrics["kl_loss"] = reduce(kl)
        loss = loss + args.kl_loss_coef * (loss_reduce(kl) if is_rejecting else metrics["kl_loss"])
    if "rollout_log_probs" in batch:
        trainer = log_probs.detach() if args.use_rollout_logprobs else old_log_probs
        metrics["train_rollout_logprob_abs_diff"] = reduce((trainer - batch.flat("rollout_log_probs")).abs())
    if batch.get("on_policy_proof") is not None:
        batch["on_policy_proof"].compare(batch, log_probs.detach())
    if "opd_reverse_kl" in batch:
        metrics["opd_reverse_kl"] = reduce(batch.flat("opd_reverse_kl"))
    return loss, metrics


def _objective(
    args: argparse.Namespace,
    batch: MicroBatch,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    reduce: Reducer,
) -> tuple[torch.Tensor, Metrics]:
    """The policy-gradient loss per token and its metrics. Of the corrections only `--use-opsm` is in it."""

    # Differentiable, and collective under context parallelism.
    whole = batch.gather_flat
    advantages = batch.flat("advantages", "--loss-type policy_loss")
    row = estimator(args.advantage_estimator)
    full_log_probs, full_old = (), ()
    if row.ratio_of_sequence:
        full_log_probs, full_old = whole(log_probs), whole(old_log_probs)
        local = batch.stream.split(log_probs)
        ppo_kl = compute_gspo_kl(full_log_probs, full_old, local, batch["loss_masks"]).to(log_probs.device)
    else:
        ppo_kl = old_log_probs - log_probs
    eps = (args.eps_clip, args.eps_clip_high, args.eps_clip_c)
    loss, clipped = getattr(objectives, row.objective)(ppo_kl, log_probs, advantages, eps)
    metrics = {"pg_clipfrac": reduce(clipped), "ppo_kl": reduce(ppo_kl)}
    if correction_flag(args):
        metrics["ois"] = reduce(importance_ratio(ppo_kl.detach()))
    if args.use_opsm:
        if not row.ratio_of_sequence:
            full_log_probs, full_old = whole(log_probs.detach()), whole(old_log_probs)
        local = batch.stream.split(advantages)
        kept, rejected = off_policy_sequence_mask(full_log_probs, full_old, local, batch["loss_masks"], args.opsm_delta)
        loss = loss.masked_fill(kept.to(loss.device) == 0, 0.0)
        metrics["opsm_clipfrac"] = reduce(rejected)
    return loss, metrics


def response_log_probs(
    args: argparse.Namespace,
    batch: MicroBatch,
    logits: torch.Tensor,
    tensor_group: dist.ProcessGroup | None,
    *,
    with_entropy: bool,
    with_entropy_grad: bool = False,
    temperature: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs (and entropy) of this rank's response tokens, float32 [their number].

    Args:
        logits: [T, V / tensor-parallel size], or [R, V / tensor-parallel size] of the R rows alone that predict a response
            token: others are not read. They are divided by the temperature inside.
        temperature: None asks for log-probs as sampling had them: at the temperature of the rollout and, where the batch has
            the sets of tokens that top-p sampling kept, within these. With a number they are those in the whole vocabulary, as
            in supervised fine-tuning, which takes 1: its tokens are data. The entropy is always of the whole distribution.
    """
    stream = batch.stream
    as_sampled = temperature is None and args.loss_type != "sft_loss"
    if temperature is None:
        temperature = args.rollout_temperature if as_sampled else 1.0
    log_probs, entropy = calculate_log_probs_and_entropy(
        logits,
        stream.next_tokens.index_select(0, stream.predicting_rows.index),
        tensor_group,
        with_entropy=with_entropy,
        chunk_size=args.log_probs_chunk_size,
        log_prob_keep_mask=kept_tokens(batch) if as_sampled else None,
        with_entropy_grad=with_entropy_grad,
        temperature=temperature,
        rows=stream.predicting_rows.within(logits),
    )
    values = stream.responses_of_predictions
    return values(log_probs), None if entropy is None else values(entropy)


def response_values(stream: PackedStream, outputs: torch.Tensor) -> torch.Tensor:
    """A critic's value before every response token of this rank, float32 [their number], from its outputs [T, 1].

    The value of a token is what was predicted before it was chosen, like its log-prob. No temperature scales it.
    """
    return stream.responses(outputs.squeeze(-1).float())


def where_trained(batch: MicroBatch, *per_token: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each of `per_token`, flat over this rank's response tokens, with 0 and no gradient at masked ones."""
    masks = batch.local_masks
    if not masks:
        return per_token
    trained = (torch.cat(masks) != 0).to(per_token[0].device)
    return tuple(torch.where(trained, values, 0.0) for values in per_token)


def make_reducer(args: argparse.Namespace, batch: MicroBatch) -> Reducer:
    """Reduce a flat tensor over this rank's response tokens of `batch` to the sum that the step's denominator divides.

    Smaller masks change what is summed, never what it is divided by.
    """
    weights = token_weights(batch.local_masks, None if args.calculate_per_token_loss else batch["rollout_mask_sums"])
    return lambda values: masked_sum(values, weights)
