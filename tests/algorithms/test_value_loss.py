import itertools

import pytest
import torch

from slime.algorithms.policy_loss import compute_value_loss
from tests.support.plain_math import finite, numeric_gradient


def plain_value_loss(value, old, target, clip):
    clipped = min(max(value, old - clip), old + clip)
    return max((clipped - target) ** 2, (value - target) ** 2)


def value_loss(values, old, returns, clip):
    return compute_value_loss(torch.tensor(values), torch.tensor(old), torch.tensor(returns), clip)


def test_clipped_value_loss():
    loss, clipfrac = value_loss([1.0, 0.55, 0.9], [0.5, 0.5, 0.5], [0.6, 0.6, 1.0], 0.2)
    assert loss.tolist() == pytest.approx([0.16, 0.0025, 0.09], rel=1e-5)
    assert clipfrac.tolist() == [1, 0, 1]


def test_a_change_by_the_whole_range_is_not_clipped_and_all_dtypes_give_float32():
    loss, clipfrac = value_loss([1.0, 1.25], [0.5, 0.5], [0.5, 0.5], 0.5)
    assert clipfrac.tolist() == [0, 1]
    for dtype in (torch.bfloat16, torch.float64):
        columns = (torch.ones(2, dtype=dtype) * factor for factor in (1.0, 0.5, 0.25))
        assert {result.dtype for result in compute_value_loss(*columns, 0.5)} == {torch.float32}


def test_loss_and_gradient_equal_the_plain_form():
    grid = [*itertools.product([-2.03, -0.31, 0.12, 0.47, 1.9], [-0.5, 0.4], [-1.0, 0.45, 3.0])]
    values = torch.tensor([value for value, _, _ in grid], requires_grad=True)
    old = torch.tensor([old for _, old, _ in grid], requires_grad=True)
    returns = torch.tensor([target for _, _, target in grid], requires_grad=True)
    loss, _ = compute_value_loss(values, old, returns, 0.3)
    assert loss.tolist() == pytest.approx([plain_value_loss(*point, 0.3) for point in grid], rel=1e-5)
    loss.sum().backward()
    expected = [
        numeric_gradient(lambda p, o=o, g=g: plain_value_loss(p[0], o, g, 0.3), [value])[0] for value, o, g in grid
    ]
    assert values.grad.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert old.grad is None and returns.grad is None


def test_values_far_away_stay_finite():
    values = torch.tensor([1e15, -1e15], requires_grad=True)
    loss, clipfrac = compute_value_loss(values, torch.zeros(2), torch.ones(2), 0.2)
    loss.sum().backward()
    assert finite(loss.tolist()) and finite(values.grad.tolist()) and clipfrac.tolist() == [1, 1]


def test_half_precision_values_are_compared_in_float32():
    loss, clipfrac = compute_value_loss(torch.tensor([1.0]).bfloat16(), torch.tensor([0.5]), torch.tensor([0.6]), 0.2)
    assert loss.dtype == clipfrac.dtype == torch.float32
    assert loss.item() == pytest.approx(0.16, rel=1e-5)
