"""Outputs of rollout functions."""

import json
import re

import numpy as np
import pytest

from slime.rollout.base_types import (
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    call_rollout_fn,
    check_eval_output,
    check_sample,
    leaves,
)
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_length": None}, "returned sample 4 with response_length None; expected a whole number of tokens"),
        ({"response_length": 1.0}, "returned sample 4 with response_length 1.0; expected a whole number"),
        ({"rollout_id": "a-b"}, "returned sample 4 with rollout_id 'a-b'; expected a whole number or None"),
        ({"index": 0.5}, "returned sample 0.5 with index 0.5; expected a whole number or None"),
        ({"metadata": ["x"]}, r"returned sample 4 with metadata \['x'\] \(list\); expected a dict"),
        ({"response": ["t"]}, r"returned sample 4 with response \['t'\] \(list\); expected a str"),
        ({"status": "done"}, "returned sample 4 with status 'done'; expected one of Sample.Status: PENDING, "),
        ({"loss_mask": 5}, "returned a sample whose fields do not fit together: "),
        (
            {"loss_mask": [1, 1]},
            "returned a sample whose fields do not fit together: sample 4: loss_mask has 2 entries",
        ),
        ({"response_length": 0}, "returned sample 4 with a response, 3 tokens and response_length 0"),
    ],
)
def test_a_field_of_another_kind_is_named_with_the_function(fields, message):
    sample = Sample(**{**ANSWERED, **fields})
    with pytest.raises(UserError, match=f"^--flag my.fn {message}"):
        check_sample(sample, "--flag my.fn returned")


ANSWERED = {"index": 4, "tokens": [1, 2, 3], "response_length": 1, "response": "t", "status": Sample.Status.COMPLETED}


def test_what_stands_for_nothing_and_numbers_of_other_libraries_are_taken():
    odd = {
        "metadata": None,
        "response": None,
        "response_length": np.int64(1),
        "index": np.int32(4),
        "status": "truncated",
    }
    sample = Sample(**{**ANSWERED, **odd})
    check_sample(sample, "--flag my.fn returned")
    assert (sample.metadata, sample.response, sample.truncated) == ({}, "", True)
    assert json.dumps([sample.index, sample.response_length]) == "[4, 1]"


@pytest.mark.parametrize("fields", [{"status": Sample.Status.FAILED}, {"remove_sample": True}, {"tokens": []}])
def test_a_response_that_is_not_to_be_trained_may_have_no_tokens(fields):
    check_sample(Sample(**{**ANSWERED, "response_length": 0, **fields}), "--flag my.fn returned")


def test_samples_of_an_evaluation_are_looked_at():
    data = {"sums": {"rewards": [1.0, 0.0], "samples": [Sample(status="truncated"), Sample(index=3, metadata=7)]}}
    with pytest.raises(UserError, match="^--flag my.fn, set 'sums' has sample 3 with metadata 7"):
        check_eval_output(RolloutFnEvalOutput(data), "--flag my.fn")
    assert data["sums"]["samples"][0].truncated
