"""The schedule of learning rate and weight decay: how flags describe it, how a checkpoint keeps it, and what a resumed run says
if its own schedule is another one.

The schedule is megatron.core's `OptimizerParamScheduler`, for any optimizer with groups of parameters. It counts rollouts
("samples" in Megatron's words), not iterations, so that a step which lost some of its rollouts moves it on by what was really
trained. Lengths that are given in iterations are therefore multiplied by the global batch size: by that of the run that began
with them, so that the curve goes on where it was when a resumed run takes steps of another size.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

from slime.arguments.config_files.role_config import CRITIC
from slime.arguments.sizes import train_iterations
from slime.utils.errors import UserError

# The backend knows the class.
Scheduler = Any
# What shapes the curve, and is missing in the state that Megatron makes of a schedule.
_FURTHER = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")
# The lengths of a schedule that flags give in optimizer steps.
_IN_STEPS = {
    "lr_warmup_steps": "lr_warmup_iters", "lr_decay_steps": "lr_decay_iters", "wsd_decay_steps": "lr_wsd_decay_iters",
}  # fmt: skip
# Two schedules are compared at so many points.
_POINTS = 64


def schedule_settings(args: Any) -> dict[str, Any]:
    """The arguments of `OptimizerParamScheduler`, beside the optimizer.

    Raises:
        UserError: the schedule is empty, or its warmup is as long as the schedule, or its last phase longer than what follows.
    """
    decay_steps, warmup_steps = _schedule_lengths(args)
    weight_decay = args.weight_decay
    from_checkpoint = args.use_checkpoint_opt_param_scheduler
    last_phase = None if args.lr_wsd_decay_iters is None else args.lr_wsd_decay_iters * args.global_batch_size
    if args.lr_decay_style == "WSD" and last_phase > decay_steps - warmup_steps:
        raise UserError(
            f"the last phase of the learning rate ({last_phase} rollouts) is longer than its schedule behind the warm-up "
            f"({decay_steps - warmup_steps} rollouts); lower --lr-wsd-decay-iters or raise --lr-decay-iters"
        )
    return dict(
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=weight_decay if args.start_weight_decay is None else args.start_weight_decay,
        end_wd=weight_decay if args.end_weight_decay is None else args.end_weight_decay,
        wd_incr_steps=train_iterations(args) * args.global_batch_size,
        wd_incr_style=args.weight_decay_incr_style,
        # After a resume the flags of this run hold, unless those of the checkpoint are asked for. Megatron can also stop when
        # they differ, but the schedule is as long as --num-rollout says, so then no run could be prolonged.
        use_checkpoint_opt_param_scheduler=from_checkpoint,
        override_opt_param_scheduler=not from_checkpoint,
        wsd_decay_steps=last_phase,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def _schedule_lengths(args: Any) -> tuple[int, int]:
    """(decay, warmup) in rollouts."""
    decay_iterations = args.lr_decay_iters or train_iterations(args)
    decay_steps = decay_iterations * args.global_batch_size
    if decay_steps <= 0:
        raise UserError(
            f"the learning-rate schedule is empty: --num-rollout {args.num_rollout} gives no optimizer step with "
            f"--global-batch-size {args.global_batch_size}; raise --num-rollout or set --lr-decay-iters"
        )
    if args.lr_warmup_fraction is not None:
        warmup_steps = int(args.lr_warmup_fraction * decay_steps)
    else:
        warmup_steps = args.lr_warmup_iters * args.global_batch_size
    if warmup_steps >= decay_steps:
        raise UserError(
            f"the learning-rate warmup ({warmup_steps} rollouts) is not shorter than the schedule ({decay_steps} "
            "rollouts); lower --lr-warmup-iters / --lr-warmup-fraction or raise --lr-decay-iters"
        )
    return decay_steps, warmup_steps


def schedule_state(args: argparse.Namespace, scheduler: Scheduler) -> dict[str, Any]:
    """Where the schedule stands and what it is, as plain values."""
    size = vars(scheduler).get("global_batch_size", args.global_batch_size)
    return {
        **scheduler.state_dict(), **{name: getattr(scheduler, name) for name in _FURTHER}, "global_batch_size": size,
    }  # fmt: skip


def restore_schedule(args: argparse.Namespace, scheduler: Scheduler, state: dict[str, Any]) -> list[str]:
    """Put the schedule where it was. With `--use-checkpoint-opt-param-scheduler` it also becomes the checkpoint's.

    Args:
        scheduler: made by this run's `schedule_settings`.
        state: of `schedule_state`.

    Returns:
        Lines about what is not as the flags, or the checkpoint, alone would have it.
    """
    lines = []
    if scheduler.use_checkpoint_opt_param_scheduler:
        for name in _FURTHER:
            setattr(scheduler, name, state.get(name, getattr(scheduler, name)))
        scheduler.global_batch_size = state.get("global_batch_size", args.global_batch_size)
    else:
        lines += _keep_lengths(args, scheduler, state)
    # Megatron moves the schedule on by the number that it loads, so it has to stand at the start. It sets the parameter groups
    # before it takes over the checkpoint's weight decay, so a step of 0 sets them again.
    scheduler.num_steps = 0
    scheduler.load_state_dict(state)
    scheduler.step(0)
    return lines if scheduler.use_checkpoint_opt_param_scheduler else lines + _changed_curves(args, scheduler, state)


def _keep_lengths(args: argparse.Namespace, scheduler: Scheduler, state: dict[str, Any]) -> list[str]:
    """If steps have another size than when the schedule began: keep the lengths that flags give in steps as they did then. In
    steps of now the place in the schedule, which is counted in rollouts, would be at another point of its curve, or behind
    its end. Returns a line about them."""
    size, now = state.get("global_batch_size", args.global_batch_size), args.global_batch_size
    given = {name: steps for name, flag in _IN_STEPS.items() if (steps := vars(args)[flag])}
    kept = {name: steps for name, steps in given.items() if size != now and steps * size == state[name]}
    if not kept:
        return []
    scheduler.global_batch_size = size
    for name in kept:
        setattr(scheduler, name, state[name])
    if args.lr_warmup_fraction is not None:
        scheduler.lr_warmup_steps = int(args.lr_warmup_fraction * scheduler.lr_decay_steps)
    told = ", ".join(
        f"--{_IN_STEPS[name].replace('_', '-')} {steps} is {steps * size / now:g} of now"
        for name, steps in kept.items()
    )
    return [
        f"{args.role}: the learning-rate schedule goes on as it began, in optimizer steps of {size} rollouts; the run takes "
        f"those of {now}: {told}. Another value counts steps of {now}"
    ]


def _changed_curves(args: argparse.Namespace, scheduler: Scheduler, state: dict[str, Any]) -> list[str]:
    """A line for each curve (learning rate, weight decay) that differs from the checkpoint's because it is as long as the run.

    Args:
        scheduler: this run's, at the point where the checkpoint's was.
        state: the checkpoint's.

    Returns:
        No line for a curve that stays, or whose length was given by a flag.
    """
    saved = copy.copy(scheduler)
    vars(saved).update(state)
    lines = [] if args.lr_decay_iters else [_changed_rate(args, scheduler, saved)]
    lines.append(_changed_decay(args, scheduler, saved))
    # `--train-iters` is the length of the run, given in optimizer steps.
    is_given = args.train_iters and state.get("global_batch_size") in (None, args.global_batch_size)
    return [] if is_given else [line for line in lines if line is not None]


def _changed_rate(args: argparse.Namespace, scheduler: Scheduler, saved: Scheduler) -> str | None:
    done, own_end, saved_end = scheduler.num_steps, scheduler.lr_decay_steps, saved.lr_decay_steps
    if own_end == saved_end or not _differ(_rate, scheduler, saved, max(own_end, saved_end)):
        return None
    size = args.global_batch_size
    role, steps = args.role, max(round(saved_end / size), 1)
    way = f"`lr_decay_iters: {steps}` in the critic's overrides" if role == CRITIC else f"--lr-decay-iters {steps}"
    return (
        f"{role}: the learning-rate schedule is as long as the run, {own_end / size:g} optimizer steps with --num-rollout "
        f"{args.num_rollout}, and was {saved_end / size:g} in the checkpoint. After {done / size:g} steps the next has lr "
        f"{_rate(scheduler, done):.4g} (by the checkpoint's schedule {_rate(saved, done):.4g}); the schedule ends at "
        f"{_rate(scheduler, own_end):.4g} after {own_end / size:g} steps (the checkpoint's at "
        f"{_rate(saved, saved_end):.4g} after {saved_end / size:g}). To keep its length, give {way}"
    )


def _changed_decay(args: argparse.Namespace, scheduler: Scheduler, saved: Scheduler) -> str | None:
    done, own_end, saved_end = scheduler.num_steps, scheduler.wd_incr_steps, saved.wd_incr_steps
    as_long = copy.copy(scheduler)
    as_long.wd_incr_steps = saved_end
    if not _differ(_decay, scheduler, as_long, max(own_end, saved_end)):
        return None
    size = args.global_batch_size
    return (
        f"{args.role}: the weight decay changes over the length of the run, {own_end / size:g} optimizer "
        f"steps with --num-rollout {args.num_rollout}, and did so over {saved_end / size:g} in the checkpoint. After "
        f"{done / size:g} steps the next has {_decay(scheduler, done):.4g} (by the checkpoint's schedule "
        f"{_decay(saved, done):.4g}). To keep its schedules, that of the learning rate too, give "
        "--use-checkpoint-opt-param-scheduler"
    )


def _differ(
    curve: Callable[[Scheduler, int], float],
    scheduler: Scheduler,
    saved: Scheduler,
    end: int,
) -> bool:
    """Whether two schedules differ at some point between here and `end`."""
    done, left = scheduler.num_steps, max(end - scheduler.num_steps, 0)
    points = {done + left * point // _POINTS for point in range(_POINTS + 1)}
    return any(curve(scheduler, point) != curve(saved, point) for point in points)


def _decay(scheduler: Scheduler, rollouts: int) -> float:
    """The weight decay after so many rollouts."""
    at = copy.copy(scheduler)
    at.num_steps = rollouts
    return at.get_wd()


def _rate(scheduler: Scheduler, rollouts: int) -> float:
    """The learning rate after so many rollouts, of parameter groups without one of their own."""
    at = copy.copy(scheduler)
    at.num_steps = rollouts
    return at.get_lr({})
