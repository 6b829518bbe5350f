"""Samples near the context length of the engines, which refuse inputs that leave them too little of it."""

from types import SimpleNamespace

import pytest

from slime.rollout.dialogue import dialogue
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate, generate_and_rm, generate_streaming
from slime.rollout.on_policy_distillation import reward_func
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.models.rollout_args import CONTEXT_LENGTH, make_args
from tests.support.models.rollout_steps import params, run

Status = Sample.Status
# The longest input that an engine of this context length takes.
LONGEST = CONTEXT_LENGTH - 7
STEPS = "speculative_num_steps"


def begun(length):
    """A sample of so many tokens, of which two are a response that was interrupted."""
    sample = Sample(index=0, tokens=[1] * length, response="ab", response_length=2)
    sample.rollout_log_probs, sample.loss_mask, sample.status = [-1.0, -2.0], [1, 1], Status.ABORTED
    return sample


@pytest.mark.parametrize("own", [None, CONTEXT_LENGTH, CONTEXT_LENGTH - 3])
def test_an_answer_that_an_engine_would_not_go_on_with_is_full(server, checkpoint, own):
    args = make_args(checkpoint, server.port, rollout_max_response_len=100, rollout_max_context_len=own)
    for length in range(LONGEST, CONTEXT_LENGTH + 2):
        sample = run(generate(args, begun(length), params(args)))
        assert (sample.status, sample.response_length) == (Status.TRUNCATED, 2)
    assert server.requests == []
    sample = run(generate(args, begun(LONGEST - 2), params(args)))
    assert (sample.status, len(sample.tokens)) == (Status.TRUNCATED, LONGEST)
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == 2


def test_engines_of_others_may_have_a_shorter_context_than_the_model(server, checkpoint):
    """The limit of the run is at most that."""
    engines = [SimpleNamespace(context_length=length) for length in (None, 128)]
    args = make_args(checkpoint, server.port, rollout_max_context_len=128, rollout_external_engine_infos=engines)
    server.context_length = 128
    assert run(generate(args, begun(122), params(args))).status is Status.TRUNCATED and server.requests == []


def test_a_limit_of_the_run_is_no_limit_of_the_engines(server, checkpoint):
    """An answer may have all of it."""
    args = make_args(checkpoint, server.port, rollout_max_context_len=LONGEST - 1)
    assert run(generate(args, begun(LONGEST - 2), params(args))).status is Status.TRUNCATED
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == 1


@pytest.mark.parametrize("engines", [None, 128])
def test_a_prompt_that_an_engine_would_refuse_fails_alone(server, checkpoint, engines):
    server.context_length = engines or CONTEXT_LENGTH
    args = make_args(checkpoint, server.port, sglang_context_length=engines, rollout_max_context_len=CONTEXT_LENGTH)
    for length in range(server.context_length - 7, server.context_length + 1):
        sample = run(generate_and_rm(args, Sample(index=3, tokens=[1] * length), params(args)))
        assert sample.status is Status.FAILED and sample.remove_sample
        told = (
            f"the prompt has {length} tokens, and with its response it may have {server.context_length - 7} (--rollout-"
        )
        assert sample.metadata["fail_reason"].startswith(told)
    sample = run(generate_and_rm(args, Sample(index=3, tokens=[1] * (server.context_length - 8)), params(args)))
    assert sample.status is Status.TRUNCATED and len(server.requests) == 1


@pytest.mark.parametrize("left", [1, 6, 7, 8])
def test_a_reply_after_which_an_engine_would_refuse_the_dialogue_ends_it(server, checkpoint, left):
    args = make_args(checkpoint, server.port, rollout_max_response_len=CONTEXT_LENGTH)
    server.text_of = GenerateState(args).tokenizer.decode
    # There are five tokens of the prompt, and three that the model says.
    said = "." * (CONTEXT_LENGTH - 8 - left)
    sample = run(dialogue(args, Sample(index=0, tokens=[1] * 5), params(args), lambda turn: said))
    assert sample.status is Status.TRUNCATED
    assert (len(server.requests), sample.response_length) == ((2, LONGEST - 5) if left == 8 else (1, 3))


def test_an_answer_as_long_as_the_context_allows_is_scored_by_a_teacher_of_the_same_context(server, checkpoint):
    args = make_args(checkpoint, server.port, rollout_max_response_len=CONTEXT_LENGTH, rm_url=server.url)
    server.answer, server.text_of = lambda payload: [70] * CONTEXT_LENGTH, GenerateState(args).tokenizer.decode
    sample = run(generate(args, Sample(index=0, tokens=[1] * 5), params(args)))
    assert sample.status is Status.TRUNCATED
    assert run(reward_func(args, sample)) == 0.0 and len(sample.teacher_log_probs) == sample.response_length


@pytest.mark.parametrize(
    ("steps", "of_groups", "reserved", "free"),
    [(3, [], 4, 7), (None, [], 4, 7), (9, [], 10, 11), (3, [{}, {STEPS: 9}], 10, 11)],
)
def test_what_engines_reserve_for_their_drafts_is_left_to_them(server, checkpoint, steps, of_groups, reserved, free):
    server.reserved = reserved
    served = [SimpleNamespace(groups=[SimpleNamespace(overrides=overrides) for overrides in of_groups])]
    args = make_args(
        checkpoint, server.port, rollout_max_response_len=CONTEXT_LENGTH, sglang_speculative_algorithm="EAGLE",
        sglang_speculative_num_steps=steps, served_models=served if of_groups else None,
    )  # fmt: skip
    run(generate(args, Sample(index=0, tokens=[1] * 200), params(args)))
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == CONTEXT_LENGTH - free - 200


def least_and_most(server):
    asked = [request["sampling_params"] for request in server.requests]
    return [(params["min_new_tokens"], params["max_new_tokens"]) for params in asked]


def test_a_minimum_is_one_of_the_whole_response_and_never_above_what_is_left(server, checkpoint):
    args = make_args(checkpoint, server.port)
    for sample, least in ((begun(10), 5), (begun(10), 1), (begun(LONGEST - 1), 5), (Sample(tokens=[1]), 20)):
        run(generate(args, sample, {**params(args), "min_new_tokens": least}))
    assert least_and_most(server) == [(3, 6), (0, 6), (1, 1), (8, 8)]


def test_a_minimum_is_one_of_all_turns_of_a_dialogue(server, checkpoint):
    args = make_args(checkpoint, server.port, rollout_max_response_len=24)
    server.text_of = GenerateState(args).tokenizer.decode
    wanted = {**params(args), "min_new_tokens": 3}
    run(dialogue(args, Sample(index=0, tokens=[1] * 5), wanted, lambda turn: "." * 20))
    assert least_and_most(server) == [(3, 24), (0, 1)]


@pytest.mark.parametrize("function", [generate, generate_streaming])
@pytest.mark.parametrize(("cache_tokens", "is_told"), [(28, False), (27, True)])
def test_an_answer_that_an_engine_has_no_room_for_is_told(server, checkpoint, caplog, function, cache_tokens, is_told):
    """SGLang ends it as one that is as long as was asked for."""
    args = make_args(checkpoint, server.port, rollout_max_response_len=8)
    SingletonMeta.clear_instances()
    server.cache_tokens, server.answer = cache_tokens, lambda payload: [5] * 100
    for _ in range(2):
        sample = run(function(args, begun(20), params(args)))
        assert sample.status is Status.TRUNCATED
    assert caplog.text.count("an engine cut an answer off after 5 of 6 tokens") == is_told
