"""Where every training rank and every engine goes: GPUs in order of their nodes, training first unless they share."""

import argparse
from dataclasses import dataclass

from slime.arguments.plan.structure import GpuPlan, NodePlan, PlacementPlan
from slime.scheduling.parallel_layout import ParallelLayout


@dataclass(frozen=True)
class EnginePart:
    """GPU `first + i` of the run holds part i % `per_engine` of an engine; engines of one kind, `worker`."""

    first: int
    count: int
    per_engine: int
    worker: str | None = None


def plan_placement(
    args: argparse.Namespace, layout: ParallelLayout | None, parts: tuple[EnginePart, ...]
) -> PlacementPlan:
    """The placement; `layout` None: no training ranks. `parts` count their GPUs from the first GPU of the run."""
    mode = placement_mode(args)
    training = layout.world_size if layout is not None else 0
    total = max([training, *(part.first + part.count for part in parts)])
    per_node = gpus_per_node(args)
    engines = _engine_of_gpu(parts)
    gpus = [_gpu(gpu, layout if gpu < training else None, engines.get(gpu)) for gpu in range(total)]
    nodes = tuple(
        NodePlan(start // per_node, tuple(gpus[start : start + per_node])) for start in range(0, total, per_node)
    )
    count = len({place[0] for place in engines.values()})
    return PlacementPlan(mode, total, per_node, training, count, nodes)


def placement_mode(args: argparse.Namespace) -> str:
    """The way in which training and engines share the GPUs."""
    if not args.has_engines:
        return "training only"
    if not args.has_trainer:
        return "engines only"
    if args.rollout_external_engine_addrs:
        return "external engines"
    return "colocated" if args.colocate else "disaggregated"


def gpus_per_node(args: argparse.Namespace) -> int:
    """GPUs of one node."""
    if args.colocate and "num_gpus_per_node" not in args.typed_flags:
        return args.actor_num_gpus_per_node
    return args.num_gpus_per_node


def _engine_of_gpu(parts: tuple[EnginePart, ...]) -> dict[int, tuple[int, int, str | None]]:
    found: dict[int, tuple[int, int, str | None]] = {}
    engine = 0
    for part in parts:
        for offset in range(part.count - part.count % part.per_engine):
            number, rank = divmod(offset, part.per_engine)
            found[part.first + offset] = (engine + number, rank, part.worker)
        engine += part.count // part.per_engine
    return found


def _gpu(gpu: int, layout: ParallelLayout | None, engine: tuple[int, int, str | None] | None) -> GpuPlan:
    number, engine_rank, worker = engine if engine is not None else (None, None, None)
    if layout is None:
        return GpuPlan(gpu, engine=number, engine_rank=engine_rank, worker=worker)
    place = layout.place(gpu)
    return GpuPlan(
        gpu, gpu, place.tensor, place.context, place.data, place.pipeline, place.expert, number, engine_rank, worker
    )
