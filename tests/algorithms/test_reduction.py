import itertools

import numpy as np
import pytest
import torch

from slime.algorithms.reduction import masked_sum, rollout_mask_sums, sum_of_sample_mean

VALUES = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0]), torch.tensor([6.0])]
MASKS = [torch.tensor([1, 0, 1]), torch.tensor([1, 1]), torch.tensor([1])]


def mask_sums(masks, rollout_ids):
    return rollout_mask_sums([int(mask.sum()) for mask in masks], rollout_ids)


def test_mean_over_samples_that_are_executions_of_their_own():
    total = sum_of_sample_mean(VALUES, MASKS, mask_sums(MASKS, [0, 1, 2]))
    assert total.item() == pytest.approx(12.5)
    assert total.item() / 3 == pytest.approx(4.166666667)


def test_per_token_mean():
    assert masked_sum(VALUES, MASKS).item() / sum(int(mask.sum()) for mask in MASKS) == pytest.approx(3.8)


def test_l3_samples_of_one_execution_share_its_denominator():
    denominators = mask_sums(MASKS, [7, 7, 8])
    assert denominators.tolist() == [4, 4, 1]
    total = sum_of_sample_mean(VALUES, MASKS, denominators)
    assert total.item() == pytest.approx(9.25)
    assert total.item() / 2 == pytest.approx(4.625)


def test_four_and_three_samples_of_length_three():
    values = torch.arange(1.0, 13.0)
    masks = [torch.ones(3, dtype=torch.int32)] * 4
    denominators = mask_sums(masks, [0, 0, 0, 1])
    assert denominators.tolist() == [9, 9, 9, 3]
    assert sum_of_sample_mean(values, masks, denominators).item() == pytest.approx(16)
    assert sum_of_sample_mean(values[:9], masks[:3], mask_sums(masks[:3], [0, 1, 2])).item() == pytest.approx(15)


def test_rollout_mask_sums_counts_a_missing_id_as_an_execution_of_its_own():
    sums = rollout_mask_sums([3, 4, 5, 6], [None, 0, None, 0])
    assert sums.tolist() == [3, 10, 5, 10]
    assert sums.dtype == np.float32


def test_every_sample_has_a_mask_sum():
    with pytest.raises(ValueError, match="shorter"):
        rollout_mask_sums([3, 4], [7, 7, 7])


def test_l13_any_cut_into_micro_batches_sums_to_the_whole():
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 1, 7, 3, 2, 6]
    values = [torch.randn(length, generator=generator) for length in lengths]
    masks = [torch.randint(0, 2, (length,), generator=generator) for length in lengths]
    denominators = mask_sums(masks, [0, 1, 0, 2, 1, 0])
    whole = sum_of_sample_mean(values, masks, denominators)
    for first, second in itertools.combinations(range(7), 2):
        parts = [slice(0, first), slice(first, second), slice(second, 6)]
        split = sum(sum_of_sample_mean(values[part], masks[part], denominators[part]) for part in parts)
        assert split.item() == pytest.approx(whole.item(), abs=1e-5)


def test_a_fully_masked_sample_contributes_zero_and_its_tokens_may_be_nan():
    values = [torch.tensor([float("nan"), 1.0]), torch.tensor([4.0])]
    masks = [torch.tensor([0, 0]), torch.tensor([1])]
    assert sum_of_sample_mean(values, masks, mask_sums(masks, [0, 1])).item() == 4.0
    assert masked_sum(values, masks).item() == 4.0


def test_gradient_is_the_mask_over_the_denominator():
    values = torch.ones(6, requires_grad=True)
    sum_of_sample_mean(values, MASKS, [4.0, 4.0, 0.5]).backward()
    assert values.grad.tolist() == [0.25, 0.0, 0.25, 0.25, 0.25, 1.0]


def test_an_empty_shard_gives_zero_with_a_gradient_path():
    values = torch.zeros(0, requires_grad=True)
    total = sum_of_sample_mean(values, [], [])
    total.backward()
    assert total.item() == 0.0
    assert values.grad.shape == (0,)
    assert sum_of_sample_mean([], [], []).item() == 0.0


def test_values_that_do_not_match_the_masks_are_an_error():
    with pytest.raises(ValueError, match="mask entries"):
        masked_sum(torch.ones(4), MASKS)
