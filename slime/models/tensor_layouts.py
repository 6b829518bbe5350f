"""How one Megatron parameter corresponds to Hugging Face tensors, and how it is cut over tensor-parallel ranks.

A layout does three things with a kind of parameter.
- `part` makes a rank's part from the HF tensors, and reads only those rows of them that are in it.
- `gather` makes the whole Megatron parameter, the one that a single rank would hold, from the parts of all ranks.
- `split` makes the HF tensors from that. After `gather` it is the exact inverse of `part`.

Values are only moved, never computed. Families are read before there is any tensor (for `--help`), so this file does not import
torch before it moves one.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from slime.utils.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class TensorSizes:
    """The sizes of a model that the layouts need."""

    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    padded_vocab_size: int
    # For linear attention, the indexer of sparse attention, and the rotated channels of latent attention; 0 in other models.
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    dsa_indexer_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> TensorSizes:
        """The sizes of the model that `flags` describe. They may lack `padded_vocab_size` if no tensor is padded."""
        heads = flags["num_attention_heads"]
        groups = flags.get("num_query_groups") if flags.get("group_query_attention", True) else None
        optional = [field.name for field in dataclasses.fields(cls) if field.default == 0]
        return cls(
            num_attention_heads=heads,
            num_query_groups=groups or heads,
            vocab_size=flags["vocab_size"],
            padded_vocab_size=flags.get("padded_vocab_size", 0),
            **{name: flags.get(name) or 0 for name in optional},
        )


class Stored(Protocol):
    """A tensor, or one that is still in a file, of which only the indexed part is read."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor: ...


