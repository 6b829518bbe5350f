from types import SimpleNamespace

import pytest
import torch

from slime.training.advantages import compute_advantages_and_returns
from slime.utils.errors import UserError


def data():
    return {"tokens": [torch.arange(4), torch.arange(5)], "response_lengths": [2, 3], "rewards": [0.5, -1.5]}


def doubled(args, rollout_data):
    rollout_data["advantages"] = [torch.full((n,), 2.0) for n in rollout_data["response_lengths"]]
    rollout_data["returns"] = rollout_data["advantages"]


def too_short(args, rollout_data):
    rollout_data["advantages"] = rollout_data["returns"] = [torch.ones(1), torch.ones(3)]


def test_grpo_spreads_the_reward_over_the_response():
    rollout_data = data()
    compute_advantages_and_returns(SimpleNamespace(custom_advantage_function_path=None), rollout_data)
    assert [a.tolist() for a in rollout_data["advantages"]] == [[0.5, 0.5], [-1.5, -1.5, -1.5]]
    assert [k.tolist() for k in rollout_data["kl"]] == [[0, 0], [0, 0, 0]]


def test_custom_function_replaces_the_estimator():
    rollout_data = data()
    args = SimpleNamespace(custom_advantage_function_path=f"{__file__}:doubled")
    compute_advantages_and_returns(args, rollout_data)
    assert rollout_data["advantages"][1].tolist() == [2, 2, 2]


def test_custom_function_is_checked():
    args = SimpleNamespace(custom_advantage_function_path=f"{__file__}:too_short")
    with pytest.raises(UserError, match=r"rollout_data\['advantages'\].*expected lengths \[2, 3\].*got \[1, 3\]"):
        compute_advantages_and_returns(args, data())
