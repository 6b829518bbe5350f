"""The engine's expert choices in its answers, and what a sample makes of them."""

import base64
import copy
from types import SimpleNamespace

import numpy as np
import pytest

from slime.utils.types import Sample

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
