"""Slots in use, from when answers were asked for and there."""

import pytest

from tools.bench.bench_stragglers import idle_share, occupancy
from tools.bench.long_answers import Written

# Two slots: the third answer waits until the second one is there, a second later.
WRITTEN = [Written(10.0, 14.0, 40), Written(11.0, 12.0, 10), Written(11.0, 13.0, 10)]


def test_no_more_slots_are_in_use_than_there_are():
    in_use = dict(occupancy(WRITTEN, 2, started=9.0))
    assert in_use == {0.0: 0, 1.0: 1, 2.0: 2, 3.0: 2, 4.0: 1, 5.0: 0}


def test_slots_are_idle_from_the_first_answer_on():
    # One of two for a second in the beginning, and one for the last second: 2 of 8.
    assert idle_share(occupancy(WRITTEN, 2, started=9.0), 2) == pytest.approx(2 / 8)
    assert idle_share(occupancy(WRITTEN, 1, started=9.0), 1) == pytest.approx(0)
