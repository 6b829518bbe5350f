"""Words of a command line as values: numbers with suffixes, JSON, layer patterns."""

import argparse

import pytest

from slime.arguments.value_types import environment_variables, integers, json_object, layer_pattern


def test_what_is_no_layer_pattern_is_told_with_an_example():
    assert layer_pattern("[0]*2+[1]") == [0, 0, 1]
    with pytest.raises(argparse.ArgumentTypeError, match=r"'\[0\]\*' is no layer pattern .*\[0\]\*3\+\[1\]\*58"):
        layer_pattern("[0]*")


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
