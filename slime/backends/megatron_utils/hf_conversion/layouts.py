"""How one Megatron parameter corresponds to Hugging Face tensors, and how it is cut over tensor-parallel ranks.

A layout knows four things about a kind of parameter. `merge` and `split` translate between the HF tensors and the whole
Megatron parameter, the one that a single rank would hold; `shard` and `gather` translate between that and the parts of
the tensor-parallel ranks. Each pair is an exact inverse: only rows are moved, no number is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from slime.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes that the layouts need."""

    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    padded_vocab_size: int

    @classmethod
    def from_args(cls, args: Any) -> ModelShape:
        return cls(
            num_attention_heads=args.num_attention_heads,
            num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
            vocab_size=args.vocab_size,
            padded_vocab_size=args.padded_vocab_size,
        )


class Layout(Protocol):
    """One kind of parameter; see the module's docstring."""

    # Whether tensor-parallel ranks hold different parts.
    sharded: bool

    def merge(self, tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor: ...

    def split(self, whole: torch.Tensor, shape: ModelShape) -> Sequence[torch.Tensor]: ...

    def shard(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor: ...

    def gather(self, shards: Sequence[torch.Tensor]) -> torch.Tensor: ...


class Replicated:
    """One HF tensor, whole on every rank (norms)."""

    sharded = False

    def merge(self, tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
        (tensor,) = tensors
        return tensor

    def split(self, whole: torch.Tensor, shape: ModelShape) -> Sequence[torch.Tensor]:
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

    def gather(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tuple(shards), dim=self.dim)


class Vocabulary(Sharded):
    """Embedding or output rows: padded with zero rows to the padded vocabulary, cut along the rows."""

    def __init__(self) -> None:
        super().__init__(dim=0)

    def merge(self, tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
        (tensor,) = tensors
        if tensor.shape[0] != shape.vocab_size:
            raise UserError(
                f"--vocab-size {shape.vocab_size} does not fit the checkpoint: its embedding has {tensor.shape[0]} rows"
            )
        padding = tensor.new_zeros(shape.padded_vocab_size - shape.vocab_size, *tensor.shape[1:])
        return torch.cat((tensor, padding))

    def split(self, whole: torch.Tensor, shape: ModelShape) -> Sequence[torch.Tensor]:
        return (whole[: shape.vocab_size],)


class QueryKeyValue(Sharded):
    """HF query, key and value rows; in Megatron's fused layer each query group's rows stand together as
    [its query heads, its key head, its value head], and ranks hold whole groups. Weights and biases alike."""

    def __init__(self) -> None:
        super().__init__(dim=0)

    def merge(self, tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
        groups = shape.num_query_groups
        if any(tensor.shape[0] % groups for tensor in tensors):
            rows = [tensor.shape[0] for tensor in tensors]
            raise UserError(
                f"--num-query-groups {groups} does not divide the checkpoint's rows of query, key and value: {rows}"
            )
        per_group = [tensor.unflatten(0, (groups, -1)) for tensor in tensors]
        return torch.cat(per_group, dim=1).flatten(0, 1)

    def split(self, whole: torch.Tensor, shape: ModelShape) -> Sequence[torch.Tensor]:
        heads_per_group = shape.num_attention_heads // shape.num_query_groups
        groups = whole.unflatten(0, (shape.num_query_groups, heads_per_group + 2, -1))
        parts = (groups[:, :heads_per_group], groups[:, heads_per_group], groups[:, heads_per_group + 1])
        return tuple(part.reshape(-1, *whole.shape[1:]) for part in parts)


class GatedLinear(Sharded):
    """HF gate and up rows, stacked as [gate; up]; each rank holds its part of gate, then its part of up."""

    def __init__(self) -> None:
        super().__init__(dim=0)

    def merge(self, tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
        return torch.cat(tuple(tensors))

    def split(self, whole: torch.Tensor, shape: ModelShape) -> Sequence[torch.Tensor]:
        return whole.chunk(2)

    def shard(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])

    def gather(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat(gates + ups)
