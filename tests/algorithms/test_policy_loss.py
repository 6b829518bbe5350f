import pytest
import torch

from slime.algorithms.policy_loss import compute_policy_loss
from slime.utils.errors import UserError


def policy_loss(ratios, advantages, *clips):
    loss, clipfrac = compute_policy_loss(-torch.tensor(ratios).log(), torch.tensor(advantages), *clips)
    return loss.tolist(), clipfrac.tolist()


def test_clip():
    loss, clipfrac = policy_loss([1.5, 0.5, 1.1, 0.5], [1.0, 1.0, 2.0, -1.0], 0.2, 0.28)
    assert loss == pytest.approx([-1.28, -0.5, -2.2, 0.8], rel=1e-6)
    assert clipfrac == [1, 0, 0, 1]


def test_a6_dual_clip_changes_the_loss_of_negative_advantages_only():
    loss, clipfrac = policy_loss([1.5, 0.5, 3.0, 3.0], [1.0, -1.0, -2.0, 2.0], 0.2, 0.28, 2.0)
    assert loss == pytest.approx([-1.28, 0.8, 4.0, -2.56], rel=1e-6)
    assert clipfrac == [1, 1, 0, 1]
    loss, _ = policy_loss([2.0, 2.0, 0.5], [2.0, -2.0, 2.0], 0.2, 0.2, 1.5)
    assert loss == pytest.approx([-2.4, 3.0, -1.0], rel=1e-6)


def test_gradient_is_minus_ratio_times_advantage_inside_and_zero_where_clipped():
    ppo_kl = (-torch.tensor([1.1, 1.5, 0.5, 3.0]).log()).requires_grad_()
    loss, clipfrac = compute_policy_loss(ppo_kl, torch.tensor([2.0, 1.0, -1.0, -2.0]), 0.2, 0.28, 2.0)
    assert not clipfrac.requires_grad
    loss.sum().backward()
    # d(−ρA)/d(ppo_kl) = ρA; the last token is above the dual bound.
    assert ppo_kl.grad.tolist() == pytest.approx([2.2, 0.0, 0.0, 0.0], rel=1e-6)


def test_a_dual_bound_of_one_or_less_is_refused():
    with pytest.raises(UserError, match="--eps-clip-c 1.0"):
        policy_loss([1.0], [1.0], 0.2, 0.2, 1.0)
