"""What one weight sync moves, and how long that takes at least over the given link."""

import argparse
from typing import Any

from slime.arguments.plan.engines import quantised_bytes, starts_engines, weight_bytes
from slime.arguments.plan.placement import placement_mode
from slime.arguments.plan.setup import read
from slime.arguments.plan.structure import SyncPlan
from slime.scheduling.model_shape import ModelShape
from slime.scheduling.serving_memory import served_bytes

_SHARED_HANDLES = "shared handles"


def plan_sync(args: argparse.Namespace, shape: ModelShape, hf_config: dict[str, Any] | None) -> SyncPlan | None:
    """Every engine receives every weight once; the receiving link is the bottleneck. None: nothing is pushed."""
    external = read(args, "rollout_external_engine_addrs", None)
    if not (args.has_trainer and (external or starts_engines(args))):
        return None
    plain = weight_bytes(args)
    total = served_bytes(shape, plain, quantised_bytes(args, hf_config, plain))
    gbps = read(args, "dry_run_link_gbps", 400.0)
    bucket = read(args, "update_weight_buffer_size", total)
    transport = _transport(args)
    shared = transport == _SHARED_HANDLES
    moves = not shared or _sharded(args)
    return SyncPlan(transport, total, -(-total // bucket), gbps, total * 8 / (gbps * 1e9) if moves else 0.0, shared)


def _sharded(args: argparse.Namespace) -> bool:
    """Whether no rank holds all weights."""
    if read(args, "train_backend", "megatron") != "megatron":
        return args.world_size > 1
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    return any(read(args, name, 1) > 1 for name in names)


def _transport(args: argparse.Namespace) -> str:
    if read(args, "update_weight_mode", "full") == "delta":
        return "disk, changed bytes only (at most)"
    if read(args, "update_weight_transport", "nccl") == "disk":
        return "disk"
    return _SHARED_HANDLES if placement_mode(args) == "colocated" else "process group"
