"""Where every training rank and every engine goes, how engines divide their memory, and what a weight sync moves to them.

GPUs are numbered node by node; those for training come first, unless training and engines share them.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime.arguments.config_files.serving_config import arguments_of_group, served_groups, served_models
from slime.arguments.sizes import layout_of, plans_for_gpus
from slime.estimates.layout import ParallelLayout
from slime.estimates.serving_memory import (
    ServingSetup,
    WeightBytes,
    served_bytes,
    served_expert_bytes,
    served_weight_bytes,
    unknown_quantisation,
)
from slime.estimates.shape import ModelShape
from slime.plan.structure import GpuPlan, NodePlan, PlacementPlan, ServedModelPlan, SyncPlan
from slime.scheduling.device_turns import Sides
from slime.scheduling.served_models import ServerGroup
from slime.utils.weight_transports import WEIGHT_TRANSPORTS
from slime.weights.expert_exchange import experts_go_directly, hosted_experts


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
    # This includes GPUs that are kept free of engines, or unused.
    total = layout_of(args).gpus
    per_node = args.num_gpus_per_node
    engines = _engine_of_gpu(parts)
    gpus = [_gpu(gpu, layout if gpu < training else None, engines.get(gpu)) for gpu in range(total)]
    nodes = tuple(
        NodePlan(start // per_node, tuple(gpus[start : start + per_node])) for start in range(0, total, per_node)
    )
    count = len({place[0] for place in engines.values()})
    models = tuple(_models(args)) if starts_engines(args) and args.sglang_config is not None else ()
    return PlacementPlan(mode, total, per_node, training, count, nodes, models)


def spread_engines(placement: PlacementPlan) -> Iterator[str]:
    """A warning if an engine lies on more nodes than its GPUs need, with what that costs."""
    parts: dict[int, Counter[int]] = {}
    for node in placement.nodes:
        for gpu in node.gpus:
            if gpu.engine is not None:
                parts.setdefault(gpu.engine, Counter())[node.node] += 1
    needed = {engine: -(-of_node.total() // placement.gpus_per_node) for engine, of_node in parts.items()}
    spread = [engine for engine, of_node in parts.items() if len(of_node) > needed[engine]]
    if spread:
        first, more = spread[0], f" (like {len(spread) - 1} more)" if len(spread) > 1 else ""
        yield (
            f"engine {first}{more} has {parts[first].total()} GPUs on {len(parts[first])} nodes, and {needed[first]} would do: "
            "the ranks of an engine exchange what they compute over the network in every layer; fewer GPUs per engine, or "
            "training that ends where a node ends, keep them together"
        )


def _models(args: argparse.Namespace) -> Iterator[ServedModelPlan]:
    first = 0
    for model in served_models(args):
        count = sum(group.num_engines for group in model.groups)
        engines = (first, first + count - 1) if count else None
        yield ServedModelPlan(model.name, model.model_path, engines, model.update_weights)
        first += count


def placement_mode(args: argparse.Namespace) -> str:
    """The way in which training and engines share the GPUs."""
    if not args.has_engines:
        return "training only"
    if args.rollout_external_engine_addrs:
        return "external engines"
    if not args.has_trainer:
        return "engines only"
    if args.rollout_num_gpus == 0:
        return "external engines"
    if not args.colocate:
        return "disaggregated"
    ranks = layout_of(args).actor_gpus
    beside = any(part.first + part.count > ranks for part in engine_parts(args, 0))
    return "mixed" if beside else "colocated"


def shares_gpus(args: argparse.Namespace) -> bool:
    """Whether all engines, or some, are on GPUs of training ranks."""
    return placement_mode(args) in ("colocated", "mixed")


def trains(args: argparse.Namespace) -> bool:
    """Whether training ranks take steps. With `--num-rollout 0` they only push their weights, and the run ends after an
    evaluation: there is no optimizer, and no critic."""
    return args.num_rollout != 0


def has_critic(args: argparse.Namespace) -> bool:
    """Whether a critic is built."""
    return args.use_critic and trains(args)


def sleeping_sides(args: argparse.Namespace) -> Sides:
    """Whether trainer and engines each give their memory back while the other works.

    A trainer that ends while engines work counts as one that sleeps: its state is in a checkpoint.

    A critic turns `offload_train` on by itself. But actor and critic train one after the other with both on the GPUs, and on
    GPUs of their own they make room for nobody, so without `--colocate` they sleep only for a typed flag.
    """
    both = args.has_trainer and args.has_engines
    trainer, engines = both and (args.offload_train or args.release_train), both and args.offload_rollout
    if trainer and args.use_critic and not args.colocate:
        trainer = not args.typed_flags.isdisjoint({"offload", "offload_train"})
    return Sides(trainer, engines and not args.rollout_external)


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


# SGLang's own choice is between 0.8 and 0.9, depending on GPU and graph sizes.
ASSUMED_STATIC_FRACTION = 0.85
# What SGLang takes for --sglang-mamba-full-memory-ratio.
_STATES_TO_CACHE = 0.9
# Values of --sglang-moe-a2a-backend with which ranks divide shared experts; otherwise each has them whole.
_DIVIDES_SHARED_EXPERTS = ("none", "ascend_tp")
# Tokens in the cache of an engine on CPU, unless a flag says otherwise.
CPU_CACHE_TOKENS = 32768
_CACHE_BYTES = {"auto": None, "bfloat16": 2.0, "bf16": 2.0, "float32": 4.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}
# By --sglang-dtype; see `dtype_of_engine`.
_WEIGHT_BYTES = {"auto": 2.0, "bfloat16": 2.0, "half": 2.0, "float16": 2.0, "float": 4.0, "float32": 4.0}


def starts_engines(args: argparse.Namespace) -> bool:
    """Whether the run has engines on GPUs of its own."""
    return args.has_engines and not args.rollout_external_engine_addrs and bool(args.rollout_num_gpus)


def engine_parts(args: argparse.Namespace, first: int) -> tuple[EnginePart, ...]:
    """The engines of the run, as ranges of GPUs with equal engines; the first range begins at GPU `first`."""
    if not starts_engines(args):
        return ()
    parts = []
    for group in served_groups(args):
        worker = group.worker_type
        if worker != "placeholder":
            parts.append(
                EnginePart(first, group.num_gpus, group.num_gpus_per_engine, None if worker == "regular" else worker)
            )
        first += group.num_gpus
    return tuple(parts)


def serving_setup(
    args: argparse.Namespace, shape: ModelShape, hf_config: dict[str, Any] | None, gpu_memory: int | None
) -> ServingSetup:
    """How an engine of the trained model divides its memory. If `--sglang-config` has several groups, the first one counts.

    Args:
        hf_config: the config of --hf-checkpoint, for its quantisation; None when there is none.
        gpu_memory: bytes of one GPU; None on CPU.
    """
    group = _group_of_trained_model(args)
    overrides = group.overrides if group is not None else {}
    gpus = group.num_gpus_per_engine if group is not None else max(1, args.rollout_num_gpus_per_engine)

    def field(*names: str) -> Any:
        found = [overrides.get(name, vars(args).get(f"sglang_{name}")) for name in names]
        return next((value for value in found if value is not None), None)

    pipeline = field("pp_size", "pp") or 1
    attention_data = (field("dp_size", "dp") or 1) if field("enable_dp_attention") else 1
    weights = weight_bytes(args, shape, hf_config)
    tokens = field("max_total_tokens")
    ratio = field("mamba_full_memory_ratio")
    counts_states = field("max_mamba_cache_size") or field("disable_radix_cache") and field("max_running_requests")
    if gpu_memory is None and tokens is None:
        tokens = CPU_CACHE_TOKENS
    return ServingSetup(
        tensor=max(1, gpus // pipeline),
        pipeline=pipeline,
        attention_data=attention_data,
        weight_bytes=weights,
        cache_bytes=_CACHE_BYTES.get(field("kv_cache_dtype") or "auto") or weights.rest,
        gpu_memory=gpu_memory or 0,
        static_fraction=None if gpu_memory is None else field("mem_fraction_static") or ASSUMED_STATIC_FRACTION,
        max_total_tokens=tokens,
        sharded_head=not field("enable_dp_lm_head"),
        draft_layers=1 if field("speculative_algorithm") else 0,
        hands_over=bool(field("enable_hierarchical_cache")) or (group is not None and group.worker_type != "regular"),
        state_ratio=0.0 if counts_states else _STATES_TO_CACHE if ratio is None else ratio,
        shared_whole=(field("moe_a2a_backend") or "none") not in _DIVIDES_SHARED_EXPERTS,
        dense_whole=shape.moe is not None and field("moe_dense_tp_size") == 1,
        redundant_experts=field("ep_num_redundant_experts") or 0,
    )


def weight_bytes(
    args: argparse.Namespace, shape: ModelShape, hf_config: dict[str, Any] | None, *, pushed: bool = False
) -> WeightBytes:
    """Bytes of one element of a weight by part, as --hf-checkpoint is quantised.

    Args:
        pushed: as a push brings it: what is not quantised is in the trainer's dtype. Otherwise in that of the engines.
    """
    group = _group_of_trained_model(args)
    engine = args if group is None else arguments_of_group(args, group)
    if pushed:
        plain = 4.0 if args.params_dtype_name == "float32" else 2.0
    else:
        plain = _WEIGHT_BYTES[engine.sglang_dtype or ("auto" if plans_for_gpus(args) else "float32")]
    return served_weight_bytes(shape, plain, *_quantised_as(engine, hf_config))


def unknown_format(args: argparse.Namespace, hf_config: dict[str, Any] | None) -> str | None:
    """The name of the quantised format of --hf-checkpoint if its bytes are not known; else None."""
    return unknown_quantisation(*_quantised_as(args, hf_config))


def _quantised_as(
    args: argparse.Namespace, hf_config: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, str | None]:
    return (hf_config or {}).get("quantization_config"), args.sglang_quantization


def dtype_of_engine(named: str, hf_config: dict[str, Any]) -> str:
    """The dtype in which sglang 0.5.21 computes a model with this config if it is told `named`, a value of --sglang-dtype."""
    if named == "auto":
        stored = str(hf_config.get("dtype") or hf_config.get("torch_dtype"))
        return stored if stored in ("bfloat16", "float16") else "float16"
    return {"half": "float16", "float": "float32"}.get(named, named)


def _group_of_trained_model(args: argparse.Namespace) -> ServerGroup | None:
    """The first group with engines whose model gets the trainer's weights; if there is none, the first group with engines."""
    models = sorted(served_models(args), key=lambda model: not model.update_weights)
    return next((group for model in models for group in model.groups if group.num_engines), None)


