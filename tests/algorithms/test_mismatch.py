"""Engine's log-probs against the trainer's, and the weights that are made of them."""

import dataclasses
import itertools
import math
import random

import pytest
import torch

from slime.algorithms.mismatch import (
    LEVELS,
    MODES,
    MisSettings,
    WorstToken,
    mean_weight,
    merge_worst_tokens,
    mis_metrics,
    mismatch_metrics,
    mismatch_sums,
    normalised,
    sequence_extremes,
    sequence_sums,
    weight_sums,
    weight_tokens,
    worst_tokens,
)
from slime.utils.errors import UserError
from tests.support.oracles.plain_mis import plain_step


def measure(train, rollout, mask):
    return mismatch_metrics(*mismatch_sums(torch.tensor(train), torch.tensor(rollout), torch.tensor(mask)))


def plain(train, rollout, mask):
    pairs = [(t, r) for t, r, m in zip(train, rollout, mask, strict=True) if m]
    weights = [math.exp(t - r) for t, r in pairs]
    count = len(pairs)
    return {
        "mismatch_k1": sum(r - t for t, r in pairs) / count,
        "mismatch_k3": sum(w - 1 - math.log(w) for w in weights) / count,
        "mismatch_abs": sum(abs(t - r) for t, r in pairs) / count,
        "mismatch_ess": sum(weights) ** 2 / (count * sum(w * w for w in weights)),
        "mismatch_max_abs": max(abs(t - r) for t, r in pairs),
    }


def test_three_tokens():
    assert measure([-1.0, -1.2, -0.3], [-2.0, -1.0, -0.3], [1, 1, 1]) == pytest.approx(
        {
            "mismatch_k1": -0.266666667, "mismatch_k3": 0.245670861, "mismatch_abs": 0.4,
            "mismatch_ess": 0.757391489, "mismatch_max_abs": 1.0,
        },
        rel=1e-6,
    )  # fmt: skip


def random_tokens(count=300):
    numbers = random.Random(11)
    train = [numbers.uniform(-5, 0) for _ in range(count)]
    rollout = [value + numbers.gauss(0, 0.3) for value in train]
    return train, rollout, [int(numbers.random() < 0.7) for _ in range(count)]


def test_equals_the_plain_form_and_any_cut_into_shards_adds_up_to_it():
    train, rollout, mask = random_tokens()
    expected = plain(train, rollout, mask)
    tensors = [torch.tensor(column, dtype=torch.float64) for column in (train, rollout, mask)]
    for cuts in ([300], [1, 0, 120, 179]):
        shards = [mismatch_sums(*part) for part in zip(*(tensor.split(cuts) for tensor in tensors), strict=True)]
        sums = torch.stack([sums for sums, _ in shards]).sum(0)
        largest = torch.stack([largest for _, largest in shards]).amax(0)
        assert mismatch_metrics(sums, largest) == pytest.approx(expected, rel=1e-12)


def test_masked_tokens_may_hold_anything():
    assert measure([-1.0, math.nan], [-1.5, math.inf], [1, 0]) == pytest.approx(plain([-1.0], [-1.5], [1]), rel=1e-6)


def test_equal_log_probs_and_no_tokens_at_all():
    same = {"mismatch_k1": 0, "mismatch_k3": 0, "mismatch_abs": 0, "mismatch_ess": 1, "mismatch_max_abs": 0}
    assert measure([-1.0, -2.0], [-1.0, -2.0], [1, 1]) == same
    assert measure([-1.0], [-2.0], [0]) == same
    assert measure([], [], []) == same


def test_the_k3_estimate_keeps_its_digits_when_the_log_probs_are_close():
    assert measure([-1.0], [-1.0 - 2**-14], [1])["mismatch_k3"] == pytest.approx(2**-29, rel=1e-4)


def test_an_engine_that_calls_its_own_token_impossible_does_not_spoil_everything():
    metrics = measure([-1.0, -1.0], [-math.inf, -1.0], [1, 1])
    assert metrics["mismatch_k3"] > 1e30 and metrics["mismatch_max_abs"] == math.inf
    assert metrics["mismatch_ess"] == pytest.approx(0.5)


