"""Triton kernels of Transformer Engine for the tokens of experts (`pytorch/triton/permutation.py`) in plain PyTorch.

A token has a row for each expert that its router chose for it; rows are sorted by expert, then by token. `row_id_map`, int32
[tokens, 2·experts + 1], has for each token its rows, from the last expert to the first; from column `experts` on the experts
that these are of; and in the last column the number of them.
"""

from __future__ import annotations

import torch


def make_row_id_map(routing_map: torch.Tensor, num_tokens: int, num_experts: int) -> torch.Tensor:
    """`routing_map` [tokens, experts] tells which experts each token has."""
    chosen = routing_map.bool()
    rows = chosen.T.flatten().cumsum(0).view(num_experts, num_tokens).T - 1
    found = torch.full((num_tokens, 2 * num_experts + 1), -1, dtype=torch.int32)
    for token, of_token in enumerate(chosen):
        experts = of_token.nonzero().flatten().flip(0)
        found[token, : len(experts)] = rows[token, experts].int()
        found[token, num_experts : num_experts + len(experts)] = experts.int()
        found[token, -1] = len(experts)
    return found


def _pairs(row_id_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token, expert and row, int64 each, of every choice."""
    width = row_id_map.shape[1] // 2
    tokens, columns = (torch.arange(width) < row_id_map[:, -1:]).nonzero(as_tuple=True)
    return tokens, row_id_map[tokens, width + columns].long(), row_id_map[tokens, columns].long()


def permute_with_mask_map(
    inp: torch.Tensor, row_id_map: torch.Tensor, probs: torch.Tensor | None, scale: torch.Tensor | None, num_tokens: int,
    num_experts: int, num_out_tokens: int, hidden_size: int, scale_hidden_dim: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """`inp` [tokens, width] by rows; scales of FP8 alike; and of `probs` [tokens, experts] that of each row."""
    tokens, experts, rows = _pairs(row_id_map)

    def by_row(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(num_out_tokens, *values.shape[1:]).index_copy(0, rows, values)

    return (
        by_row(inp[tokens]),
        None if scale is None else by_row(scale[tokens]),
        None if probs is None else by_row(probs[tokens, experts]),
    )


def unpermute_with_mask_map(
    inp: torch.Tensor, row_id_map: torch.Tensor, merging_probs: torch.Tensor | None, permuted_probs: torch.Tensor | None,
    num_tokens: int, num_experts: int, hidden_size: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """For each token the sum of its rows of `inp`, by weights [tokens, experts] if these are given; and numbers by row as
    [tokens, experts] with zeros."""
    tokens, experts, rows = _pairs(row_id_map)
    values = inp[rows].float()
    if merging_probs is not None:
        values = values * merging_probs[tokens, experts].float()[:, None]
    summed = torch.zeros(num_tokens, hidden_size).index_add(0, tokens, values).to(inp.dtype)
    if permuted_probs is None:
        return summed, None
    probs = permuted_probs.new_zeros(num_tokens, num_experts)
    probs[tokens, experts] = permuted_probs[rows]
    return summed, probs


def make_chunk_sort_map(
    split_sizes: torch.Tensor, sorted_indices: torch.Tensor, num_tokens: int, num_splits: int
) -> torch.Tensor:
    """Where each row goes, int32 [rows], when chunks of these sizes are put in the order `sorted_indices`."""
    chunks = torch.arange(num_tokens).split(split_sizes.tolist())
    order = torch.cat([chunks[index] for index in sorted_indices.tolist()])
    return order.argsort().int()


def sort_chunks_by_map(
    inp: torch.Tensor, row_id_map: torch.Tensor, probs: torch.Tensor | None, num_tokens: int, hidden_size: int,
    is_forward: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Put rows of `inp` [rows, width], and of `probs` [rows], where the map says, or take them back from there."""
    source = row_id_map.long()
    source = source.argsort() if is_forward else source
    return inp[source], None if probs is None else probs[source]
