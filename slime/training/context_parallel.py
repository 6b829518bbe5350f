"""Sequences and responses cut over context-parallel ranks, and put together again.

Whatever layout the model's stream has, per-token results live in the zigzag layout of `slime.scheduling.zigzag`:
a rank holds, of every response, the tokens that its two chunks predict, in order. The ranks of a context-parallel group
have the same samples, so each call that gathers is made by all of them, also where a rank owns nothing. The gathers are
differentiable; all ranks of the group then have to run the backward pass through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from slime.scheduling.zigzag import chunk_size, local_response_length, response_ranges


@dataclass(frozen=True)
class ContextParallel:
    """This rank's place in its context-parallel group.

    `all_gather`: the model's stream is cut contiguously instead of in zigzag chunks.
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None
    all_gather: bool = False


NO_CONTEXT_PARALLEL = ContextParallel(size=1, rank=0, group=None)

# The place of this process, as its backend told it (`tell_place`).
_told = NO_CONTEXT_PARALLEL


def tell_place(cp: ContextParallel) -> None:
    """Say where this process stands, for functions of users that ask without knowing a backend. Ranks of Megatron need not:
    its own state tells their places."""
    global _told
    _told = cp


def told_place() -> ContextParallel:
    """What was told last; one rank alone, which owns everything, where nothing was."""
    return _told


def slice_with_cp(tokens: torch.Tensor, pad_value: float, cp: ContextParallel) -> torch.Tensor:
    """The rank's two chunks [2·c, …] of a whole sequence [T, …], padded behind its end with `pad_value`."""
    if cp.size == 1:
        return tokens
    size = chunk_size(len(tokens), cp.size)
    padding = tokens.new_full((2 * cp.size * size - len(tokens), *tokens.shape[1:]), pad_value)
    chunks = torch.cat([tokens, padding]).split(size) if size else (tokens,) * (2 * cp.size)
    return torch.cat([chunks[cp.rank], chunks[2 * cp.size - 1 - cp.rank]])


def slice_response(
    per_token: torch.Tensor | list, total_length: int, response_length: int, cp: ContextParallel
) -> torch.Tensor | list:
    """The rank's part of a full response: a tensor [response length, …] or a list, and the same type back.

    Raises:
        ValueError: `per_token` does not have one entry per response token.
    """
    _require_whole(per_token, response_length)
    if cp.size == 1:
        return per_token
    (start, end), (second_start, second_end) = response_ranges(total_length, response_length, cp.size, cp.rank)
    first, second = per_token[start:end], per_token[second_start:second_end]
    return torch.cat([first, second]) if isinstance(per_token, torch.Tensor) else [*first, *second]


def _require_whole(per_token: torch.Tensor | list, response_length: int) -> None:
    if len(per_token) != response_length:
        raise ValueError(f"{len(per_token)} values for a response of {response_length} tokens")


def slice_responses(
    column: Sequence[torch.Tensor | list],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    cp: ContextParallel,
) -> list:
    """`slice_response` of every sample; tensors in as many operations for any number of samples."""
    if cp.size == 1 or not len(column) or not all(isinstance(row, torch.Tensor) for row in column):
        return [slice_response(*row, cp) for row in zip(column, total_lengths, response_lengths, strict=True)]
    for row, response in zip(column, response_lengths, strict=True):
        _require_whole(row, response)
    places = _owned_places(total_lengths, response_lengths, cp)
    owned = torch.cat(list(column)).index_select(0, torch.cat(places).to(column[0].device, non_blocking=True))
    return list(owned.split([len(places_of_sample) for places_of_sample in places]))


def gather_response(local: torch.Tensor, total_length: int, response_length: int, cp: ContextParallel) -> torch.Tensor:
    """The full response [response length, …] on every rank, from the parts of all."""
    return gather_responses([local], [total_length], [response_length], cp)[0]


def gather_responses(
    local: Sequence[torch.Tensor], total_lengths: Sequence[int], response_lengths: Sequence[int], cp: ContextParallel
) -> list[torch.Tensor]:
    """`gather_response` of many samples in one collective: a sum over ranks, each of which has zeros for the others' parts.

    The gradient is the sum of what all ranks ask for. Either every rank's tensors need a gradient or none's.

    Raises:
        ValueError: a tensor does not have one entry per response token that the rank owns.
    """
    if cp.size == 1 or not local:
        return list(local)
    for part, total, response in zip(local, total_lengths, response_lengths, strict=True):
        owned = local_response_length(total, response, cp.size, cp.rank)
        if len(part) != owned:
            raise ValueError(
                f"context-parallel rank {cp.rank} of {cp.size} owns {owned} of the {response} response tokens in a "
                f"sequence of {total}, but has {len(part)} values"
            )
    whole = gather_flat_responses(torch.cat(list(local)), total_lengths, response_lengths, cp)
    return list(whole.split(list(response_lengths)))


def gather_flat_responses(
    local: torch.Tensor, total_lengths: Sequence[int], response_lengths: Sequence[int], cp: ContextParallel
) -> torch.Tensor:
    """`gather_responses` of parts that come concatenated over samples, and so are whole responses then."""
    if cp.size == 1:
        return local
    places = torch.cat([*_owned_places(total_lengths, response_lengths, cp), torch.empty(0, dtype=torch.int64)])
    spread = local.new_zeros(sum(response_lengths), *local.shape[1:])
    spread = spread.index_copy(0, places.to(local.device, non_blocking=True), local)
    return _SumOverRanks.apply(spread, cp.group)


def _owned_places(
    total_lengths: Sequence[int], response_lengths: Sequence[int], cp: ContextParallel
) -> list[torch.Tensor]:
    """Per sample where the tokens that the rank owns stand among the response tokens of all samples; int64, on the host."""
    places, begin = [], 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        ranges = response_ranges(total, response, cp.size, cp.rank)
        places.append(torch.cat([torch.arange(begin + start, begin + end) for start, end in ranges]))
        begin += response
    return places


def gather_rows(local: torch.Tensor, cp: ContextParallel, order: torch.Tensor | None = None) -> torch.Tensor:
    """The rows of all ranks [size · rows, …], rank after rank, or as the permutation `order` (int64) picks them from that.

    The gradient of a row, summed over all ranks, goes back to the rank that the row came from.
    """
    return local if cp.size == 1 else _GatherRows.apply(local, cp.group, order)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, group, order):
        ctx.group, ctx.order = group, order
        rows = local.new_empty(dist.get_world_size(group) * len(local), *local.shape[1:])
        dist.all_gather_into_tensor(rows, local.contiguous(), group=group)
        return rows if order is None else rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        if ctx.order is not None:
            gradient = torch.empty_like(gradient).index_copy_(0, ctx.order, gradient)
        local = gradient.new_empty(len(gradient) // dist.get_world_size(ctx.group), *gradient.shape[1:])
        dist.reduce_scatter_tensor(local, gradient.contiguous(), group=ctx.group)
        return local, None, None
