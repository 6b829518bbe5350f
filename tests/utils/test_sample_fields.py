"""Per-token fields as arrays and lists, and what an engine's `meta_info` does to a sample."""

import base64
import copy
import dataclasses
import json
import pickle
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.utils.packed_sample import pack_sample
from slime.utils.sample_fields import TOKEN_FIELDS, held, hold_arrays, read_only, token_array
from slime.utils.types import Sample


def array_sample() -> Sample:
    sample = Sample(tokens=np.array([5, 6]))
    sample.append_response_tokens(tokens=np.array([7, 8]), log_probs=np.array([-0.5, -0.25], np.float32))
    return sample


def list_sample() -> Sample:
    sample = Sample(tokens=[5, 6])
    sample.append_response_tokens(tokens=[7, 8], log_probs=[-0.5, -0.25])
    return sample


def are_arrays(sample: Sample) -> list[bool]:
    return [isinstance(held(sample, name), np.ndarray) for name in TOKEN_FIELDS if held(sample, name) is not None]


def test_arrays_are_held_until_somebody_reads_them():
    sample = array_sample()
    assert are_arrays(sample) == [True, True, True]
    assert [held(sample, name).dtype for name in list(TOKEN_FIELDS)[:3]] == [np.int64, np.int32, np.float32]
    sample.validate_lengths()
    assert sample.effective_response_length == 2 and type(sample.effective_response_length) is int
    assert are_arrays(sample) == [True, True, True]
    assert sample.tokens == [5, 6, 7, 8] and type(sample.tokens[0]) is int
    assert are_arrays(sample) == [False, True, True]


def test_the_list_that_was_read_wins():
    sample = array_sample()
    sample.tokens[0] = 9
    sample.loss_mask[1] = 0
    sample.rollout_log_probs.pop()
    assert (sample.tokens, sample.loss_mask, sample.rollout_log_probs) == ([9, 6, 7, 8], [1, 0], [-0.5])
    with pytest.raises(ValueError, match="rollout_log_probs has 1 entries, expected 2"):
        sample.validate_lengths()


def test_two_threads_get_the_same_list():
    for _ in range(20):
        sample = Sample(tokens=np.arange(50_000))
        barrier, found = threading.Barrier(2), []

        def read(sample=sample, barrier=barrier, found=found):
            barrier.wait()
            found.append(sample.tokens)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found[0] is found[1]


def test_a_sample_of_arrays_equals_one_of_lists_and_is_copied_like_it():
    assert array_sample() == list_sample() and dataclasses.asdict(array_sample()) == dataclasses.asdict(list_sample())
    assert array_sample().to_dict() == list_sample().to_dict()
    sample = array_sample()
    assert repr(sample) == repr(list_sample()) and sample == list_sample() and are_arrays(sample) == [True, True, True]
    for duplicate in (copy.copy, copy.deepcopy, dataclasses.replace, lambda s: pickle.loads(pickle.dumps(s))):
        assert duplicate(array_sample()) == list_sample()
    original = array_sample()
    duplicate = pickle.loads(pickle.dumps(original))
    assert are_arrays(duplicate) == are_arrays(original) == [True, True, True]
    with pytest.raises(ValueError, match="read-only"):
        token_array(duplicate, "tokens")[0] = 1


def test_plain_dicts_hold_lists_unless_arrays_are_asked_for():
    sample = array_sample()
    assert sample.to_dict()["loss_mask"] == [1, 1] and are_arrays(sample) == [True, True, True]
    values = sample.to_dict(token_arrays=True)
    assert values["tokens"] is held(sample, "tokens")
    assert Sample.from_dict(values) == list_sample()


@pytest.mark.parametrize("first", [np.array, list])
@pytest.mark.parametrize("second", [np.array, list])
def test_arrays_and_lists_may_follow_each_other(first, second):
    sample = Sample(tokens=first([5]))
    sample.append_response_tokens(tokens=first([6]), log_probs=first([-0.1]))
    sample.append_response_tokens(tokens=second([7]), trainable=False)
    sample.append_response_tokens(tokens=second([8]), log_probs=second([-0.3]))
    assert sample.tokens == [5, 6, 7, 8] and sample.loss_mask == [1, 0, 1]
    assert sample.rollout_log_probs == [-0.1, 0.0, -0.3]


def test_what_is_assigned_cannot_be_changed_behind_the_sample():
    given = np.array([1, 2, 3])
    sample = Sample(tokens=given)
    given[0] = 9
    assert sample.tokens == [1, 2, 3]
    sample.append_response_tokens(tokens=given, log_probs=np.zeros(3))
    given[0] = 7
    assert sample.tokens == [1, 2, 3, 9, 2, 3] and given.flags.writeable


