"""Which GPUs of a run train and which serve, as numbers: shared by the plan and by the cluster that is started.

GPUs are numbered as the run's bundles are sorted; training ranks take the first ones.
"""

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuRanges:
    """GPUs of a run.

    Attributes:
        gpus: all that the run reserves.
        actor_gpus: the first ones, one training rank on each.
        rollout_gpus: those of the engines that the run starts, from `first_rollout_gpu` on.
    """

    gpus: int
    actor_gpus: int
    rollout_gpus: int
    first_rollout_gpu: int


def layout_of(args: argparse.Namespace) -> GpuRanges:
    """The layout for derived arguments (`has_trainer`, `has_engines`, `rollout_external`, `colocate`, sizes)."""
    actor = args.world_size if args.has_trainer else 0
    rollout = args.rollout_num_gpus or 0
    if not args.has_engines:
        return GpuRanges(actor, actor, 0, 0)
    if args.rollout_external:
        # The sizes of the training ranks stay reserved for runs that only generate, so that both kinds place alike.
        return GpuRanges(args.world_size, actor, 0, actor)
    if not args.has_trainer:
        return GpuRanges(rollout, 0, rollout, 0)
    if args.colocate:
        return GpuRanges(max(actor, rollout), actor, rollout, 0)
    return GpuRanges(actor + rollout, actor, rollout, actor)
