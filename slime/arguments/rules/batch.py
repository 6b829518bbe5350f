"""Rules about the number of rollouts and how they are batched."""

import argparse
import logging
from collections.abc import Iterator

from slime.arguments.lengths import longest_sample
from slime.arguments.rules import Rule

logger = logging.getLogger(__name__)


def rollout_count(args: argparse.Namespace) -> Iterator[str]:
    if args.num_rollout is None and args.num_epoch is None:
        yield "give --num-rollout (rollout steps) or --num-epoch (passes over the data)"
    if args.num_rollout is not None and args.num_epoch is not None:
        logger.warning("--num-epoch %d is ignored: --num-rollout %d is given", args.num_epoch, args.num_rollout)
    if args.num_rollout is None and args.load_debug_rollout_data is not None:
        yield "--load-debug-rollout-data needs --num-rollout: a dump does not tell how many there are"
    if args.num_rollout is None and args.num_epoch is not None and not args.rollout_global_dataset:
        yield (
            f"--num-epoch {args.num_epoch} needs the built-in data set; give --num-rollout with "
            "--disable-rollout-global-dataset"
        )
    if args.over_sampling_batch_size < args.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {args.over_sampling_batch_size} must be at least --rollout-batch-size "
            f"{args.rollout_batch_size}"
        )


def static_batches(args: argparse.Namespace) -> Iterator[str]:
    unit = args.micro_batch_size * args.data_parallel_size
    if args.has_trainer and not args.use_dynamic_batch_size and args.global_batch_size % unit:
        yield (
            f"--global-batch-size {args.global_batch_size} is no multiple of --micro-batch-size {args.micro_batch_size} x "
            f"{args.data_parallel_size} data-parallel ranks; change one, or give --use-dynamic-batch-size"
        )


def dynamic_batches(args: argparse.Namespace) -> Iterator[str]:
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu, the token budget of a micro-batch (8192 is usual)"
    if args.balance_by_flops and not args.use_dynamic_batch_size:
        yield "--balance-by-flops needs --use-dynamic-batch-size"
    longest = longest_sample(args)
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is not None and longest is not None:
        budget = args.max_tokens_per_gpu * args.context_parallel_size
        # A plan says it among its own warnings.
        if longest > budget and not args.dry_run:
            logger.warning(
                "the longest allowed sample has %d tokens, more than --max-tokens-per-gpu %d x --context-parallel-size %d = "
                "%d: it makes a micro-batch of its own that needs more memory than the others",
                longest, args.max_tokens_per_gpu, args.context_parallel_size, budget,
            )  # fmt: skip


BATCH_RULES: tuple[Rule, ...] = (rollout_count, static_batches, dynamic_batches)
