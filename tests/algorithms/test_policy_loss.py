import itertools
import math

import pytest
import torch

from slime.algorithms.policy_loss import compute_cispo_loss, compute_policy_loss
from slime.utils.errors import UserError
from tests.support.plain_math import finite, numeric_gradient

RATIOS = (0.05, 0.5, 0.79, 0.81, 0.999, 1.1, 1.27, 1.29, 1.5, 1.99, 2.01, 3.5, 20.0)
ADVANTAGES = (-3.0, -0.4, 0.0, 0.3, 2.0)
GRID = [*itertools.product(RATIOS, ADVANTAGES)]
CLIPS = [(0.2, 0.28, None), (0.2, 0.2, 1.5), (0.2, 0.28, 2.0), (1.0, 1.0, None), (1.5, 4.0, 3.0)]


def policy_loss(ratios, advantages, *clips):
    loss, clipfrac = compute_policy_loss(-torch.tensor(ratios).log(), torch.tensor(advantages), *clips)
    return loss.tolist(), clipfrac.tolist()


def plain_policy_loss(ppo_kl, advantage, low, high, dual):
    """The loss of one token, by cases."""
    ratio = math.exp(-ppo_kl)
    bounded = min(max(ratio, 1 - low), 1 + high)
    if advantage >= 0:
        return -min(ratio * advantage, bounded * advantage)
    loss = -advantage * max(ratio, bounded)
    return loss if dual is None else min(loss, -dual * advantage)


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


@pytest.mark.parametrize("clips", CLIPS)
def test_loss_and_gradient_equal_the_plain_form(clips):
    ppo_kl = [-math.log(ratio) for ratio, _ in GRID]
    advantages = [advantage for _, advantage in GRID]
    tensor = torch.tensor(ppo_kl, requires_grad=True)
    loss, _ = compute_policy_loss(tensor, torch.tensor(advantages), *clips)
    expected = [plain_policy_loss(kl, advantage, *clips) for kl, advantage in zip(ppo_kl, advantages, strict=True)]
    assert loss.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    loss.sum().backward()
    gradient = [
        numeric_gradient(lambda point, a=advantage: plain_policy_loss(point[0], a, *clips), [kl])[0]
        for kl, advantage in zip(ppo_kl, advantages, strict=True)
    ]
    assert tensor.grad.tolist() == pytest.approx(gradient, rel=1e-4, abs=1e-6)


def test_gradient_is_minus_ratio_times_advantage_inside_and_zero_where_clipped():
    ppo_kl = (-torch.tensor([1.1, 1.5, 0.5, 3.0]).log()).requires_grad_()
    loss, clipfrac = compute_policy_loss(ppo_kl, torch.tensor([2.0, 1.0, -1.0, -2.0]), 0.2, 0.28, 2.0)
    assert not clipfrac.requires_grad
    loss.sum().backward()
    # d(−ρA)/d(ppo_kl) = ρA; the last token is above the dual bound.
    assert ppo_kl.grad.tolist() == pytest.approx([2.2, 0.0, 0.0, 0.0], rel=1e-6)


def test_extreme_ratios_have_no_gradient_where_the_loss_is_clipped():
    # Log-ratios ±200 leave float32; each of these losses is on a bound: upper, dual, no advantage, lower.
    ppo_kl = torch.tensor([-200.0, -200.0, -200.0, 200.0], requires_grad=True)
    loss, _ = compute_policy_loss(ppo_kl, torch.tensor([1.0, -1.0, 0.0, -1.0]), 0.2, 0.28, 3.0)
    assert loss.tolist() == pytest.approx([-1.28, 3.0, 0.0, 0.8], rel=1e-6)
    loss.sum().backward()
    assert ppo_kl.grad.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_an_extreme_ratio_that_no_bound_holds_is_loud_and_finite():
    ppo_kl = torch.tensor([-200.0], requires_grad=True)
    loss, _ = compute_policy_loss(ppo_kl, torch.tensor([-1.0]), 0.2, 0.28)
    loss.sum().backward()
    assert finite(loss.tolist()) and finite(ppo_kl.grad.tolist())
    assert loss.item() > 1e30 and ppo_kl.grad.item() < -1e30


def test_a_dual_bound_of_one_or_less_is_refused():
    with pytest.raises(UserError, match="--eps-clip-c 1.0"):
        policy_loss([1.0], [1.0], 0.2, 0.2, 1.0)


def cispo(ratios, log_probs, advantages, low, high):
    leaf = torch.tensor(log_probs, requires_grad=True)
    # As in training, the ratio hangs on the log-probs too; old = lp − log ρ.
    ppo_kl = (leaf.detach() - torch.tensor(ratios).log()) - leaf
    loss, clipfrac = compute_cispo_loss(ppo_kl, leaf, torch.tensor(advantages), low, high)
    loss.sum().backward()
    return loss.tolist(), clipfrac.tolist(), leaf.grad.tolist()


def test_cispo():
    loss, clipfrac, _ = cispo([1.5, 0.5, 1.1], [-0.5, -1.0, -2.0], [1.0, -1.0, 2.0], 0.2, 0.28)
    assert loss == pytest.approx([0.64, -0.8, 4.4], rel=1e-6)
    assert clipfrac == [1, 1, 0]


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (1.0, 4.0), (1.5, 0.28)])
def test_cispo_equals_the_plain_form_and_its_ratio_is_a_constant(low, high):
    log_probs = [-0.01 - 0.1 * position for position in range(len(GRID))]
    ratios, advantages = [ratio for ratio, _ in GRID], [advantage for _, advantage in GRID]
    loss, clipfrac, gradient = cispo(ratios, log_probs, advantages, low, high)
    weights = [min(max(ratio, 1 - low), 1 + high) for ratio in ratios]
    slopes = [-weight * advantage for weight, advantage in zip(weights, advantages, strict=True)]
    assert gradient == pytest.approx(slopes, rel=1e-4)
    assert loss == pytest.approx([s * lp for s, lp in zip(slopes, log_probs, strict=True)], rel=1e-4)
    assert clipfrac == [float(weight != ratio) for weight, ratio in zip(weights, ratios, strict=True)]


def test_cispo_with_eps_clip_of_one_or_more_leaves_the_lower_side_open():
    for eps in (1.0, 1.5):
        loss, clipfrac, gradient = cispo([0.001], [-2.0], [1.0], eps, 0.28)
        assert loss == pytest.approx([0.002], rel=1e-4) and clipfrac == [0]
        assert gradient == pytest.approx([-0.001], rel=1e-4)


def test_cispo_with_extreme_ratios_stays_finite():
    log_probs = torch.tensor([-1.0, -300.0, -1.0], requires_grad=True)
    old = torch.tensor([-300.0, -1.0, -math.inf])
    loss, clipfrac = compute_cispo_loss(old - log_probs, log_probs, torch.tensor([1.0, -1.0, 1.0]), 1.0, 0.28)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([1.28, 0.0, 1.28]) and clipfrac.tolist() == [1, 0, 1]
    assert log_probs.grad.tolist() == pytest.approx([-1.28, 0.0, -1.28])
