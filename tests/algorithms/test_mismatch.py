import dataclasses
import math
import random

import pytest
import torch

from slime.algorithms.mismatch import (
    WorstToken,
    merge_worst_tokens,
    mismatch_metrics,
    mismatch_sums,
    worst_tokens,
)


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


def test_k3_keeps_its_digits_when_the_log_probs_are_close():
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
