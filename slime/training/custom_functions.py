"""Functions of the user inside the loss, with what they return checked: loss, correction, and reducer.

Beside them stand the shipped functions for `--custom-tis-function-path`, and what `--use-opsm` asks for. A correction takes
the loss per token and gives it back weighted. Rejected tokens may be expressed by a weight of zero (as here) or by smaller
masks; either way the denominators of the reduction stay as they were, and metrics are reduced with the masks that came in: a
metric of what was rejected must still see it.
"""

from __future__ import annotations

import argparse
import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slime.algorithms.policy_loss import (
    PerToken,
    icepop_weights,
    importance_weights,
    off_policy_sequence_mask,
    truncated_weights,
    weighting_metrics,
)
from slime.training.rollout_batch import correction_flag
from slime.training.rollout_data import Metrics, MicroBatch, Reducer
from slime.utils.errors import UserError
from slime.utils.plugin_loader import accepted_keywords, calling_user_code, load_function

# The micro-batch of the user's loss that runs, for shipped functions that it calls with columns alone.
batch_of_custom_loss: contextvars.ContextVar[MicroBatch | None] = contextvars.ContextVar("batch_of_loss", default=None)


def custom_loss_function(
    args: argparse.Namespace, batch: MicroBatch, logits: torch.Tensor, reduce: Reducer
) -> tuple[torch.Tensor, Metrics]:
    """What the function of `--custom-loss-function-path` gives: an un-normalised sum over samples, and metrics.

    It is called as `fn(args, batch, logits, sum_of_sample_mean)` and returns `(loss, {name: scalar tensor})`. `logits` are
    [T, V / tensor-parallel size]; `slime.backends.megatron_utils.loss` has the shipped losses to build on. The whole sequences
    stand in `batch` as `tokens` and as `unconcat_tokens`.
    """
    path, flag = args.custom_loss_function_path, "--custom-loss-function-path"
    function = load_function(path, flag=flag)
    token = batch_of_custom_loss.set(batch)
    try:
        result = _call(flag, path, batch, function, args, batch, logits, reduce)
    finally:
        batch_of_custom_loss.reset(token)
    if not (isinstance(result, tuple) and len(result) == 2 and torch.is_tensor(result[0])):
        raise UserError(f"{flag} {path} returned {_kind(result)}; expected (loss tensor, {{name: scalar tensor}})")
    loss, metrics = result
    if loss.numel() != 1:
        raise UserError(
            f"{flag} {path} returned a loss of shape {tuple(loss.shape)}; expected a single number: reduce it with the fourth "
            "argument"
        )
    if not isinstance(metrics, dict):
        raise UserError(f"{flag} {path} returned {_kind(metrics)} as metrics; expected {{name: scalar tensor}}")
    wrong = [f"{name!r}, {_kind(m)}" for name, m in metrics.items() if not torch.is_tensor(m) or m.numel() != 1]
    if wrong:
        raise UserError(f"{flag} {path} returned the metrics {'; '.join(wrong)}; expected {{name: scalar tensor}}")
    return loss.reshape(()), {name: value.reshape(()) for name, value in metrics.items()}


def custom_correction(
    args: argparse.Namespace, batch: MicroBatch, pg_loss: torch.Tensor, train_log_probs: torch.Tensor
) -> Correction:
    """The loss per token after `--custom-tis-function-path`, and without one after truncated importance sampling.

    Args:
        pg_loss, train_log_probs: flat over this rank's response tokens.

    Returns:
        (loss, masks of whole responses, which a user's function may have edited in place, {name: metric per token}).
    """
    path, flag = args.custom_tis_function_path, "--custom-tis-function-path"
    rollout = batch.flat("rollout_log_probs", correction_flag(args))
    stream = batch.stream
    arguments = {
        "args": args,
        "pg_loss": pg_loss,
        "train_log_probs": stream.split(train_log_probs.detach()),
        "rollout_log_probs": stream.split(rollout),
        "loss_masks": batch["loss_masks"],
        "total_lengths": batch["total_lengths"],
        "response_lengths": batch["response_lengths"],
        "cp": stream.cp,
        "step_statistics": batch.get("step_statistics"),
    }
    if path is None:
        return vanilla_tis_function(**arguments)
    # An edit of these in place is a rejection like new masks.
    arguments["loss_masks"] = copied_masks(batch["loss_masks"])
    # These may be those that the KL and the metrics are made of after it.
    arguments["train_log_probs"] = stream.split(train_log_probs.detach().clone())
    result = _call(flag, path, batch, load_function(path, flag=flag), **arguments)
    return _checked_correction(f"{flag} {path}", result, pg_loss, batch)


