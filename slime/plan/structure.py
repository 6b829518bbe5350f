"""The plan of a run as frozen dataclasses of values that JSON has. Bytes and counts are integers, times are in seconds."""

from dataclasses import dataclass
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class GpuPlan:
    """One GPU, with the training rank and the engine on it; None if there is none. The coordinates are those of the rank."""

    gpu: int
    rank: int | None = None
    tensor: int | None = None
    context: int | None = None
    data: int | None = None
    pipeline: int | None = None
    expert: int | None = None
    engine: int | None = None
    engine_rank: int | None = None
    worker: str | None = None


@dataclass(frozen=True)
class NodePlan:
    node: int
    gpus: tuple[GpuPlan, ...]


@dataclass(frozen=True)
class ServedModelPlan:
    """A model behind a router of its own; `engines`: the numbers of its first and its last engine, None if it has none."""

    name: str
    path: str
    engines: tuple[int, int] | None
    update_weights: bool


@dataclass(frozen=True)
class PlacementPlan:
    """mode: "colocated", "mixed" (some engines on GPUs of training ranks, others beside them), "disaggregated", "training
        only", "engines only" or "external engines".

    models: those of `--sglang-config`; empty without it.
    """

    mode: str
    num_gpus: int
    gpus_per_node: int
    training_ranks: int
    engines: int
    nodes: tuple[NodePlan, ...]
    models: tuple[ServedModelPlan, ...] = ()


@dataclass(frozen=True)
class LayoutPlan:
    """Parallel sizes of the training ranks; `layers`: decoder layers of each pipeline stage."""

    tensor: int
    context: int
    expert: int
    expert_tensor: int
    data: int
    pipeline: int
    virtual_pipeline: int
    sequence_parallel: bool
    layers: tuple[int, ...] | None


@dataclass(frozen=True)
class BatchPlan:
    """From prompts to optimizer steps. Every number is of one rollout step, unless its name says otherwise.

    longest_sample: tokens of the longest allowed sample, or of its response alone unless `prompt_is_limited`; None: the flags
        set no limit.
    assumed_sample: tokens of the sample with which everything else is planned if the flags set no limit; else None.
    micro_batches: of one optimizer step on one data-parallel rank, if all samples are as long as allowed; a lower bound unless
        `prompt_is_limited`. None: no training ranks.
    object_store: bytes of the train batch in Ray's object store, without images, under the same assumptions as
        `micro_batches`.
    in_manager: the train batch is in the rollout manager's own memory instead (`--rollout-data-transport nixl`).
    kept_per_token: the most ids of kept tokens that one token may have, which `object_store` counts; 0: engines report none.
    """

    prompts: int
    samples_per_prompt: int
    rollouts: int
    global_batch_size: int
    optimizer_steps: int
    rollouts_per_rank_and_step: float
    token_budget: int | None
    longest_sample: int | None
    prompt_is_limited: bool
    assumed_sample: int | None
    micro_batches: int | None
    num_rollout: int | None
    total_optimizer_steps: int | None
    object_store: int | None
    kept_per_token: int = 0
    in_manager: bool = False


@dataclass(frozen=True)
class OverlapPlan:
    """What goes on at the same time, and how old that makes what is trained.

    loop: "train.py" or "train_async.py"; with the latter generation and training overlap.
    never_stops: the engines always generate, and rollouts take what is finished (fully async).
    rollouts_ahead: how many rollouts beyond the trained one are generated meanwhile, or wait.
    trainer, engines: what each does while the other works: "stays", "sleeps" or, a trainer alone, "ends". None: no engines.
    push_interval: rollouts from one push to the next; None: nothing is pushed.
    in_flight: pushes swap weights under running requests, not between rollouts.
    oldest: by how many pushes the weights that made a trained token may be older than those that train on it; None: no flag
        sets a bound, or nothing is pushed.
    batches: the most train batches that wait for the trainer or are trained; `BatchPlan` has the bytes of one.
    """

    loop: str
    never_stops: bool
    rollouts_ahead: int
    trainer: str | None
    engines: str | None
    push_interval: int | None
    in_flight: bool
    oldest: int | None
    batches: int