def test_shapes_that_differ_are_an_error():
    with pytest.raises(ValueError, match=r"\(2,\), \(2,\) and \(3,\)"):
        mismatch_sums(torch.zeros(2), torch.zeros(2), torch.ones(3))


TRAIN = [torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-0.5, -0.25])]
ROLLOUT = [torch.tensor([-1.5, -2.0, -9.0]), torch.tensor([-0.25, -1.25])]
MASKS = [torch.tensor([1, 1, 0]), torch.tensor([1, 1])]


def test_worst_tokens_are_trained_ones_with_sample_and_position():
    worst = worst_tokens(TRAIN, ROLLOUT, MASKS, [40, 41], 3)
    assert [dataclasses.astuple(token) for token in worst] == [
        (41, 1, -0.25, -1.25), (40, 0, -1.0, -1.5), (41, 0, -0.5, -0.25)
    ]  # fmt: skip
    assert worst[0].difference == 1.0
    assert len(worst_tokens(TRAIN, ROLLOUT, MASKS, [40, 41], 10)) == 4


def test_a_trained_token_without_a_difference_comes_before_masked_ones():
    """Which stand before it, and would otherwise take its place among the worst."""
    train, masks = [torch.tensor([-1.0, -2.0, -3.0])], [torch.tensor([0, 0, 1])]
    worst = worst_tokens(train, train, masks, [40], 1)
    assert [dataclasses.astuple(token) for token in worst] == [(40, 2, -3.0, -3.0)]


def test_worst_tokens_of_a_part_of_a_response_have_positions_in_the_whole():
    positions = [torch.tensor([5, 6, 20]), torch.tensor([0, 9])]
    worst = worst_tokens(TRAIN, ROLLOUT, MASKS, [40, 41], 2, positions)
    assert [(token.sample, token.position) for token in worst] == [(41, 9), (40, 5)]


def test_worst_tokens_merge_over_ranks():
    whole = worst_tokens(TRAIN, ROLLOUT, MASKS, [40, 41], 3)
    shards = [worst_tokens(TRAIN[i : i + 1], ROLLOUT[i : i + 1], MASKS[i : i + 1], [40 + i], 3) for i in range(2)]
    assert merge_worst_tokens(shards, 3) == merge_worst_tokens(reversed(shards), 3) == whole
    assert merge_worst_tokens([[], []], 3) == []


def test_what_is_no_number_is_the_worst():
    worst = worst_tokens([torch.tensor([-1.0, math.nan])], [torch.tensor([-9.0, -1.0])], [torch.ones(2)], [0], 1)
    assert worst[0].position == 1
    ordinary = [WorstToken(1, position, -1.0, -9.0) for position in range(3)]
    assert merge_worst_tokens([ordinary, worst, ordinary], 1) == worst
    equal = [WorstToken(1, 0, -1.0, -2.0), WorstToken(0, 3, -2.0, -1.0), WorstToken(0, 2, -1.0, -2.0)]
    assert [(token.sample, token.position) for token in merge_worst_tokens([equal], 2)] == [(0, 2), (0, 3)]


TRAINED, SAMPLED = [-1.0, -1.2, -0.3], [-2.0, -1.0, -0.3]
NAMES = (
    "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "kl", "k3_kl", "log_ppl_diff",
    "log_ppl_abs_diff", "ppl_ratio", "chi2_token", "chi2_seq", "tis_weight_before_bound", "tis_weight_after_bound",
    "tis_truncate_fraction", "tis_clip_fraction_low", "tis_clip_fraction_high", "rs_mask_fraction_low",
    "rs_mask_fraction_high", "rs_catastrophic_token_fraction", "rs_catastrophic_seq_fraction",
    "is_ratio_mean_after_tis_rs", "batch_norm_factor", "is_ratio_mean_final", "is_ratio_min_final",
    "is_ratio_max_final",
)  # fmt: skip


