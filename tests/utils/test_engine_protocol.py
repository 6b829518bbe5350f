"""What engines take, by the comparisons of SGLang 0.5.21 that refuse the rest."""

from slime.utils.engine_protocol import longest_input


def test_the_longest_input_is_one_that_an_engine_takes_whatever_is_left_to_it():
    context_length = 256

    def is_refused(length, new_tokens):
        max_req_input_len = context_length - 1 - 5  # `TpModelWorker.get_worker_info`
        by_scheduler = length >= max_req_input_len  # `validate_input_length`
        total = length  # `TokenizerManager._validate_one_request`
        return by_scheduler or total >= context_length or total + new_tokens > context_length

    longest = longest_input(context_length)
    assert not any(is_refused(length, longest - length) for length in range(longest + 1))
    assert is_refused(longest + 1, 0)
