"""The length of the schedules of learning rate and weight decay."""

import pytest

from slime.arguments.critic import critic_args
from slime.arguments.schedule_length import train_iterations
from tests.support.args import parse
from tests.support.rules import violations

PPO = ("--advantage-estimator", "ppo")


def test_rollouts_of_the_run_over_the_global_batch_size(tmp_path):
    assert train_iterations(parse(tmp_path, "--num-rollout", "10", "--num-steps-per-rollout", "2")) == 20


@pytest.mark.parametrize(("critic_only", "expected"), [(0, 10), (3, 7), (10, 10), (12, 10)])
def test_rollouts_of_the_critic_alone_are_no_steps_of_the_actor(tmp_path, critic_only, expected):
    args = parse(tmp_path, *PPO, "--num-rollout", "10", "--num-critic-only-steps", str(critic_only))
    assert train_iterations(args) == expected
    assert train_iterations(critic_args(args)) == 10


def test_a_warmup_is_compared_with_the_rollouts_that_train_the_actor(tmp_path):
    words = [*PPO, "--num-rollout", "4", "--lr-warmup-iters", "3"]
    assert train_iterations(parse(tmp_path, *words)) == 4
    (message,) = violations(tmp_path, [*words, "--num-critic-only-steps", "2"])
    assert "must be below the 2 optimizer steps of the schedule (those of --num-rollout 4 without " in message
