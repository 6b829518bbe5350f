"""Masked importance sampling as a function for `--custom-tis-function-path`.

    --custom-tis-function-path examples/train_infer_mismatch_helper/mis.py:compute_mis_weights_with_cp
    --custom-config-path examples/train_infer_mismatch_helper/mis.yaml

The mathematics is in `slime.algorithms.mismatch`. Here it meets the trainer: log-probs are a context-parallel
rank's part of each response, so per-sequence sums are added over the ranks that share the sequence.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms.mismatch import (
    MisSettings,
    WeightedTokens,
    mean_weight,
    mis_metrics,
    normalised,
    sequence_extremes,
    sequence_sums,
    weight_sums,
    weight_tokens,
)
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel, gather_responses, slice_responses
from slime.utils.errors import UserError

Tensors = Sequence[torch.Tensor]

_NAMES = tuple(field.name for field in dataclasses.fields(MisSettings))
_PREFIXES = ("tis_", "rs_", "use_rs", "use_tis")


def compute_mis_weights_with_cp(
    *,
    args: argparse.Namespace,
    pg_loss: torch.Tensor,
    train_log_probs: Tensors,
    rollout_log_probs: Tensors,
    loss_masks: Tensors,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    cp: ContextParallel = NO_CONTEXT_PARALLEL,
    step_statistics: dict[str, torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """The loss times the weights, the masks without rejected tokens, and the metrics.

    Args:
        pg_loss: [N], flat over this rank's response tokens of all samples.
        train_log_probs, rollout_log_probs: per sample, this rank's part of the response.
        loss_masks: per sample, the whole response.
        step_statistics: sums over the optimizer step, needed with `tis_batch_normalize`.

    Returns:
        Loss [N]; masks of whole responses; metrics `mis_…`, each [N], to be reduced with `loss_masks` as they came in.
    """
    settings = mis_settings_from_args(args)
    local_masks = slice_responses(loss_masks, total_lengths, response_lengths, cp)
    weighted = _weigh(settings, train_log_probs, rollout_log_probs, local_masks, cp)
    if _normalises(settings):
        if step_statistics is None:
            raise UserError(
                "tis_batch_normalize needs statistics of the whole optimizer step, and none were handed over; "
                "set it to false where the function is called by other code than the trainer"
            )
        weighted = normalised(weighted, mean_weight(step_statistics["weight_sums"]))
    metrics = mis_metrics(weighted, _over_ranks(sequence_extremes(weighted), dist.ReduceOp.MIN, cp))

    ratios = weighted.ratios.to(pg_loss.dtype)
    # Where the weight is zero the loss may be infinite; their product must not be NaN.
    loss = (pg_loss * ratios).masked_fill(ratios == 0, 0.0)
    if not settings.use_rs:
        return loss, list(loss_masks), metrics
    kept = gather_responses(weighted.split(weighted.kept.float()), total_lengths, response_lengths, cp)
    return loss, [mask * kept_part.to(mask) for mask, kept_part in zip(loss_masks, kept, strict=True)], metrics


def mis_step_statistics(
    *,
    args: argparse.Namespace,
    train_log_probs: Tensors,
    rollout_log_probs: Tensors,
    loss_masks: Tensors,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    cp: ContextParallel,
) -> dict[str, torch.Tensor]:
    """This rank's share of what the mean weight of a step is made of; see `slime.training.step_statistics`."""
    local_masks = slice_responses(loss_masks, total_lengths, response_lengths, cp)
    weighted = _weigh(mis_settings_from_args(args), train_log_probs, rollout_log_probs, local_masks, cp)
    return {"weight_sums": weight_sums(weighted)}


def needs_mis_step_statistics(args: argparse.Namespace) -> bool:
    """Whether weights are divided by their mean."""
    return _normalises(mis_settings_from_args(args))


compute_mis_weights_with_cp.step_statistics = mis_step_statistics
compute_mis_weights_with_cp.needs_step_statistics = needs_mis_step_statistics


def mis_settings_from_args(args: argparse.Namespace) -> MisSettings:
    """The settings as far as `args` has them, where `--custom-config-path` has put them, else their defaults.

    Raises:
        UserError: a value that cannot be, or a key of the configuration file that is none but looks like one.
    """
    for key in args.custom_config:
        if key.startswith(_PREFIXES) and key not in _NAMES:
            near = difflib.get_close_matches(key, _NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_NAMES)}"
            raise UserError(f"masked importance sampling: unknown setting {key}; {hint}")
    return MisSettings(**{name: value for name, value in vars(args).items() if name in _NAMES})


def _weigh(
    settings: MisSettings,
    train_log_probs: Tensors,
    rollout_log_probs: Tensors,
    local_masks: Tensors,
    cp: ContextParallel,
) -> WeightedTokens:
    sums = sequence_sums(settings, train_log_probs, rollout_log_probs, local_masks)
    return weight_tokens(
        settings, train_log_probs, rollout_log_probs, local_masks, _over_ranks(sums, dist.ReduceOp.SUM, cp)
    )


def _normalises(settings: MisSettings) -> bool:
    return settings.use_tis and settings.tis_batch_normalize


def _over_ranks(per_sequence: torch.Tensor, operation: dist.ReduceOp, cp: ContextParallel) -> torch.Tensor:
    """[S, columns] of this rank's parts of the sequences to that of whole sequences."""
    if cp.size == 1 or per_sequence.numel() == 0:
        return per_sequence
    total = per_sequence.clone()
    dist.all_reduce(total, op=operation, group=cp.group)
    return total
