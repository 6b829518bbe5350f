"""Attention over packed streams, causal within each sequence, for fewer groups of keys than heads.

No row sees anything of another sequence. On CPU, and in float32, every sequence is a call of PyTorch's fused attention: its
result depends on nothing else in the stream, to the last bit, and no score matrix of the whole stream is ever made. On CUDA in
16 bits one variable-length kernel does the stream.

A context-parallel rank holds pieces of sequences (`Segment`), each of which attends to its sequence from the start up to
itself. Keys and values of all ranks are gathered, queries stay where they are. The gather is one collective per layer; in the
backward pass the ranks' gradients are summed and each keeps its own rows.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from slime.training.context_parallel import gather_rows
from slime.training.packed_stream import PackedStream

# Queries, keys and values of any number of sequences, the boundaries of the sequences' queries and keys, the largest numbers of
# both in one sequence, and `scale=`, to the output of each query, whose sequence's last one sees all of its keys.
Kernel = Callable[..., torch.Tensor]
# One key and one value for every group of heads, [groups, dim] each.
FirstKey = tuple[torch.Tensor, torch.Tensor]


def causal_varlen_attention() -> Kernel:
    """torch's kernel for sequences of any lengths, causal, for fewer groups of keys than heads."""
    from torch.nn.attention.varlen import varlen_attn

    return functools.partial(varlen_attn, window_size=(-1, 0), **_grouped(varlen_attn))


def flash_attention(module: str) -> Kernel:
    """The kernel of a package of flash attention, which has it in `module`.

    Raises:
        ImportError: the package is not there, or another than the one that is meant.
    """
    try:
        attend = importlib.import_module(module).flash_attn_varlen_func
    except AttributeError as error:
        raise ImportError(str(error)) from error
    return functools.partial(_attend_by_flash, attend)


def _attend_by_flash(
    attend: Callable[..., Any], *stream: torch.Tensor | int, scale: float, window_size: tuple[int, int] = (-1, -1)
) -> torch.Tensor:
    output = attend(*stream, softmax_scale=scale, causal=True, window_size=window_size)
    # Versions of flash-attn-3 give what the backward pass needs, too.
    return output[0] if isinstance(output, tuple) else output


@functools.cache
def _grouped(varlen_attn: Callable[..., torch.Tensor]) -> dict[str, bool]:
    """torch 2.11 shares keys without being asked, and 2.13 when it is."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def as_wide_as(wide: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with zeros up to the width of `wide`: the variable-length kernel knows one width."""
    missing = wide.shape[-1] - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


# Queries of one call on CPU: their mask over all keys exists as a tensor.
_CPU_QUERIES = 512


def attend_to_each_sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """Causal attention within each sequence of a stream that this rank has whole, without a variable-length kernel.

    Args:
        query: [T, heads, dim]; key, value: [T, groups, dim].
        lengths: of the sequences.

    Returns:
        [T, heads · dim of a value]
    """
    # Neighbours of one length are a batch. On a CPU it makes no difference to any of them, to the last bit.
    runs = [(length, len(list(run))) for length, run in itertools.groupby(lengths) if length]
    # One split for the whole stream: the gradient of a slice is as long as the stream, so slicing per run would make the
    # backward pass quadratic in the number of runs.
    pieces = (tensor.split([length * count for length, count in runs]) for tensor in (query, key, value))
    outputs = [
        causal_attention(*(piece.unflatten(0, (count, length)).transpose(1, 2) for piece in sequences), scale)
        .transpose(1, 2)
        .flatten(0, 1)
        for (length, count), *sequences in zip(runs, *pieces, strict=True)
    ]
    return torch.cat(outputs).flatten(1)


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """A batch of whole sequences: [count, heads, length, dim] with keys and values [count, groups, length, dim]."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=scale)


def attend_over_context(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stream: PackedStream,
    scale: float,
    chosen: torch.Tensor | None = None,
    first: FirstKey | None = None,
    kernel: Callable[[], Kernel] = causal_varlen_attention,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention within each sequence of the whole stream, for the rows of this rank. Collective.

    Args:
        query: [T, heads, dim]; key, value: [T, groups, dim], rotated, of this rank's rows.
        chosen: the keys that each row attends to, int32 [T, k], as places in its sequence, −1 for none; None: all that it sees.
        first: a key and a value that stand before every sequence and are seen by all of its rows, without `chosen`. Where the
            key has more channels than those of the stream, these have zeros there.
        kernel: gives what computes 16-bit types on CUDA.
        window: of how many keys a row sees the last, its own among them; not with `chosen` or `first`. None: all.

    Returns:
        [T, heads · dim of a value]
    """
    if stream.cp.size > 1:
        key_width = key.shape[-1]
        gathered = gather_rows(torch.cat([key, value], dim=-1), stream.cp, stream.gather_order)
        key, value = gathered[..., :key_width], gathered[..., key_width:]
    if first is not None:
        key = as_wide_as(query, key)
    # The variable-length kernel exists for 16-bit types only.
    if query.is_cuda and query.dtype != torch.float32 and chosen is None:
        return _attend_cuda(query, key, value, stream, scale, first, kernel(), window)
    return _attend_each_segment(query, key, value, stream, scale, chosen, first, window)


