"""Estimators of the KL, and distillation."""

import math

import pytest
import torch

from slime.algorithms.kl import KL_LOSS_TYPES, approx_kl_of_responses, compute_approx_kl, distilled_advantages
from slime.algorithms.policy_loss import importance_ratio
from slime.utils.errors import UserError
from tests.support.oracles.plain_math import finite, numeric_gradient


def plain_kl(kind, log_prob, base, old=None):
    """The estimate for one token; weighted by the ratio to `old` if that is given."""
    d = log_prob - base
    value = {"k1": d, "k2": d * d / 2}.get(kind, math.exp(-d) - 1 + d)
    value *= 1.0 if old is None else math.exp(log_prob - old)
    return min(max(value, -10.0), 10.0) if kind == "low_var_kl" else value


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


def test_the_k3_estimate_keeps_its_digits_when_the_policies_are_close():
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


@pytest.mark.parametrize("kind", KL_LOSS_TYPES)
@pytest.mark.parametrize("old_shift", [None, 0.2, -0.7])
def test_value_and_gradient_equal_the_plain_form(kind, old_shift):
    """With a ratio, the gradient passes through it too: that is what makes the estimator's gradient unbiased."""
    points = [(-0.2, -0.9), (-1.0, -1.0), (-1.3, -0.4), (-2.0, -0.1), (-4.1, -1.0), (-0.1, -3.0), (-5.0, -0.5)]
    log_probs = torch.tensor([log_prob for log_prob, _ in points], requires_grad=True)
    base = torch.tensor([base for _, base in points])
    old = [None if old_shift is None else log_prob + old_shift for log_prob, _ in points]
    ratio = None if old_shift is None else importance_ratio(torch.tensor(old) - log_probs)
    estimate = compute_approx_kl(log_probs, base, kind, ratio)
    expected = [plain_kl(kind, lp, b, o) for (lp, b), o in zip(points, old, strict=True)]
    assert estimate.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    estimate.sum().backward()
    gradient = [
        numeric_gradient(lambda point, b=b, o=o: plain_kl(kind, point[0], b, o), [lp])[0]
        for (lp, b), o in zip(points, old, strict=True)
    ]
    assert log_probs.grad.tolist() == pytest.approx(gradient, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", KL_LOSS_TYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_masked_token_of_any_size_leaves_the_gradient_alone(kind, weighted):
    log_probs = torch.tensor([-300.0, -1.0], requires_grad=True)
    ratio = importance_ratio(torch.tensor([-600.0, -1.2]) - log_probs) if weighted else None
    estimate = compute_approx_kl(log_probs, torch.tensor([-1.0, -1.5]), kind, ratio)
    (estimate.masked_fill(torch.tensor([True, False]), 0.0)).sum().backward()
    assert log_probs.grad[0] == 0.0 and finite(log_probs.grad.tolist())


def test_low_var_kl_is_finite_when_ratio_and_estimate_both_leave_float32():
    log_probs = torch.tensor([-300.0], requires_grad=True)
    ratio = importance_ratio(torch.tensor([-600.0]) - log_probs)
    estimate = compute_approx_kl(log_probs, torch.tensor([-1.0]), "low_var_kl", ratio)
    estimate.sum().backward()
    assert estimate.item() == 10.0 and log_probs.grad.item() == 0.0


def test_kl_of_responses():
    new, base = [torch.tensor([-1.0, -1.5]), torch.zeros(0)], [torch.tensor([-1.5, -1.0]), torch.zeros(0)]
    new[0].requires_grad_()
    kl_rows = approx_kl_of_responses(new, base, [2, 0], "k3")
    assert kl_rows[0].tolist() == pytest.approx([0.10653066, 0.148721271], rel=1e-6)
    assert kl_rows[1].shape == (0,) and not kl_rows[0].requires_grad
    with pytest.raises(ValueError, match=r"lengths \[2, 0\] for responses of \[2, 1\]"):
        approx_kl_of_responses(new, base, [2, 1], "k3")
    with pytest.raises(ValueError, match="2 log_probs and 1 log_probs_base"):
        approx_kl_of_responses(new, base[:1], [2, 0], "k3")


@pytest.mark.parametrize(("new", "base"), [(None, None), ([torch.ones(2)], None), (None, [torch.ones(2)])])
def test_kl_without_log_probs_is_zeros_of_the_responses_lengths(new, base):
    rows = approx_kl_of_responses(new, base, [2], "k1")
    assert [row.tolist() for row in rows] == [[0.0, 0.0]] and rows[0].dtype == torch.float32
    assert [len(row) for row in approx_kl_of_responses(None, None, [3, 0, 1], "k1")] == [3, 0, 1]


def test_an_unknown_type_is_named():
    with pytest.raises(UserError, match="--kl-loss-type k4.*low_var_kl"):
        kl("k4", 0.0, 0.0)


def test_by_hand():
    distilled, reverse_kl = distilled_advantages(
        [torch.ones(2)], [torch.tensor([-1.0, -0.2])], [torch.tensor([-0.5, -0.9])], [torch.ones(2)], 1.0
    )
    torch.testing.assert_close(distilled, [torch.tensor([1.5, 0.3])])
    torch.testing.assert_close(reverse_kl, [torch.tensor([-0.5, 0.7])])


def test_equals_plain_loops():
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 127, 128, 129, 300, 0, 5)
    advantages, student, teacher = [[torch.randn(length, generator=generator) for length in lengths] for _ in range(3)]
    masks = [(torch.rand(length, generator=generator) < 0.5).int() for length in lengths[:-1]] + [torch.zeros(5)]
    before = [tokens.clone() for tokens in advantages]
    distilled, reverse_kl = distilled_advantages(advantages, student, teacher, masks, 0.3)
    for sample in range(len(lengths)):
        columns = (column[sample].tolist() for column in (before, student, teacher, masks))
        pairs = [(a - 0.3 * (s - t), s - t) if m else (a, 0.0) for a, s, t, m in zip(*columns, strict=True)]
        torch.testing.assert_close(distilled[sample], torch.tensor([a for a, _ in pairs]))
        torch.testing.assert_close(reverse_kl[sample], torch.tensor([kl for _, kl in pairs]))
    assert all(torch.equal(one, other) for one, other in zip(advantages, before, strict=True))


def test_no_samples():
    assert distilled_advantages([], [], [], [], 1.0) == ([], [])
    assert approx_kl_of_responses([], [], [], "k1") == []


def test_masked_tokens_may_have_no_likelihood():
    distilled, reverse_kl = distilled_advantages(
        [torch.zeros(2)], [torch.zeros(2)], [torch.tensor([-1.0, -torch.inf])], [torch.tensor([1, 0])], 1.0
    )
    assert distilled[0].tolist() == [-1, 0] and reverse_kl[0].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (None, "the batch has none"),
        ([torch.zeros(2), None], r"missing for 1 samples, the first ones \[1\]"),
        ([torch.zeros(2), torch.zeros(2)], "sample 1: advantages has 3 tokens and teacher_log_probs 2"),
        ([torch.zeros(2)], "2 advantages and 1 teacher_log_probs"),
    ],
)
def test_missing_teacher_log_probs_are_an_error(teacher, message):
    tokens = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(ValueError, match=message):
        distilled_advantages(tokens, tokens, teacher, [torch.ones(2), torch.ones(3)], 1.0)