class Layout(Protocol):
    """One kind of parameter; see the module's docstring."""

    # Whether tensor-parallel ranks hold different parts.
    sharded: bool
    # Whether `split` moves columns as well as rows.
    moves_columns: bool

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        """The part of the parameter that tensor-parallel rank `rank` of `size` holds.

        Raises:
            UserError: the tensors contradict a flag.
        """
        ...

    def parts(self, tensors: Sequence[Stored], sizes: TensorSizes) -> Sequence[torch.Tensor]:
        """The whole parameter, as pieces along its rows: so rows that only change their place need not be copied."""
        ...

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        """The HF tensors of the whole parameter."""
        ...

    def gather(self, shards: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """The whole parameter from the parts of all ranks: one tensor each, or one [ranks, …], whose memory may be shared."""
        ...


class Replicated:
    """One HF tensor, whole on every rank (norms)."""

    sharded = False
    moves_columns = False

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        (tensor,) = tensors
        return tensor[:]

    def parts(self, tensors: Sequence[Stored], sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return [self.part(tensors, sizes, 0, 1)]

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return (whole,)

    def gather(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        return shards[0]


class IndexerHeads(Replicated):
    """One HF tensor, whole on every rank, with the rows of the indexer's heads. In each head the rotated channels stand first
    in the HF tensor, and last in Megatron's."""

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        (tensor,) = tensors
        return self._swapped(tensor[:], sizes, sizes.qk_pos_emb_head_dim)

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return (self._swapped(whole, sizes, sizes.dsa_indexer_head_dim - sizes.qk_pos_emb_head_dim),)

    def _swapped(self, tensor: torch.Tensor, sizes: TensorSizes, first: int) -> torch.Tensor:
        heads = tensor.unflatten(0, (-1, sizes.dsa_indexer_head_dim))
        return _joined((heads[:, first:], heads[:, :first]), dim=1).flatten(0, 1)


class Sharded(Replicated):
    """One HF tensor, cut along `dim`: 0 for column-parallel, 1 for row-parallel layers."""

    sharded = True

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        (tensor,) = tensors
        own = _own(tensor.shape[self.dim], rank, size)
        return tensor[own] if self.dim == 0 else tensor[:, own]

    def gather(self, shards: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        # The parts are rows that lie end to end in memory already.
        if self.dim == 0 and not isinstance(shards, list | tuple):
            return shards.flatten(0, 1)
        return _joined(shards, dim=self.dim)


class SwappedInputs(Sharded):
    """One HF tensor, cut along the rows, whose left and right halves of columns are exchanged."""

    moves_columns = True

    def __init__(self) -> None:
        super().__init__(dim=0)

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        rows = super().part(tensors, sizes, rank, size)
        return rows.roll(rows.shape[1] // 2, dims=1)

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return (whole.roll(whole.shape[1] // 2, dims=1),)


class Vocabulary(Sharded):
    """Embedding or output rows: padded with zero rows to the padded vocabulary, cut along the rows."""

    def __init__(self) -> None:
        super().__init__(dim=0)

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        return _joined(self._rows(tensors, sizes, rank, size))

    def parts(self, tensors: Sequence[Stored], sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return self._rows(tensors, sizes, 0, 1)

    def _rows(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> Sequence[torch.Tensor]:
        (tensor,) = tensors
        if tensor.shape[0] != sizes.vocab_size:
            raise UserError(
                f"--vocab-size {sizes.vocab_size} does not fit the checkpoint: its embedding has {tensor.shape[0]} rows"
            )
        own = _own(sizes.padded_vocab_size, rank, size)
        # The last ranks may hold nothing but padding.
        rows = tensor[min(own.start, sizes.vocab_size) : min(own.stop, sizes.vocab_size)]
        return rows, rows.new_zeros(own.stop - own.start - rows.shape[0], *rows.shape[1:])

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return (whole[: sizes.vocab_size],)


# Consecutive rows of an HF tensor: the number of the tensor, the first row, and how many rows there are.
Piece = tuple[int, int, int]


class _Interleaved(Sharded, abc.ABC):
    """One Megatron parameter with the rows of several HF tensors in another order; a rank holds consecutive rows of it."""

    def __init__(self) -> None:
        super().__init__(dim=0)

    @abc.abstractmethod
    def _pieces(self, rows: Sequence[int], sizes: TensorSizes) -> Iterator[Piece]:
        """The HF rows in Megatron's order.

        Args:
            rows: how many rows each HF tensor has.

        Raises:
            UserError: the numbers of rows contradict a flag.
        """

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        return _joined(self._rows(tensors, sizes, rank, size))

    def parts(self, tensors: Sequence[Stored], sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return self._rows(tensors, sizes, 0, 1)

    def _rows(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> Sequence[torch.Tensor]:
        rows = [tensor.shape[0] for tensor in tensors]
        own = _own(sum(rows), rank, size)
        pieces, start = [], 0
        for tensor, begin, count in self._pieces(rows, sizes):
            # A rank may have only a part of a piece, if there are more ranks than groups of rows.
            first, last = max(own.start - start, 0), min(own.stop - start, count)
            if first < last:
                pieces.append(tensors[tensor][begin + first : begin + last])
            start += count
        return pieces


class QueryKeyValue(_Interleaved):
    """HF query, key and value rows; in Megatron's fused layer each query group's rows stand together as
    [its query heads, its key head, its value head]. Weights and biases alike."""

    # How many heads of rows the HF query tensor has for each query head.
    heads_per_query = 1

    def _pieces(self, rows: Sequence[int], sizes: TensorSizes) -> Iterator[Piece]:
        groups = sizes.num_query_groups
        if any(count % groups for count in rows):
            raise UserError(
                f"--num-query-groups {groups} does not divide the checkpoint's rows of query, key and value: {list(rows)}"
            )
        for group in range(groups):
            yield from self._queries(group, rows[0] // groups, sizes)
            for tensor in range(1, len(rows)):
                count = rows[tensor] // groups
                yield tensor, group * count, count

    def _queries(self, group: int, count: int, sizes: TensorSizes) -> Iterator[Piece]:
        yield 0, group * count, count

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        queries = self.heads_per_query * sizes.num_attention_heads // sizes.num_query_groups
        groups = whole.unflatten(0, (sizes.num_query_groups, queries + 2, -1))
        parts = (self._in_hf_order(groups[:, :queries]), groups[:, queries], groups[:, queries + 1])
        return tuple(part.reshape(-1, *whole.shape[1:]) for part in parts)

    def _in_hf_order(self, queries: torch.Tensor) -> torch.Tensor:
        return queries


class GatedQueryKeyValue(QueryKeyValue):
    """`QueryKeyValue` for attention whose output is gated. HF has [query, gate] for every head; Megatron has, for every group,
    all its queries, then all its gates."""

    heads_per_query = 2

    def _queries(self, group: int, count: int, sizes: TensorSizes) -> Iterator[Piece]:
        heads = 2 * sizes.num_attention_heads // sizes.num_query_groups
        for first in (0, 1):
            for head in range(first, heads, 2):
                yield 0, group * count + head * (count // heads), count // heads

    def _in_hf_order(self, queries: torch.Tensor) -> torch.Tensor:
        return queries.unflatten(1, (2, -1)).transpose(1, 2)


class PerKeyHead(_Interleaved):
    """The input projections of a linear-attention layer. In Megatron the rows of each key head stand together, in HF's order.

    Args:
        tensors: what each HF tensor consists of. Each string stands for rows of all key heads in turn, and each of its letters
            for rows of one head: `k` is as wide as a key, `v` as the values of a key head, `h` has one row per value head. So
            ("k", "v") has the keys of all heads, then the values of all; ("kv",) has for every head its key and its values.
    """

    def __init__(self, *tensors: tuple[str, ...]) -> None:
        super().__init__()
        self.tensors = tensors

    def _widths(self, sizes: TensorSizes) -> list[list[int]]:
        values = sizes.linear_num_value_heads // sizes.linear_num_key_heads
        width = {"k": sizes.linear_key_head_dim, "v": values * sizes.linear_value_head_dim, "h": values}
        return [[sum(width[kind] for kind in block) for block in blocks] for blocks in self.tensors]

    def _pieces(self, rows: Sequence[int], sizes: TensorSizes) -> Iterator[Piece]:
        heads, widths = sizes.linear_num_key_heads, self._widths(sizes)
        expected = [heads * sum(blocks) for blocks in widths]
        if list(rows) != expected:
            raise UserError(
                f"the flags of linear attention (--linear-num-key-heads {heads} and others) ask for {expected} rows, and the "
                f"checkpoint has {list(rows)}"
            )
        for head in range(heads):
            for tensor, blocks in enumerate(widths):
                begin = 0
                for width in blocks:
                    yield tensor, begin + head * width, width
                    begin += heads * width

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        widths = self._widths(sizes)
        heads = whole.unflatten(0, (sizes.linear_num_key_heads, -1))
        blocks = iter(heads.split([width for blocks in widths for width in blocks], dim=1))
        return tuple(_joined([next(blocks).flatten(0, 1) for _ in tensor_blocks]) for tensor_blocks in widths)


class GatedLinear(Sharded):
    """HF gate and up rows, stacked as [gate; up]; each rank holds its part of gate, then its part of up."""

    def __init__(self) -> None:
        super().__init__(dim=0)

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        return _joined([tensor[_own(tensor.shape[0], rank, size)] for tensor in tensors])

    def parts(self, tensors: Sequence[Stored], sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return [tensor[:] for tensor in tensors]

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return whole.chunk(2)

    def gather(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return _joined(gates + ups)


class FusedGatedLinear(GatedLinear):
    """One HF tensor [gate; up]; each rank holds its part of gate, then its part of up."""

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        (tensor,) = tensors
        width = tensor.shape[0] // 2
        own = _own(width, rank, size)
        return _joined([tensor[own], tensor[width + own.start : width + own.stop]])

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return (whole,)


def _own(length: int, rank: int, size: int) -> slice:
    """The rows out of `length` that a rank holds. If they do not divide evenly, parts differ in size, and the model's
    parameters do not accept them."""
    return slice(length * rank // size, length * (rank + 1) // size)


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    import torch

    return torch.cat(tuple(tensors), dim=dim)
