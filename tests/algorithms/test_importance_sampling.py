import math
import random

import pytest
import torch

from slime.algorithms.policy_loss import (
    icepop_weights,
    importance_weights,
    truncated_weights,
    weighting_metrics,
)

TRAIN, ROLLOUT = torch.tensor([-1.0, -1.2, -0.3]), torch.tensor([-2.0, -1.0, -0.3])


def test_weights_and_truncation():
    weights = importance_weights(TRAIN, ROLLOUT)
    assert weights.tolist() == pytest.approx([2.718281828, 0.818730753, 1.0], rel=1e-6)
    applied = truncated_weights(weights, 0.0, 2.0)
    assert applied.tolist() == pytest.approx([2.0, 0.818730753, 1.0], rel=1e-6)
    metrics = weighting_metrics(weights, applied)
    assert metrics["tis"].tolist() == weights.tolist()
    assert metrics["tis_clipfrac"].tolist() == [1, 0, 0]
    assert metrics["tis_abs"].tolist() == pytest.approx([1.718281828, 0.181269247, 0.0], rel=1e-6)


def test_icepop():
    weights = importance_weights(TRAIN, ROLLOUT)
    applied = icepop_weights(weights, 0.5, 2.0)
    assert applied.tolist() == pytest.approx([0.0, 0.818730753, 1.0], rel=1e-6)
    assert weighting_metrics(weights, applied)["tis_clipfrac"].tolist() == [1, 0, 0]
    on_the_bounds = torch.tensor([0.5, 2.0])
    assert icepop_weights(on_the_bounds, 0.5, 2.0).tolist() == [0.5, 2.0]


def test_both_equal_the_plain_form():
    numbers = random.Random(3)
    pairs = [(numbers.uniform(-4, 0), numbers.uniform(-4, 0)) for _ in range(200)]
    weights = importance_weights(*torch.tensor(pairs).T)
    plain = [math.exp(train - rollout) for train, rollout in pairs]
    assert weights.tolist() == pytest.approx(plain, rel=1e-5)
    low, high = 0.4, 1.7
    assert truncated_weights(weights, low, high).tolist() == pytest.approx(
        [low if w < low else high if w > high else w for w in plain], rel=1e-5
    )
    assert icepop_weights(weights, low, high).tolist() == pytest.approx(
        [w if low <= w <= high else 0.0 for w in plain], rel=1e-5
    )


def test_weights_are_constants_in_float32():
    train = TRAIN.double().requires_grad_()
    weights = importance_weights(train, ROLLOUT.double())
    assert not weights.requires_grad and weights.dtype == torch.float32


def test_extreme_differences_stay_finite():
    weights = importance_weights(torch.tensor([-1.0, -300.0, 0.0]), torch.tensor([-300.0, -1.0, -math.inf]))
    assert weights.isfinite().all()
    assert truncated_weights(weights, 0.0, 2.0).tolist() == [2.0, 0.0, 2.0]
    assert icepop_weights(weights, 0.5, 2.0).tolist() == [0.0, 0.0, 0.0]
