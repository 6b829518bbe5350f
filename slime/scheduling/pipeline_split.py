"""Which decoder layers each pipeline stage holds, and how many micro-batches are under way in it.

The layers of a stage are cut into `virtual_pipeline` chunks; chunk c of every stage comes before chunk c + 1 of any, as
Megatron-Core numbers them.
"""

import math
from dataclasses import dataclass

from slime.scheduling.parallel_layout import ParallelLayout
from slime.utils.errors import UserError

_COUNTED = "--account-for-embedding-in-pipeline-split / --account-for-loss-in-pipeline-split"


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


def _numbered(sizes: list[list[int]]) -> tuple[PipelineStage, ...]:
    """`sizes[stage][chunk]` layers, counted through the first chunks of all stages, then the second ones, and so on."""
    chunks: list[list[tuple[int, ...]]] = [[] for _ in sizes]
    start = 0
    for chunk in range(len(sizes[0])):
        for stage, of_stage in enumerate(sizes):
            chunks[stage].append(tuple(range(start, start + of_stage[chunk])))
            start += of_stage[chunk]
    last = len(sizes) - 1
    return tuple(
        PipelineStage(index=stage, chunks=tuple(chunks[stage]), is_first=stage == 0, is_last=stage == last)
        for stage in range(len(sizes))
    )


def _layers_per_stage(
    num_layers: int, extra: int, pipeline: int, first: int | None, last: int | None, virtual: int
) -> list[int]:
    """Layers of every stage; `extra`: embedding and loss that count as layers."""
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
    """The last stage takes what is left when those between hold equally many, as many as an even share rounded up."""
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
    """Micro-batches whose activations stage `stage` holds at most, in units of all its layers.

    One forward, one backward: a stage holds one per stage from itself to the end (Narayanan et al. 2021, arXiv 2104.04473,
    section 2.2.1). Interleaved, it runs further ahead, in chunks (section 2.2.2): `group` micro-batches go through one chunk
    before any goes through the next (`--microbatch-group-size-per-virtual-pipeline-stage`; None: one per stage).
    """
    stages, virtual = layout.pipeline, layout.virtual_pipeline
    if stages == 1:
        return 1.0
    if virtual == 1:
        return float(min(stages - stage, micro_batches))
    warm_up = 2 * (stages - stage - 1) + (virtual - 1) * (group or stages)
    return min(warm_up + 1, micro_batches * virtual) / virtual
