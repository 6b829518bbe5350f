"""The memory part of the plan: what training and serving need, on GPUs and in host memory, and which flags would lower it.

Actor and critic take turns. The one that rests is not moved to the host: its weights, gradients and optimizer state stay on the
GPU, but while engines work there, when both sleep.

On a machine without GPUs all tensors of engines and ranks are in its own memory, and flags may ask for any number of these
processes. With GPUs the plan counts the host memory that ranks take; that of engines is not known.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from slime.arguments.config_files.serving_config import arguments_of_group, served_groups
from slime.arguments.hf_config import SUPPLEMENTS, read_hf_config
from slime.arguments.sizes import longest_sample, plans_for_gpus
from slime.estimates.layout import ParallelLayout
from slime.estimates.serving_memory import ServingMemory, serving_memory
from slime.estimates.shape import ModelShape
from slime.estimates.training_memory import (
    HOST_PARTS,
    MEMORY_PARTS,
    SAVING_PARTS,
    RankMemory,
    TrainingSetup,
    push_buffers,
    received_buffers,
    training_memory,
    worst_rank,
)
from slime.models.families import model_args_from_hf
from slime.plan.critic_memory import CriticMemory, critic_memory
from slime.plan.placement import (
    EnginePart,
    has_critic,
    serving_setup,
    shares_gpus,
    starts_engines,
    trains,
)
from slime.plan.setup import (
    CUDA_OVERHEAD_BYTES,
    host_copies,
    longest_request,
    padded_stream,
    prompt_is_limited,
    recomputing_all,
    shape_of,
    tokens_of_stream,
    training_setup,
)
from slime.plan.structure import GIB, MemoryPlan, PartPlan, PhasePlan, ServingMemoryPlan, TrainingMemoryPlan
from slime.utils.device import gpus_on_this_machine
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

_USUAL_GPU_MEMORY_GIB = 80.0
_QUERY = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
_QUERY_SECONDS = 10.0


def plan_memory(
    args: argparse.Namespace,
    shape: ModelShape,
    layout: ParallelLayout | None,
    micro_batches: int | None,
    hf_config: dict[str, Any] | None,
) -> tuple[MemoryPlan, tuple[str, ...], tuple[str, ...]]:
    """(the estimates, warnings about them, notes on what they assume)."""
    gpu_memory, source = None, "the run uses no GPU (SLIME_ACCELERATOR=cpu)"
    if plans_for_gpus(args):
        gib, source = gpu_memory_gib(args)
        gpu_memory = round(gib * GIB)
    reason = _not_estimated(args, layout)
    setup = worst = training = None
    memories: tuple[RankMemory, ...] = ()
    critic = 0
    if layout is not None and reason is None:
        setup = training_setup(args, layout, tokens_of_stream(args, layout), micro_batches)
        memories = training_memory(shape, setup)
        critics = critic_memory(args, layout, memories, micro_batches)
        worst = max(memories, key=lambda memory: memory.total + critics.device[memory.stage])
        critic = critics.device[worst.stage]
        training = _training(args, setup, memories, worst, critics, gpu_memory)
    served, serving = _serving(args, shape, hf_config, gpu_memory)
    buffers = 0
    if setup is not None:
        buffers = max(push_buffers(shape, setup, stage) for stage in setup.stages) + received_buffers(shape, setup)
    phases = _phases(args, worst, critic, buffers, served, gpu_memory)
    warnings = [_too_large(phase, gpu_memory) for phase in phases if phase.fits is False]
    warnings += cache_warnings(args, shape, hf_config, gpu_memory)
    if setup is not None and setup.trains:
        warnings += _over_long(args, shape, setup, worst_rank(memories))
    notes = (reason,) if reason is not None else tuple(_training_notes(args) if training is not None else ())
    return MemoryPlan(gpu_memory, source, training, serving, phases), tuple(warnings), notes


def _training(
    args: argparse.Namespace,
    setup: TrainingSetup,
    memories: tuple[RankMemory, ...],
    worst: RankMemory,
    critics: CriticMemory,
    gpu_memory: int | None,
) -> TrainingMemoryPlan:
    critic, critic_host = critics.device[worst.stage], critics.host[worst.stage]
    total = worst.total + critic
    limit, one_memory = min(total, gpu_memory or total), gpu_memory is None
    parts = tuple(
        PartPlan(name, size, lower_training(args, setup, name, size / limit))
        for name in MEMORY_PARTS
        if (size := getattr(worst, name))
    )
    if critic:
        parts = (*parts, PartPlan("critic", critic, lower_training(args, setup, "critic", critic / limit)))
    ranks_of_stage = setup.layout.world_size // setup.layout.pipeline
    ranks_of_node = min(args.num_gpus_per_node, setup.layout.world_size)
    stages_of_node = setup.layout.stages_among(ranks_of_node)
    return TrainingMemoryPlan(
        parts,
        total,
        worst.stage,
        worst.moment,
        tuple(memory.total + critics.device[memory.stage] for memory in memories),
        worst.host + critic_host,
        _host_parts(args, worst) + ((PartPlan("critic", critic_host),) if critic_host else ()),
        worst.host_of_ranks(ranks_of_node, stages_of_node) + ranks_of_node * critic_host,
        tuple(
            -(-memory.host_of_ranks(ranks_of_stage, 1) // ranks_of_stage) + critics.host[memory.stage]
            for memory in memories
        ),
        worst.saving,
        tuple(
            PartPlan(part.removeprefix("saving_"), getattr(worst, part))
            for part in SAVING_PARTS
            if getattr(worst, part)
        ),
        worst.saving_of_node(ranks_of_node, stages_of_node),
        tuple(
            max(memory.saving_beyond(one_memory=one_memory), memory.loading_beyond(one_memory=one_memory))
            for memory in memories
        ),
        worst.loading,
    )


def _training_notes(args: argparse.Namespace) -> Iterator[str]:
    if has_critic(args):
        yield (
            "the critic stays on the GPU while the actor works, and the actor while the critic works; --offload-train moves "
            "both to the host while engines generate"
        )
    if longest_sample(args) is not None and not prompt_is_limited(args):
        yield (
            "no flag limits the prompt: samples are counted without theirs, so micro-batches and memory are lower bounds; "
            "give --rollout-max-prompt-len or --rollout-max-context-len"
        )


def _host_parts(args: argparse.Namespace, worst: RankMemory) -> tuple[PartPlan, ...]:
    names = {
        "host_offloaded": "offloaded optimizer",
        "host_asleep": "weights and optimizer while the trainer sleeps",
        "host_snapshot": "weights that engines have (--update-weight-mode delta)",
        "host_copies": f"sets of weights ({', '.join(host_copies(args))})",
    }
    return tuple(PartPlan(names[part], getattr(worst, part)) for part in HOST_PARTS if getattr(worst, part))


def _not_estimated(args: argparse.Namespace, layout: ParallelLayout | None) -> str | None:
    """Why there is no estimate for training ranks; None if there is one, or if there are no such ranks."""
    if layout is None:
        return None
    typed = {
        f"--train-backend {args.train_backend}": args.train_backend != "megatron",
        "--use-megatron-fsdp": args.use_megatron_fsdp,
    }
    if any(typed.values()):
        return f"{next(flag for flag in typed if typed[flag])}: training memory is not estimated"
    if tokens_of_stream(args, layout) is None:
        return (
            "training memory needs the size of a micro-batch: give --max-tokens-per-gpu with --use-dynamic-batch-size, "
            "or --rollout-max-context-len"
        )
    return None


def _serving(
    args: argparse.Namespace, shape: ModelShape, hf_config: dict[str, Any] | None, gpu_memory: int | None
) -> tuple[ServingMemory | None, ServingMemoryPlan | None]:
    if not starts_engines(args):
        return None, None
    setup = serving_setup(args, shape, hf_config, gpu_memory)
    memory = serving_memory(shape, setup)
    parts = [
        PartPlan(name, size, lower_serving(name, size / min(memory.total, gpu_memory or memory.total)))
        for name in ("weights", "kv_cache", "states", "reserve")
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
        stage=memory.stage,
        stage_totals=memory.stage_totals,
    )
    return memory, plan


def _phases(
    args: argparse.Namespace,
    worst: RankMemory | None,
    critic: int,
    buffers: int,
    served: ServingMemory | None,
    gpu_memory: int | None,
) -> tuple[PhasePlan, ...]:
    """What one GPU holds in each phase. Trainer and engines share the GPU, or each has GPUs of its own."""
    if gpu_memory is None:
        return ()
    engine = served.total - served.reserve if served is not None else 0
    if not shares_gpus(args) or worst is None or served is None:
        trainer = None if worst is None else worst.total + critic
        return _phases_apart(args, trainer, engine if served is not None else None, gpu_memory)
    # Actor and critic are two processes. Both always sleep while engines work on their GPUs.
    left_behind = CUDA_OVERHEAD_BYTES * (2 if has_critic(args) else 1)
    asleep = 0 if args.release_train else left_behind if args.offload_train else worst.persistent
    idle = CUDA_OVERHEAD_BYTES if args.offload_rollout else engine
    # A trainer that sleeps keeps its weights on the GPU until they are pushed. Engines take room for weights before the push,
    # and for the cache after it.
    sending = left_behind + worst.weights if args.offload_train or args.release_train else asleep
    receiving = CUDA_OVERHEAD_BYTES + served.weights if args.offload_rollout else idle
    phases = [
        _phase("weight sync", sending + buffers, receiving, gpu_memory),
        _phase("generation", asleep, engine, gpu_memory),
    ]
    if trains(args):
        phases.insert(0, _phase("training", worst.total + critic, idle, gpu_memory))
    if args.use_fault_tolerance and args.offload_rollout and not args.release_train:
        # The other engines keep their caches and go on generating. If the trainer has ended, files of it are pushed, so that it
        # takes no memory.
        phases.append(_phase("push to a replaced engine", sending + buffers, engine, gpu_memory))
    return tuple(phases)


def _phases_apart(
    args: argparse.Namespace, trainer: int | None, engine: int | None, gpu_memory: int
) -> tuple[PhasePlan, ...]:
    """The phases if trainer and engines have GPUs of their own, or if one of the two is not estimated."""
    phases = []
    unknown = args.has_trainer and trainer is None
    if args.has_trainer:
        phases.append(_phase("training" if trains(args) else "weight sync", trainer, 0, gpu_memory))
    if engine is not None:
        beside = None if unknown and shares_gpus(args) else 0
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


def _groups(args: argparse.Namespace) -> list[tuple[str, argparse.Namespace, bool]]:
    """For every group of engines of `--sglang-config`: its place in the file, the flags that describe it, and whether its model
    is frozen, not the trained one. Without that flag one group stands for all engines."""
    if args.sglang_config is None or not starts_engines(args):
        return [("", args, False)]
    groups = [group for group in served_groups(args) if group.num_engines]
    return [
        (f"{group.where}: " if group.where else "", arguments_of_group(args, group), not group.update_weights)
        for group in groups
    ]


def _frozen_model(args: argparse.Namespace) -> tuple[ModelShape, dict[str, Any]] | None:
    """Shape and config of --hf-checkpoint, whatever the flags say of the trained model; None if they are not known."""
    try:
        config = read_hf_config(args.hf_checkpoint)
        # Flags of the trained model must not add what the config of this one does not name.
        unset = dict.fromkeys((*SUPPLEMENTS, "padded_vocab_size", "mtp_num_layers"))
        shape = shape_of(argparse.Namespace(**{**vars(args), **unset, **model_args_from_hf(config)}))
    except UserError:
        return None
    return None if shape is None else (shape, config)


def cache_warnings(
    args: argparse.Namespace, shape: ModelShape, hf_config: dict[str, Any] | None, gpu_memory: int | None
) -> Iterator[str]:
    """A warning for each group of engines whose weights or longest samples have no room.

    Args:
        shape, hf_config: of --hf-checkpoint, the config None if it is not known.
        gpu_memory: bytes of one GPU; None on CPU.
    """
    for where, of_group, frozen in _groups(args):
        found = _frozen_model(of_group) if frozen else (shape, hf_config)
        served = _serving(of_group, *found, gpu_memory)[0] if found is not None else None
        if served is not None:
            name = "num_gpus_per_engine" if where else "--rollout-num-gpus-per-engine"
            for warning in _of_cache(of_group, served, gpu_memory):
                yield where + warning.replace("--rollout-num-gpus-per-engine", name)


def _of_cache(args: argparse.Namespace, served: ServingMemory, gpu_memory: int | None) -> Iterator[str]:
    ways_out = ["--sglang-max-total-tokens"] if gpu_memory is None or args.sglang_max_total_tokens is not None else []
    ways_out += ["--rollout-num-gpus-per-engine", "--sglang-mem-fraction-static"] if gpu_memory is not None else []
    if served.cache_tokens == 0:
        yield (
            f"the weights of an engine take {served.weights / GIB:.1f} GiB on each of its "
            f"{args.rollout_num_gpus_per_engine} GPUs and leave nothing for the KV cache; raise {' or '.join(ways_out[-2:])}"
        )
        return
    holder = "an engine" if served.cache_tokens == served.group_tokens else "a data-parallel group of an engine"
    short = short_cache(args, served.group_tokens)
    if short is not None:
        yield f"the KV cache of {holder} {short}; raise {' or '.join(ways_out)}"


def short_cache(args: argparse.Namespace, tokens: int) -> str | None:
    """Words for a cache of so many tokens if it has no room for the longest sample of a rollout or an evaluation; else None.

    SGLang 0.5.21 leaves two tokens of the cache free, and without a word lets an answer end where the others are used up.
    """
    longest, room = longest_request(args), tokens - 2
    if longest is None or longest <= room:
        return None
    return f"has room for samples of {room} tokens, and the longest may have {longest}: its answer would be cut short"


def _over_long(args: argparse.Namespace, shape: ModelShape, setup: TrainingSetup, worst: RankMemory) -> Iterator[str]:
    """A warning if samples may be above the token budget, with the memory that they would need."""
    longest = longest_sample(args)
    share = -(-longest // setup.layout.context) if longest is not None else 0
    if share > setup.stream_tokens:
        longer = replace(setup, stream_tokens=padded_stream(args, setup.layout, share))
        peak = worst_rank(training_memory(shape, longer)).total
        peaks = f"{peak / GIB:.1f} GiB instead of {worst.total / GIB:.1f} GiB"
        yield over_long_warning(longest, setup.stream_tokens, setup.layout.context, peaks)


def over_long_warning(longest: int, tokens: int, context: int, peaks: str | None = None) -> str:
    """The warning that samples may be above the token budget. `peaks`: words for the training peak then, and otherwise."""
    warning = (
        f"the longest allowed sample ({longest} tokens) is above the token budget of a micro-batch ({tokens} x "
        f"--context-parallel-size {context}): such a sample makes a micro-batch of its own"
    )
    return warning if peaks is None else f"{warning}, and the training peak is then {peaks}"


# A part gets advice if it is at least this share of the whole, or of the GPU if the whole is larger. For a smaller one advice
# would only distract.
_WORTH_WHILE = 0.02

_SERVING = {
    "weights": "--rollout-num-gpus-per-engine",
    "kv_cache": "--sglang-mem-fraction-static, --sglang-kv-cache-dtype fp8_e4m3",
    "states": "--sglang-mamba-full-memory-ratio",
}


def lower_training(args: argparse.Namespace, setup: TrainingSetup, part: str, share: float) -> str | None:
    """Flags that would lower `part`, which is `share` of the whole or of the GPU; None if that is not worth while, or if no
    such flags are known."""
    if share < _WORTH_WHILE:
        return None
    find = {
        "weights": _sharding,
        "gradients": _gradients,
        "optimizer": _optimizer,
        "critic": _sharding,
        "activations": _activations,
        "logits": _logits,
        "buffers": _buffers,
    }.get(part)
    return ", ".join(find(args, setup)) if find is not None else None


def lower_serving(part: str, share: float) -> str | None:
    """As `lower_training`, for a part of an engine."""
    return _SERVING.get(part) if share >= _WORTH_WHILE else None


def _sharding(args: argparse.Namespace, setup: TrainingSetup) -> list[str]:
    flags = ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"]
    return ["--expert-model-parallel-size", *flags] if args.num_experts else flags


def _gradients(args: argparse.Namespace, setup: TrainingSetup) -> list[str]:
    in_16_bits = ["--grad-reduce-in-bf16"] if setup.state.gradient > setup.state.weight else []
    return [*in_16_bits, *_sharding(args, setup)]


def _optimizer(args: argparse.Namespace, setup: TrainingSetup) -> list[str]:
    flags = []
    if not setup.state.distributed:
        flags.append("--use-distributed-optimizer")
    if setup.state.offloaded < 1:
        flags.append("--optimizer-cpu-offload")
    if setup.state.distributed and _keeps_whole_main_parameters(args):
        flags.append("--use-precision-aware-optimizer")
    return [*flags, "more --actor-num-nodes"]


def _keeps_whole_main_parameters(args: argparse.Namespace) -> bool:
    """Whether main parameters are kept in 32 bits although the weights are their upper halves, so that 16 bits would do."""
    narrow = args.use_precision_aware_optimizer or args.optimizer_cpu_offload
    return args.params_dtype_name == "bfloat16" and args.optimizer == "adam" and not narrow


def _activations(args: argparse.Namespace, setup: TrainingSetup) -> list[str]:
    flags = []
    if setup.recompute.granularity != "full":
        flags.append(recomputing_all(args))
    if setup.layout.tensor > 1 and not setup.layout.sequence_parallel:
        flags.append("--sequence-parallel")
    return [*flags, *_tokens(args), "--context-parallel-size"]


def _logits(args: argparse.Namespace, setup: TrainingSetup) -> list[str]:
    return [*_tokens(args), "--tensor-model-parallel-size"]


def _buffers(args: argparse.Namespace, setup: TrainingSetup) -> list[str]:
    return ["--update-weight-buffer-size", "--tensor-model-parallel-size"]


def _tokens(args: argparse.Namespace) -> list[str]:
    if args.use_dynamic_batch_size:
        return ["--max-tokens-per-gpu"]
    return ["--micro-batch-size", "--use-dynamic-batch-size --max-tokens-per-gpu"]


# Memory of processes on CPU, without their tensors. Measured as the private pages of each after a rollout, with torch 2.13,
# sglang 0.5.21, megatron-core 0.16, Ray 2.60 and a model of 0.1 M parameters. An engine takes 0.68 GiB, rounded up here: its
# Ray actor, HTTP server, scheduler and detokenizer; a further tensor-parallel rank adds a scheduler. A run takes driver,
# manager, router and Ray (0.8 GiB), and once the libraries that all processes share (0.5 GiB).
ENGINE_BYTES = round(0.75 * GIB)
FURTHER_SCHEDULER_BYTES = round(0.3 * GIB)
RANK_BYTES = round(0.3 * GIB)
RUN_BYTES = round(1.3 * GIB)

_LIMITS_OF_CONTAINERS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class HostShare:
    """`count` equal parts of a run, and the host memory that each takes on average, in bytes.

    flag: the flag that lowers the count and leaves the memory of each part as it is; empty if there is none, as for training
        ranks: if there are fewer, each holds larger shards.
    per_count: by how much the flag's value rises for one part more.
    """

    name: str
    count: int
    each: int
    flag: str = ""
    per_count: int = 1

    @property
    def total(self) -> int:
        return self.count * self.each


def host_shares(
    args: argparse.Namespace,
    memory: MemoryPlan | None,
    ranks: int,
    engines: Sequence[EnginePart],
    *,
    on_gpus: bool,
) -> tuple[HostShare, ...]:
    """The memory that a run takes of its one machine, as far as the plan knows.

    Args:
        memory: estimates; None if the model's shape is not known: then only the processes count.
        ranks: training ranks, without those of a critic.
    """
    training = memory.training if memory is not None else None
    host = _mean(training.stage_hosts) + _mean(training.stage_savings) if training is not None else 0
    if on_gpus:
        return (HostShare("training rank", ranks, host),) if ranks and host else ()
    shares = [HostShare("Ray, driver, manager and router", 1, RUN_BYTES)]
    if ranks:
        # Actor and critic are processes of their own; the estimate holds the tensors of both.
        processes = RANK_BYTES * (2 if has_critic(args) else 1)
        # Stages differ in memory, but have equally many ranks: so the mean over stages is that over ranks.
        tensors = _mean(training.stage_totals) + host if training is not None else 0
        shares.append(HostShare("training rank", ranks, processes + tensors))
    tensors = memory.serving.total if memory is not None and memory.serving is not None else 0
    for part in engines:
        each = ENGINE_BYTES + (part.per_engine - 1) * FURTHER_SCHEDULER_BYTES + part.per_engine * tensors
        shares.append(HostShare("engine", part.count // part.per_engine, each, "--rollout-num-gpus", part.per_engine))
    return tuple(shares)


def host_memory_problem(shares: Sequence[HostShare], machine: int) -> str | None:
    """A message with both numbers and a way out if the shares are more than `machine` bytes; else None."""
    needed = sum(share.total for share in shares)
    if needed <= machine:
        return None
    listed = ", ".join(
        f"{share.count} {share.name}{'s' if share.count > 1 else ''} of {share.each / GIB:.1f} GiB"
        if share.count > 1 or share.flag
        else f"{share.name} {share.total / GIB:.1f} GiB"
        for share in sorted(shares, key=lambda share: -share.total)
    )
    return (
        f"the run needs about {needed / GIB:.1f} GiB of memory ({listed}), but this machine has {machine / GIB:.1f} GiB; "
        f"{_way_out(shares, needed - machine)}"
    )


def require_host_memory(shares: Sequence[HostShare], *, on_gpus: bool) -> None:
    """Raise UserError if the run needs more memory than this machine has. With GPUs only warn, since the estimate covers only a
    part of the host memory."""
    problem = host_memory_problem(shares, machine_memory())
    if problem is None:
        return
    if not on_gpus:
        raise UserError(problem)
    logger.warning("%s", problem)


def machine_memory() -> int:
    """Bytes of memory that processes of this machine may use: all of it, or the limit of the container they are in."""
    limits = [psutil.virtual_memory().total]
    for file in _LIMITS_OF_CONTAINERS:
        try:
            limits.append(int(Path(file).read_text()))
        except (OSError, ValueError):
            continue  # not there, or "max"
    return min(limits)


def _mean(sizes: Sequence[int]) -> int:
    return -(-sum(sizes) // len(sizes))


def _way_out(shares: Sequence[HostShare], missing: int) -> str:
    elsewhere = "or join a cluster by RAY_ADDRESS"
    countable = [share for share in shares if share.flag]
    if len(countable) == 1:
        (share,) = countable
        fits = share.count - -(-missing // share.each)
        if fits >= 1:
            return f"{share.flag} {fits * share.per_count} would fit, {elsewhere}"
    return f"take a smaller model or fewer of its parts, {elsewhere}"


def gpu_memory_gib(args: argparse.Namespace) -> tuple[float, str]:
    """Memory of one GPU in GiB, and where the number comes from."""
    if args.dry_run_gpu_memory_gib is not None:
        return args.dry_run_gpu_memory_gib, "--dry-run-gpu-memory-gib"
    found = _smallest_gpu_gib() if gpus_on_this_machine() > 0 else None
    if found is not None:
        return found, "this machine's GPU"
    return _USUAL_GPU_MEMORY_GIB, "assumed: no GPU on this machine, and no --dry-run-gpu-memory-gib"


def _smallest_gpu_gib() -> float | None:
    try:
        output = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True).stdout
        return min(int(line) for line in output.split()) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
