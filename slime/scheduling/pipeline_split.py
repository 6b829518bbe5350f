"""Which decoder layers each pipeline stage holds, and how many micro-batches are under way in it.

The layers of a stage are cut into `virtual_pipeline` chunks; chunk c of every stage comes before chunk c + 1 of any, as
Megatron-Core numbers them.
"""

from dataclasses import dataclass

from slime.scheduling.parallel_layout import ParallelLayout
from slime.utils.errors import UserError


@dataclass(frozen=True)
class PipelineStage:
    """One stage. `chunks[c]`: decoder layers of its model chunk c, counted from 0 over the whole model."""

    index: int
    chunks: tuple[tuple[int, ...], ...]
    is_first: bool
    is_last: bool

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
        embedding_counts, loss_counts: `--account-for-{embedding,loss}-in-pipeline-split`: a layer less on that stage.

    Raises:
        UserError: the layers do not divide; says which numbers would.
    """
    counts = _layers_per_stage(num_layers + embedding_counts + loss_counts, pipeline, first, last)
    counts[0] -= embedding_counts
    counts[-1] -= loss_counts
    uneven = [count for count in counts if count % virtual_pipeline]
    if uneven:
        raise UserError(
            f"{uneven[0]} layers of a pipeline stage cannot be cut into {virtual_pipeline} virtual stages; change "
            "--num-virtual-stages-per-pipeline-rank / --num-layers-per-virtual-pipeline-stage, or leave it out"
        )
    chunk_sizes = [count // virtual_pipeline for count in counts]
    chunks: list[list[tuple[int, ...]]] = [[] for _ in range(pipeline)]
    start = 0
    for _ in range(virtual_pipeline):
        for stage, size in enumerate(chunk_sizes):
            chunks[stage].append(tuple(range(start, start + size)))
            start += size
    return tuple(
        PipelineStage(index=stage, chunks=tuple(chunks[stage]), is_first=stage == 0, is_last=stage == pipeline - 1)
        for stage in range(pipeline)
    )


def _layers_per_stage(num_layers: int, pipeline: int, first: int | None, last: int | None) -> list[int]:
    fixed = [size for size in (first, last) if size is not None]
    stages, layers = pipeline - len(fixed), num_layers - sum(fixed)
    if pipeline == 1:
        if fixed and fixed != [num_layers]:
            raise UserError(
                "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers need "
                "--pipeline-model-parallel-size above 1; drop them"
            )
        return [num_layers]
    if layers < 0 or (stages > 0 and layers % stages) or (stages == 0 and layers):
        raise UserError(
            f"--num-layers {num_layers} cannot be split over --pipeline-model-parallel-size {pipeline}"
            + (f" with {sum(fixed)} layers fixed by --decoder-first/last-pipeline-num-layers" if fixed else "")
            + f": {layers} layers remain for {stages} equal stages; "
            + _working_last_stage(num_layers - (first or 0), pipeline - (first is not None))
        )
    middle = layers // stages if stages else 0
    counts = [middle] * pipeline
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts


def _working_last_stage(layers: int, stages: int) -> str:
    """The last stage takes what is left when the others hold equally many, as many as an even share rounded up."""
    share = -(-layers // stages)
    last = layers - share * (stages - 1)
    while last <= 0 and share > 1:
        share -= 1
        last = layers - share * (stages - 1)
    return f"--decoder-last-pipeline-num-layers {last} would do"


def chunks_in_flight(layout: ParallelLayout, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations stage `stage` holds at most, in units of all its layers.

    One forward, one backward: a stage holds one per stage from itself to the end (Narayanan et al. 2021, arXiv 2104.04473,
    section 2.2.1). Interleaved, it runs further ahead, in chunks (section 2.2.2).
    """
    stages, virtual = layout.pipeline, layout.virtual_pipeline
    if stages == 1:
        return 1.0
    if virtual == 1:
        return float(min(stages - stage, micro_batches))
    warm_up = 2 * (stages - stage - 1) + (virtual - 1) * stages
    return min(warm_up + 1, micro_batches * virtual) / virtual
