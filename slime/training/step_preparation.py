"""What is known about an optimizer step before its first micro-batch, from stored log-probs of all ranks."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slime.training.context_parallel import ContextParallel
from slime.training.mismatch_report import mismatch_of_step
from slime.training.step_statistics import FLAG, compute_step_statistics, wants_step_statistics
from slime.utils.plugin_loader import load_function


@dataclass(frozen=True)
class StepFacts:
    """`statistics`: what the correction of the loss asked for, to be handed to it; `metrics`: equal on all ranks."""

    statistics: dict[str, torch.Tensor] | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


def facts_of_step(
    args: argparse.Namespace,
    rollout_data: dict[str, Any],
    positions: Sequence[int],
    cp: ContextParallel,
    data_group: dist.ProcessGroup,
) -> StepFacts:
    """Collective over `data_group`, the data- and context-parallel ranks, if the arguments ask for anything.

    Args:
        positions: the step's samples in this rank's data.
    """
    if args.loss_type == "sft_loss":
        return StepFacts()
    statistics, path = None, args.custom_tis_function_path
    if args.use_tis and path is not None:
        correction = load_function(path, flag=FLAG)
        if wants_step_statistics(correction, args):
            statistics = compute_step_statistics(correction, args, rollout_data, positions, cp, data_group)
    metrics = mismatch_of_step(rollout_data, positions, cp, data_group) if args.get_mismatch_metrics else {}
    return StepFacts(statistics, metrics)
