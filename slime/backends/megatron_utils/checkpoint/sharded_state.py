"""What a checkpoint holds: a rank's share of model and optimizer, where further sets of weights lie, and the layout."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.checkpoint.api import CheckpointException

from slime.backends.megatron_utils.checkpoint.float32_weights import describe_copies
from slime.backends.megatron_utils.checkpoint.optimizer_state import optimizer_state, trained_parts
from slime.backends.megatron_utils.parameter_names import unwrap_model
from slime.backends.megatron_utils.parameter_selection import selection_of

_LAYOUT = (
    "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size",
)  # fmt: skip


def sharded_state(
    args: argparse.Namespace,
    model: list[torch.nn.Module],
    optimizer: Any | None,
    *,
    is_loading: bool,
    float32_prefix: str | None = None,
) -> dict[str, Any]:
    """This rank's share, as Megatron describes it for torch_dist: its chunks of the model, and the optimizer if it is given.

    Args:
        float32_prefix: what the names of the optimizer's float32 copies begin with, if they are all that is wanted of it.
    """
    memory_efficient = getattr(args, "distrib_optim_fully_reshardable_mem_efficient", False)
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": memory_efficient,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": replicas(),
    }
    state: dict[str, Any] = {
        key: unwrap_model(chunk).sharded_state_dict(metadata=metadata) for key, chunk in chunks_by_key(model).items()
    }
    if optimizer is not None:
        described = dict(state)
        if selection_of(args):
            # Megatron stacks the layers into one tensor, in which those that are not trained would be missing.
            metadata["non_homogeneous_layers"] = True
            described = {
                key: unwrap_model(chunk).sharded_state_dict(metadata=metadata)
                for key, chunk in chunks_by_key(model).items()
            }
        if float32_prefix is None:
            state["optimizer"] = optimizer_state(optimizer, described, is_loading=is_loading, metadata=metadata)
        else:
            parts = trained_parts(optimizer)
            state["float32_copies"] = describe_copies(
                parts, described, float32_prefix, is_loading=is_loading, on_one_rank=memory_efficient
            )
    return state


def chunks_by_key(model: list[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Where a rank's chunks stand in its state. On disk tensors go by their place in the model, whichever chunk has them."""
    return {"model" if len(model) == 1 else f"model{index}": chunk for index, chunk in enumerate(model)}


def directory_of_state(checkpoint: Path, name: str) -> Path:
    """Where the further set of weights `name` lies in a checkpoint."""
    return checkpoint / "states" / name


def replicas() -> dist.ProcessGroup:
    """The ranks that hold the same weights."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def layout_of(args: argparse.Namespace) -> dict[str, int]:
    """The parallel sizes with which the states of generators can be used again."""
    return {name: getattr(args, name) for name in _LAYOUT}


def describe(cause: BaseException) -> str:
    """An error of the writer in one line; of what torch gathered from several ranks the first, without its traceback."""
    if isinstance(cause, CheckpointException) and cause.failures:
        rank, (first, _) = next(iter(cause.failures.items()))
        return f"rank {rank}: {describe(first)}"
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"