def _attend_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stream: PackedStream,
    scale: float,
    first: FirstKey | None,
    kernel: Kernel,
    window: int | None,
) -> torch.Tensor:
    """One call of the kernel, for which every segment is a sequence with fewer queries than keys.

    Its causal mask then is aligned at the end: the last query sees all keys.
    """
    width = value.shape[-1]
    rows, boundaries, most_keys = stream.segment_keys, stream.key_boundaries, max(s.keys for s in stream.segments)
    if first is not None:
        rows, boundaries, most_keys = *_each_behind(len(key), rows, boundaries), most_keys + 1
        key, value = (torch.cat([tensor, row[None]]) for tensor, row in zip((key, value), first, strict=True))
    seen = key, as_wide_as(key, value)
    if stream.cp.size > 1 or first is not None:
        seen = (tensor.index_select(0, rows) for tensor in seen)
    output = kernel(
        query.contiguous(),
        *(tensor.contiguous() for tensor in seen),
        stream.query_boundaries,
        boundaries,
        max(s.queries for s in stream.segments),
        most_keys,
        scale=scale,
        **({} if window is None else {"window_size": (window - 1, 0)}),
    )
    return output[..., :width].flatten(1)


def _each_behind(first: int, rows: torch.Tensor, boundaries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` with row `first` before those of every segment, and the segments' boundaries then."""
    numbers = torch.arange(len(boundaries), dtype=boundaries.dtype, device=boundaries.device)
    shifts = numbers[1:].repeat_interleave(boundaries.diff(), output_size=len(rows))
    behind = rows.new_full((len(rows) + len(boundaries) - 1,), first)
    places = torch.arange(len(rows), device=rows.device) + shifts
    return behind.index_copy_(0, places, rows), boundaries + numbers


def _attend_each_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stream: PackedStream,
    scale: float,
    chosen: torch.Tensor | None,
    first: FirstKey | None,
    window: int | None,
) -> torch.Tensor:
    # One split per tensor: the gradient of a slice is as long as what it was cut from.
    counts = [segment.queries for segment in stream.segments]
    query_pieces = query.transpose(0, 1).split(counts, dim=1)
    choices = [None] * len(counts) if chosen is None else chosen.split(counts)
    before = first or (None, None)
    key_pieces, value_pieces = (_by_sequence(*pair, stream) for pair in zip((key, value), before, strict=True))
    outputs = []
    for segment, piece, choice in zip(stream.segments, query_pieces, choices, strict=True):
        keys, values = key_pieces[segment.first_key], value_pieces[segment.first_key]
        seen = segment.keys + (first is not None)
        outputs += _attend_in_blocks(piece, keys, values, seen, scale, choice, window)
    return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)


def _by_sequence(tensor: torch.Tensor, first: torch.Tensor | None, stream: PackedStream) -> dict[int, torch.Tensor]:
    """[groups, length, dim] of every sequence of the stream, under its first row; a row longer where all begin with `first`."""
    pieces = tensor.transpose(0, 1).split(stream.sequence_lengths, dim=1)
    if first is not None:
        pieces = [torch.cat([first[:, None], piece], dim=1) for piece in pieces]
    starts = [0, *itertools.accumulate(stream.sequence_lengths)]
    return dict(zip(starts, pieces, strict=False))


def _attend_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: int,
    scale: float,
    chosen: torch.Tensor | None,
    window: int | None,
) -> Iterator[torch.Tensor]:
    """Queries [heads, n, dim], the last of which sees the first `keys` keys, in blocks that bound the size of a mask.

    Of `chosen`, [n, k], they see no others, and of all no more than the last `window`. Each block is computed once more in the
    backward pass: masks that are kept would take as many bytes as a score matrix of the whole stream.
    """
    attend = functools.partial(checkpoint, _attend_block, use_reentrant=False, preserve_rng_state=False)
    first_key_count = keys - query.shape[1]
    for start in range(0, query.shape[1], _CPU_QUERIES):
        block = query[:, start : start + _CPU_QUERIES]
        rows = block.shape[1]
        seen = first_key_count + start + rows
        choice = None if chosen is None else chosen[start : start + rows]
        unseen = 0 if window is None else max(0, seen - rows + 1 - window)
        yield attend(block, key[:, unseen:seen], value[:, unseen:seen], scale, choice, window)


def _attend_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    chosen: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor:
    """Queries [heads, n, dim], the last of which sees all of the keys [groups, seen, dim], but of `chosen`, [n, k], no others,
    and of all no more than the last `window`."""
    rows, seen = query.shape[1], key.shape[1]
    if chosen is None:
        visible = torch.ones(rows, seen, dtype=torch.bool, device=query.device).tril(seen - rows)
        if window is not None:
            visible = visible.triu(seen - rows + 1 - window)
    else:
        # A row sees all that it has chosen.
        visible = visible_keys(chosen, seen)
    return F.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=visible, enable_gqa=True, scale=scale
    )[0]


def visible_keys(chosen: torch.Tensor, keys: int) -> torch.Tensor:
    """For each row which of the first `keys` keys of its sequence it has chosen, bool [n, keys], from their places, int32
    [n, k], −1 for none."""
    # A column more is for what is no key.
    places = chosen.long()
    visible = torch.zeros(len(chosen), keys + 1, dtype=torch.bool, device=chosen.device)
    return visible.scatter_(1, places.where(places >= 0, keys), True)[:, :keys]
