"""From sums per micro-batch and rank to the one number that is reported, the same for every parallel layout."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.utils.errors import UserError
from slime.utils.packed_sample import as_loss_mask


def step_denominator(
    loss_masks: Sequence[torch.Tensor], global_batch_size: int, per_token: bool, data_group: dist.ProcessGroup
) -> float:
    """What the sums of an optimizer step are divided by: its rollouts, or its trained tokens over all ranks (at least 1).

    Args:
        loss_masks: masks of this rank's samples of the step; with context parallelism of the tokens that it owns.
        data_group: data- and context-parallel ranks.
    """
    if not per_token:
        return float(global_batch_size)
    tokens = torch.tensor([sum(int(mask.sum()) for mask in loss_masks)], dtype=torch.float64)
    return max(float(all_reduce_sum(tokens, data_group)[0]), 1.0)


def refresh_mask_sums(rollout_data: dict[str, Any], data_group: dist.ProcessGroup) -> None:
    """Compute `rollout_mask_sums` again, after masks were edited: trained tokens per execution, over all ranks.

    Masks that are lists or arrays become tensors. Collective over `data_group`.

    Raises:
        UserError: on any rank a mask holds something else than 1 and 0, is no row of numbers or of another length than its
            response, or there are more or fewer masks than samples; on all ranks.
    """
    local, failure = [], None
    try:
        rollout_data["loss_masks"] = _checked_masks(rollout_data)
        sums = (int(mask.sum()) for mask in rollout_data["loss_masks"])
        local = list(zip(rollout_data["rollout_ids"], sums, strict=True))
    except UserError as error:
        failure = str(error)
    gathered: list[Any] = [None] * dist.get_world_size(data_group)
    dist.all_gather_object(gathered, (local, failure), group=data_group)
    for _, message in gathered:
        if message is not None:
            raise UserError(message)
    totals: dict[int, int] = {}
    for rollout_id, mask_sum in (pair for part, _ in gathered for pair in part):
        totals[rollout_id] = totals.get(rollout_id, 0) + mask_sum
    rollout_data["rollout_mask_sums"] = [float(totals[rollout_id]) for rollout_id in rollout_data["rollout_ids"]]


def _checked_masks(rollout_data: dict[str, Any]) -> list[torch.Tensor]:
    flag = "--rollout-data-postprocess-path"
    masks, samples = rollout_data.get("loss_masks"), rollout_data["sample_indices"]
    if not isinstance(masks, Sequence) or len(masks) != len(samples):
        found = f"{len(masks)} masks" if isinstance(masks, Sequence) else type(masks).__name__
        raise UserError(f"{flag}: `loss_masks` must be a list of one mask per sample, {len(samples)} here, not {found}")
    rows = zip(samples, masks, rollout_data["response_lengths"], strict=True)
    return [_checked_mask(f"{flag}: sample {sample}: `loss_masks`", mask, length) for sample, mask, length in rows]


def _checked_mask(name: str, mask: Any, length: int) -> torch.Tensor:
    try:
        given = torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{name} is no row of numbers ({error})") from error
    if given.shape != (length,):
        raise UserError(f"{name} has the shape {list(given.shape)}; the response has {length} tokens")
    as_loss_mask(given.detach().cpu(), name)
    return given


def reduce_metrics(
    sums: Sequence[dict[str, torch.Tensor]], denominator: float, data_group: dist.ProcessGroup
) -> dict[str, float]:
    """Sum `sums` (one dict per micro-batch) over micro-batches and ranks, and divide.

    What a micro-batch does not name adds nothing: a function of the user's may report a metric for some of them only.
    Collective over `data_group`.
    """
    named: list[Any] = [None] * dist.get_world_size(data_group)
    dist.all_gather_object(named, {name for metrics in sums for name in metrics}, group=data_group)
    names = sorted(set().union(*named))
    local = [sum(float(metrics[name]) for metrics in sums if name in metrics) for name in names]
    total = all_reduce_sum(torch.tensor(local, dtype=torch.float64), data_group) / denominator
    return dict(zip(names, total.tolist(), strict=True))


def mean_of_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of optimizer steps that share one number: each is the mean over the steps that have it."""
    if len(steps) == 1:
        return steps[0]
    names = dict.fromkeys(name for metrics in steps for name in metrics)
    values = {name: [metrics[name] for metrics in steps if name in metrics] for name in names}
    return {name: statistics.fmean(of_name) for name, of_name in values.items()}


def all_reduce_sum(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`values` summed over the ranks of `group`, on the device that the group's backend needs."""
    return _all_reduce(values, group, dist.ReduceOp.SUM)


def all_reduce_max(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The elementwise maximum of `values` over the ranks of `group`."""
    return _all_reduce(values, group, dist.ReduceOp.MAX)


def _all_reduce(values: torch.Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
    values = values.cuda() if dist.get_backend(group) == "nccl" else values.cpu()
    dist.all_reduce(values, operation, group=group)
    return values.cpu()
