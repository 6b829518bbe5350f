"""The memory part of the plan: training, serving, and both together on the GPUs that they share."""

import argparse
from typing import Any

from slime.arguments.plan.advice import lower_serving, lower_training
from slime.arguments.plan.engines import serving_setup, starts_engines
from slime.arguments.plan.placement import gpus_per_node, placement_mode
from slime.arguments.plan.setup import (
    CUDA_OVERHEAD_BYTES,
    host_copies,
    longest_sample,
    padded_stream,
    prompt_is_limited,
    read,
    tokens_of_stream,
    training_setup,
)
from slime.arguments.plan.structure import MemoryPlan, PartPlan, PhasePlan, ServingMemoryPlan, TrainingMemoryPlan
from slime.arguments.planned_device import gpu_memory_gib, plans_for_gpus
from slime.scheduling.memory import (
    BUCKETS_AT_ONCE,
    HOST_PARTS,
    MEMORY_PARTS,
    RankMemory,
    TrainingSetup,
    training_memory,
    worst_rank,
)
from slime.scheduling.model_shape import ModelShape
from slime.scheduling.parallel_layout import ParallelLayout
from slime.scheduling.serving_memory import ServingMemory, ServingSetup, serving_memory

GIB = 2**30


def plan_memory(
    args: argparse.Namespace,
    shape: ModelShape,
    layout: ParallelLayout | None,
    micro_batches: int | None,
    hf_config: dict[str, Any] | None,
    warnings: list[str],
    notes: list[str],
) -> MemoryPlan:
    """Estimates and what they say; warnings and notes are appended."""
    gpu_memory, source = None, "the run uses no GPU (SLIME_ACCELERATOR=cpu)"
    if plans_for_gpus(args):
        gib, source = gpu_memory_gib(args)
        gpu_memory = round(gib * GIB)
    setup, worst, training = _training(args, shape, layout, micro_batches, gpu_memory, notes)
    served, serving = _serving(args, shape, hf_config, gpu_memory)
    phases = _phases(args, worst, setup, served, gpu_memory)
    warnings += [_too_large(phase, gpu_memory) for phase in phases if phase.fits is False]
    warnings += _cache_warnings(args, served, gpu_memory)
    if setup is not None and worst is not None:
        warnings += _over_long(args, shape, setup, worst)
    return MemoryPlan(gpu_memory, source, training, serving, phases)


def _training(
    args: argparse.Namespace,
    shape: ModelShape,
    layout: ParallelLayout | None,
    micro_batches: int | None,
    gpu_memory: int | None,
    notes: list[str],
) -> tuple[TrainingSetup | None, RankMemory | None, TrainingMemoryPlan | None]:
    if layout is None:
        return None, None, None
    reason = _not_estimated(args)
    if reason is not None:
        notes.append(f"{reason}: training memory is not estimated")
        return None, None, None
    if read(args, "use_critic", False):
        notes.append("the critic takes turns with the actor on the same GPUs; its memory is not added")
    tokens = tokens_of_stream(args, layout)
    if tokens is None:
        notes.append(
            "training memory needs the size of a micro-batch: give --max-tokens-per-gpu with --use-dynamic-batch-size, "
            "or --rollout-max-context-len"
        )
        return None, None, None
    setup = training_setup(args, layout, tokens, micro_batches)
    memories = training_memory(shape, setup)
    worst = worst_rank(memories)
    parts = tuple(
        PartPlan(name, size, lower_training(args, setup, name, size / min(worst.total, gpu_memory or worst.total)))
        for name in MEMORY_PARTS
        if (size := getattr(worst, name))
    )
    totals = tuple(memory.total for memory in memories)
    on_node = min(gpus_per_node(args), layout.world_size)
    plan = TrainingMemoryPlan(
        parts,
        worst.total,
        worst.stage,
        worst.moment,
        totals,
        worst.host,
        _host_parts(args, worst),
        worst.host * on_node,
    )
    if longest_sample(args) is not None and not prompt_is_limited(args):
        notes.append(
            "no flag limits the prompt: samples are counted without theirs, so micro-batches and memory are lower bounds; "
            "give --rollout-max-prompt-len or --rollout-max-context-len"
        )
    return setup, worst, plan


def _host_parts(args: argparse.Namespace, worst: RankMemory) -> tuple[PartPlan, ...]:
    names = {
        "host_offloaded": "offloaded optimizer",
        "host_asleep": "weights and optimizer while the trainer sleeps",
        "host_copies": f"sets of weights ({', '.join(host_copies(args))})",
    }
    return tuple(PartPlan(names[part], getattr(worst, part)) for part in HOST_PARTS if getattr(worst, part))


def _not_estimated(args: argparse.Namespace) -> str | None:
    if read(args, "train_backend", "megatron") != "megatron":
        return f"--train-backend {args.train_backend}"
    if read(args, "use_megatron_fsdp", False):
        return "--use-megatron-fsdp"
    if read(args, "pipeline_model_parallel_layout", None):
        return "--pipeline-model-parallel-layout"
    return None


