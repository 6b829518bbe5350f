"""What engines take, by the comparisons of SGLang 0.5.21 that refuse the rest."""

import pytest

from slime.utils.engine_protocol import longest_input, reserved_for_drafts, within_budget


@pytest.mark.parametrize("reserved", [0, 4, 5, 6, 7, 20])
def test_the_longest_input_is_one_that_an_engine_takes_whatever_is_left_to_it(reserved):
    context_length = 256

    def is_refused(length, new_tokens):
        max_req_input_len = context_length - 1 - 5  # `TpModelWorker.get_worker_info`
        by_scheduler = length >= max_req_input_len  # `validate_input_length`
        total = length + reserved  # `TokenizerManager._validate_one_request`
        return by_scheduler or total >= context_length or total + new_tokens > context_length

    longest = longest_input(context_length, reserved)
    assert not any(is_refused(length, longest - length) for length in range(longest + 1))
    assert is_refused(longest + 1, 0)


@pytest.mark.parametrize(("steps", "topk", "draft_tokens", "given"), [(3, 1, 4, 3), (5, 1, 6, 5), (3, 1, 4, None)])
def test_what_drafts_take_of_a_context(steps, topk, draft_tokens, given):
    """The last case is what SGLang takes without these settings for the models that have a layer to draft with
    (`_auto_choose_speculative_params`)."""
    assert reserved_for_drafts(given) == max(topk * steps, draft_tokens)  # `compute_num_reserved_tokens`


@pytest.mark.parametrize(
    ("least", "budget", "generated", "left"),
    [(5, 8, 0, 5), (5, 8, 2, 3), (5, 8, 7, 0), (9, 8, 0, 8), (9, 3, 2, 3), (0, 1, 0, 0)],
)
def test_a_minimum_is_what_is_missing_of_it_and_at_most_what_is_left(least, budget, generated, left):
    params = {"min_new_tokens": least, "max_new_tokens": 100, "top_k": 3}
    wanted = {"min_new_tokens": left, "max_new_tokens": budget, "top_k": 3}
    assert within_budget(params, budget, generated) == wanted
    assert params == {"min_new_tokens": least, "max_new_tokens": 100, "top_k": 3}


def test_no_minimum_stays_none():
    assert within_budget({"min_new_tokens": None}, 3) == {"min_new_tokens": None, "max_new_tokens": 3}
    assert within_budget({}, 3) == {"max_new_tokens": 3}
