"""The leaf rule and flattening."""

import pytest

from slime.ray.rollout_validation import flatten_rollout_output
from slime.utils.types import Sample


def sample(index, rollout_id=None):
    return Sample(index=index, rollout_id=rollout_id)


def indices(groups):
    return [s.index for s in flatten_rollout_output(groups)]


def test_groups_of_samples_and_fan_outs_are_flattened_in_order():
    assert indices([[sample(0), sample(1)], [sample(2)]]) == [0, 1, 2]
    assert indices([[[sample(0, 7), sample(1, 7)], [sample(2)]], [sample(3), [sample(4)]]]) == [0, 1, 2, 3, 4]
    assert indices([[[[sample(0, 1)], [sample(1, 1)]]]]) == [0, 1]


def test_a_group_of_several_samples_needs_no_rollout_id():
    assert indices([[sample(0), sample(1)]]) == [0, 1]
    assert indices([sample(0), sample(1)]) == [0, 1]


@pytest.mark.parametrize("ids", [(None, None), (1, 2), (1, None)])
def test_executions_must_share_an_id(ids):
    with pytest.raises(ValueError, match=r"samples\[1\]\[0\] holds 2 samples of one execution with rollout_id"):
        flatten_rollout_output([[sample(0)], [[sample(1, ids[0]), sample(2, ids[1])]]])


def test_an_execution_is_of_one_group():
    groups = [[[Sample(index=i, group_index=group, rollout_id=3) for i in range(2)]] for group in (0, 1)]
    with pytest.raises(
        ValueError, match="groups 0 and 1 both have an execution with rollout_id 3, and would count as one"
    ):
        flatten_rollout_output(groups)


def test_one_object_in_two_places_is_refused():
    twice = sample(0, 3)
    for groups in ([[twice, twice]], [[twice], [[sample(1, 3), twice]]]):
        with pytest.raises(ValueError, match="^--rollout-function-path returned one Sample object in several places"):
            flatten_rollout_output(groups)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "returned NoneType as samples"),
        ([[sample(0)], [3]], r"samples\[1\]\[0\] is int"),
        ([], "returned no samples"),
        ([[], []], "returned no samples"),
    ],
)
def test_other_shapes_are_named(output, message):
    with pytest.raises(ValueError, match=f"^--rollout-function-path mine.py:fn.* {message}"):
        flatten_rollout_output(output, "--rollout-function-path mine.py:fn")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_id": "a"}, "sample 1 with rollout_id 'a'; expected a whole number or None"),
        ({"status": "over"}, "sample 1 with status 'over'; expected one of"),
        ({"loss_mask": [1]}, "a sample whose fields do not fit together: sample 1: loss_mask has 1 entries"),
    ],
)
def test_samples_that_cannot_be_trained_are_named_with_the_function(fields, message):
    with pytest.raises(ValueError, match=f"^--rollout-function-path mine.py:fn returned {message}"):
        flatten_rollout_output([[sample(0)], [Sample(index=1, **fields)]], "--rollout-function-path mine.py:fn")


def test_the_value_of_a_status_is_that_status():
    (found,) = flatten_rollout_output([[Sample(status="truncated")]])
    assert found.truncated
