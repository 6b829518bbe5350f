"""How training ranks are numbered, and which decoder layers each pipeline stage holds.

Ranks are numbered in Megatron-Core's default order. For attention and dense layers that is tensor · context · data · pipeline,
for experts it is expert-tensor · expert · expert-data · pipeline; the first factor varies fastest. Both describe the same
ranks, but only the pipeline stage is the same in both.

The layers of a stage are cut into `virtual_pipeline` chunks; chunk c of every stage comes before chunk c + 1 of any, as
Megatron-Core numbers them.
"""

import math
import re
from dataclasses import dataclass

from slime.utils.errors import UserError


@dataclass(frozen=True)
class RankPlace:
    """Coordinates of a rank; `expert` and `expert_data` are those of its experts."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_data: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of all parallel groups of `world_size` ranks.

    virtual_pipeline: model chunks per pipeline rank (1: not interleaved).
    stages_beside: pipeline stages vary faster than data-parallel ranks, so that stages of one pipeline are neighbours.
    optimizers: how many complete copies of the optimizer state of a shard are held by the ranks that have this shard.

    Raises:
        UserError: the world cannot be divided into these groups; names the flags.
    """

    world_size: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int = 1
    sequence_parallel: bool = False
    stages_beside: bool = False
    optimizers: int = 1

    def __post_init__(self) -> None:
        dense, experts = self.tensor * self.pipeline * self.context, self.expert_tensor * self.expert * self.pipeline
        if self.world_size % dense:
            raise UserError(
                f"{self.world_size} training ranks (--actor-num-nodes x --actor-num-gpus-per-node) cannot be divided into "
                f"groups of --tensor-model-parallel-size {self.tensor} x --pipeline-model-parallel-size {self.pipeline} x "
                f"--context-parallel-size {self.context} = {dense}; a multiple of {dense} would do"
            )
        if self.world_size % experts:
            raise UserError(
                f"{self.world_size} training ranks (--actor-num-nodes x --actor-num-gpus-per-node) cannot be divided into "
                f"groups of --expert-tensor-parallel-size {self.expert_tensor} x --expert-model-parallel-size {self.expert} x "
                f"--pipeline-model-parallel-size {self.pipeline} = {experts}; a multiple of {experts} would do"
            )

    @property
    def data(self) -> int:
        """Data-parallel size: groups of ranks that see different micro-batches."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @property
    def dense_replicas(self) -> int:
        """Ranks that hold the same shard of dense parameters."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.world_size // (self.expert_tensor * self.expert * self.pipeline)

    def place(self, rank: int) -> RankPlace:
        """Coordinates of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        expert_rest, expert = divmod(rank // self.expert_tensor, self.expert)
        if self.stages_beside:
            data, pipeline = divmod(rest, self.pipeline)
            return RankPlace(tensor, context, data, pipeline, expert, expert_rest // self.pipeline)
        pipeline, data = divmod(rest, self.data)
        return RankPlace(tensor, context, data, pipeline, expert, expert_rest % self.expert_replicas)

    @property
    def ranks_between_stages(self) -> int:
        """By how much the first rank of a stage and that of the next one differ."""
        return self.tensor * self.context if self.stages_beside else self.world_size // self.pipeline

    def ranks_of_stage(self, stage: int) -> list[int]:
        """The ranks of a stage, in order."""
        return [rank for rank in range(self.world_size) if rank // self.ranks_between_stages % self.pipeline == stage]

    @property
    def first_of_stages(self) -> list[int]:
        """The first rank of every stage, which sends the stage's weights to engines."""
        return [stage * self.ranks_between_stages for stage in range(self.pipeline)]

    def stages_among(self, ranks: int) -> int:
        """How many stages have their first rank among the first `ranks` ones."""
        return min(self.pipeline, -(-ranks // self.ranks_between_stages))


_COUNTED = "--account-for-embedding-in-pipeline-split / --account-for-loss-in-pipeline-split"


@dataclass(frozen=True)
class PipelineStage:
    """One stage.

    chunks[c]: decoder layers of its model chunk c, counted from 0 over the whole model.
    predicts: if the model has layers of multi-token prediction, they are on this stage, and the final norm with them.
    passes_on: the stage comes after that one, and passes on what it computed.
    """

    index: int
    chunks: tuple[tuple[int, ...], ...]
    is_first: bool
    is_last: bool
    predicts: bool
    passes_on: bool

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for chunk in self.chunks for layer in chunk)


def split_into_stages(
    num_layers: int,
    pipeline: int,
    *,
    first: int | None = None,
    last: int | None = None,
    virtual_pipeline: int = 1,
    embedding_counts: bool = False,
    loss_counts: bool = False,
) -> tuple[PipelineStage, ...]:
    """The stages of a model.

    Args:
        first, last: `--decoder-{first,last}-pipeline-num-layers`; None: like the stages between.
        embedding_counts, loss_counts: `--account-for-{embedding,loss}-in-pipeline-split`: embedding and loss take the place
            of a layer in the first chunk and in the last one.

    Raises:
        UserError: the layers do not divide; says which numbers would.
    """
    fixed = {"--decoder-first-pipeline-num-layers": first, "--decoder-last-pipeline-num-layers": last}
    fixed = {flag: size for flag, size in fixed.items() if size is not None}
    if fixed and (embedding_counts or loss_counts):
        raise UserError(f"{' and '.join(fixed)} with {_COUNTED}: both shift layers between stages; drop one of them")
    counts = _layers_per_stage(num_layers, embedding_counts + loss_counts, pipeline, first, last, virtual_pipeline)
    _require_whole_chunks(counts, virtual_pipeline)
    sizes = [[count // virtual_pipeline] * virtual_pipeline for count in counts]
    sizes[0][0] -= embedding_counts
    sizes[-1][-1] -= loss_counts
    if min(sizes[0][0], sizes[-1][-1]) < 0:
        raise UserError(
            f"--num-layers {num_layers} over --pipeline-model-parallel-size {pipeline}: a stage would have less than no layer; "
            f"drop {_COUNTED}, or use fewer stages"
        )
    return _numbered(sizes)


def split_as_laid_out(layout: str, pipeline: int) -> tuple[PipelineStage, ...]:
    """The stages of a model whose `--pipeline-model-parallel-layout` says, for a multiple of `pipeline`, what each holds.

    With more of them than pipeline ranks, the ranks take turns: virtual stages.
    """
    sizes = [part.count("t") for part in parts_of_layout(layout)]
    predicting = stage_of_predictions(layout, pipeline)
    return _numbered([sizes[stage::pipeline] for stage in range(pipeline)], predicting)


def stage_of_predictions(layout: str | None, pipeline: int) -> int:
    """The stage, counted from 0, that has the layers of multi-token prediction: the last one, if the layout says nothing."""
    predicting = [index for index, part in enumerate(parts_of_layout(layout or "")) if "m" in part]
    return (predicting[0] if predicting else -1) % pipeline


def parts_of_layout(layout: str) -> list[str]:
    """The letters of every stage, first to last, with repetitions written out.

    In Megatron's notation `E` is the embedding, `t` a layer, `m` a layer of multi-token prediction, `L` the loss; `|` ends a
    stage, `x*3` and `(xy)*3` repeat, commas are for the eye.
    """
    text = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda found: found.group(1) * int(found.group(2)), text)
    return text.split("|")


def _numbered(sizes: list[list[int]], predicting: int | None = None) -> tuple[PipelineStage, ...]:
    """Stages of `sizes[stage][chunk]` layers. Layers are numbered through the first chunks of all stages, then through the
    second chunks, and so on."""
    chunks: list[list[tuple[int, ...]]] = [[] for _ in sizes]
    start = 0
    for chunk in range(len(sizes[0])):
        for stage, chunk_sizes in enumerate(sizes):
            chunks[stage].append(tuple(range(start, start + chunk_sizes[chunk])))
            start += chunk_sizes[chunk]
    last = len(sizes) - 1
    predicting = last if predicting is None else predicting
    return tuple(
        PipelineStage(stage, tuple(chunks[stage]), stage == 0, stage == last, stage == predicting, stage > predicting)
        for stage in range(len(sizes))
    )


def _layers_per_stage(
    num_layers: int, extra: int, pipeline: int, first: int | None, last: int | None, virtual: int
) -> list[int]:
    """How many layers every stage has; `extra`: how many of embedding and loss count as layers."""
    fixed = {"--decoder-first-pipeline-num-layers": first, "--decoder-last-pipeline-num-layers": last}
    typed = [f"{flag} {size}" for flag, size in fixed.items() if size is not None]
    stages, layers = pipeline - len(typed), num_layers + extra - (first or 0) - (last or 0)
    if pipeline == 1:
        if typed and layers:
            raise UserError(f"{' and '.join(typed)} need --pipeline-model-parallel-size above 1; drop them")
        return [num_layers + extra]
    if layers < 0 or (stages > 0 and layers % stages) or (stages == 0 and layers):
        drop = f"drop {_COUNTED}; then " if extra else ""
        raise UserError(
            f"{' '.join([f'--num-layers {num_layers} over --pipeline-model-parallel-size {pipeline}', *typed])}: {layers} "
            f"layers cannot be split evenly over {stages} stages; {drop}{_advice(num_layers, pipeline, first, virtual)}"
        )
    counts = [layers // stages if stages else 0] * pipeline
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts


def _advice(num_layers: int, pipeline: int, first: int | None, virtual: int) -> str:
    """Advice that works: the stages between hold an even share each, rounded up, and the last stage takes the rest."""
    layers, stages = num_layers - (first or 0), pipeline - (first is not None)
    if first and layers < stages:
        return (
            f"a --decoder-first-pipeline-num-layers of at most {num_layers - stages} would leave layers for the others"
        )
    for share in range(-(-layers // stages), 0, -1):
        last = layers - share * (stages - 1)
        if last > 0 and share % virtual == 0 and last % virtual == 0:
            return f"--decoder-last-pipeline-num-layers {last} would do"
    return "use fewer stages" if virtual == 1 else "use fewer stages, or no virtual ones"


def _require_whole_chunks(counts: list[int], virtual: int) -> None:
    uneven = [count for count in counts if count % virtual]
    if uneven:
        common = math.gcd(*counts)
        fitting = next(size for size in range(virtual - 1, 0, -1) if common % size == 0)
        flag = "--num-virtual-stages-per-pipeline-rank"
        raise UserError(
            f"{uneven[0]} layers of a pipeline stage cannot be cut into {virtual} virtual stages; "
            + (f"{flag} {fitting} would do" if fitting > 1 else f"drop {flag}")
        )


def chunks_in_flight(layout: ParallelLayout, stage: int, micro_batches: int, group: int | None = None) -> float:
    """For how many micro-batches stage `stage` holds activations at most; one through all its layers counts 1.

    In the schedule of one forward, one backward, a stage holds one for each stage from itself to the end (Narayanan et al.
    2021, arXiv 2104.04473, section 2.2.1). In the interleaved one it runs further ahead, in chunks (section 2.2.2): `group`
    micro-batches go through one chunk before any goes through the next
    (`--microbatch-group-size-per-virtual-pipeline-stage`; None: as many as there are stages).
    """
    stages, virtual = layout.pipeline, layout.virtual_pipeline
    if stages == 1:
        return 1.0
    if virtual == 1:
        return float(min(stages - stage, micro_batches))
    warm_up = 2 * (stages - stage - 1) + (virtual - 1) * (group or stages)
    return min(warm_up + 1, micro_batches * virtual) / virtual
