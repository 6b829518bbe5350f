"""Which samples an epoch has. Counts are worked out by hand."""

from collections import Counter
from fractions import Fraction

import pytest

from slime.utils.epoch_order import Part, epoch_order, epoch_permutation, shares


def test_the_order_of_an_epoch_never_changes_between_versions():
    assert epoch_permutation(8, 42, 0).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]
    assert sorted(epoch_permutation(1000, -5, 7)) == list(range(1000))
    seeds = (5, -5, 5 + 2**32)
    assert len({tuple(epoch_permutation(20, seed, 0)) for seed in seeds}) == len(seeds)
    of_parts = [11, 0, 9, 6, 10, 5, 1, 0, 13, 8, 10, 12, 12, 14, 11, 13, 2, 4, 15, 12]
    assert epoch_order(PARTS, 42, 3, True).tolist() == of_parts


PARTS = [Part(10, 1.0), Part(4, 2.5), Part(6, 0.5)]  # 10 + 10 + 3 of 23, of 20 samples: 8.7, 8.7, 2.6


def test_shares_are_proportional_within_one_and_an_epoch_keeps_its_length():
    assert shares(PARTS) == [9, 9, 2] or shares(PARTS) == [9, 8, 3]
    whole = sum(Fraction(part.weight) * part.size for part in PARTS)
    for part, count in zip(PARTS, shares(PARTS), strict=True):
        assert abs(count - 20 * part.size * Fraction(part.weight) / whole) < 1
    for shuffled in (False, True):
        for epoch in range(4):
            drawn = Counter(0 if i < 10 else 1 if i < 14 else 2 for i in epoch_order(PARTS, 1, epoch, shuffled))
            assert [drawn[part] for part in range(3)] == shares(PARTS)


@pytest.mark.parametrize("shuffled", [False, True])
def test_no_sample_of_a_part_comes_again_before_all_others_have(shuffled):
    counts = Counter(int(i) for epoch in range(50) for i in epoch_order(PARTS, 3, epoch, shuffled))
    for first, last in ((0, 10), (10, 14), (14, 20)):
        of_part = [counts[i] for i in range(first, last)]
        assert max(of_part) - min(of_part) <= 1


@pytest.mark.parametrize("weight", [1.0, 2.5])
@pytest.mark.parametrize("shuffled", [False, True])
def test_equal_weights_give_every_sample_once_in_the_order_of_one_file(weight, shuffled):
    parts = [Part(size, weight) for size in (5, 0, 8, 2)]
    for epoch in (0, 4):
        order = list(map(int, epoch_order(parts, 9, epoch, shuffled)))
        assert order == (epoch_permutation(15, 9, epoch).tolist() if shuffled else list(range(15)))


def test_an_epoch_follows_from_seed_and_number_alone_and_others_differ():
    def order(seed, epoch):
        return epoch_order(PARTS, seed, epoch, True).tolist()

    assert order(1, 2) == order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)
    assert sorted(order(1, 2)) != sorted(order(1, 3)), (
        "another epoch has other samples of the parts that it does not have whole"
    )


def test_each_pass_over_a_part_draws_anew():
    """An epoch has three of the six, every second one begins a pass."""
    begun = {
        frozenset(int(i) for i in epoch_order([Part(6, 1.0), Part(6, 3.0)], 5, epoch, True) if i < 6)
        for epoch in range(0, 12, 2)
    }
    assert len(begun) > 1 and {len(drawn) for drawn in begun} == {3}


def test_parts_of_one_size_are_drawn_apart():
    parts = [Part(6, 1.0), Part(6, 1.0), Part(6, 4.0)]
    drawn = [sorted(map(int, epoch_order(parts, 5, epoch, True))) for epoch in range(0, 12, 2)]
    assert any({i for i in one if i < 6} != {i - 6 for i in one if 6 <= i < 12} for one in drawn)


def test_files_in_order_go_on_where_the_last_epoch_stopped():
    parts = [Part(4, 1.0), Part(4, 3.0)]
    assert [list(epoch_order(parts, 0, epoch, False)) for epoch in (0, 1)] == [
        [0, 1, 4, 5, 6, 7, 4, 5],
        [2, 3, 6, 7, 4, 5, 6, 7],
    ]


def test_an_empty_part_has_nothing_to_give():
    order = epoch_order([Part(0, 5.0), Part(2, 1.0), Part(2, 2.0)], 0, 0, True)
    assert sum(position < 2 for position in order) == 1 and sorted(order)[1:] in ([2, 2, 3], [2, 3, 3])
