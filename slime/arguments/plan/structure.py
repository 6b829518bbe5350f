"""The plan of a run as plain values: frozen, and JSON as it stands. Bytes and counts are integers, times seconds."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuPlan:
    """One GPU. `rank` None: no training rank on it; `engine` None: no engine. Coordinates are those of the rank."""

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
class PlacementPlan:
    """mode: "colocated", "disaggregated", "training only", "engines only" or "external engines"."""

    mode: str
    num_gpus: int
    gpus_per_node: int
    training_ranks: int
    engines: int
    nodes: tuple[NodePlan, ...]


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
    """From prompts to optimizer steps; every number is of one rollout step unless its name says otherwise.

    longest_sample: tokens of the longest allowed sample, or of its response alone unless `prompt_is_limited`; None: the flags
        set no limit.
    micro_batches: of one optimizer step on one data-parallel rank, all samples at their longest; None: not known.
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
    micro_batches: int | None
    num_rollout: int | None
    total_optimizer_steps: int | None


@dataclass(frozen=True)
class ParameterPlan:
    """total: of the model; per_rank: of the rank with most. `stages`: parts of a rank of each pipeline stage."""

    total: int
    per_rank: int
    stages: tuple[dict[str, int], ...]


@dataclass(frozen=True)
class PartPlan:
    """A part of a memory estimate; `lower`: flags that would make it smaller."""

    name: str
    bytes: int
    lower: str | None = None


@dataclass(frozen=True)
class TrainingMemoryPlan:
    """Peak of the training rank with most; `moment`: when. `stage_totals`: peak of each pipeline stage.

    host: bytes of one rank in host memory (offloaded optimizer state, copies of weights); host_of_node: of all on a node.
    """

    parts: tuple[PartPlan, ...]
    total: int
    stage: int
    moment: str
    stage_totals: tuple[int, ...]
    host: int
    host_of_node: int


@dataclass(frozen=True)
class ServingMemoryPlan:
    """One GPU of an engine. `cache_tokens`: of the whole engine; `sequences`: of the longest allowed length in them."""

    parts: tuple[PartPlan, ...]
    total: int
    static_fraction: float | None
    cache_bytes_per_token: float
    cache_tokens: int
    sequences: float | None


@dataclass(frozen=True)
class PhasePlan:
    """What lies on one GPU while the run does one thing."""

    name: str
    trainer: int
    engine: int
    total: int
    fits: bool


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
    """One weight sync: bytes that every engine receives, and the time that takes at the given link speed."""

    transport: str
    bytes: int
    buckets: int
    link_gbps: float
    seconds: float


@dataclass(frozen=True)
class ValuePlan:
    """A flag whose value is not its default."""

    flag: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Plan:
    """A whole plan. Parts that the flags do not tell enough about are None; `missing` names the flags they need."""

    model: str
    device: str
    precision: str
    placement: PlacementPlan
    layout: LayoutPlan | None
    batch: BatchPlan
    parameters: ParameterPlan | None
    memory: MemoryPlan | None
    sync: SyncPlan | None
    values: tuple[ValuePlan, ...]
    custom_values: dict[str, Any]
    missing: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
