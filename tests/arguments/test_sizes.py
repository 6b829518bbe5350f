"""Which GPUs train and which serve, how many steps there are."""

from argparse import Namespace

import pytest

from slime.arguments.config_files.role_config import critic_args
from slime.arguments.sizes import layout_of, plans_for_gpus, train_iterations
from tests.support.models.args import parse
from tests.support.tables.rules import violations

# A = 4 GPUs train, R = 2 or 6 serve: total, first GPU of an engine.
MODES = [
    ({"has_engines": False}, (4, 0)),
    ({"rollout_external": True, "has_trainer": False}, (4, 0)),
    ({"colocate": True}, (4, 0)),
    ({"colocate": True, "rollout_num_gpus": 6}, (6, 0)),
    ({"rollout_external": True}, (4, 4)),
    ({"has_trainer": False}, (2, 0)),
    ({}, (6, 4)),
]


@pytest.mark.parametrize("values, expected", MODES, ids=[" ".join(values) or "otherwise" for values, _ in MODES])
def test_layout(values, expected):
    usual = {
        "world_size": 4, "rollout_num_gpus": 2, "has_trainer": True, "has_engines": True, "rollout_external": False,
        "colocate": False,
    }  # fmt: skip
    layout = layout_of(Namespace(**{**usual, **values}))
    assert (layout.gpus, layout.first_rollout_gpu) == expected


def test_external_engines_take_none_of_the_runs_gpus():
    args = Namespace(world_size=4, rollout_num_gpus=8, has_trainer=True, has_engines=True, rollout_external=True)
    assert layout_of(args).rollout_gpus == 0


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


@pytest.mark.parametrize(
    "accelerator, typed, expected",
    [(None, None, True), ("cpu", None, False), ("cpu", 24.0, True), ("cuda", None, True)],
)
def test_a_plan_is_for_gpus_unless_the_run_says_cpu(monkeypatch, accelerator, typed, expected):
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    if accelerator is not None:
        monkeypatch.setenv("SLIME_ACCELERATOR", accelerator)
    assert plans_for_gpus(Namespace(dry_run_gpu_memory_gib=typed)) is expected