def test_a_part_of_a_larger_array_does_not_keep_it():
    whole = read_only(np.arange(1000))
    assert held(Sample(tokens=whole), "tokens") is whole
    assert held(Sample(tokens=whole[:2]), "tokens").base is None
    sample = array_sample()
    sample.reset_for_retry()
    assert held(sample, "tokens").base is None and sample.tokens == [5, 6]


def test_no_value_changes_by_being_held():
    fields = {"tokens": [2**40, 1], "loss_mask": [0.5, 1], "rollout_log_probs": [-0.1, 1e300], "response_length": 2}
    sample = Sample(**fields)
    hold_arrays(sample)
    assert are_arrays(sample) == [True, True, True]
    assert {name: getattr(sample, name) for name in fields} == fields


@pytest.mark.parametrize("values", [[], [None, 1], ["a"], [[1], [2, 3]], [[1], [2]]])
def test_what_is_no_flat_list_of_numbers_is_left_alone(values):
    sample = Sample(tokens=values)
    hold_arrays(sample)
    assert held(sample, "tokens") is values
    if values:
        with pytest.raises(ValueError, match="tokens is no flat list of numbers"):
            token_array(sample, "tokens")


def test_a_refused_append_leaves_the_sample_as_it_was():
    sample = array_sample()
    sample.loss_mask = [1, None]
    before = copy.deepcopy(sample)
    with pytest.raises(ValueError, match="loss_mask is no flat list of numbers"):
        sample.append_response_tokens(tokens=np.array([9]), log_probs=np.array([0.0]))
    assert sample == before


def test_no_tokens_are_an_empty_list():
    sample = Sample(tokens=None, loss_mask=None)
    assert (sample.tokens, sample.loss_mask) == ([], None)
    sample.tokens = None
    sample.validate_lengths()
    hold_arrays(sample)
    sample.tokens.append(5)
    assert sample.tokens == [5]


def test_a_deleted_field_has_its_default():
    sample = array_sample()
    del sample.loss_mask, sample.tokens, sample.rollout_log_probs
    sample.response_length = 0
    assert (sample.tokens, sample.loss_mask, sample.rollout_log_probs) == ([], None, None)
    sample.validate_lengths()
    assert sample == Sample(tokens=[]) and Sample.from_dict(sample.to_dict()) == sample


@pytest.mark.parametrize("name", ["tokens", "loss_mask", "metadata", "remove_sample"])
def test_a_sample_from_before_a_field_was_added_has_its_default(name):
    old = Sample(index=3)
    del old.__dict__[name]
    for sample in (pickle.loads(pickle.dumps(old)), copy.deepcopy(old)):
        assert sample == Sample(index=3)
        assert getattr(sample, name) == getattr(Sample(), name)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda sample: pickle.loads(pickle.dumps(sample))])
def test_arrays_stay_read_only_on_their_way(duplicate):
    sample = duplicate(array_sample())
    assert [held(sample, name).flags.writeable for name in list(TOKEN_FIELDS)[:3]] == [False] * 3


def test_numbers_of_numpy_in_lists_become_plain():
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[np.int64(5)], log_probs=[np.float32(-1)])
    sample.tokens += list(np.array([6, 7]))
    sample.loss_mask = [np.int64(1), np.int64(0)]
    fields = {name: getattr(sample, name) for name in ("tokens", "loss_mask", "rollout_log_probs")}
    assert json.loads(json.dumps(fields)) == {"tokens": [1, 5, 6, 7], "loss_mask": [1, 0], "rollout_log_probs": [-1.0]}


@pytest.mark.parametrize("log_prob", [None, float("nan"), float("-inf"), float("inf")])
def test_a_trained_token_without_a_finite_log_prob_is_refused(log_prob):
    for log_probs in ([-0.5, log_prob], np.array([-0.5, log_prob], np.float64)):
        sample = Sample(index=4, tokens=[1])
        sample.append_response_tokens(tokens=[5], log_probs=[-1.0])
        with pytest.raises(ValueError, match="sample 4: log_prob .* of response token 2 is no finite number"):
            sample.append_response_tokens(tokens=[6, 7], log_probs=log_probs)
        assert sample.tokens == [1, 5]


class CountingList(list):
    """Counts the entries that are read."""

    read = 0

    def __iter__(self):
        self.read += len(self)
        return super().__iter__()

    def __getitem__(self, position):
        found = super().__getitem__(position)
        self.read += len(found) if isinstance(position, slice) else 1
        return found


def test_a_list_that_grows_by_numbers_of_numpy_is_not_read_again_each_time():
    sample, given, count = Sample(), CountingList([1, 2]), 500
    sample.tokens = given
    given.read = 0
    for number in range(count):
        sample.tokens += [np.int64(number), np.int64(number)]
    assert given.read <= 4 * count
    assert json.loads(json.dumps(sample.tokens)) == [1, 2, *(n for number in range(count) for n in (number, number))]


