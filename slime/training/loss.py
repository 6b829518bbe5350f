"""The loss of one micro-batch, assembled from pure parts.

Every term is reduced by one reducer: per rollout, the sum over samples of masked means with the denominators of whole
executions; per token, the masked sum. The caller divides by the step's denominator (rollouts, or trained tokens) and by
nothing else, so splitting a step over micro-batches and ranks changes neither loss nor gradient.

A micro-batch is a dict with one entry per sample under every key (`tokens`, `loss_masks`, `advantages`, …) plus
`stream`, the packed stream that the logits belong to.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

import torch

from slime.algorithms.kl import compute_approx_kl
from slime.algorithms.policy_loss import compute_policy_loss
from slime.algorithms.reduction import masked_sum, sum_of_sample_mean
from slime.training.log_probs import calculate_log_probs_and_entropy
from slime.training.packed_stream import PackedStream
from slime.utils.errors import UserError
from slime.utils.misc import load_function
from slime.utils.user_code import calling_user_code

MicroBatch = dict[str, Any]
Reducer = Callable[[torch.Tensor], torch.Tensor]
Metrics = dict[str, torch.Tensor]


def response_log_probs(
    args: argparse.Namespace,
    stream: PackedStream,
    logits: torch.Tensor,
    tensor_group: torch.distributed.ProcessGroup | None,
    *,
    with_entropy: bool,
    with_entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs (and entropy) of all response tokens of a stream, float32 [sum of response lengths].

    Args:
        logits: [T, V / tensor-parallel size], divided by the rollout temperature inside.
    """
    log_probs, entropy = calculate_log_probs_and_entropy(
        logits,
        stream.next_tokens,
        tensor_group,
        with_entropy=with_entropy,
        chunk_size=args.log_probs_chunk_size,
        with_entropy_grad=with_entropy_grad,
        temperature=args.rollout_temperature,
    )
    return stream.responses(log_probs), None if entropy is None else stream.responses(entropy)


def make_reducer(args: argparse.Namespace, batch: MicroBatch) -> Reducer:
    """Reduce a flat tensor over the response tokens of `batch` to the sum that the step's denominator divides."""
    if args.calculate_per_token_loss:
        return lambda values: masked_sum(values, batch["loss_masks"])
    return lambda values: sum_of_sample_mean(values, batch["loss_masks"], batch["rollout_mask_sums"])


def loss_function(
    args: argparse.Namespace,
    batch: MicroBatch,
    logits: torch.Tensor,
    tensor_group: torch.distributed.ProcessGroup | None,
) -> tuple[torch.Tensor, Metrics]:
    """The un-normalised loss of a micro-batch and its metrics, both sums over its samples.

    Args:
        logits: [T, V / tensor-parallel size] of `batch["stream"]`.
    """
    reduce = make_reducer(args, batch)
    if args.loss_type == "custom_loss":
        loss, metrics = _custom_loss(args, batch, logits, reduce)
    elif args.loss_type == "sft_loss":
        loss, metrics = sft_loss_function(args, batch, logits, tensor_group, reduce)
    else:
        loss, metrics = policy_loss_function(args, batch, logits, tensor_group, reduce)
    return loss, {"loss": loss.detach(), **{name: value.detach() for name, value in metrics.items()}}


def policy_loss_function(
    args: argparse.Namespace,
    batch: MicroBatch,
    logits: torch.Tensor,
    tensor_group: torch.distributed.ProcessGroup | None,
    reduce: Reducer,
) -> tuple[torch.Tensor, Metrics]:
    """Clipped policy gradient − entropy_coef·entropy + kl_loss_coef·KL(policy, reference).

    Old log-probs are the engine's with `use_rollout_logprobs`, else those of the log-prob pass, else (one step per
    rollout: the policy has not moved) the new ones without gradient.
    """
    log_probs, entropy = response_log_probs(
        args, batch["stream"], logits, tensor_group, with_entropy=True, with_entropy_grad=args.entropy_coef != 0
    )
    old_log_probs = _old_log_probs(args, batch, log_probs)
    advantages = torch.cat(batch["advantages"])
    ppo_kl = old_log_probs - log_probs
    pg_loss, clip_fraction = compute_policy_loss(ppo_kl, advantages, args.eps_clip, args.eps_clip_high, args.eps_clip_c)
    metrics = {
        "pg_loss": _policy_gradient_reducer(args, batch, reduce)(pg_loss),
        "entropy_loss": reduce(entropy),
        "pg_clipfrac": reduce(clip_fraction),
        "ppo_kl": reduce(ppo_kl),
    }
    loss = metrics["pg_loss"] - args.entropy_coef * metrics["entropy_loss"]
    if args.use_kl_loss:
        ratio = torch.exp(-ppo_kl) if args.use_unbiased_kl else None
        kl = compute_approx_kl(log_probs, torch.cat(batch["ref_log_probs"]), args.kl_loss_type, ratio)
        metrics["kl_loss"] = reduce(kl)
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    if "rollout_log_probs" in batch:
        trainer = log_probs.detach() if args.use_rollout_logprobs else old_log_probs
        difference = (trainer - torch.cat(batch["rollout_log_probs"])).abs()
        metrics["train_rollout_logprob_abs_diff"] = reduce(difference)
    return loss, metrics


def sft_loss_function(
    args: argparse.Namespace,
    batch: MicroBatch,
    logits: torch.Tensor,
    tensor_group: torch.distributed.ProcessGroup | None,
    reduce: Reducer,
) -> tuple[torch.Tensor, Metrics]:
    """Negative log-likelihood of the trained tokens."""
    log_probs, _ = response_log_probs(args, batch["stream"], logits, tensor_group, with_entropy=False)
    return -reduce(log_probs), {}


def _custom_loss(
    args: argparse.Namespace, batch: MicroBatch, logits: torch.Tensor, reduce: Reducer
) -> tuple[torch.Tensor, Metrics]:
    path, flag = args.custom_loss_function_path, "--custom-loss-function-path"
    with calling_user_code(flag, path, f"samples {batch.get('sample_indices')}"):
        result = load_function(path, flag=flag)(args, batch, logits, reduce)
    if not (isinstance(result, tuple) and len(result) == 2 and torch.is_tensor(result[0])):
        raise UserError(
            f"--custom-loss-function-path {path} returned {type(result).__name__}; "
            "expected (loss tensor, {name: scalar tensor})"
        )
    loss, metrics = result
    # A custom loss may use no logit of this rank; its backward collectives must still match the others'.
    return loss + 0.0 * logits.sum(), metrics


def _old_log_probs(args: argparse.Namespace, batch: MicroBatch, log_probs: torch.Tensor) -> torch.Tensor:
    if args.use_rollout_logprobs:
        return torch.cat(batch["rollout_log_probs"])
    if "log_probs" in batch:
        return torch.cat(batch["log_probs"])
    return log_probs.detach()


def _policy_gradient_reducer(args: argparse.Namespace, batch: MicroBatch, default: Reducer) -> Reducer:
    path = args.custom_pg_loss_reducer_function_path
    if path is None:
        return default
    flag = "--custom-pg-loss-reducer-function-path"
    make = load_function(path, flag=flag)
    arguments = [batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], args.calculate_per_token_loss]
    if "rollout_mask_sums" in inspect.signature(make).parameters:
        arguments.append(batch["rollout_mask_sums"])
    with calling_user_code(flag, path, f"samples {batch.get('sample_indices')}"):
        reduce = make(*arguments)
    if not callable(reduce):
        raise UserError(f"{flag} {path} returned {type(reduce).__name__}; expected a function of a flat tensor")
    return reduce
