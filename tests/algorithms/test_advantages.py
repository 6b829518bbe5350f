import pytest
import torch

from slime.algorithms.advantages import get_grpo_returns, grpo_advantages


def test_every_token_gets_the_reward_of_its_sample():
    advantages = grpo_advantages([0.5, -1.0, 2.0], [2, 0, 3])
    assert [tokens.tolist() for tokens in advantages] == [[0.5, 0.5], [], [2.0, 2.0, 2.0]]
    assert all(tokens.dtype == torch.float32 for tokens in advantages)


def test_rewards_may_be_a_tensor():
    advantages = grpo_advantages(torch.tensor([1.0, 2.0], dtype=torch.float64), [1, 2])
    assert [tokens.tolist() for tokens in advantages] == [[1.0], [2.0, 2.0]]


def test_no_samples():
    assert grpo_advantages([], []) == []
    assert get_grpo_returns([], []) == []


def test_counts_that_differ_are_an_error():
    with pytest.raises(ValueError, match="2 rewards and 1 lengths"):
        grpo_advantages([1.0, 2.0], [3])


def test_returns_take_their_lengths_from_kl():
    kl = [torch.full((2,), 9.0), torch.full((1,), 9.0)]
    assert [tokens.tolist() for tokens in get_grpo_returns([0.25, -0.5], kl)] == [[0.25, 0.25], [-0.5]]
