"""How one Megatron parameter corresponds to Hugging Face tensors, and how it is cut over tensor-parallel ranks.

A layout knows three things about a kind of parameter. `part` makes a rank's part out of the HF tensors, and reads nothing of
them that is not in it. `gather` makes the whole Megatron parameter, the one that a single rank would hold, out of the parts of
all ranks, and `split` makes the HF tensors out of that: together the exact inverse. Only rows are moved, no number is computed.

Families are read before there is a tensor (`--help`), so that nothing here imports torch before it moves one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

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


class Stored(Protocol):
    """A tensor that may be in a file still: what is indexed is read. A tensor is one."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor: ...


class Layout(Protocol):
    """One kind of parameter; see the module's docstring."""

    # Whether tensor-parallel ranks hold different parts.
    sharded: bool

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        """What tensor-parallel rank `rank` of `size` holds.

        Raises:
            UserError: the tensors contradict a flag.
        """
        ...

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]: ...

    def gather(self, shards: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """The whole parameter from the part of every rank, or from all parts as one tensor [ranks, …], which it may share."""
        ...


class Replicated:
    """One HF tensor, whole on every rank (norms)."""

    sharded = False

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        (tensor,) = tensors
        return tensor[:]

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return (whole,)

    def gather(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        return shards[0]


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
        # Rows that lie end to end are the whole already.
        if self.dim == 0 and not isinstance(shards, list | tuple):
            return shards.flatten(0, 1)
        return _joined(shards, dim=self.dim)


class Vocabulary(Sharded):
    """Embedding or output rows: padded with zero rows to the padded vocabulary, cut along the rows."""

    def __init__(self) -> None:
        super().__init__(dim=0)

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        (tensor,) = tensors
        if tensor.shape[0] != sizes.vocab_size:
            raise UserError(
                f"--vocab-size {sizes.vocab_size} does not fit the checkpoint: its embedding has {tensor.shape[0]} rows"
            )
        own = _own(sizes.padded_vocab_size, rank, size)
        # The last ranks may hold padding alone.
        rows = tensor[min(own.start, sizes.vocab_size) : min(own.stop, sizes.vocab_size)]
        return _joined((rows, rows.new_zeros(own.stop - own.start - rows.shape[0], *rows.shape[1:])))

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return (whole[: sizes.vocab_size],)


class QueryKeyValue(Sharded):
    """HF query, key and value rows; in Megatron's fused layer each query group's rows stand together as
    [its query heads, its key head, its value head]. Weights and biases alike."""

    def __init__(self) -> None:
        super().__init__(dim=0)

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        groups = sizes.num_query_groups
        rows = [tensor.shape[0] for tensor in tensors]
        if any(count % groups for count in rows):
            raise UserError(
                f"--num-query-groups {groups} does not divide the checkpoint's rows of query, key and value: {rows}"
            )
        own = _own(sum(rows), rank, size)
        pieces, start = [], 0
        for group in range(groups):
            for tensor, count in zip(tensors, rows, strict=True):
                of_group = count // groups
                # Of more ranks than groups each has a part of one.
                first, last = max(own.start - start, 0), min(own.stop - start, of_group)
                if first < last:
                    pieces.append(tensor[group * of_group + first : group * of_group + last])
                start += of_group
        return _joined(pieces)

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        heads_per_group = sizes.num_attention_heads // sizes.num_query_groups
        groups = whole.unflatten(0, (sizes.num_query_groups, heads_per_group + 2, -1))
        parts = (groups[:, :heads_per_group], groups[:, heads_per_group], groups[:, heads_per_group + 1])
        return tuple(part.reshape(-1, *whole.shape[1:]) for part in parts)


class GatedLinear(Sharded):
    """HF gate and up rows, stacked as [gate; up]; each rank holds its part of gate, then its part of up."""

    def __init__(self) -> None:
        super().__init__(dim=0)

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        return _joined([tensor[_own(tensor.shape[0], rank, size)] for tensor in tensors])

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
    """The rows that a rank has of `length`; where they do not divide, parts differ, and do not fit the model's parameters."""
    return slice(length * rank // size, length * (rank + 1) // size)


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    import torch

    return torch.cat(tuple(tensors), dim=dim)
