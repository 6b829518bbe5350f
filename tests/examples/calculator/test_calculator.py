"""The calculator's replies, and the task that teaches to ask it."""

import re

import pytest

from examples.calculator import toy_task
from examples.calculator.calculator import reply
from tests.support.models.toy_rows import toy_rows


@pytest.mark.parametrize(
    ("said", "result"),
    [
        ("<calc>47*38</calc><|im_end|>", "1786"),
        ("first <calc> 3 - 10 </calc>", "-7"),
        ("<calc>1+1</calc> then <calc>-2+5</calc>", "3"),
        ("<calc>9**9</calc>", "error"),
        ("<calc>" + "9" * 13 + "*1</calc>", "error"),
        ("<calc>import os", "error"),
    ],
)
def test_the_last_calculation_is_answered(said, result):
    assert reply(said) == {"role": "tool", "content": result}


def test_nothing_asked_nothing_replied():
    assert reply("\\boxed{1792}<|im_end|>") is None


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return toy_rows(tmp_path_factory.mktemp("task"), toy_task)


def factors(row):
    return tuple(map(int, re.findall(r"\d+", (row.get("prompt") or row["messages"])[0]["content"])))


def test_labels_are_right_and_held_out_factors_are_nowhere_else(task):
    for row in task["train"] + task["eval"]:
        left, right, more = factors(row)
        assert row["label"] == str(left * right + more)
    held_out = {factors(row)[:2] for row in task["eval"]}
    assert len(held_out) == 64
    assert not held_out & {factors(row)[:2] for row in task["train"] + task["sft"]}


def test_demonstrations_hear_what_the_calculator_says_and_a_third_of_them_end_right(task):
    right = 0
    for row in task["sft"]:
        messages = row["messages"]
        for asked, answered in zip(messages[1::2], messages[2::2], strict=False):
            assert reply(asked["content"]) == answered
        left, times, more = factors(row)
        right += messages[-1]["content"] == f"\\boxed{{{left * times + more}}}"
        assert reply(messages[-1]["content"]) is None
    assert 0.25 < right / len(task["sft"]) < 0.4
