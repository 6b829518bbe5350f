"""The schedule of learning rate and weight decay in a checkpoint, and what a resumed run says when its own is another one."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.arguments.config_files.role_config import ACTOR, CRITIC

# What shapes the curve and is missing in the state that Megatron makes of a schedule.
_FURTHER = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")
_POINTS = 64


def schedule_state(scheduler: OptimizerParamScheduler) -> dict[str, Any]:
    """Where the schedule stands and what it is, as plain values."""
    return {**scheduler.state_dict(), **{name: getattr(scheduler, name) for name in _FURTHER}}


def restore_schedule(scheduler: OptimizerParamScheduler, state: dict[str, Any]) -> None:
    """Put the schedule where it was; it also becomes the checkpoint's, if that is asked for."""
    if scheduler.use_checkpoint_opt_param_scheduler:
        for name in _FURTHER:
            setattr(scheduler, name, state.get(name, getattr(scheduler, name)))
    # Megatron's loading moves the schedule on by what is loaded, so it must stand at the start. It takes the checkpoint's
    # weight decay over only after it has set that of the parameter groups: they are set again.
    scheduler.num_steps = 0
    scheduler.load_state_dict(state)
    scheduler.step(0)


def changed_curves(args: argparse.Namespace, scheduler: OptimizerParamScheduler, state: dict[str, Any]) -> list[str]:
    """A line for each curve, of the learning rate and of the weight decay, that changes because its length follows the length
    of the run.

    Args:
        scheduler: this run's, where the checkpoint's was.
        state: the checkpoint's.

    Returns:
        Nothing about a curve that stays, or whose length was given.
    """
    if scheduler.use_checkpoint_opt_param_scheduler:
        return []
    saved = copy.copy(scheduler)
    vars(saved).update(state)
    lines = [] if getattr(args, "lr_decay_iters", None) else [_changed_rate(args, scheduler, saved)]
    lines.append(_changed_decay(args, scheduler, saved))
    # `--train-iters` is the length of the run, given in optimizer steps.
    return [] if getattr(args, "train_iters", None) else [line for line in lines if line is not None]


def _changed_rate(
    args: argparse.Namespace, scheduler: OptimizerParamScheduler, saved: OptimizerParamScheduler
) -> str | None:
    done, own_end, saved_end = scheduler.num_steps, scheduler.lr_decay_steps, saved.lr_decay_steps
    if own_end == saved_end or not _differ(_rate, scheduler, saved, max(own_end, saved_end)):
        return None
    size = args.global_batch_size
    role, steps = getattr(args, "role", ACTOR), max(round(saved_end / size), 1)
    way = f"`lr_decay_iters: {steps}` in the critic's overrides" if role == CRITIC else f"--lr-decay-iters {steps}"
    return (
        f"{role}: the learning-rate schedule is as long as the run, {own_end / size:g} optimizer steps with --num-rollout "
        f"{args.num_rollout}, and was {saved_end / size:g} in the checkpoint. After {done / size:g} steps the next has lr "
        f"{_rate(scheduler, done):.4g} (by the checkpoint's schedule {_rate(saved, done):.4g}); the schedule ends at "
        f"{_rate(scheduler, own_end):.4g} after {own_end / size:g} steps (the checkpoint's at "
        f"{_rate(saved, saved_end):.4g} after {saved_end / size:g}). To keep its length, give {way}"
    )


def _changed_decay(
    args: argparse.Namespace, scheduler: OptimizerParamScheduler, saved: OptimizerParamScheduler
) -> str | None:
    done, own_end, saved_end = scheduler.num_steps, scheduler.wd_incr_steps, saved.wd_incr_steps
    as_long = copy.copy(scheduler)
    as_long.wd_incr_steps = saved_end
    if not _differ(_decay, scheduler, as_long, max(own_end, saved_end)):
        return None
    size = args.global_batch_size
    return (
        f"{getattr(args, 'role', ACTOR)}: the weight decay changes over the length of the run, {own_end / size:g} optimizer "
        f"steps with --num-rollout {args.num_rollout}, and did so over {saved_end / size:g} in the checkpoint. After "
        f"{done / size:g} steps the next has {_decay(scheduler, done):.4g} (by the checkpoint's schedule "
        f"{_decay(saved, done):.4g}). To keep its schedules, that of the learning rate too, give "
        "--use-checkpoint-opt-param-scheduler"
    )


def _differ(
    curve: Callable[[OptimizerParamScheduler, int], float],
    scheduler: OptimizerParamScheduler,
    saved: OptimizerParamScheduler,
    end: int,
) -> bool:
    """Whether two schedules differ at some point between here and `end`."""
    done, left = scheduler.num_steps, max(end - scheduler.num_steps, 0)
    points = {done + left * point // _POINTS for point in range(_POINTS + 1)}
    return any(curve(scheduler, point) != curve(saved, point) for point in points)


def _decay(scheduler: OptimizerParamScheduler, rollouts: int) -> float:
    """The weight decay after so many rollouts."""
    at = copy.copy(scheduler)
    at.num_steps = rollouts
    return at.get_wd()


def _rate(scheduler: OptimizerParamScheduler, rollouts: int) -> float:
    """The learning rate after so many rollouts, of parameter groups without one of their own."""
    at = copy.copy(scheduler)
    at.num_steps = rollouts
    return at.get_lr({})
