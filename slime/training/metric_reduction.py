"""From sums per micro-batch and rank to the one number that is reported, the same for every parallel layout.

`whiten` brings advantages to mean 0 and variance 1 over the trained tokens of all ranks (`--normalize-advantages`).

Invariants
- Every rank joins both collectives, whatever it holds: also one without tokens, also when no rank has any.
- Two passes in float64: the mean, then the squares of what is left. The one-pass E[x²] − E[x]² loses everything to
  rounding when the mean is large beside the spread, and its variance may come out negative.
- Statistics are gathered and added in rank order, so all ranks scale by the same bits.
- Equal values have nothing to scale by: zeros, exactly. So do none at all.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slime.utils.device import get_accelerator


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
    return max(float(all_reduce_sum(trained_tokens(loss_masks).double(), data_group)), 1.0)


def trained_tokens(loss_masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of all masks, a scalar on their device: whoever needs the number waits for it once."""
    return torch.cat(list(loss_masks)).sum() if len(loss_masks) else torch.zeros((), dtype=torch.int64)


def reduce_metrics(
    sums: Sequence[dict[str, torch.Tensor]], denominator: float, host_group: dist.ProcessGroup
) -> dict[str, float]:
    """Sum `sums` (one dict per micro-batch) over micro-batches and ranks, and divide.

    What a micro-batch does not name adds nothing: a function of the user's may report a metric for some of them only.

    Args:
        host_group: data- and context-parallel ranks, on the host: a device is waited for once, whatever there is to say.
            Collective.
    """
    local: collections.Counter[str] = collections.Counter()
    numbers = iter(joined([value for metrics in sums for value in metrics.values()]).tolist())
    for metrics in sums:
        local.update({name: next(numbers) for name in metrics})
    of_ranks: list[Any] = [None] * dist.get_world_size(host_group)
    dist.all_gather_object(of_ranks, dict(local), group=host_group)
    names = sorted(set().union(*of_ranks))
    return {name: sum(of_rank.get(name, 0.0) for of_rank in of_ranks) / denominator for name in names}


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The entries of all tensors one after the other, float64 without gradient; on the host only where all of them are."""
    devices = [tensor.device for tensor in tensors]
    device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    flat = [tensor.detach().to(device, torch.float64, non_blocking=True).flatten() for tensor in tensors]
    return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64)


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
    values = values.to(get_accelerator().group_device(group))
    dist.all_reduce(values, operation, group=group)
    return values.cpu()


@dataclass(frozen=True)
class Whitened:
    """`values`: float32, one tensor per sample; `is_empty`: no rank had a trained token, and all values are 0."""

    values: list[torch.Tensor]
    is_empty: bool


def whiten(
    values: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    process_group: dist.ProcessGroup | None = None,
    *,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> Whitened:
    """Whiten a rank's lists of values [R_i], with masks [R_i] cut in the same way; collective over `process_group`.

    `process_group` holds all ranks among which trained tokens are divided: data *and* context parallel. A rank may come
    with empty lists. The formula stands at `distributed_masked_whiten`. Raises ValueError if a mask differs in length.
    """
    lengths = [len(tokens) for tokens in values]
    if lengths != [len(mask) for mask in masks]:
        raise ValueError(
            f"values of lengths {lengths[:8]} with masks of lengths {[len(m) for m in masks][:8]}; "
            "under context parallelism masks are cut like the values"
        )
    flat = torch.cat(list(values)).float() if values else torch.zeros(0)
    mask = (torch.cat(list(masks)) != 0).to(flat.device) if masks else torch.zeros(0, dtype=torch.bool)
    whitened, count = _whiten(flat, mask, process_group, shift_mean, epsilon)
    return Whitened(list(whitened.split(lengths)) if values else [], is_empty=count == 0)


def distributed_masked_whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    process_group: dist.ProcessGroup | None = None,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> torch.Tensor:
    """(x − μ)·(σ² + epsilon)^(−1/2) for `values` of any shape, float32; `mask` of that shape is not 0 at what counts.

    μ and σ² run over what counts on all ranks of `process_group` (None: the default group, or this process alone when
    there is none), σ² with Bessel's correction from two values on. Masked values are moved and scaled like the others.
    Without `shift_mean` μ is added again. Zeros when nothing counts anywhere, or when all that counts is equal (then μ,
    without `shift_mean`). Collective. Raises ValueError if the shapes differ.
    """
    if values.shape != mask.shape:
        raise ValueError(f"a mask of the values' shape: got {tuple(mask.shape)} for {tuple(values.shape)}")
    return _whiten(values, (mask != 0).to(values.device), process_group, shift_mean, epsilon)[0]


@torch.no_grad()
def _whiten(
    values: torch.Tensor, mask: torch.Tensor, group: dist.ProcessGroup | None, shift_mean: bool, epsilon: float
) -> tuple[torch.Tensor, int]:
    # Not by an index, for which the host would wait until it knows how many there are.
    values = values.double()
    infinity = values.new_full((1,), torch.inf)
    smallest = torch.cat([torch.where(mask, values, torch.inf).flatten(), infinity]).amin()
    largest = torch.cat([torch.where(mask, values, -torch.inf).flatten(), -infinity]).amax()
    local = torch.stack([mask.sum().double(), torch.where(mask, values, 0.0).sum(), smallest, largest])
    counts, sums, smallest_of_ranks, largest_of_ranks = _from_all_ranks(local, group).unbind(1)
    count = int(counts.sum())
    mean = sums.sum() / max(count, 1)

    centered_squares = torch.where(mask, values - mean.to(values.device), 0.0).square().sum()
    variance = _from_all_ranks(centered_squares[None], group).sum() / max(count - 1, 1)

    if count == 0:
        return torch.zeros_like(values, dtype=torch.float32), 0
    if smallest_of_ranks.min() == largest_of_ranks.max():
        whitened = torch.zeros_like(values, dtype=torch.float64)
    else:
        whitened = (values - mean.item()) * torch.rsqrt(variance + epsilon).item()
    return (whitened if shift_mean else whitened + mean.item()).float(), count


def _from_all_ranks(local: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """float64 [ranks, n] on the CPU: `local` [n] of every rank."""
    if not dist.is_initialized():
        return local[None].cpu()
    local = local.to(get_accelerator().group_device(group))
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local, group=group)
    return torch.stack(gathered).cpu()
