import math

import pytest
import torch

from slime.algorithms.policy_loss import importance_ratio, saturated


def test_the_ratio_is_the_exponential_of_minus_ppo_kl():
    ratio = importance_ratio(torch.tensor([0.5, 0.0, -1.5]).bfloat16())
    assert ratio.dtype == torch.float32
    assert ratio.tolist() == pytest.approx([math.exp(-0.5), 1.0, math.exp(1.5)], rel=1e-6)


def test_huge_exponents_stop_in_value_and_keep_a_huge_finite_gradient():
    ppo_kl = torch.tensor([-200.0, -math.inf, math.inf, 200.0], requires_grad=True)
    ratio = importance_ratio(ppo_kl)
    largest = math.exp(80)
    assert ratio.tolist() == pytest.approx([largest, largest, 0.0, 0.0], rel=1e-5)
    ratio.sum().backward()
    assert ppo_kl.grad.tolist() == pytest.approx([-largest, -largest, 0.0, 0.0], rel=1e-5)


def test_a_masked_token_with_a_huge_ratio_has_no_gradient():
    ppo_kl = torch.tensor([-200.0, 0.0], requires_grad=True)
    (importance_ratio(ppo_kl).masked_fill(torch.tensor([True, False]), 0.0)).sum().backward()
    assert ppo_kl.grad.tolist() == [0.0, -1.0]


def test_what_is_no_number_stays_none():
    assert saturated(torch.tensor([math.nan])).isnan().item()