def policy_gradient_reducer(
    args: argparse.Namespace, batch: MicroBatch, loss_masks: Sequence[torch.Tensor]
) -> Reducer | None:
    """The reducer that `--custom-pg-loss-reducer-function-path` makes for the policy-gradient term; None without the flag.

    It is called as `fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss[, rollout_mask_sums])` and returns
    a function from a flat tensor over this rank's response tokens to a scalar. The result is divided by what the default's
    would be: the rollouts of the step, or its trained tokens. With context parallelism the tensor holds this rank's part of
    each response, while `loss_masks` are whole: `slime.backends.megatron_utils.cp_utils.slice_log_prob_with_cp` cuts them.

    The constant length of "Dr. GRPO" (arXiv 2503.20783), which keeps long wrong answers as expensive per token as short ones:

        def constant_length(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
            masks = [slice_log_prob_with_cp(*row) for row in zip(loss_masks, total_lengths, response_lengths)]
            return lambda per_token: (per_token * torch.cat(masks)).sum() / 8192

    with --disable-grpo-std-normalization, and the longest response (or any other constant) in place of 8192.
    """
    path, flag = args.custom_pg_loss_reducer_function_path, "--custom-pg-loss-reducer-function-path"
    if path is None:
        return None
    make = load_function(path, flag=flag)
    arguments = [
        batch["total_lengths"],
        batch["response_lengths"],
        copied_masks(loss_masks),
        args.calculate_per_token_loss,
    ]
    sums = accepted_keywords(make, {"rollout_mask_sums": batch.get("rollout_mask_sums")})
    reduce = _call(flag, path, batch, make, *arguments, **sums)
    if not callable(reduce):
        raise UserError(f"{flag} {path} returned {_kind(reduce)}; expected a function of a flat tensor")

    def checked(values: torch.Tensor) -> torch.Tensor:
        result = _call(flag, path, batch, reduce, values)
        if not torch.is_tensor(result) or result.numel() != 1:
            shown = tuple(result.shape) if torch.is_tensor(result) else result
            raise UserError(
                f"{flag} {path}: its reducer returned {shown} for {len(values)} tokens; expected a scalar tensor"
            )
        return result.reshape(())

    return checked


def _call(flag: str, path: str, batch: MicroBatch, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """What a function of the user's returns; what it raises becomes an error that names flag, path and samples."""
    with calling_user_code(flag, path, f"samples {batch.get('sample_indices')}"):
        return function(*given, **named)


def copied_masks(masks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Masks that a user's function may edit in place: the rank's data stay as they are."""
    return list(torch.cat(list(masks)).split([len(mask) for mask in masks])) if len(masks) else []


def _checked_correction(where: str, result: Any, pg_loss: torch.Tensor, batch: MicroBatch) -> Correction:
    expected = "expected (pg_loss, modified_masks, {name: tensor per token})"
    if not (isinstance(result, tuple) and len(result) == 3):
        raise UserError(f"{where} returned {_kind(result)}; {expected}")
    loss, masks, metrics = result
    if not torch.is_tensor(loss) or loss.shape != pg_loss.shape:
        raise UserError(f"{where} returned {_kind(loss)} as pg_loss; expected one of shape {tuple(pg_loss.shape)}")
    lengths = [len(mask) for mask in masks] if isinstance(masks, list | tuple) else None
    if lengths != list(batch["response_lengths"]) or not all(map(torch.is_tensor, masks)):
        raise UserError(
            f"{where} returned masks of lengths {lengths}; expected one tensor per sample, as long as its whole response: "
            f"{list(batch['response_lengths'])}"
        )
    is_dict = isinstance(metrics, dict)
    wrong = [name for name, m in metrics.items() if getattr(m, "shape", None) != pg_loss.shape] if is_dict else ["…"]
    if wrong:
        raise UserError(
            f"{where} returned {_kind(metrics)} as metrics, {', '.join(map(str, wrong))} not of shape "
            f"{tuple(pg_loss.shape)}; expected one value per token, flat like pg_loss"
        )
    return loss, list(masks), metrics


def _kind(value: Any) -> str:
    if torch.is_tensor(value):
        return f"Tensor {tuple(value.shape)}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


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
    full_log_probs: PerToken,
    full_old_log_probs: PerToken,
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
