import math

import pytest
import torch

from slime.algorithms.kl import compute_approx_kl
from slime.utils.errors import UserError


def kl(kind, log_prob, base, ratio=None):
    ratio = None if ratio is None else torch.tensor([ratio])
    return compute_approx_kl(torch.tensor([log_prob]), torch.tensor([base]), kind, ratio).item()


@pytest.mark.parametrize(
    ("log_prob", "base", "expected"),
    [
        (-1.0, -1.5, {"k1": 0.5, "k2": 0.125, "k3": 0.10653066, "low_var_kl": 0.10653066}),
        (-1.5, -1.0, {"k1": -0.5, "k2": 0.125, "k3": 0.148721271, "low_var_kl": 0.148721271}),
        (-20.0, -1.0, {"k1": -19.0, "k2": 180.5, "k3": 178482280.963187, "low_var_kl": 10.0}),
    ],
)
def test_estimators(log_prob, base, expected):
    assert {kind: kl(kind, log_prob, base) for kind in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", 0.610701379), ("k2", 0.152675345), ("k3", 0.130116842), ("low_var_kl", 0.130116842)],
)
def test_unbiased_estimators_are_weighted_by_the_importance_ratio(kind, expected):
    assert kl(kind, -1.0, -1.5, ratio=math.exp(-1.0 + 1.2)) == pytest.approx(expected, rel=1e-6)


def test_low_var_kl_is_clamped_after_weighting():
    assert kl("low_var_kl", -20.0, -1.0, ratio=1e-8) == pytest.approx(1.78482280963, rel=1e-6)
    assert kl("low_var_kl", -1.0, -1.5, ratio=1e6) == 10.0


def test_k3_keeps_its_digits_when_the_policies_are_close():
    # d²/2 to leading order; e^{−d} − 1 + d computed plainly would lose every digit in float32.
    assert kl("k3", -1.0, -1.0 - 2**-14) == pytest.approx(2**-29, rel=1e-3)


def test_the_estimate_is_float32_for_half_precision_inputs():
    result = compute_approx_kl(torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.5]).bfloat16(), "k3")
    assert result.dtype == torch.float32


def test_gradient_of_the_weighted_estimator_includes_the_ratio():
    log_probs = torch.tensor([-1.0], dtype=torch.float32, requires_grad=True)
    ratio = torch.exp(log_probs + 1.2)
    compute_approx_kl(log_probs, torch.tensor([-1.5]), "k1", ratio).sum().backward()
    # d/dlp (e^{lp+1.2}·(lp+1.5)) = e^{.2}·(.5 + 1)
    assert log_probs.grad.item() == pytest.approx(1.5 * math.exp(0.2), rel=1e-6)


def test_an_extreme_difference_has_a_finite_gradient_under_low_var_kl():
    log_probs = torch.tensor([-200.0, -1.0], requires_grad=True)
    compute_approx_kl(log_probs, torch.tensor([-1.0, -1.5]), "low_var_kl").sum().backward()
    assert log_probs.grad[0] == 0.0
    assert log_probs.grad[1].item() == pytest.approx(1 - math.exp(-0.5), rel=1e-6)


def test_an_unknown_type_is_named():
    with pytest.raises(UserError, match="--kl-loss-type k4.*low_var_kl"):
        kl("k4", 0.0, 0.0)
