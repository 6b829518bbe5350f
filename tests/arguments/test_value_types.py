"""Words of a command line as values: numbers with suffixes, JSON, layer patterns."""

import argparse

import pytest

from slime.arguments.value_types import environment_variables, integers, json_object, layer_pattern, written_pattern


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
def test_layer_pattern(text, value):
    assert layer_pattern(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "[0]*", "[1.5]", "[True]", "['a']", "[0]-[1]", "2**8", "[[1],[2]]", "[1]+2", "[1]*[2]", "len([1])",
        "__import__('os')", "[x for x in [1]]", "-1", "[0]*10**9", "[0]*1000*1000",
    ],
)  # fmt: skip
def test_anything_else_is_no_layer_pattern(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"no layer pattern .*\[0\]\*3\+\[1\]\*58"):
        layer_pattern(text)


def test_integers():
    assert integers("128,0") == integers("(128, 0)") == integers("[128,0,]") == [128, 0]
    with pytest.raises(argparse.ArgumentTypeError, match="128,0"):
        integers("128;0")


@pytest.mark.parametrize(
    "text",
    [
        '{"WANDB_API_KEY": "hunter2"',
        '["HF_TOKEN=hunter2"]',
        '{"OPENAI_KEY": "hunter2",}',
        '{"DB": "pg://me:hunter2@host",}',
    ],
)
def test_broken_json_with_a_secret_is_not_repeated(text):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        json_object(text)
    assert "hunter2" not in str(error.value) and "not" in str(error.value)


@pytest.mark.parametrize("text", ['{"A": 1, "A": 2}', '{"B": {"A": 1, "A": 1}}'])
def test_a_name_that_stands_twice_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="'A' stands twice"):
        json_object(text)


def test_environment_variables():
    assert environment_variables('{"A": "b", "C": 1.5, "D": true}') == {"A": "b", "C": 1.5, "D": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"B": null}', "B is null"),
        ('{"C": [1]}', "C is a list"),
        ('{"": "x"}', "'' cannot"),
        ('{"A=B": 1}', "'A=B' cannot"),
    ],
)
def test_values_that_no_variable_can_have(text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        environment_variables(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [([0] * 3 + [1] * 58, "[0]*3+[1]*58"), ([1], "[1]"), ([1, 0, 1, 0], "[1,0,1,0]"), ([0, 1, 1], "[0,1,1]")],
)
def test_written_patterns_are_short_and_read_back(value, text):
    assert written_pattern(value) == text and layer_pattern(text) == value
