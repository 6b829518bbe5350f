"""The policy loss of a micro-batch: objective, corrections, entropy and KL, each per token, then reduced.

A correction may reject tokens. They leave the loss altogether (its policy-gradient, entropy and KL terms are summed with the
smaller masks), but neither what the sums are divided by nor what is reported: metrics, those of the rejection first of all,
speak of all trained tokens. Only `pg_loss` is the term as it enters the loss.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from slime.algorithms.kl import compute_approx_kl
from slime.algorithms.policy_loss import compute_cispo_loss, compute_policy_loss
from slime.algorithms.ratios import importance_ratio
from slime.algorithms.sequence_ratio import compute_gspo_kl
from slime.training.context_parallel import gather_responses
from slime.training.corrections import compute_opsm_mask
from slime.training.custom_functions import custom_correction, policy_gradient_reducer
from slime.training.micro_batch import (
    Metrics,
    MicroBatch,
    Reducer,
    make_reducer,
    per_token_column,
    response_log_probs,
    where_trained,
)


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
    clip = (args.eps_clip, args.eps_clip_high)
    is_gspo = args.advantage_estimator == "gspo"
    full_log_probs, full_old = (), ()
    if is_gspo:
        full_log_probs, full_old = _full(batch, log_probs), _full(batch, old_log_probs)
        local = batch["stream"].split(log_probs)
        ppo_kl = compute_gspo_kl(full_log_probs, full_old, local, batch["loss_masks"]).to(log_probs.device)
    else:
        ppo_kl = old_log_probs - log_probs
    if args.advantage_estimator == "cispo":
        loss, clipped = compute_cispo_loss(ppo_kl, log_probs, advantages, *clip)
    else:
        loss, clipped = compute_policy_loss(ppo_kl, advantages, *clip, args.eps_clip_c)
    metrics = {"pg_clipfrac": reduce(clipped), "ppo_kl": reduce(ppo_kl)}
    if args.use_tis:
        metrics["ois"] = reduce(importance_ratio(ppo_kl.detach()))
    if args.use_opsm:
        if not is_gspo:
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
