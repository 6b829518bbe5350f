"""Rules about the schedules of learning rate and weight decay: ranks build them last, after the weights are loaded."""

import argparse
from collections.abc import Iterator

from slime.arguments.rules import Rule
from slime.arguments.schedule_length import train_iterations


def warmup(args: argparse.Namespace) -> Iterator[str]:
    fraction, steps = args.lr_warmup_fraction, args.lr_warmup_iters
    if fraction is not None and steps:
        yield f"--lr-warmup-fraction {fraction} and --lr-warmup-iters {steps} exclude each other; drop one"
    if fraction is not None and not 0 <= fraction < 1:
        yield f"--lr-warmup-fraction {fraction}: it must be at least 0 and below 1, 0.1 for example"
    if args.lr_warmup_init > args.lr:
        yield f"--lr-warmup-init {args.lr_warmup_init} is above --lr {args.lr}; give at most {args.lr} (0 is usual)"
    length, source = _decay_steps(args)
    if fraction is None and steps and length and steps >= length:
        yield (
            f"--lr-warmup-iters {steps} must be below the {length} optimizer steps of the schedule ({source}); give at most "
            f"{length - 1}, or --lr-decay-iters above {steps}"
        )


def decay(args: argparse.Namespace) -> Iterator[str]:
    if args.min_lr is not None and args.min_lr > args.lr:
        yield f"--min-lr {args.min_lr} is above --lr {args.lr}; give at most {args.lr}"
    if args.use_checkpoint_opt_param_scheduler and args.override_opt_param_scheduler:
        yield "--use-checkpoint-opt-param-scheduler and --override-opt-param-scheduler contradict each other; drop one"
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters, the steps of its last phase"


def weight_decay(args: argparse.Namespace) -> Iterator[str]:
    start, end = args.start_weight_decay, args.end_weight_decay
    if (start is None) != (end is None):
        yield "--start-weight-decay and --end-weight-decay belong together; give both, or --weight-decay alone"
    if start is None or end is None or start == end:
        return
    both = f"--start-weight-decay {start} and --end-weight-decay {end}"
    if start > end:
        yield f"{both}: weight decay can only grow; give --end-weight-decay {start} or more"
    elif args.weight_decay_incr_style == "constant":
        yield f"{both} need --weight-decay-incr-style linear or cosine, not constant"


def _decay_steps(args: argparse.Namespace) -> tuple[int | None, str]:
    """Optimizer steps of the learning-rate schedule, and what they follow from; None where only the data set knows."""
    for name in ("lr_decay_iters", "train_iters"):
        if getattr(args, name):
            return getattr(args, name), f"--{name.replace('_', '-')}"
    without = f" without --num-critic-only-steps {args.num_critic_only_steps}" if args.num_critic_only_steps else ""
    return train_iterations(args), f"those of --num-rollout {args.num_rollout}{without}"


SCHEDULE_RULES: tuple[Rule, ...] = (warmup, decay, weight_decay)
