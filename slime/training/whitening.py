"""Advantages brought to mean 0 and variance 1 over the trained tokens of all ranks (`--normalize-advantages`).

Invariants
- Every rank joins both collectives, whatever it holds: also one without tokens, also when no rank has any.
- Two passes in float64: the mean, then the squares of what is left. The one-pass E[x²] − E[x]² loses everything to
  rounding when the mean is large beside the spread, and its variance may come out negative.
- Statistics are gathered and added in rank order, so all ranks scale by the same bits.
- Equal values have nothing to scale by: zeros, exactly. So do none at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


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
    flat = torch.cat([tokens.float() for tokens in values]) if values else torch.zeros(0)
    mask = torch.cat([(mask != 0).to(flat.device) for mask in masks]) if masks else torch.zeros(0, dtype=torch.bool)
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
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    local = local.to(device)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local, group=group)
    return torch.stack(gathered).cpu()
