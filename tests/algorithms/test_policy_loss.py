"""Losses of policy and values, ratios and weights, against their plain forms."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch

from slime.algorithms.policy_loss import (
    compute_cispo_loss,
    compute_gspo_kl,
    compute_policy_loss,
    compute_value_loss,
    icepop_weights,
    importance_ratio,
    importance_weights,
    off_policy_sequence_mask,
    saturated,
    sequence_kl,
    truncated_weights,
    weighting_metrics,
)
from slime.algorithms.reduction import masked_sum, rollout_mask_sums, sum_of_sample_mean
from slime.utils.errors import UserError
from slime.utils.ppo_utils import compute_opsm_mask
from tests.support.oracles.plain_math import finite, numeric_gradient

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


def test_value_loss_and_gradient_equal_the_plain_form():
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


OLD = [[-1.0, -2.0, -3.0], [-0.5, -0.5], [-0.7], [-1.0, -1.0]]
NEW = [[-1.1, -1.8, -3.3], [-0.4, -0.7], [-0.2], [-3.0, -0.5]]
MASKS = [[1, 1, 0], [1, 1], [1], [0, 0]]


def rows(values):
    return [torch.tensor(row) for row in values]


def plain_sequence_kl(new, old, mask):
    total = sum(m * (o - n) for n, o, m in zip(new, old, mask, strict=True))
    return total / max(sum(mask), 1)


def test_gspo():
    kl = compute_gspo_kl(rows(NEW[:2]), rows(OLD[:2]), rows(NEW[:2]), rows(MASKS[:2]))
    assert kl.tolist() == pytest.approx([-0.05] * 3 + [0.05] * 2, rel=1e-5)
    assert torch.exp(-kl)[[0, 3]].tolist() == pytest.approx([1.051271096, 0.951229425], rel=1e-6)


def test_every_token_of_the_local_part_has_its_sequences_ratio():
    # The parts that one of two context-parallel ranks may have: nothing of the second response.
    local = [torch.zeros(1), torch.zeros(0), torch.zeros(1), torch.zeros(2)]
    kl = compute_gspo_kl(rows(NEW), rows(OLD), local, rows(MASKS))
    assert kl.tolist() == pytest.approx([-0.05, -0.5, 0.0, 0.0], rel=1e-5)
    assert compute_gspo_kl([], [], [], []).tolist() == []


def test_gspo_gradient_equals_the_plain_form():
    """Σ over tokens of clip loss · mask / trained tokens, by loops over one flat list of log-probs."""
    advantages, low, high = [1.0, -0.5, 2.0, 1.0], 0.2, 0.2

    def plain(flat):
        total, start = 0.0, 0
        for old, mask, advantage in zip(OLD, MASKS, advantages, strict=True):
            new = flat[start : start + len(old)]
            start += len(old)
            ratio = math.exp(-plain_sequence_kl(new, old, mask))
            bounded = min(max(ratio, 1 - low), 1 + high)
            token = max(-ratio * advantage, -bounded * advantage)
            total += sum(m * token for m in mask) / max(sum(mask), 1)
        return total

    new = [row.requires_grad_() for row in rows(NEW)]
    kl = compute_gspo_kl(new, rows(OLD), new, rows(MASKS))
    per_token = torch.cat([torch.full((len(row),), a) for row, a in zip(OLD, advantages, strict=True)])
    loss, _ = compute_policy_loss(kl, per_token, low, high)
    total = sum_of_sample_mean(loss, rows(MASKS), [sum(mask) for mask in MASKS])
    total.backward()
    flat = [value for row in NEW for value in row]
    assert total.item() == pytest.approx(plain(flat), rel=1e-6)
    gradient = torch.cat([row.grad for row in new]).tolist()
    assert gradient == pytest.approx(numeric_gradient(plain, flat), rel=1e-4, abs=1e-6)
    assert gradient[2] == 0.0 and gradient[-2:] == [0.0, 0.0], "masked tokens learn nothing"


def test_masked_tokens_may_hold_anything():
    new = torch.tensor([-1.0, math.nan, -math.inf], requires_grad=True)
    kl = sequence_kl([new], [torch.tensor([-0.5, 0.0, 0.0])], [torch.tensor([1, 0, 0])])
    kl.sum().backward()
    assert kl.tolist() == [0.5] and new.grad.tolist() == [-1.0, 0.0, 0.0]


def test_log_probs_and_masks_of_one_response_have_one_length():
    with pytest.raises(ValueError, match="sample 0: loss_masks has 2 tokens and log_probs 3"):
        sequence_kl([torch.zeros(3)], [torch.zeros(3)], [torch.ones(2)])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_concatenated_log_probs_are_as_many_as_the_mask_entries(count):
    masks = [torch.ones(2), torch.ones(1)]
    with pytest.raises(ValueError, match=rf"\({count},\) log_probs for 3 mask entries"):
        sequence_kl(torch.zeros(count), torch.zeros(3), masks)
    with pytest.raises(ValueError, match=rf"\({count},\) old_log_probs for 3 mask entries"):
        sequence_kl(torch.zeros(3), torch.zeros(count), masks)
    assert sequence_kl(torch.zeros(3), torch.ones(3), masks).tolist() == [1.0, 1.0]


def test_opsm():
    new, old, mask = [torch.tensor([-1.2, -1.3])], [torch.tensor([-1.0, -1.0])], [torch.ones(2)]
    keep, rejected = compute_opsm_mask(SimpleNamespace(opsm_delta=1e-4), new, old, [torch.tensor([-1.0, 1.0])], mask)
    assert keep.tolist() == [0, 1] and rejected.tolist() == [1, 0]
    keep, _ = compute_opsm_mask(SimpleNamespace(opsm_delta=0.26), new, old, [torch.tensor([-1.0, -1.0])], mask)
    assert keep.tolist() == [1, 1], "the mean log-ratio is .25"


def test_opsm_rejects_neither_without_advantage_nor_at_the_threshold():
    old, new, mask = rows([[0.0, 0.0]]), rows([[-0.5, -0.5]]), rows([[1, 1]])
    for advantages, delta, rejected in (([0.0, -1.0], 0.25, [0, 1]), ([-1.0, -1.0], 0.5, [0, 0])):
        assert off_policy_sequence_mask(new, old, rows([advantages]), mask, delta)[1].tolist() == rejected


def test_opsm_of_no_samples():
    keep, rejected = off_policy_sequence_mask([], [], [], [], 0.1)
    assert keep.shape == rejected.shape == (0,) and keep.dtype == rejected.dtype == torch.float32


def test_opsm_carries_no_gradient():
    new = torch.tensor([-1.2], requires_grad=True)
    keep, rejected = off_policy_sequence_mask([new], [torch.zeros(1)], [-torch.ones(1)], [torch.ones(1)], 0.1)
    assert not keep.requires_grad and not rejected.requires_grad


def test_l16_the_rejected_fraction_is_reduced_like_every_other_metric():
    advantages = [[-1.0, -1.0, -1.0], [-1.0, 1.0], [-1.0], [-1.0, -1.0]]
    _, rejected = off_policy_sequence_mask(rows(NEW), rows(OLD), rows(advantages), rows(MASKS), 0.01)
    # Sequence means −.05, .05, −.5, 0: only the second is beyond, with one of its two tokens.
    assert rejected.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert masked_sum(rejected, rows(MASKS)).item() / 5 == pytest.approx(1 / 5)
    denominators = rollout_mask_sums([sum(mask) for mask in MASKS], [0, 0, 1, 2])
    # The first two samples are one execution with 4 trained tokens, one of them rejected; three executions.
    assert sum_of_sample_mean(rejected, rows(MASKS), denominators).item() / 3 == pytest.approx(1 / 4 / 3)


def test_l16_masked_tokens_of_a_rejected_sequence_do_not_count():
    new, old = [torch.tensor([-2.0, -2.0])], [torch.tensor([-1.0, -1.0])]
    mask = [torch.tensor([1, 0])]
    _, rejected = off_policy_sequence_mask(new, old, [-torch.ones(2)], mask, 0.5)
    assert masked_sum(rejected, mask).item() == 1


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
