"""What one weight sync moves, and how long that takes at least over the given link."""

import argparse
from typing import Any

from slime.arguments.plan.engines import starts_engines, weight_bytes
from slime.arguments.plan.placement import placement_mode
from slime.arguments.plan.structure import SyncPlan
from slime.scheduling.model_shape import ModelShape
from slime.scheduling.serving_memory import served_bytes

_SHARED_HANDLES = "shared handles"


def plan_sync(args: argparse.Namespace, shape: ModelShape, hf_config: dict[str, Any] | None) -> SyncPlan | None:
    """Every engine receives every weight once; the receiving link is the bottleneck. None: nothing is pushed."""
    if not (args.has_trainer and (args.rollout_external_engine_addrs or starts_engines(args))):
        return None
    total = served_bytes(shape, weight_bytes(args, shape, hf_config))
    gbps, bucket = args.dry_run_link_gbps, args.update_weight_buffer_size
    transport = _transport(args)
    shared = transport == _SHARED_HANDLES
    moves = not shared or _sharded(args)
    return SyncPlan(transport, total, -(-total // bucket), gbps, total * 8 / (gbps * 1e9) if moves else 0.0, shared)


def _sharded(args: argparse.Namespace) -> bool:
    """Whether no rank holds all weights."""
    if args.train_backend != "megatron":
        return args.world_size > 1
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size)
    return max(sizes) > 1


def _transport(args: argparse.Namespace) -> str:
    if args.update_weight_mode == "delta":
        return "disk, changed bytes only (at most)"
    if args.update_weight_transport == "disk":
        return "disk"
    return _SHARED_HANDLES if placement_mode(args) == "colocated" else "process group"
