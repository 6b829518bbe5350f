"""What engines take, by the comparisons of SGLang 0.5.21 that refuse the rest."""

import pytest

from slime.utils.engine_protocol import longest_input, reserved_for_drafts


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
