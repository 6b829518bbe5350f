"""Distillation alone: the teacher is asked in training, and answers are graded in evaluations."""

import asyncio

import pytest

from examples.on_policy_distillation import distill, toy_task
from slime.utils.errors import UserError
from slime.utils.types import Sample
from tests.support.models.toy_rows import toy_rows


@pytest.mark.parametrize(
    ("evaluation", "response", "reward"), [(False, "\\boxed{7}", 0.0), (True, "\\boxed{7}", 1.0), (True, "7", 0.0)]
)
def test_rewards_are_measured_in_evaluations_alone(monkeypatch, evaluation, response, reward):
    asked = []

    async def ask_teacher(args, sample):
        asked.append(sample)
        return 0.0

    monkeypatch.setattr(distill, "reward_func", ask_teacher)
    sample = Sample(response=response, label="7")
    assert asyncio.run(distill.reward(None, sample, evaluation=evaluation)) == reward
    assert asked == ([] if evaluation else [sample])


def test_an_evaluation_needs_labels():
    with pytest.raises(UserError, match="the label of a row is None.*--label-key"):
        asyncio.run(distill.reward(None, Sample(response="\\boxed{7}"), evaluation=True))


def test_the_teacher_learns_the_same_sums_without_mistakes(tmp_path):
    task = toy_rows(tmp_path, toy_task)

    def right(rows):
        return [
            row["messages"][-1]["content"].endswith(f"\\boxed{{{sum(row['metadata']['operands'])}}}") for row in rows
        ]

    assert all(right(task["teacher"]))
    assert 0.3 < sum(right(task["sft"])) / len(task["sft"]) < 0.6
    held_out = {row["prompt"][0]["content"] for row in task["eval"]}
    assert not held_out & {row["messages"][0]["content"] for row in task["teacher"] + task["sft"]}
