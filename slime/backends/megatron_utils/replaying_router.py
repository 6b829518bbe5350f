"""Routing replay of a Megatron model: its routers ask a `RoutingReplay` which experts to choose.

Megatron's router passes its attribute `router_replay` to the function that takes the top k, which asks it if it is set. The
objects put there are this trainer's own. Megatron's would keep one record per layer, although pipelines have several
micro-batches under way, and one list per process for all models.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from slime.training.rollout_data import MicroBatch
from slime.training.routing_replay import ExpertSource, RoutingReplay, experts_of_stream
from slime.utils.errors import UserError

_ATTRIBUTE = "routing_replay"


def attach_routing_replay(args: argparse.Namespace, model: Sequence[torch.nn.Module]) -> RoutingReplay:
    """Connect the routers of the decoder layers with a new `RoutingReplay`; without `--use-routing-replay` it has no layers.

    Layers of multi-token prediction choose freely: the log-prob pass and the engine have none.

    Args:
        model: the chunks of this rank.

    Raises:
        UserError: the model has no experts, or its routers would not ask.
    """
    if not args.use_routing_replay:
        return RoutingReplay()
    _require_asking_routers(model[0].config)
    routers = [list(_routers(chunk)) for chunk in model]
    numbers = [[router.layer_number for router in of_chunk] for of_chunk in routers]
    source = _rollout_source(args, model[0].config) if args.use_rollout_routing_replay else None
    replay = RoutingReplay(numbers, source)
    for of_chunk, layers in zip(routers, replay.layers, strict=True):
        for router, layer in zip(of_chunk, layers, strict=True):
            router.router_replay = layer
    setattr(model[0], _ATTRIBUTE, replay)
    return replay


def routing_replay_of(model: Sequence[torch.nn.Module]) -> RoutingReplay:
    """The replay that was attached to the model; if none was, one without layers."""
    return getattr(model[0], _ATTRIBUTE, None) or RoutingReplay()


def _require_asking_routers(config: object) -> None:
    if not config.num_moe_experts:
        raise UserError(
            "--use-routing-replay: the model has no experts (--num-experts), so there is no routing to replay"
        )
    if config.moe_router_fusion:
        raise UserError(
            "--use-routing-replay: the kernel of --moe-router-fusion chooses experts by itself; drop that flag"
        )
    if "sinkhorn" in config.moe_router_load_balancing_type:
        raise UserError(
            "--use-routing-replay: --moe-router-load-balancing-type sinkhorn assigns experts over all tokens; give none or "
            "aux_loss"
        )


def _routers(chunk: torch.nn.Module) -> Iterator[TopKRouter]:
    for name, module in chunk.named_modules():
        if isinstance(module, TopKRouter) and "mtp" not in name.split("."):
            yield module


def _rollout_source(args: argparse.Namespace, config: object) -> ExpertSource:
    def experts(batch: MicroBatch, layer_numbers: Sequence[int]) -> torch.Tensor:
        rows = experts_of_stream(batch, layer_numbers, config.num_moe_experts)
        if not config.sequence_parallel:
            return rows
        parts = rows.chunk(parallel_state.get_tensor_model_parallel_world_size())
        return parts[parallel_state.get_tensor_model_parallel_rank()]

    return experts
