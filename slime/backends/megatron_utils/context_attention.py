"""Core attention of a context-parallel rank: keys and values of all ranks are gathered, queries stay where they are.

A rank's rows are pieces of sequences (`Segment`), each of which attends to its sequence from the start up to itself. The
gather is one collective per layer; in the backward pass the ranks' gradients are summed and each keeps its own rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from slime.training.context_parallel import gather_rows
from slime.training.packed_stream import PackedStream

# Queries of one call on CPU: their mask over all keys exists as a tensor.
_CPU_QUERIES = 512


@dataclass
class StreamParams(PackedSeqParams):
    """Megatron's description of a packed stream, with the stream itself for our own attention and rotary embedding."""

    stream: PackedStream | None = None


def packed_seq_params(stream: PackedStream) -> StreamParams:
    """What the model is told about `stream`.

    The zigzag layout is Megatron's own for packed sequences ("thd"), whose rotary embedding finds the positions from the
    lengths of whole sequences. It has no contiguous one. Any other format name makes it rotate row by row, by the
    frequencies that `rotary.rotate_by_position` then provides.
    """
    longest = max(stream.sequence_lengths)
    return StreamParams(
        qkv_format="contiguous" if stream.cp.all_gather else "thd",
        cu_seqlens_q=stream.cu_seqlens,
        cu_seqlens_kv=stream.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        stream=stream,
    )


def is_context_parallel(packed: PackedSeqParams | None) -> bool:
    """Whether the rank holds only a part of the stream."""
    stream = getattr(packed, "stream", None)
    return stream is not None and stream.cp.size > 1


def attend_over_context(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stream: PackedStream, scale: float
) -> torch.Tensor:
    """Causal attention within each sequence of the whole stream, for the rows of this rank. Collective.

    Args:
        query: [T, heads, dim]; key, value: [T, groups, dim], rotated, of this rank's rows.

    Returns:
        [T, heads · dim]
    """
    key_width = key.shape[-1]
    gathered = gather_rows(torch.cat([key, value], dim=-1), stream.cp, stream.gather_order)
    key, value = gathered[..., :key_width], gathered[..., key_width:]
    # The variable-length kernel exists for 16-bit types only.
    if query.is_cuda and query.dtype != torch.float32:
        return _attend_cuda(query, key, value, stream, scale)
    return _attend_each_segment(query, key, value, stream, scale)


def _attend_cuda(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stream: PackedStream, scale: float
) -> torch.Tensor:
    """One call of the kernel, for which every segment is a sequence with fewer queries than keys.

    Its causal mask then is aligned at the end: the last query sees all keys.
    """
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        query.contiguous(),
        key.index_select(0, stream.segment_keys),
        value.index_select(0, stream.segment_keys),
        stream.query_boundaries,
        stream.key_boundaries,
        max(s.queries for s in stream.segments),
        max(s.keys for s in stream.segments),
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=True,
    )
    return output.flatten(1)


def _attend_each_segment(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stream: PackedStream, scale: float
) -> torch.Tensor:
    # One split per tensor: the gradient of a slice is as long as what it was cut from.
    query_pieces = query.transpose(0, 1).split([s.queries for s in stream.segments], dim=1)
    key_pieces, value_pieces = (_by_sequence(tensor, stream) for tensor in (key, value))
    outputs = []
    for segment, piece in zip(stream.segments, query_pieces, strict=True):
        keys, values = key_pieces[segment.first_key], value_pieces[segment.first_key]
        outputs += _attend_in_blocks(piece, keys, values, segment.keys, scale)
    return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)


def _by_sequence(tensor: torch.Tensor, stream: PackedStream) -> dict[int, torch.Tensor]:
    """[groups, length, dim] of every sequence of the stream, under its first row."""
    pieces = tensor.transpose(0, 1).split(stream.sequence_lengths, dim=1)
    starts = [0, *itertools.accumulate(stream.sequence_lengths)]
    return dict(zip(starts, pieces, strict=False))


def _attend_in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: int, scale: float
) -> Iterator[torch.Tensor]:
    """Queries [heads, n, dim], the last of which sees the first `keys` keys, in blocks that bound the size of a mask."""
    first_key_count = keys - query.shape[1]
    for start in range(0, query.shape[1], _CPU_QUERIES):
        block = query[:, start : start + _CPU_QUERIES]
        rows = block.shape[1]
        before = first_key_count + start
        seen = before + rows
        visible = torch.ones(rows, seen, dtype=torch.bool, device=query.device).tril(before)
        yield F.scaled_dot_product_attention(
            block[None], key[None, :, :seen], value[None, :, :seen], attn_mask=visible, enable_gqa=True, scale=scale
        )[0]
