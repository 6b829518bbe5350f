"""How one Megatron parameter corresponds to Hugging Face tensors, and how it is cut over tensor-parallel ranks.

A layout knows four things about a kind of parameter. `merge` and `split` translate between the HF tensors and the whole
Megatron parameter, the one that a single rank would hold; `shard` and `gather` translate between that and the parts of
the tensor-parallel ranks. Each pair is an exact inverse: only rows are moved, no number is computed.

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


class Layout(Protocol):
    """One kind of parameter; see the module's docstring."""

    # Whether tensor-parallel ranks hold different parts.
    sharded: bool

    def merge(self, tensors: Sequence[torch.Tensor], sizes: TensorSizes) -> torch.Tensor: ...

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]: ...

    def shard(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor: ...

    def gather(self, shards: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """The whole parameter from the part of every rank, or from all parts as one tensor [ranks, …], which it may share."""
        ...


class Replicated:
    """One HF tensor, whole on every rank (norms)."""

    sharded = False

    def merge(self, tensors: Sequence[torch.Tensor], sizes: TensorSizes) -> torch.Tensor:
        (tensor,) = tensors
        return tensor

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return (whole,)

    def shard(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        return whole

    def gather(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        return shards[0]


class Sharded(Replicated):
    """One HF tensor, cut along `dim`: 0 for column-parallel, 1 for row-parallel layers."""

    sharded = True

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def shard(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        return whole.chunk(size, dim=self.dim)[rank]

    def gather(self, shards: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        # Rows that lie end to end are the whole already.
        if self.dim == 0 and not isinstance(shards, list | tuple):
            return shards.flatten(0, 1)
        return _joined(shards, dim=self.dim)


class Vocabulary(Sharded):
    """Embedding or output rows: padded with zero rows to the padded vocabulary, cut along the rows."""

    def __init__(self) -> None:
        super().__init__(dim=0)

    def merge(self, tensors: Sequence[torch.Tensor], sizes: TensorSizes) -> torch.Tensor:
        (tensor,) = tensors
        if tensor.shape[0] != sizes.vocab_size:
            raise UserError(
                f"--vocab-size {sizes.vocab_size} does not fit the checkpoint: its embedding has {tensor.shape[0]} rows"
            )
        padding = tensor.new_zeros(sizes.padded_vocab_size - sizes.vocab_size, *tensor.shape[1:])
        return _joined((tensor, padding))

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return (whole[: sizes.vocab_size],)


class QueryKeyValue(Sharded):
    """HF query, key and value rows; in Megatron's fused layer each query group's rows stand together as
    [its query heads, its key head, its value head], and ranks hold whole groups. Weights and biases alike."""

    def __init__(self) -> None:
        super().__init__(dim=0)

    def merge(self, tensors: Sequence[torch.Tensor], sizes: TensorSizes) -> torch.Tensor:
        groups = sizes.num_query_groups
        if any(tensor.shape[0] % groups for tensor in tensors):
            rows = [tensor.shape[0] for tensor in tensors]
            raise UserError(
                f"--num-query-groups {groups} does not divide the checkpoint's rows of query, key and value: {rows}"
            )
        per_group = [tensor.unflatten(0, (groups, -1)) for tensor in tensors]
        return _joined(per_group, dim=1).flatten(0, 1)

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        heads_per_group = sizes.num_attention_heads // sizes.num_query_groups
        groups = whole.unflatten(0, (sizes.num_query_groups, heads_per_group + 2, -1))
        parts = (groups[:, :heads_per_group], groups[:, heads_per_group], groups[:, heads_per_group + 1])
        return tuple(part.reshape(-1, *whole.shape[1:]) for part in parts)


class GatedLinear(Sharded):
    """HF gate and up rows, stacked as [gate; up]; each rank holds its part of gate, then its part of up."""

    def __init__(self) -> None:
        super().__init__(dim=0)

    def merge(self, tensors: Sequence[torch.Tensor], sizes: TensorSizes) -> torch.Tensor:
        return _joined(tensors)

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return whole.chunk(2)

    def shard(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        return _joined([half.chunk(size)[rank] for half in whole.chunk(2)])

    def gather(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return _joined(gates + ups)


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    import torch

    return torch.cat(tuple(tensors), dim=dim)