def tensors(rows):
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def weigh(settings, train, rollout, masks, norm=True):
    """The three stages on one shard that holds a whole step; (weighted, metrics)."""
    columns = tensors(train), tensors(rollout), tensors(masks)
    weighted = weight_tokens(settings, *columns, sequence_sums(settings, *columns))
    if norm and settings.use_tis and settings.tis_batch_normalize:
        weighted = normalised(weighted, mean_weight(weight_sums(weighted)))
    return weighted, mis_metrics(weighted, sequence_extremes(weighted))


def mean(values, mask):
    return sum(v for v, m in zip(values.tolist(), mask, strict=True) if m) / sum(mask)


def step(seed=0, count=9):
    """Sequences of lengths 0 … 8 with masks that have holes, some off-policy far enough to be rejected or vetoed."""
    generator = torch.Generator().manual_seed(seed)
    train, rollout, masks = [], [], []
    for length in range(count):
        roll = -torch.rand(length, generator=generator, dtype=torch.float64) * 3
        noise = torch.randn(length, generator=generator, dtype=torch.float64) * (4.0 if length % 4 == 3 else 0.4)
        train.append((roll + noise).tolist())
        rollout.append(roll.tolist())
        masks.append((torch.rand(length, generator=generator) < 0.8).int().tolist())
    train[5][1] -= 12.0
    masks[5][1], masks[4] = 1, [0] * 4
    return train, rollout, masks


# The worked example.


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2.718281828, 0.818730753, 1.0]),
        ("sequence", [2.225540928] * 3),
        ("geometric", [1.305605172] * 3),
    ],
)
def test_weights_of_every_level(level, expected):
    weighted, metrics = weigh(MisSettings(tis_level=level, tis_upper_bound=100.0), [TRAINED], [SAMPLED], [[1, 1, 1]])
    assert weighted.weights.tolist() == pytest.approx(expected, abs=1e-6)
    assert metrics["mis_tis_weight_before_bound"].tolist() == pytest.approx(expected, abs=1e-6)


def test_divergences():
    _, metrics = weigh(MisSettings(), [TRAINED], [SAMPLED], [[1, 1, 1]])
    assert metrics["mis_k3_kl"].tolist() == pytest.approx([0.718281828, 0.018730753, 0.0], abs=1e-6)
    assert metrics["mis_kl"].tolist() == pytest.approx([-1.0, 0.2, 0.0], abs=1e-6)
    expected = {
        "chi2_token": 2.019792048, "chi2_seq": 3.953032424, "training_ppl": 2.300975891, "rollout_ppl": 3.004166024,
        "training_log_ppl": 2.5 / 3, "rollout_log_ppl": 1.1, "log_ppl_diff": -0.266666667,
        "log_ppl_abs_diff": 0.266666667, "ppl_ratio": 0.765928338,
    }  # fmt: skip
    for name, value in expected.items():
        assert mean(metrics[f"mis_{name}"], [1, 1, 1]) == pytest.approx(value, abs=1e-6), name


def test_truncated_weights_are_divided_by_their_mean():
    weighted, metrics = weigh(MisSettings(tis_batch_normalize=True), [TRAINED], [SAMPLED], [[1, 1, 1]])
    assert metrics["mis_tis_weight_after_bound"].tolist() == pytest.approx([2.0, 0.818730753, 1.0], abs=1e-6)
    assert metrics["mis_batch_norm_factor"].tolist() == pytest.approx([1.272910251] * 3, abs=1e-6)
    assert weighted.ratios.tolist() == pytest.approx([1.571202682, 0.643195977, 0.785601341], abs=1e-6)
    assert metrics["mis_is_ratio_mean_final"].tolist() == pytest.approx(weighted.ratios.tolist(), abs=1e-6)
    assert metrics["mis_is_ratio_min_final"].tolist() == pytest.approx([0.643195977] * 3, abs=1e-6)
    assert metrics["mis_is_ratio_max_final"].tolist() == pytest.approx([1.571202682] * 3, abs=1e-6)


# Rules.


