"""Outputs of rollout functions."""

import pytest

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn, leaves
from slime.utils.errors import UserError
from slime.utils.types import Sample


def test_bare_returns_are_wrapped():
    group = [[Sample()]]
    assert call_rollout_fn(lambda a, evaluation: group, 1, evaluation=False) == RolloutFnTrainOutput(group)
    data = {"set": {"rewards": [1.0], "truncated": [False], "samples": []}}
    assert call_rollout_fn(lambda a, evaluation: data, 1, evaluation=True) == RolloutFnEvalOutput(data)
    output = RolloutFnTrainOutput(group, {"x": 1})
    assert call_rollout_fn(lambda evaluation: output, evaluation=False) is output


@pytest.mark.parametrize(
    ("value", "evaluation", "flag"),
    [
        (None, False, "--rollout-function-path"),
        ([], True, "--eval-function-path"),
        ({}, False, "--rollout-function-path"),
    ],
)
def test_other_returns_name_the_flag(value, evaluation, flag):
    with pytest.raises(UserError, match=f"{flag}: .*returned {type(value).__name__}"):
        call_rollout_fn(lambda evaluation: value, evaluation=evaluation)


def test_leaves():
    samples = [Sample(index=i) for i in range(4)]
    assert leaves([samples[0], [samples[1], [samples[2]]], [samples[3]]]) == samples
    assert leaves(samples[0]) == [samples[0]]
