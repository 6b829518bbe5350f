"""Metrics of a rollout's data as the trainer sees it, equal for every parallel layout."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms.reduction import masked_sum, sum_of_sample_mean
from slime.training.advantages import is_kl_known
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel, slice_responses
from slime.training.metric_reduction import all_reduce_sum, trained_tokens

_PER_TOKEN = (
    "log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs", "entropy", "values", "kl", "advantages",
    "returns", "opd_reverse_kl",
)  # fmt: skip
_PER_SAMPLE = ("rewards", "truncated", "response_lengths", "total_lengths")


def rollout_data_metrics(
    args: argparse.Namespace,
    rollout_data: dict[str, Any],
    data_group: dist.ProcessGroup,
    cp: ContextParallel = NO_CONTEXT_PARALLEL,
) -> dict[str, float]:
    """Means over the data of all ranks: per-token columns reduced like the loss, others averaged over samples. There is no
    `kl` where nobody computed one.

    Collective over `data_group`, which spans data- and context-parallel ranks; all of them must hold the same columns.
    """
    # Every token is counted by the one rank that owns it; a sample by each rank of its context-parallel group.
    masks = slice_responses(
        rollout_data["loss_masks"], rollout_data["total_lengths"], rollout_data["response_lengths"], cp
    )
    tokens_seen = [name for name in _PER_TOKEN if name in rollout_data]
    samples_seen = [name for name in _PER_SAMPLE if name in rollout_data]
    token_count = trained_tokens(masks)
    has_kl = is_kl_known(rollout_data) if "kl" in rollout_data else torch.zeros_like(token_count)
    of_tokens = [_reduce(args, rollout_data, name, masks) for name in tokens_seen]
    # One wait for the device, however many columns and samples there are.
    on_device = torch.stack(
        [value.to(token_count.device, torch.float64) for value in (*of_tokens, token_count, has_kl)]
    ).tolist()
    of_samples = [float(sum(rollout_data[name])) for name in samples_seen]
    local = torch.tensor([*on_device, *of_samples, len(masks)], dtype=torch.float64)
    total = all_reduce_sum(local, data_group).tolist()
    *of_tokens, token_count, ranks_with_kl = total[: len(on_device)]
    *of_samples, sample_count = total[len(on_device) :]
    rollouts = float(sum(rollout_data["global_batch_sizes"]))
    per_token = max(token_count if args.calculate_per_token_loss else rollouts, 1.0)
    metrics = {name: value / per_token for name, value in zip(tokens_seen, of_tokens, strict=True)}
    metrics |= {name: value / max(sample_count, 1.0) for name, value in zip(samples_seen, of_samples, strict=True)}
    if not ranks_with_kl:
        metrics.pop("kl", None)
    raw = rollout_data["raw_reward"]
    metrics["raw_reward"] = sum(raw) / max(len(raw), 1)
    return metrics


def _reduce(
    args: argparse.Namespace, rollout_data: dict[str, Any], name: str, masks: list[torch.Tensor]
) -> torch.Tensor:
    if args.calculate_per_token_loss:
        return masked_sum(rollout_data[name], masks)
    return sum_of_sample_mean(rollout_data[name], masks, rollout_data["rollout_mask_sums"])