@pytest.mark.parametrize(
    ("mode", "expected", "truncated", "low", "high"),
    [
        ("truncate", [2.0, 0.818730753, 1.0], [1, 0, 0], [0, 0, 0], [0, 0, 0]),
        ("clip", [2.0, 0.9, 1.0], [0, 0, 0], [0, 1, 0], [1, 0, 0]),
        ("mask", [0.0, 0.0, 1.0], [0, 0, 0], [0, 1, 0], [1, 0, 0]),
    ],
)
def test_modes(mode, expected, truncated, low, high):
    settings = MisSettings(tis_mode=mode, tis_lower_bound=0.9)
    weighted, metrics = weigh(settings, [TRAINED], [SAMPLED], [[1, 1, 1]])
    assert weighted.ratios.tolist() == pytest.approx(expected, abs=1e-6)
    assert weighted.kept.tolist() == [True] * 3
    assert metrics["mis_tis_truncate_fraction"].tolist() == truncated
    assert metrics["mis_tis_clip_fraction_low"].tolist() == low
    assert metrics["mis_tis_clip_fraction_high"].tolist() == high


@pytest.mark.parametrize("combination", list(itertools.product(LEVELS, MODES, (None, *LEVELS), (False, True))))
def test_a_step_equals_the_plain_loops(combination):
    tis_level, mode, rs_level, batch_normalize = combination
    settings = MisSettings(
        use_rs=rs_level is not None, tis_level=tis_level, rs_level=rs_level or "token", tis_mode=mode,
        tis_lower_bound=0.8, tis_upper_bound=1.3, rs_lower_bound=0.6, rs_upper_bound=1.7, tis_batch_normalize=batch_normalize,
    )  # fmt: skip
    case = step()
    factors, new_masks, norm = plain_step(settings, *case)
    weighted, metrics = weigh(settings, *case)
    assert weighted.ratios.tolist() == pytest.approx(sum(factors, []), abs=1e-9)
    assert weighted.kept.int().tolist() == sum(new_masks, [])
    assert weighted.batch_norm_factor == pytest.approx(norm, abs=1e-9)
    for name, extreme in (("min", min), ("max", max)):
        found = weighted.split(metrics[f"mis_is_ratio_{name}_final"])
        for ratios, factor_row, mask in zip(found, factors, case[2], strict=True):
            # A masked token, whose loss has the factor 0, is not the smallest of its sequence.
            trained = [factor for factor, m in zip(factor_row, mask, strict=True) if m]
            assert ratios.tolist() == pytest.approx([extreme(trained, default=0.0)] * len(mask), abs=1e-6)


