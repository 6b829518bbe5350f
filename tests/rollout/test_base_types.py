"""Outputs of rollout functions."""

import re

import pytest

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn, leaves
from slime.rollout.filter_hub.base_types import call_dynamic_filter
from slime.utils.errors import UserError
from slime.utils.plugin_loader import load_function
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
    with pytest.raises(
        UserError, match=f"^{flag} tests.rollout.test_base_types.*<lambda> returned {type(value).__name__}"
    ):
        call_rollout_fn(lambda evaluation: value, evaluation=evaluation)


FILE = """
def function(*arguments, **keywords): ...

class Callable:
    def __call__(self, *arguments, **keywords): ...

instance = Callable()
"""


@pytest.mark.parametrize(("name", "told"), [("function", "function"), ("instance", "Callable")])
def test_a_function_of_a_file_is_named_by_the_file(tmp_path, name, told):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    with pytest.raises(UserError, match=f"^--eval-function-path {re.escape(str(path))}:{told} returned NoneType"):
        call_rollout_fn(load_function(f"{path}:{name}"), evaluation=True)
    with pytest.raises(UserError, match=f"^--dynamic-sampling-filter-path {re.escape(str(path))}:{told} returned None"):
        call_dynamic_filter(load_function(f"{path}:{name}"))


def test_leaves():
    samples = [Sample(index=i) for i in range(4)]
    assert leaves([samples[0], [samples[1], [samples[2]]], [samples[3]]]) == samples
    assert leaves(samples[0]) == [samples[0]]
