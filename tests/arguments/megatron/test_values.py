"""Megatron's notation for pipeline layouts."""

import pytest

from slime.arguments.megatron.values import parts_of_layout


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ("Et|tL", ["Et", "tL"]),
        ("Et*3|tL", ["Ettt", "tL"]),
        ("Ettt|(tt|)*2,m|L", ["Ettt", "tt", "tt", "m", "L"]),
        ("E(t|)*3tL", ["Et", "t", "t", "tL"]),
        ("E|t*2,t|L", ["E", "ttt", "L"]),
    ],
)
def test_repetitions_are_written_out(layout, parts):
    assert parts_of_layout(layout) == parts
