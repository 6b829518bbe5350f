import itertools
import math
import random

import numpy as np
import pytest

from slime.scheduling.packing import (
    balance_by_swaps,
    best_fit_pack,
    expand_bins_by_splitting,
    first_fit_pack,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    greedy_partition,
    karmarkar_karp,
    split_bins_over_capacity,
)

LENGTHS = [5, 7, 4, 3, 6]


def naive_first_fit(lengths, capacity):
    bins = []
    for item, length in enumerate(lengths):
        for members in bins:
            if sum(lengths[member] for member in members) + length <= capacity:
                members.append(item)
                break
        else:
            bins.append([item])
    return bins


def naive_best_fit(lengths, capacity):
    bins = []
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        loads = [sum(lengths[member] for member in members) for members in bins]
        open_bins = [number for number, load in enumerate(loads) if load + lengths[item] <= capacity]
        if open_bins:
            bins[max(open_bins, key=lambda number: (loads[number], -number))].append(item)
        else:
            bins.append([item])
    return sorted(sorted(members) for members in bins)


def log_normal_lengths(count, mean, seed, cap):
    generator = np.random.default_rng(seed)
    return np.clip(generator.lognormal(math.log(mean) - 0.5, 1.0, count), 1, cap).astype(int).tolist()


def weights_of(bins, weights):
    return [sum(weights[item] for item in members) for members in bins]


def test_first_fit():
    assert first_fit_pack(LENGTHS, 10) == [[0, 2], [1, 3], [4]]


def test_best_fit():
    assert best_fit_pack(LENGTHS, 10) == [[0], [1, 3], [2, 4]]


@pytest.mark.parametrize("pack", [first_fit_pack, best_fit_pack])
def test_an_item_over_the_capacity_stays_alone(pack):
    assert pack([3, 25, 3], 10) == [[0, 2], [1]]
    assert pack([25, 25], 10) == [[0], [1]]
    assert pack([], 10) == []
    assert pack([4], 10) == [[0]]


@pytest.mark.parametrize("seed", range(20))
def test_packing_equals_the_naive_algorithms(seed):
    generator = random.Random(seed)
    lengths = [generator.randint(1, 60) for _ in range(generator.randint(1, 120))]
    assert first_fit_pack(lengths, 50) == naive_first_fit(lengths, 50)
    assert best_fit_pack(lengths, 50) == naive_best_fit(lengths, 50)


def test_best_fit_needs_at_most_one_bin_more_than_the_bound():
    lengths = log_normal_lengths(4096, 4000, seed=0, cap=16384)
    bins = best_fit_pack(lengths, 16384)
    assert len(bins) <= math.ceil(sum(lengths) / 16384) + 1
    assert max(weights_of(bins, lengths)) <= 16384


def test_expansion_splits_the_heaviest_bin_and_puts_the_lighter_half_at_the_end():
    bins = [[0, 2], [1, 3], [4]]
    assert expand_bins_by_splitting(bins, LENGTHS, 4) == [[0, 2], [1], [4], [3]]
    assert expand_bins_by_splitting(bins, LENGTHS, 3) == bins
    assert bins == [[0, 2], [1, 3], [4]]


def test_expansion_deals_each_item_to_the_lighter_side():
    # 9 | 6, 4: the sides are 9 and 10; then the heavier of the rest, [1, 2], is split.
    lengths = [9, 6, 4]
    assert expand_bins_by_splitting([[0, 1, 2]], lengths, 2) == [[0], [1, 2]]
    assert expand_bins_by_splitting([[0, 1, 2]], lengths, 3) == [[0], [1], [2]]
    with pytest.raises(ValueError, match="3 items cannot fill 4 bins"):
        expand_bins_by_splitting([[0, 1, 2]], lengths, 4)


def test_expansion_leaves_no_bin_empty_for_items_without_length():
    assert expand_bins_by_splitting([[0, 1, 2]], [0, 0, 0], 3) == [[0], [1], [2]]


def test_bins_over_capacity_are_split_until_they_fit():
    lengths = [6, 6, 6, 6, 30, 2]
    bins = split_bins_over_capacity([[0, 1, 2, 3], [4], [5]], lengths, 10)
    assert sorted(bins) == [[0], [1], [2], [3], [4], [5]]
    assert split_bins_over_capacity([[0, 5], [1]], lengths, 10) == [[0, 5], [1]]


def test_karmarkar_karp():
    lengths = [5, 7, 4, 3, 6, 8]
    assert karmarkar_karp(lengths, 2, equal_size=True) == [[1, 2, 4], [0, 3, 5]]
    assert karmarkar_karp(lengths, 3) == [[3, 5], [0, 4], [1, 2]]
    assert karmarkar_karp(lengths, 3, equal_size=True) == [[3, 5], [0, 4], [1, 2]]
    assert get_seqlen_balanced_partitions(lengths, 2, equal_size=True) == [[1, 2, 4], [0, 3, 5]]


@pytest.mark.parametrize("partition", [karmarkar_karp, greedy_partition])
@pytest.mark.parametrize("equal_size", [False, True])
def test_partitions_hold_each_item_once_in_order(partition, equal_size):
    generator = random.Random(3)
    for _ in range(20):
        part_count = generator.randint(1, 6)
        lengths = [generator.randint(1, 40) for _ in range(part_count * generator.randint(1, 8))]
        parts = partition(lengths, part_count, equal_size)
        assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
        assert all(part == sorted(part) for part in parts)
        assert len(parts) == part_count
        if equal_size:
            assert {len(part) for part in parts} == {len(lengths) // part_count}


@pytest.mark.parametrize("partition", [karmarkar_karp, greedy_partition])
def test_unequal_shares_are_an_error(partition):
    with pytest.raises(ValueError, match="5 items cannot be divided equally into 2"):
        partition(LENGTHS, 2, equal_size=True)


def test_greedy_gives_the_longest_first_to_the_lightest():
    assert greedy_partition([5, 7, 4, 3, 6], 2) == [[1, 2, 3], [0, 4]]
    assert greedy_partition([9, 1, 1, 1], 2, equal_size=True) == [[0, 3], [1, 2]]


def test_balanced_partitions_are_never_empty():
    assert all(get_seqlen_balanced_partitions([0, 0, 5], 3))
    with pytest.raises(ValueError, match="2 items are too few for 3"):
        get_seqlen_balanced_partitions([1, 2], 3)


def test_swaps_answer_an_outlier_with_light_items():
    # Two outliers of 100 among items of 8 and 10: differencing cannot give both all the light ones.
    weights = [100, 100] + [8] * 6 + [10] * 4
    parts = [[0, 8, 9], [1, 10, 11], [2, 3, 4], [5, 6, 7]]
    balanced = balance_by_swaps(parts, weights)
    assert max(weights_of(balanced, weights)) == 116
    assert sorted(itertools.chain(*balanced)) == list(range(12))
    assert {len(part) for part in balanced} == {3}


def test_swaps_leave_balanced_partitions_alone():
    parts = [[0, 3], [1, 2]]
    assert balance_by_swaps(parts, [1000, 999, 1001, 1002]) == parts
    assert balance_by_swaps([[0, 1]], [5, 1]) == [[0, 1]]
    assert balance_by_swaps([[0], [1]], [0, 0]) == [[0], [1]]


def test_reverse_index_undoes_a_permutation():
    assert get_reverse_idx([2, 0, 3, 1]) == [1, 3, 0, 2]