def _serving(
    args: argparse.Namespace, shape: ModelShape, hf_config: dict[str, Any] | None, gpu_memory: int | None
) -> tuple[ServingMemory | None, ServingMemoryPlan | None]:
    if not starts_engines(args):
        return None, None
    setup: ServingSetup = serving_setup(args, hf_config, gpu_memory)
    memory = serving_memory(shape, setup)
    parts = [
        PartPlan(name, size, lower_serving(name, size / min(memory.total, gpu_memory or memory.total)))
        for name in ("weights", "kv_cache", "reserve")
        if (size := getattr(memory, name))
    ]
    longest = longest_sample(args)
    plan = ServingMemoryPlan(
        parts=tuple(parts),
        total=memory.total,
        static_fraction=setup.static_fraction,
        cache_bytes_per_token=memory.cache_bytes_per_token,
        cache_tokens=memory.cache_tokens,
        sequences=memory.cache_tokens / longest if longest else None,
    )
    return memory, plan


def _phases(
    args: argparse.Namespace,
    worst: RankMemory | None,
    setup: TrainingSetup | None,
    served: ServingMemory | None,
    gpu_memory: int | None,
) -> tuple[PhasePlan, ...]:
    """What lies on one GPU in each phase: on GPUs of their own, or with both on it."""
    if gpu_memory is None:
        return ()
    engine = served.weights + served.kv_cache if served is not None else 0
    if placement_mode(args) != "colocated" or worst is None or served is None:
        return _phases_apart(args, worst, engine if served is not None else None, gpu_memory)
    left_behind = CUDA_OVERHEAD_BYTES
    trainer_sleeps, engine_sleeps = read(args, "offload_train", True), read(args, "offload_rollout", True)
    asleep = left_behind if trainer_sleeps else worst.persistent
    idle = left_behind if engine_sleeps else engine
    # A trainer that sleeps sends its host copies; engines take their weights back first, the cache after the sync.
    buckets = BUCKETS_AT_ONCE * min(setup.push_bucket, worst.weights)
    receiving = left_behind + served.weights if engine_sleeps else idle
    return (
        _phase("training", worst.total, idle, gpu_memory),
        _phase("weight sync", asleep + buckets, receiving, gpu_memory),
        _phase("generation", asleep, engine, gpu_memory),
    )


def _phases_apart(
    args: argparse.Namespace, worst: RankMemory | None, engine: int | None, gpu_memory: int
) -> tuple[PhasePlan, ...]:
    """Each on its own GPUs, or on shared ones where one of them is not known."""
    phases = []
    unknown = args.has_trainer and worst is None
    if args.has_trainer:
        phases.append(_phase("training", None if worst is None else worst.total, 0, gpu_memory))
    if engine is not None:
        beside = None if unknown and placement_mode(args) == "colocated" else 0
        phases.append(_phase("generation", beside, engine, gpu_memory))
    return tuple(phases)


def _phase(name: str, trainer: int | None, engine: int, gpu_memory: int) -> PhasePlan:
    if trainer is None:
        return PhasePlan(name, None, engine, engine, None if engine <= gpu_memory else False)
    return PhasePlan(name, trainer, engine, trainer + engine, trainer + engine <= gpu_memory)


def _too_large(phase: PhasePlan, gpu_memory: int) -> str:
    return (
        f"{phase.name} needs {phase.total / GIB:.1f} GiB on a GPU of {gpu_memory / GIB:.1f} GiB: it does not fit; "
        "the flags beside the largest parts would lower it"
    )


def _cache_warnings(args: argparse.Namespace, served: ServingMemory | None, gpu_memory: int | None) -> list[str]:
    if served is None or gpu_memory is None:
        return []
    gpus = args.rollout_num_gpus_per_engine
    if served.cache_tokens == 0:
        return [
            f"the weights of an engine take {served.weights / GIB:.1f} GiB on each of its {gpus} GPUs and leave nothing "
            "for the KV cache; raise --rollout-num-gpus-per-engine or --sglang-mem-fraction-static"
        ]
    longest = longest_sample(args)
    if longest is not None and served.cache_tokens < longest:
        return [
            f"the KV cache of an engine holds {served.cache_tokens} tokens, less than one sample of {longest}; raise "
            "--rollout-num-gpus-per-engine or --sglang-mem-fraction-static"
        ]
    return []


def _over_long(args: argparse.Namespace, shape: ModelShape, setup: TrainingSetup, worst: RankMemory) -> list[str]:
    """A sample above the token budget makes a micro-batch of its own; what that would need."""
    longest = longest_sample(args)
    share = -(-longest // setup.layout.context) if longest is not None else 0
    if share <= setup.stream_tokens:
        return []
    stream = padded_stream(args, setup.layout, share)
    longer = TrainingSetup(**{**vars(setup), "stream_tokens": stream})
    peak = worst_rank(training_memory(shape, longer)).total
    return [
        f"{over_long(longest, setup.stream_tokens, setup.layout.context)}, and the training peak is then "
        f"{peak / GIB:.1f} GiB instead of {worst.total / GIB:.1f} GiB"
    ]


def over_long(longest: int, tokens: int, context: int) -> str:
    """What happens to a sample above the budget, as the beginning of a warning."""
    return (
        f"the longest allowed sample ({longest} tokens) is above the token budget of a micro-batch ({tokens} x "
        f"--context-parallel-size {context}): such a sample makes a micro-batch of its own"
    )