_SHARED_HANDLES = "shared handles"


def plan_sync(
    args: argparse.Namespace, shape: ModelShape, hf_config: dict[str, Any] | None, layout: ParallelLayout | None
) -> SyncPlan | None:
    """The weight sync: every engine receives every weight once, and its link is the bottleneck. None: nothing is pushed."""
    if layout is None or not (args.rollout_external_engine_addrs or starts_engines(args)):
        return None
    sizes = weight_bytes(args, shape, hf_config, pushed=True)
    total, of_experts = served_bytes(shape, sizes), served_expert_bytes(shape, sizes)
    gbps, bucket = args.dry_run_link_gbps, args.update_weight_buffer_size
    transport, buckets = _transport(args), -(-total // bucket)
    if transport != _SHARED_HANDLES:
        return SyncPlan(transport, total, buckets, gbps, total * 8 / (gbps * 1e9), False)
    cut, experts_cut = _cut(args, layout)
    rest = total - of_experts
    directly = experts_go_directly(args, shares_host_memory=not plans_for_gpus(args))
    if directly:
        hosted, lacked = (of_experts * count // args.num_experts for count in _experts_of_a_rank(args, layout))
        # Buckets of experts have those that the engine rank hosts, and those that the training rank on its device sends away.
        sent = min(lacked, of_experts // layout.expert)
        buckets = -(-rest // bucket) + -(-(hosted + sent) // bucket)
        gathered = rest * cut + lacked
    else:
        gathered = rest * cut + of_experts * experts_cut
    return SyncPlan(transport, total, buckets, gbps, gathered * 8 / (gbps * 1e9), True, gathered, directly)


def _cut(args: argparse.Namespace, layout: ParallelLayout) -> tuple[bool, bool]:
    """Whether no rank holds all weights beside experts, and whether none holds all experts."""
    if args.train_backend != "megatron":
        return layout.world_size > 1, layout.world_size > 1
    return layout.tensor * layout.pipeline > 1, layout.expert * layout.expert_tensor * layout.pipeline > 1


def _experts_of_a_rank(args: argparse.Namespace, layout: ParallelLayout) -> tuple[int, int]:
    """If experts go directly to the engine ranks that host them: how many an engine rank hosts, and the largest number of these
    that the training rank on the same device does not have."""
    each = args.num_experts // layout.expert
    lacked = [
        sum(expert // each != layout.place(device).expert for expert in hosted_experts(args, device))
        for device in range(args.rollout_num_gpus)
    ]
    return len(hosted_experts(args, 0)), max(lacked)


def _transport(args: argparse.Namespace) -> str:
    way = WEIGHT_TRANSPORTS[args.update_weight_transport]
    if args.update_weight_mode == "delta":
        return f"{way.told_as}, changed bytes only (at most)"
    if way.colocated is None or not shares_gpus(args):
        return way.told_as
    ranks, first, shared, beside = layout_of(args).actor_gpus, 0, False, False
    for group in served_groups(args):
        behind = first + group.num_gpus
        if group.num_engines and group.update_weights:
            # An engine with GPUs of training ranks and others counts as one beside the trainer.
            shared, beside = shared or first + group.num_gpus_per_engine <= ranks, beside or behind > ranks
        first = behind
    if shared and beside:
        return f"{_SHARED_HANDLES}, and by {way.told_as} to those with GPUs beside the trainer's"
    return way.told_as if beside else _SHARED_HANDLES
