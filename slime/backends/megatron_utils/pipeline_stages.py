"""Where this rank stands in the pipeline, and how the other stages hear what only one of them knows.

Losses, log-probs and everything that follows from them exist on the last stage; rank 0, which logs and talks to the
engines, is on the first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def is_last_stage() -> bool:
    """Whether logits come out on this rank (with virtual stages: out of its last model chunk)."""
    return parallel_state.is_pipeline_last_stage()


def broadcast_from_last_stage(value: Any) -> Any:
    """`value` of the last stage, on all stages. Collective over the pipeline group; small picklable things only."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    group = parallel_state.get_pipeline_model_parallel_group()
    box = [value]
    dist.broadcast_object_list(box, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return box[0]


def gather_from_stages(value: Any) -> list[Any]:
    """`value` of every stage, first to last, on all of them. Collective over the pipeline group; small things only."""
    size = parallel_state.get_pipeline_model_parallel_world_size()
    if size == 1:
        return [value]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, value, group=parallel_state.get_pipeline_model_parallel_group())
    return gathered


def broadcast_tensor(stage: int, tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """`tensor` of pipeline stage `stage`, on all stages; elsewhere `like` (a meta tensor does) tells shape and dtype.

    Collective over the pipeline group. The stage itself gets back what it gave.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return tensor
    group = parallel_state.get_pipeline_model_parallel_group()
    if tensor is None:
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    tensor = tensor.contiguous()
    dist.broadcast(tensor, src=dist.get_global_rank(group, stage), group=group)
    return tensor
