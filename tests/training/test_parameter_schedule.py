"""The schedule that flags describe, at points of its curves that are worked out by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from slime.training.parameter_schedule import restore_schedule, schedule_settings, schedule_state
from tests.support.models.args import default_args

# 10 optimizer steps of 4 rollouts. The last 5 steps are the last phase of a WSD schedule.
FLAGS = {
    "num_rollout": 10, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "global_batch_size": 4, "lr": 3e-3, "min_lr": 1e-4,
    "lr_warmup_iters": 2, "weight_decay": 0.5, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 5,
}  # fmt: skip
# How much of the way from the lowest to the highest learning rate is left after a quarter of the last phase.
QUARTER = {"linear": 0.75, "cosine": (1 + math.sqrt(0.5)) / 2, "exponential": 2**0.75 - 1, "minus_sqrt": 0.5}


def args_of(**changes: Any) -> Any:
    return default_args(**{**FLAGS, **changes})


def scheduler_of(**changes: Any) -> Any:
    # It imports Megatron: seconds, which only these tests cost then.
    from slime.backends.megatron_utils.optimizer import OptimizerParamScheduler

    return OptimizerParamScheduler(SimpleNamespace(param_groups=[{}]), **schedule_settings(args_of(**changes)))


def after(scheduler: Any, rollouts: int) -> tuple[float, float]:
    """(learning rate, weight decay) after so many rollouts."""
    scheduler.step(rollouts - scheduler.num_steps)
    (group,) = scheduler.optimizer.param_groups
    return group["lr"], group["weight_decay"]


@pytest.mark.parametrize("style", QUARTER)
def test_the_last_phase_falls_in_its_own_style(style):
    scheduler = scheduler_of(lr_wsd_decay_style=style)
    for rollouts in (8, 20):
        assert after(scheduler, rollouts)[0] == pytest.approx(3e-3)
    assert after(scheduler, 25)[0] == pytest.approx(1e-4 + QUARTER[style] * 2.9e-3)
    assert after(scheduler, 40)[0] == pytest.approx(1e-4)


@pytest.mark.parametrize(("style", "quarter"), [("linear", 0.04), ("cosine", 0.02 + 0.08 * (1 - math.sqrt(0.5)) / 2)])
def test_the_weight_decay_grows_in_its_own_style_over_the_run_however_long_that_of_the_rate_is(style, quarter):
    ends = {"start_weight_decay": 0.02, "end_weight_decay": 0.1, "weight_decay_incr_style": style}
    scheduler = scheduler_of(**ends, lr_decay_iters=20)
    assert [after(scheduler, rollouts)[1] for rollouts in (0, 10, 40, 60)] == pytest.approx([0.02, quarter, 0.1, 0.1])
    assert after(scheduler_of(), 10)[1] == 0.5


@pytest.mark.parametrize("of_checkpoint", [False, True])
def test_a_schedule_is_the_checkpoints_only_where_that_is_asked_for(of_checkpoint):
    saved = scheduler_of(lr_wsd_decay_style="minus_sqrt", lr_wsd_decay_iters=6, lr_decay_iters=20)
    after(saved, 60)
    flags = {"lr_wsd_decay_style": "linear", "use_checkpoint_opt_param_scheduler": of_checkpoint}
    other = scheduler_of(**flags)
    restore_schedule(args_of(**flags), other, schedule_state(args_of(), saved))
    assert other.num_steps == 60
    # By the saved one the last phase goes from 56 to 80; by the flags the end was 40.
    lr = 1e-4 + 2.9e-3 * (1 - math.sqrt(4 / 24)) if of_checkpoint else 1e-4
    assert after(other, 60)[0] == pytest.approx(lr)


@pytest.mark.parametrize("decay", [{"lr_decay_iters": 20}, {}], ids=["its own length", "that of the run"])
def test_a_curve_goes_on_where_it_was_when_steps_become_smaller_or_larger(decay):
    flags = {"lr_decay_style": "linear", "lr_wsd_decay_iters": None, **decay}
    end = 80 if decay else 40
    scheduler = scheduler_of(**flags)
    # It is beyond the warm-up of 8 rollouts, which would be one of 16 by steps of 8.
    after(scheduler, 30)
    state = schedule_state(args_of(**flags), scheduler)
    for size in (1, 8, 8, 4):
        of_size = {**flags, "global_batch_size": size}
        resumed = scheduler_of(**of_size)
        lines = restore_schedule(args_of(**of_size), resumed, state)
        assert len(lines) == (size != 4) and all(f"of {size}" in line for line in lines)
        assert after(resumed, 30)[0] == pytest.approx(1e-4 + 2.9e-3 * (end - 30) / (end - 8))
        state = schedule_state(args_of(**of_size), resumed)


def test_a_length_that_is_typed_anew_counts_steps_of_now():
    flags = {"lr_decay_style": "linear", "lr_wsd_decay_iters": None, "lr_decay_iters": 20}
    scheduler = scheduler_of(**flags)
    after(scheduler, 30)
    state = schedule_state(args_of(**flags), scheduler)
    flags |= {"global_batch_size": 2, "lr_decay_iters": 25, "lr_warmup_iters": 1}
    resumed = scheduler_of(**flags)
    assert restore_schedule(args_of(**flags), resumed, state) == []
    assert after(resumed, 30)[0] == pytest.approx(1e-4 + 2.9e-3 * (50 - 30) / (50 - 2))
    assert schedule_state(args_of(**flags), resumed)["global_batch_size"] == 2