def test_numbers_of_numpy_anywhere_in_an_assigned_list_become_those_of_python():
    sample = Sample(tokens=[np.int64(5), 6], loss_mask=[np.bool_(True), 1], rollout_log_probs=[np.float32(-0.5), -1.0])
    sample.teacher_log_probs = [-1.0, np.float32(-0.5), -2.0]
    for name in TOKEN_FIELDS:
        assert not [value for value in getattr(sample, name) if isinstance(value, np.generic)]
    assert json.dumps([sample.tokens, sample.teacher_log_probs]) == "[[5, 6], [-1.0, -0.5, -2.0]]"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_become_lists_of_numbers_however_they_come(dtype):
    log_probs = torch.tensor([-0.5, -1.0], dtype=dtype, requires_grad=True)
    for given in (lambda tensor: tensor, list):
        sample = Sample(tokens=given(torch.tensor([1, 2])), teacher_log_probs=None)
        sample.append_response_tokens(tokens=given(torch.tensor([5, 6])), log_probs=given(log_probs))
        sample.loss_mask = given(torch.tensor([True, False]))
        sample.teacher_log_probs = given(log_probs)
        fields = [getattr(sample, name) for name in TOKEN_FIELDS]
        assert fields == [[1, 2, 5, 6], [1, 0], [-0.5, -1.0], [-0.5, -1.0]]
        assert json.loads(json.dumps(fields)) == fields
        assert sample.effective_response_length == 1 and pack_sample(sample).rollout_log_probs.tolist() == [-0.5, -1.0]


ARGS = SimpleNamespace(num_layers=2, moe_router_topk=3)
ALL = np.arange(8 * 2 * 3, dtype=np.int32).reshape(8, 2, 3)


def encoded(rows):
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def answer(sample, count, rows, **meta_info):
    sample.append_response_tokens(
        ARGS,
        tokens=[7] * count,
        log_probs=[-1.0] * count,
        meta_info={"routed_experts": encoded(rows), "finish_reason": {"type": "stop"}, **meta_info},
    )


def test_an_answer_brings_one_row_per_token_but_the_last():
    sample = Sample(tokens=[1, 2, 3])
    answer(sample, 2, ALL[:4])
    assert sample.rollout_routed_experts.dtype == np.int32
    np.testing.assert_array_equal(sample.rollout_routed_experts, ALL[:4])
    sample.rollout_routed_experts[0] = 0  # not a view of the message


def test_a_continuation_keeps_the_rows_before_its_start_and_replaces_the_others():
    """A tool's tokens stand between; their rows come with the next answer, as does that of the token before them."""
    sample = Sample(tokens=[1, 2, 3])
    answer(sample, 2, ALL[:4])
    sample.append_response_tokens(tokens=[5, 5], trainable=False)
    assert len(sample.rollout_routed_experts) == 4
    continued = copy.deepcopy(sample)
    answer(continued, 2, ALL[4:], routed_experts_start_len=4)
    np.testing.assert_array_equal(continued.rollout_routed_experts, ALL)
    answer(sample, 2, 100 + ALL[3:], routed_experts_start_len=3)
    np.testing.assert_array_equal(sample.rollout_routed_experts, np.concatenate([ALL[:3], 100 + ALL[3:]]))


def test_without_a_start_the_answer_has_all_rows():
    sample = Sample(tokens=[1, 2, 3])
    answer(sample, 2, 100 + ALL[:4])
    answer(sample, 1, ALL[:5])
    np.testing.assert_array_equal(sample.rollout_routed_experts, ALL[:5])


@pytest.mark.parametrize(
    ("rows", "start", "message"),
    [
        (ALL[:3], 0, r"18 entries from position 0 on, expected .* = \(5 - 1 - 0\) x 2 x 3"),
        (ALL[:5], 0, "30 entries"),
        (ALL[:5], -1, "from position -1 on"),
        (ALL[:0], 5, "from position 5 on"),
        (ALL[:2], 2, "begin at position 2, but the sample has those of 0 positions only"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_leave_the_sample_as_it_was(rows, start, message):
    sample = Sample(tokens=[1, 2, 3])
    before = copy.deepcopy(sample)
    with pytest.raises(ValueError, match=message):
        answer(sample, 2, rows, routed_experts_start_len=start)
    assert sample == before


def test_a_base_that_is_too_short_is_refused():
    sample = Sample(tokens=[1, 2, 3], rollout_routed_experts=ALL[:1])
    with pytest.raises(ValueError, match="begin at position 2, but the sample has those of 1 positions only"):
        answer(sample, 2, ALL[:2], routed_experts_start_len=2)


def test_their_shape_is_that_of_the_model():
    with pytest.raises(ValueError, match="give `args`"):
        Sample(tokens=[1, 2]).append_response_tokens(
            tokens=[3], log_probs=[0.0], meta_info={"routed_experts": encoded(ALL[:2])}
        )
