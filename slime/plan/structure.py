"""The plan of a run as plain values: frozen, and JSON as it stands. Bytes and counts are integers, times seconds."""

from dataclasses import dataclass
from typing import Any

GIB = 2**30


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
class ServedModelPlan:
    """A model behind a router of its own; `engines`: the first and the last of its engines, None where it has none."""

    name: str
    path: str
    engines: tuple[int, int] | None
    update_weights: bool


@dataclass(frozen=True)
class PlacementPlan:
    """mode: "colocated", "disaggregated", "training only", "engines only" or "external engines".

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
    """From prompts to optimizer steps; every number is of one rollout step unless its name says otherwise.

    longest_sample: tokens of the longest allowed sample, or of its response alone unless `prompt_is_limited`; None: the flags
        set no limit.
    assumed_sample: tokens of a sample that everything else is planned with where the flags set no limit; else None.
    micro_batches: of one optimizer step on one data-parallel rank, all samples at their longest; a lower bound unless
        `prompt_is_limited`. None: no training ranks.
    object_store: bytes of the train batch in Ray's object store, all samples at their longest, and as `micro_batches` else;
        without images. `in_manager`: in the rollout manager's own memory instead (`--rollout-data-transport nixl`).
    kept_per_token: ids of the tokens that sampling kept, the most for one token, which `object_store` counts; 0: none are told.
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
class ParameterPlan:
    """total: of the model. per_rank: of the rank with most; None: not known. stages: parts of a rank of each stage."""

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
    """Peak of the training rank with most; `moment`: when. `stage_totals`: peak of each pipeline stage.

    host: bytes of the stage's first rank in host memory, and by part in `host_parts`; host_of_node: of all ranks on a node;
    stage_hosts: of each pipeline stage, the mean of its ranks.

    saving: what a rank has in host memory besides while a checkpoint is written, and by part in `saving_parts`; saving_of_node:
    all ranks on a node. stage_savings: of each pipeline stage, the mean of its ranks: what that is above `stage_hosts`, and on
    a machine without GPUs above `stage_totals`, since one memory holds both.

    loading: what a rank has there, at most, while its weights are loaded (`--load-main-params-from-ckpt`). `stage_savings` has
    what that is above the others, where it is more than what a save takes.
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
    """One GPU of an engine, of the pipeline stage with most (`stage`). `stage_totals`: of a GPU of each.

    `cache_tokens`: of the whole engine; `sequences`: of the longest allowed length in them.
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
    """What lies on one GPU while the run does one thing.

    trainer: None where it is not estimated; `total` is then the engine's share. fits: None: not known.
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
    """One weight sync: bytes that every engine receives, and the time that takes at least at the given link speed.

    With `shared_handles` nothing goes over a link to the engines: `seconds` is the time in which ranks get what they lack,
    `gathered` bytes at most, if that goes over the link. They lack nothing where every rank holds all. With `direct_experts`
    they need no other experts than those that the engine rank on their GPU hosts.
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

    flag: the spelling that says the value, so the value of a switch is True. typed: what a command line has after the flag.
    """

    flag: str
    value: Any
    typed: str
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
