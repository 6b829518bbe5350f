"""The numbers of parameters: of the model, and of the ranks of every pipeline stage."""

import argparse
import dataclasses

from slime.arguments.megatron.stages import pipeline_stages
from slime.arguments.plan.structure import ParameterPlan
from slime.scheduling.model_shape import ModelShape
from slime.scheduling.parallel_layout import ParallelLayout
from slime.scheduling.parameters import count_parameters
from slime.scheduling.rank_parameters import rank_parameters


def plan_parameters(args: argparse.Namespace, shape: ModelShape, layout: ParallelLayout | None) -> ParameterPlan:
    """The total is that of the checkpoint; ranks hold the padded vocabulary."""
    total = count_parameters(shape).total
    if layout is None or args.pipeline_model_parallel_layout:
        return ParameterPlan(total, None, ())
    if args.train_backend != "megatron":
        return ParameterPlan(total, -(-total // layout.world_size), ())
    counts = count_parameters(shape, padded_vocabulary=True)
    held = [rank_parameters(shape, counts, layout, stage) for stage in pipeline_stages(args)]
    return ParameterPlan(total, max(rank.total for rank in held), tuple(dataclasses.asdict(rank) for rank in held))