def test_rejection_has_its_own_level_and_bounds():
    settings = MisSettings(use_rs=True, rs_level="geometric", rs_lower_bound=0.5, rs_upper_bound=1.3)
    weighted, metrics = weigh(settings, [TRAINED, [-1.0]], [SAMPLED, [-1.1]], [[1, 1, 1], [1]])
    assert weighted.kept.tolist() == [False] * 3 + [True]
    assert weighted.ratios.tolist() == pytest.approx([0.0] * 3 + [math.exp(0.1)], abs=1e-6)
    assert metrics["mis_rs_mask_fraction_high"].tolist() == [1, 1, 1, 0]
    assert metrics["mis_rs_mask_fraction_low"].tolist() == [0, 0, 0, 0]
    assert metrics["mis_is_ratio_mean_after_tis_rs"].tolist() == pytest.approx([0.0] * 3 + [math.exp(0.1)], abs=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_a_weight_on_a_bound_is_inside(level, mode):
    """Weights of exactly 1, with nothing else allowed."""
    settings = MisSettings(
        use_rs=True, tis_level=level, rs_level=level, tis_mode=mode, tis_lower_bound=1.0, tis_upper_bound=1.0
    )
    weighted, metrics = weigh(settings, [TRAINED], [TRAINED], [[1, 1, 1]])
    assert weighted.kept.tolist() == [True] * 3 and weighted.ratios.tolist() == [1.0] * 3
    fractions = ("tis_truncate", "tis_clip", "rs_mask")
    outside = {name: metrics[name].tolist() for name in metrics if name.removeprefix("mis_").startswith(fractions)}
    assert outside == dict.fromkeys(outside, [0.0] * 3) and len(outside) == 5


def test_rejection_falls_back_to_the_bounds_of_the_weights():
    settings = MisSettings(tis_upper_bound=4.0)
    assert settings.tis_bounds == settings.rs_bounds == (0.25, 4.0)
    assert MisSettings(tis_lower_bound=0.5, rs_upper_bound=3.0).rs_bounds == (0.5, 3.0)


def test_one_catastrophic_token_rejects_its_sequence_only_if_it_is_trained():
    train, rollout = [[-1.0, -12.0], [-1.0, -12.0]], [[-1.0, -1.0], [-1.0, -1.0]]
    settings = MisSettings(use_rs=True, rs_lower_bound=1e-9, rs_upper_bound=1e9)
    weighted, metrics = weigh(settings, train, rollout, [[1, 1], [1, 0]])
    assert weighted.kept.tolist() == [False, False, True, False]
    assert metrics["mis_rs_catastrophic_token_fraction"].tolist() == [0, 1, 0, 0]
    assert metrics["mis_rs_catastrophic_seq_fraction"].tolist() == [1, 1, 0, 0]
    without = dataclasses.replace(settings, rs_veto_threshold=None)
    assert weigh(without, train, rollout, [[1, 1], [1, 0]])[0].kept.tolist() == [True, True, True, False]


@pytest.mark.parametrize(("weight", "is_kept"), [(1.05e-4, True), (0.95e-4, False)])
def test_what_the_veto_is_where_nothing_is_said(weight, is_kept):
    settings = MisSettings(use_rs=True, rs_lower_bound=1e-9, rs_upper_bound=1e9)
    weighted, _ = weigh(settings, [[math.log(weight) - 1.0, -1.0]], [[-1.0, -1.0]], [[1, 1]])
    assert weighted.kept.tolist() == [is_kept] * 2


def test_without_use_tis_weights_are_measured_and_not_applied():
    settings = MisSettings(use_tis=False, use_rs=True, rs_upper_bound=2.0, tis_batch_normalize=True)
    weighted, metrics = weigh(settings, [TRAINED], [SAMPLED], [[1, 1, 1]])
    assert weighted.ratios.tolist() == [0.0, 1.0, 1.0]
    assert metrics["mis_tis_weight_before_bound"].tolist() == pytest.approx([2.718281828, 0.818730753, 1.0], abs=1e-6)
    assert metrics["mis_tis_truncate_fraction"].tolist() == [1, 0, 0]
    assert metrics["mis_batch_norm_factor"].tolist() == [1, 1, 1]


def test_without_use_rs_rejections_are_measured_and_not_applied():
    weighted, metrics = weigh(MisSettings(rs_veto_threshold=0.9), [TRAINED], [SAMPLED], [[1, 1, 1]])
    assert weighted.kept.all()
    assert metrics["mis_rs_mask_fraction_high"].tolist() == [1, 0, 0]
    assert metrics["mis_rs_catastrophic_token_fraction"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("level", LEVELS)
def test_exponents_stop_at_20(level):
    bound = math.exp(20)
    for sign, expected in ((1, bound), (-1, 1 / bound)):
        weighted, metrics = weigh(
            MisSettings(tis_level=level, tis_upper_bound=1e12), [[-1.0] * 2], [[-1.0 - sign * 500.0] * 2], [[1, 1]]
        )
        assert weighted.weights.tolist() == pytest.approx([expected] * 2, rel=1e-9)
        assert all(torch.isfinite(metrics[f"mis_{name}"]).all() for name in ("k3_kl", "chi2_token", "chi2_seq"))


def test_masked_tokens_play_no_part_whatever_they_hold():
    mask = [1, 0, 1, 0]
    clean = weigh(MisSettings(tis_level="sequence"), [[-1.0, 0.0, -0.3, 0.0]], [[-2.0, 0.0, -0.3, 0.0]], [mask])
    dirty = weigh(
        MisSettings(tis_level="sequence"), [[-1.0, math.nan, -0.3, -500.0]], [[-2.0, 0.0, -0.3, math.inf]], [mask]
    )
    assert torch.equal(clean[0].ratios, dirty[0].ratios)
    assert all(torch.equal(clean[1][name], dirty[1][name]) for name in clean[1])
    assert clean[0].ratios[0] == pytest.approx(2.0)


def test_every_metric_is_there_for_every_setting_and_also_without_tokens():
    expected = {f"mis_{name}" for name in NAMES}
    for settings in (MisSettings(), MisSettings(use_tis=False), MisSettings(use_rs=True, tis_mode="clip")):
        for rows in ([], [[]], [[], []]):
            _, metrics = weigh(settings, rows, rows, rows)
            assert metrics.keys() == expected
            assert all(value.shape == (0,) for value in metrics.values())
        _, metrics = weigh(settings, *step())
        assert metrics.keys() == expected
        assert all(value.shape == (36,) and value.dtype == torch.float32 for value in metrics.values())
        assert all(torch.isfinite(value).all() for value in metrics.values())


def test_a_step_without_kept_tokens_has_mean_weight_one():
    for masks in ([[0, 0, 0]], [[1, 1, 1]]):
        settings = MisSettings(use_rs=True, rs_veto_threshold=0.999, rs_level="geometric", rs_upper_bound=9.0)
        weighted, metrics = weigh(dataclasses.replace(settings, tis_batch_normalize=True), [TRAINED], [SAMPLED], masks)
        assert weighted.batch_norm_factor == 1.0
        assert weighted.ratios.tolist() == [0.0] * 3
        assert metrics["mis_is_ratio_min_final"].tolist() == metrics["mis_is_ratio_max_final"].tolist() == [0.0] * 3


@pytest.mark.parametrize("weights", [[0.25], [0.25, 0.5], [3.0]])
def test_the_mean_weight_of_a_step_may_be_small(weights):
    assert mean_weight(torch.tensor([sum(weights), len(weights)])) == sum(weights) / len(weights)


def test_no_gradient_flows_through_weights():
    train = [torch.tensor(TRAINED, requires_grad=True)]
    rollout, masks = [torch.tensor(SAMPLED)], [torch.ones(3)]
    weighted = weight_tokens(MisSettings(), train, rollout, masks, sequence_sums(MisSettings(), train, rollout, masks))
    assert not weighted.weights.requires_grad


# Pitfalls.


def test_l14_metrics_of_rejection_see_what_was_rejected():
    """All sequences are vetoed: reduced with the masks from before, the fractions are one and the weights what they were."""
    mask = [1, 1, 0]
    settings = MisSettings(use_rs=True, rs_veto_threshold=0.9)
    weighted, metrics = weigh(settings, [TRAINED] * 2, [SAMPLED] * 2, [mask] * 2)
    assert not weighted.kept.any()
    for name, value in {
        "rs_catastrophic_seq_fraction": 1.0,
        "rs_catastrophic_token_fraction": 0.5,
        "rs_mask_fraction_high": 0.5,
        "tis_weight_before_bound": (math.e + math.exp(-0.2)) / 2,
        "is_ratio_mean_after_tis_rs": 0.0,
        "is_ratio_mean_final": 0.0,
    }.items():
        assert mean(metrics[f"mis_{name}"], mask * 2) == pytest.approx(value, abs=1e-6), name


def halves(rows, cut):
    return [row[:cut] for row in rows], [row[cut:] for row in rows]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_l15_a_step_weighs_the_same_however_it_is_cut(level, mode):
    """Two packings into micro-batches, and sequences split over two shards at two places, against the whole step at once."""
    settings = MisSettings(
        use_rs=True, tis_level=level, tis_mode=mode, rs_level="geometric", rs_lower_bound=0.5, rs_upper_bound=2.0,
        tis_batch_normalize=True,
    )  # fmt: skip
    case = step()
    expected, expected_metrics = weigh(settings, *case)
    assert 0 < expected.kept.sum() < expected.trained.sum()
    rows = [tensors(column) for column in case]

    for packing in ([[0, 3, 8], [1], [2, 4, 5, 6, 7]], [[8, 7, 6], [5, 4], [3, 2, 1, 0]]):
        batches = [[[column[i] for i in batch] for column in rows] for batch in packing]
        weighted = [weight_tokens(settings, *batch, sequence_sums(settings, *batch)) for batch in batches]
        norm = mean_weight(sum(weight_sums(part) for part in weighted))
        assert norm == pytest.approx(expected.batch_norm_factor, abs=1e-12)
        found = {}
        for batch, part in zip(packing, weighted, strict=True):
            part = normalised(part, norm)
            metrics = mis_metrics(part, sequence_extremes(part))
            for i, ratios, ppl in zip(
                batch, part.split(part.ratios), part.split(metrics["mis_training_ppl"]), strict=True
            ):
                found[i] = ratios, ppl
        torch.testing.assert_close(
            torch.cat([found[i][0] for i in range(len(rows[0]))]), expected.ratios, atol=1e-12, rtol=0
        )
        torch.testing.assert_close(
            torch.cat([found[i][1] for i in range(len(rows[0]))]), expected_metrics["mis_training_ppl"]
        )

    for cut in (2, 5):
        shards = list(zip(*(halves(column, cut) for column in rows), strict=True))
        sums = sum(sequence_sums(settings, *shard) for shard in shards)
        weighted = [weight_tokens(settings, *shard, sums) for shard in shards]
        norm = mean_weight(sum(weight_sums(part) for part in weighted))
        weighted = [normalised(part, norm) for part in weighted]
        extremes = torch.minimum(*(sequence_extremes(part) for part in weighted))
        for name, values in expected_metrics.items():
            parts = [part.split(mis_metrics(part, extremes)[name]) for part in weighted]
            whole = torch.cat([piece for pair in zip(*parts, strict=True) for piece in pair])
            torch.testing.assert_close(whole, values, msg=lambda text, name=name: f"{name}: {text}")


# Errors.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tis_level": "word"}, "tis_level is 'word'; expected one of token, sequence, geometric"),
        ({"rs_level": None}, "rs_level is None"),
        ({"tis_mode": "cut"}, "tis_mode is 'cut'; expected one of truncate, clip, mask"),
        ({"use_rs": "yes"}, "use_rs is 'yes'; expected true or false"),
        ({"tis_upper_bound": 0}, "tis_upper_bound is 0; expected a number above 0"),
        ({"tis_upper_bound": None}, "tis_upper_bound is None"),
        ({"tis_upper_bound": True}, "tis_upper_bound is True"),
        ({"tis_lower_bound": "0.5"}, "tis_lower_bound is '0.5'; expected a number above 0, or left out"),
        ({"rs_upper_bound": math.inf}, "rs_upper_bound is inf"),
        ({"rs_veto_threshold": -1.0}, "rs_veto_threshold is -1.0"),
        ({"tis_lower_bound": 3.0}, "tis_lower_bound 3 is above tis_upper_bound 2; 0.5 would do"),
        ({"rs_lower_bound": 2.5}, "rs_lower_bound 2.5 is above rs_upper_bound 2"),
    ],
)
def test_settings_that_cannot_be_are_refused(values, message):
    with pytest.raises(UserError, match=message.replace("'", ".")):
        MisSettings(**values)


def test_columns_of_different_tokens_are_an_error():
    rows = tensors([TRAINED])
    with pytest.raises(ValueError, match=r"\[3\] log-probs of the trainer have \[2\] mask entries"):
        sequence_sums(MisSettings(), rows, rows, tensors([[1, 1]]))
    with pytest.raises(ValueError, match=r"have \[2\] rollout log-probs"):
        sequence_sums(MisSettings(), rows, tensors([[1, 1]]), rows)
