"""Layer patterns are read without evaluating anything, and written short."""

import pytest

from slime.models.layer_pattern import read_pattern, written_pattern


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        (" 1 ", 1),
        ("2*3+1", 7),
        ("[1,1,0]", [1, 1, 0]),
        ("[0]*3+[1]*5", [0, 0, 0, 1, 1, 1, 1, 1]),
        ("3*[1]", [1, 1, 1]),
        ("([1]*3+[0])*2", [1, 1, 1, 0, 1, 1, 1, 0]),
        ("[]", []),
    ],
)
def test_a_pattern_is_read(text, value):
    assert read_pattern(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "[0]*", "[1.5]", "[True]", "['a']", "[0]-[1]", "2**8", "[[1],[2]]", "[1]+2", "[1]*[2]", "len([1])",
        "__import__('os')", "[x for x in [1]]", "-1", "[0]*10**9", "[0]*1000*1000",
    ],
)  # fmt: skip
def test_anything_else_is_no_pattern(text):
    with pytest.raises(ValueError):
        read_pattern(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [([0] * 3 + [1] * 58, "[0]*3+[1]*58"), ([1], "[1]"), ([1, 0, 1, 0], "[1,0,1,0]"), ([0, 1, 1], "[0,1,1]")],
)
def test_written_patterns_are_short_and_read_back(value, text):
    assert written_pattern(value) == text and read_pattern(text) == value
