"""The float32 copies of 16-bit weights in a checkpoint that holds nothing else of an optimizer.

An optimizer without moments, such as a stateless Adam, has these copies all the same: updates are smaller than what 16 bits
resolve, so a run that made its copies of the 16-bit weights at every resume would lose them. They stand under the names that
they have in a whole optimizer's state, and can be read out of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

# Megatron's distributed optimizer has its own word for them. The first one is used for writing.
PREFIXES = ("optimizer.state.fp32_param", "optimizer.state.param")


def has_float32_copies(optimizer: MegatronOptimizer) -> bool:
    """Whether the optimizer updates copies of the weights, which have 16 bits."""
    return bool(optimizer.config.bf16 or optimizer.config.fp16)


def prefix_in(directory: Path) -> str | None:
    """What the copies' names begin with in the checkpoint in `directory`; None where it holds none.

    A run in float32 may have saved its weights themselves under such names.
    """
    names = dist_checkpointing.load_tensors_metadata(str(directory))
    return next((prefix for prefix in PREFIXES if any(name.startswith(f"{prefix}.") for name in names)), None)


def describe_copies(
    parts: list[MegatronOptimizer], model: dict[str, Any], prefix: str, *, is_loading: bool, on_one_rank: bool
) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    """The copies of this rank's weights, whole, for torch_dist. Collective over the ranks that hold the same weights.

    Args:
        parts: the optimizers of dense and of expert parameters.
        model: the chunks' descriptions, by which the weights are found.
        is_loading: the tensors are to be filled, and hold nothing yet.
        on_one_rank: of the data-parallel ranks of a distributed optimizer only the first describes any, and then writes all of
            them, unless they are loaded: every rank takes its part out of whole copies.
    """
    described, _ = extract_sharded_tensors_and_factories(model)
    by_weight = {id(sharded.data): sharded for sharded in nested_values(described)}
    copies = (pair for part in parts for pair in _whole_copies(part, is_loading, on_one_rank))
    return {
        index: make_sharded_optimizer_tensor(by_weight[id(weight)], copy, prefix)
        for index, (weight, copy) in enumerate(copies)
    }


@torch.no_grad()
def put_copies(parts: list[MegatronOptimizer], loaded: Mapping[int, torch.Tensor]) -> None:
    """Give the optimizers the copies that were loaded into what `describe_copies` gave."""
    own = {weight: copy for part in parts for weight, copy in _own_copies(part)}
    for index, weight in enumerate(weight for part in parts for weight in _weights(part)):
        if weight in own:
            first, copy = own[weight]
            copy.view(-1).copy_(loaded[index].reshape(-1)[first : first + copy.numel()])


def _whole_copies(
    part: MegatronOptimizer, is_loading: bool, on_one_rank: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(weight, copy) of all weights that the optimizer trains, in an order that its data-parallel ranks share."""
    own = dict(_own_copies(part))
    for weight in _weights(part):
        # The copies of a whole model have room in host memory alone.
        if is_loading:
            yield weight, torch.empty(weight.shape, dtype=torch.float32)
        elif isinstance(part, DistributedOptimizer):
            whole = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
            if weight in own:
                first, copy = own[weight]
                whole[first : first + copy.numel()] = copy.detach()
            # Each entry is one rank's. As integers, sums with 0 keep all bits: that of a negative zero too.
            dist.all_reduce(whole.view(torch.int32), group=part.data_parallel_group)
            if not on_one_rank or dist.get_rank(part.data_parallel_group) == 0:
                yield weight, whole.view(weight.shape).cpu()
        else:
            yield weight, own[weight][1].detach()


def _weights(part: MegatronOptimizer) -> list[torch.Tensor]:
    if isinstance(part, DistributedOptimizer):
        return [weight for buffer in part.buffers for weight in buffer.param_index_map]
    return [weight for weight, _ in _own_copies(part)]


def _own_copies(part: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, tuple[int, torch.Tensor]]]:
    """Per weight of which this rank updates something: the first entry that it updates, and its copy from there on."""
    if isinstance(part, DistributedOptimizer):
        buckets = [bucket for ranges in part.gbuf_ranges for of_type in ranges.values() for bucket in of_type]
        for bucket in buckets:
            for weight, ranges in bucket["param_map"].items():
                group, position = part.model_param_group_index_map[weight]
                yield weight, (ranges["param"].start, part.optimizer.param_groups[group]["params"][position])
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for weights, copies in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from ((weight, (0, copy)) for weight, copy in zip(weights, copies, strict=True))
