"""The schedule of a rollout's samples that the flags describe. Free of torch: the driver's process reads it too."""

import argparse
from collections.abc import Sequence
from typing import Any

from slime.models.shape_of_flags import flops_model_from_args
from slime.scheduling.dp_schedule import BatchingRule, Bins, DPSchedule, build_schedule
from slime.utils.errors import UserError

# What a namespace that no parser made may leave out.
_LEFT_OUT = {"packing": "first-fit", "balance_data": False, "balance_by_flops": False}


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
) -> tuple[Bins, list[Bins], list[int], list[int]]:
    """(partitions, micro_batch_indices, num_microbatches, global_batch_sizes) of `schedule_from_args`, for any namespace:
    without `packing` it is first-fit, and nothing is balanced that is not said to be."""
    schedule = schedule_from_args(
        argparse.Namespace(**{**_LEFT_OUT, **vars(args)}),
        train_parallel_config,
        total_lengths,
        global_batch_size=global_batch_size,
        execution_ids=rollout_indices,
    )
    return (
        schedule.partitions,
        schedule.micro_batch_indices,
        schedule.num_microbatches,
        schedule.global_batch_sizes,
    )


def train_parallel_config(args: Any) -> dict[str, int]:
    """What `schedule_from_args` has to know about the trainer's layout, from the flags."""
    return {
        "dp_size": args.data_parallel_size,
        "cp_size": args.context_parallel_size,
        "vpp_size": args.virtual_pipeline_model_parallel_size or 1,
        "microbatch_group_size_per_vp_stage": (
            args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
        ),
    }


def schedule_from_args(
    args: Any,
    train_parallel_config: dict[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    execution_ids: Sequence[int],
) -> DPSchedule:
    """`build_schedule` with the rule that the flags describe.

    Read from `args`: `use_dynamic_batch_size`, `max_tokens_per_gpu`, `micro_batch_size`, `packing`,
    `balance_data`, `balance_by_flops`, and the model shape if FLOPs are balanced.
    `train_parallel_config`: `dp_size`, `cp_size`, `vpp_size`, `microbatch_group_size_per_vp_stage`.
    """
    has_virtual_pipeline = (train_parallel_config.get("vpp_size") or 1) > 1
    return build_schedule(
        total_lengths,
        execution_ids,
        _batching_rule(args, train_parallel_config.get("cp_size") or 1),
        global_batch_size=global_batch_size,
        dp_size=train_parallel_config["dp_size"],
        microbatch_group_size=(
            train_parallel_config["microbatch_group_size_per_vp_stage"] if has_virtual_pipeline else 1
        ),
    )


def _batching_rule(args: Any, cp_size: int) -> BatchingRule:
    flops_model = flops_model_from_args(args) if args.balance_by_flops or args.balance_data else None
    if not args.use_dynamic_batch_size:
        if args.balance_by_flops:
            raise UserError("--balance-by-flops needs --use-dynamic-batch-size and --max-tokens-per-gpu")
        return BatchingRule("static", micro_batch_size=args.micro_batch_size, flops_model=flops_model)
    if not args.max_tokens_per_gpu:
        raise UserError("--use-dynamic-batch-size needs a token budget: give --max-tokens-per-gpu")
    packing = "flops" if args.balance_by_flops else args.packing
    return BatchingRule(packing, token_budget=args.max_tokens_per_gpu * cp_size, flops_model=flops_model)
