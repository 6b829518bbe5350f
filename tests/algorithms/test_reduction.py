"""From values per token to one number, and which tokens are time steps."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slime.algorithms import reduction as action_steps
from slime.algorithms.reduction import (
    masked_sum,
    per_token,
    require_equal_lengths,
    rollout_mask_sums,
    scan_steps,
    step_masks,
    sum_of_sample_mean,
    sums_of_responses,
    trained_tokens,
    true_until,
    zero_masked_tokens,
)

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


def masks(*rows):
    return [torch.tensor(row) for row in rows]


def reversed_cumulative_sum(padded):
    return (padded.flip(1).cumsum(1).flip(1),)


def test_trained_tokens_take_steps():
    trained = trained_tokens(masks([1, 0, 1], [0.0, 0.0], [True]), [torch.zeros(3), torch.zeros(2), torch.zeros(1)])
    assert [mask.tolist() for mask in trained] == [[True, False, True], [False, False], [True]]
    assert [mask.tolist() for mask in step_masks(trained, count_masked_tokens=False)] == [m.tolist() for m in trained]


def test_what_masked_tokens_hold_is_replaced_by_0():
    rows = [torch.tensor([1.0, math.nan, 2.0]), torch.tensor([]), torch.tensor([-math.inf])]
    others = [torch.tensor([3.0, 4.0, 5.0]), torch.tensor([]), torch.tensor([6.0])]
    zeroed = zero_masked_tokens({"rows": rows, "others": others}, masks([1, 0, 1], [], [False]))
    assert [row.tolist() for row in zeroed["rows"]] == [[1.0, 0.0, 2.0], [], [0.0]]
    assert [row.tolist() for row in zeroed["others"]] == [[3.0, 0.0, 5.0], [], [0.0]]
    assert {row.dtype for row in zeroed["rows"]} == {torch.float32} and rows[0].isnan().any()
    assert zero_masked_tokens({"rows": []}, []) == {"rows": []} and zero_masked_tokens({}, masks([1])) == {}
    # As many in all, but not by sample.
    with pytest.raises(ValueError, match="sample 0: loss_masks has 2 tokens and rows 1"):
        zero_masked_tokens({"rows": [torch.zeros(1), torch.zeros(2)]}, masks([1, 0], [1]))
    with pytest.raises(ValueError, match="rows"):
        zero_masked_tokens({"rows": [torch.zeros(1)]}, [])


class Comparisons(TorchDispatchMode):
    """Counts the comparisons of tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.ne.Scalar
        return function(*args, **(kwargs or {}))


def test_masks_are_read_once_for_all_columns():
    columns = {name: [torch.ones(2), torch.ones(1)] for name in "abcdef"}
    with Comparisons() as comparisons:
        zero_masked_tokens(columns, masks([1, 0], [1]))
    assert comparisons.count == 1


def test_counting_masked_tokens_leaves_untrained_responses_without_steps():
    trained = [torch.tensor([True, False, True]), torch.tensor([False, False])]
    steps = step_masks(trained, count_masked_tokens=True)
    assert [mask.tolist() for mask in steps] == [[True, True, True], [False, False]]


def test_scans_run_over_steps_only():
    values = [torch.tensor([1.0, 100.0, 2.0, 100.0]), torch.tensor([100.0]), torch.tensor([5.0, 6.0, 7.0])]
    steps = [mask.bool() for mask in masks([1, 0, 1, 0], [0], [1, 1, 1])]
    (sums,) = scan_steps(reversed_cumulative_sum, [values], steps)
    assert [tokens.tolist() for tokens in sums] == [[3, 0, 2, 0], [0], [18, 13, 7]]


def test_rows_are_padded_behind_their_end_and_columns_stay_together():
    seen = []

    def scan(first, second):
        seen.append((first.tolist(), second.tolist()))
        return first, second

    columns = [[torch.tensor([1.0]), torch.tensor([2.0, 3.0])], [torch.tensor([4.0]), torch.tensor([5.0, 6.0])]]
    scan_steps(scan, columns, [torch.ones(1, dtype=torch.bool), torch.ones(2, dtype=torch.bool)])
    assert seen == [([[1, 0], [2, 3]], [[4, 0], [5, 6]])]


@pytest.mark.parametrize("cells", [1, 40, 10**6])
def test_batches_keep_to_their_size_and_the_result_does_not_depend_on_it(monkeypatch, cells):
    monkeypatch.setattr(action_steps, "BATCH_CELLS", cells)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 30, (25,), generator=generator).tolist()
    values = [torch.randn(length, generator=generator) for length in lengths]
    steps = [torch.rand(length, generator=generator) < 0.6 for length in lengths]
    shapes = []

    def scan(padded):
        shapes.append(padded.shape)
        return reversed_cumulative_sum(padded)

    (sums,) = scan_steps(scan, [values], steps)
    assert all(shape.numel() <= cells or shape[0] == 1 for shape in shapes)
    for tokens, step, result in zip(values, steps, sums, strict=True):
        expected = [
            sum(v for v, s in zip(tokens[t:].tolist(), step[t:].tolist(), strict=True) if s) for t in range(len(step))
        ]
        torch.testing.assert_close(result, torch.tensor(expected).where(step, torch.tensor(0.0)))


def test_lengths_that_differ_name_the_sample():
    with pytest.raises(ValueError, match="sample 1: kl has 2 tokens and loss_masks 3"):
        require_equal_lengths(kl=[torch.zeros(1), torch.zeros(2)], loss_masks=[torch.zeros(1), torch.zeros(3)])
    with pytest.raises(ValueError, match="1 kl and 2 values"):
        require_equal_lengths(kl=[torch.zeros(1)], values=[torch.zeros(1)] * 2)


def test_values_of_responses_reach_their_tokens_and_sums_come_back():
    lengths = [2, 0, 3]
    assert per_token(torch.tensor([1.0, 2.0, 3.0]), lengths).tolist() == [1, 1, 3, 3, 3]
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], requires_grad=True)
    sums = sums_of_responses(values, lengths)
    (sums * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert sums.tolist() == [3, 0, 28] and sums.dtype == torch.float64
    assert values.grad.tolist() == [1, 1, 100, 100, 100]


def test_what_one_response_holds_stays_out_of_the_sums_of_others():
    sums = sums_of_responses(torch.tensor([1.0, math.nan, 1e30, -math.inf, 5.0]), [1, 1, 1, 1, 1])
    assert sums[0] == 1 and sums[1].isnan() and sums[3] == -math.inf and sums[4] == 5


def test_true_tokens_are_counted_by_response():
    counts, until = true_until(torch.tensor([True, False, True, True, False]), [2, 0, 3])
    assert counts.tolist() == [1, 0, 2] and until.tolist() == [1, 1, 1, 2, 2]
