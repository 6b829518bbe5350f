"""Rules of pipeline parallelism: how layers are split over stages, and what the interleaved schedule asks for."""

import argparse
from collections.abc import Iterator

from slime.arguments.megatron.layout_string import parts_of_layout
from slime.arguments.megatron.stages import counted_as_layers, pipeline_stages
from slime.arguments.plug_ins import flag_of
from slime.arguments.rules import Rule
from slime.arguments.rules.advice import divisors, hint
from slime.utils.errors import UserError

_SPLIT_OTHERWISE = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip


def pipeline_split(args: argparse.Namespace) -> Iterator[str]:
    if args.pipeline_model_parallel_size == 1:
        for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
            if getattr(args, name) is not None:
                yield (
                    f"{flag_of(name)} {getattr(args, name)} with --pipeline-model-parallel-size 1: one stage holds all "
                    "layers; drop it, or give a pipeline size above 1"
                )
        return
    if not args.num_layers or args.pipeline_model_parallel_layout is not None:
        return
    try:
        pipeline_stages(args)
    except UserError as error:
        yield str(error)


def virtual_stages(args: argparse.Namespace) -> Iterator[str]:
    per_stage, per_rank = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    if args.pipeline_model_parallel_layout is not None and (per_stage is not None or per_rank is not None):
        return  # said by `pipeline_layout`
    if per_stage is not None and per_rank is not None:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {per_stage} and --num-virtual-stages-per-pipeline-rank {per_rank} "
            "say the same in two ways; drop one"
        )
    elif stages == 1 and (per_stage is not None or (per_rank or 1) > 1):
        name = (
            "num_layers_per_virtual_pipeline_stage" if per_stage is not None else "num_virtual_stages_per_pipeline_rank"
        )
        yield (
            f"{flag_of(name)} {getattr(args, name)} with --pipeline-model-parallel-size 1: nothing is interleaved there; "
            "drop it, or give a pipeline size above 1"
        )
    elif stages > 1 and per_stage and layers:
        yield from _layers_per_virtual_stage(args, layers + counted_as_layers(args))


def _layers_per_virtual_stage(args: argparse.Namespace, layers: int) -> Iterator[str]:
    stages, per_stage = args.pipeline_model_parallel_size, args.num_layers_per_virtual_pipeline_stage
    for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        if getattr(args, name) is not None:
            yield (
                f"--num-layers-per-virtual-pipeline-stage {per_stage} needs equal stages, but {flag_of(name)} is "
                f"{getattr(args, name)}; give --num-virtual-stages-per-pipeline-rank in its place"
            )
            return
    # Stages that are uneven by themselves are the affair of `pipeline_split`.
    if layers % stages == 0 and layers // stages % per_stage:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {per_stage} does not divide the {layers // stages} layers of each of "
            f"the --pipeline-model-parallel-size {stages} stages"
            + hint("--num-layers-per-virtual-pipeline-stage", divisors(layers // stages))
        )


def interleaved_schedule(args: argparse.Namespace) -> Iterator[str]:
    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    if stages == 1 or chunks == 1:
        return
    if "overlap_p2p_comm" in args.typed_flags and not args.overlap_p2p_comm:
        yield (
            "--no-overlap-p2p-communication with virtual pipeline stages: messages for different stages of a rank could be "
            "swapped; drop it"
        )
    group = args.microbatch_group_size_per_vp_stage
    if group is not None and group < stages:
        yield (
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below --pipeline-model-parallel-size {stages}; "
            f"give at least {stages}, or drop it"
        )


def pipeline_layout(args: argparse.Namespace) -> Iterator[str]:
    layout, stages = args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
    if layout is None or stages == 1:
        return
    for name in _SPLIT_OTHERWISE:
        if getattr(args, name):
            yield f"{flag_of(name)} and --pipeline-model-parallel-layout both split the layers; drop one of them"
    parts = parts_of_layout(layout)
    unknown = sorted(set("".join(parts)) - set("EtmL"))
    if unknown:
        yield (
            f"--pipeline-model-parallel-layout {layout}: {unknown[0]!r} means nothing; E stands for the embedding, t for a "
            "layer, L for the loss, | ends a stage, and (t|)*4 repeats"
        )
        return
    if len(parts) % stages:
        yield (
            f"--pipeline-model-parallel-layout {layout} has {len(parts)} stages, no multiple of "
            f"--pipeline-model-parallel-size {stages}"
        )
    layers = sum(part.count("t") for part in parts)
    if args.num_layers and layers != args.num_layers:
        yield f"--pipeline-model-parallel-layout {layout} has {layers} layers, but --num-layers is {args.num_layers}"
    if not parts[0].startswith("E") or not parts[-1].endswith("L") or "".join(parts).count("E") > 1:
        yield f"--pipeline-model-parallel-layout {layout} must begin with E, the embedding, and end with L, the loss"


PIPELINE_RULES: tuple[Rule, ...] = (pipeline_split, virtual_stages, interleaved_schedule, pipeline_layout)
