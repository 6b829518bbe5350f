"""The bars of whole weight pushes."""

import pytest

from tools.bench.bench_weight_sync import verdict


@pytest.mark.parametrize(
    "way, size, best, copy, expected",
    [
        ("group", 500e6, 0.4, 0.1, "met"),
        ("group", 500e6, 0.41, 0.1, "missed"),
        ("handles", 500e6, 0.2, 0.1, "met"),
        ("handles", 500e6, 0.23, 0.1, "missed"),
        ("group", 7e6, 0.028, 0.001, "met"),
        ("handles", 7e6, 0.036, 0.02, "missed"),
    ],
)
def test_a_push_is_told_to_meet_its_bar_or_not(way, size, best, copy, expected):
    assert verdict(way, size, best, copy) == expected