@dataclass(frozen=True)
class ParameterPlan:
    """Numbers of parameters.

    total: those of the model.
    per_rank: those of the rank with most; None: not known.
    stages: for each pipeline stage, those of a rank by part.
    """

    total: int
    per_rank: int | None
    stages: tuple[dict[str, int], ...]


@dataclass(frozen=True)
class PartPlan:
    """A part of a memory estimate; `lower`: flags that would make it smaller."""

    name: str
    bytes: int
    lower: str | None = None


@dataclass(frozen=True)
class TrainingMemoryPlan:
    """Peak of the training rank with most, in bytes.

    moment: when the peak occurs.
    stage_totals: the peak of each pipeline stage.
    host: host memory of the stage's first rank; `host_parts` has it by part, `host_of_node` that of all ranks on a node,
        `stage_hosts` that of each pipeline stage, as a mean over its ranks.
    saving: further host memory of a rank while a checkpoint is written; `saving_parts` has it by part, `saving_of_node` that of
        all ranks on a node.
    stage_savings: for each pipeline stage, as a mean over its ranks, what saving takes beyond `stage_hosts`; on a machine
        without GPUs beyond `stage_totals`, since one memory holds both. Where loading takes more than saving, it is that.
    loading: the most host memory of a rank while its weights are loaded (`--load-main-params-from-ckpt`).
    """

    parts: tuple[PartPlan, ...]
    total: int
    stage: int
    moment: str
    stage_totals: tuple[int, ...]
    host: int
    host_parts: tuple[PartPlan, ...]
    host_of_node: int
    stage_hosts: tuple[int, ...]
    saving: int
    saving_parts: tuple[PartPlan, ...]
    saving_of_node: int
    stage_savings: tuple[int, ...]
    loading: int = 0


@dataclass(frozen=True)
class ServingMemoryPlan:
    """Bytes of one GPU of an engine, on the pipeline stage with most (`stage`).

    stage_totals: bytes of one GPU of each stage.
    cache_tokens: tokens in the cache of the whole engine.
    sequences: how many samples of the longest allowed length the cache holds.
    """

    parts: tuple[PartPlan, ...]
    total: int
    static_fraction: float | None
    cache_bytes_per_token: float
    cache_tokens: int
    sequences: float | None
    stage: int
    stage_totals: tuple[int, ...]


@dataclass(frozen=True)
class PhasePlan:
    """Bytes that one GPU holds in one phase of the run.

    trainer: None if it is not estimated; `total` is then the engine's share alone.
    fits: None if that is not known.
    """

    name: str
    trainer: int | None
    engine: int
    total: int
    fits: bool | None


@dataclass(frozen=True)
class MemoryPlan:
    """gpu_memory: bytes of one GPU; None: planned for a CPU. gpu_memory_from: where that number comes from."""

    gpu_memory: int | None
    gpu_memory_from: str
    training: TrainingMemoryPlan | None
    serving: ServingMemoryPlan | None
    phases: tuple[PhasePlan, ...]


@dataclass(frozen=True)
class SyncPlan:
    """One weight sync: the bytes that every engine receives, and the least time that this takes at the given link speed.

    With `shared_handles` nothing goes over a link to the engines. `seconds` is then the time in which ranks get the weights
    that they do not hold themselves, at most `gathered` bytes, if these go over the link. With `direct_experts` a rank needs
    only those experts that the engine rank on its GPU hosts.
    """

    transport: str
    bytes: int
    buckets: int
    link_gbps: float
    seconds: float
    shared_handles: bool
    gathered: int = 0
    direct_experts: bool = False


@dataclass(frozen=True)
class ValuePlan:
    """A flag whose value is not its default.

    flag: the spelling that brings the value about; a switch has the value True.
    typed: the words that follow the flag on a command line.
    """

    flag: str
    value: Any
    typed: str
    origin: str


@dataclass(frozen=True)
class Plan:
    """A whole plan. Parts for which the flags do not say enough are None; `missing` names the flags that they need."""

    model: str
    device: str
    precision: str
    placement: PlacementPlan
    layout: LayoutPlan | None
    batch: BatchPlan
    overlap: OverlapPlan | None
    parameters: ParameterPlan | None
    memory: MemoryPlan | None
    sync: SyncPlan | None
    values: tuple[ValuePlan, ...]
    custom_values: dict[str, Any]
    missing: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
