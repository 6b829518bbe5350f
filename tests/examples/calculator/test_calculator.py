"""The calculator's replies, and the task that teaches to ask it."""

import re

import pytest

from examples.calculator import toy_task
from examples.calculator.calculator import generate, reply
from slime.utils.types import Sample
from tests.support.models.toy_rows import toy_rows
from tests.support.processes.spoken import spoken


@pytest.mark.parametrize(
    ("said", "result"),
    [
        ("<calc>47*38</calc><|im_end|>", "1786"),
        ("first <calc> 3 - 10 </calc>", "-7"),
        ("<calc>1+1</calc> then <calc>-2+5</calc>", "3"),
        ("<calc>9**9</calc>", "error"),
        ("<calc>" + "9" * 13 + "*1</calc>", "error"),
        ("<calc>import os", "error"),
        ("<think>A calculation will do: <calc>47*38</calc>", "1786"),
        ("<think>Not <calc>1+1</calc>.</think>\n\n<calc>2+2</calc>", "4"),
        ("Not \\boxed{3}: <calc>2+2</calc>", "4"),
    ],
)
def test_the_last_calculation_is_answered(said, result):
    assert reply(said) == {"role": "tool", "content": result}


@pytest.mark.parametrize(
    "said",
    [
        "\\boxed{1792}<|im_end|>",
        "<think>Or <calc>47*38</calc>? I know it.</think>\n\nIt is 1786.<|im_end|>",
        "<think>What does <calc> do?</think>\\boxed{1792}<|im_end|>",
        "<calc>47*38</calc> is 1786, so \\boxed{1792}<|im_end|>",
    ],
)
def test_nothing_asked_nothing_replied(said):
    assert reply(said) is None


@pytest.mark.usefixtures("fresh_state")
def test_a_turn_ends_behind_its_call_and_the_result_is_not_trained(checkpoint):
    said = ["<calc>47*38</calc>", "\\boxed{1786}"]
    sample = Sample(index=0, prompt=[{"role": "user", "content": "47*38?"}])
    answer, requests = spoken(checkpoint, generate, sample, said, rollout_stop=["STOP"])
    assert [request["sampling_params"]["stop"] for request in requests] == [["STOP", "</calc>"]] * 2
    assert "1786" in answer.response.removeprefix(said[0]).removesuffix(said[1])
    assert sum(answer.loss_mask) == sum(map(len, said))


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
