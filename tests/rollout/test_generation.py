"""One sample and one group, against a server that speaks `/generate`."""

import asyncio
import datetime
import enum
import gc
import sys
import threading

import numpy as np
import pytest

from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate, generate_and_rm, generate_and_rm_group
from slime.rollout.generation_call import GenerationCall
from slime.utils import async_utils, http_utils
from slime.utils.errors import UserError
from slime.utils.http_utils import HttpError, close_http_client
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample, failed_and_masked
from tests.support.models.rollout_args import CONTEXT_LENGTH, VOCAB_SIZE, make_args
from tests.support.models.rollout_steps import params, plugin, run
from tests.support.processes.waiting import until

Status = Sample.Status


def test_default_generation_takes_tokens_and_log_probs_from_the_engine(server, checkpoint):
    args = make_args(checkpoint, server.port)
    sample = run(generate(args, Sample(index=0, prompt="hello"), params(args)))
    prompt_ids = GenerateState(args).tokenizer.encode("hello", add_special_tokens=True)
    assert sample.tokens == [*prompt_ids, 70, 71, 72]
    assert (sample.response, sample.response_length) == ("FGH", 3)
    assert sample.rollout_log_probs == [-0.5] * 3
    assert sample.loss_mask == [1, 1, 1]
    assert sample.status is Status.COMPLETED
    assert sample.weight_versions == ["1"]
    assert len(server.requests[0].pop("rid")) == 32
    assert server.requests == [
        {
            "input_ids": prompt_ids,
            "sampling_params": {
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "max_new_tokens": 8,
                "skip_special_tokens": False,
                "no_stop_trim": True,
                "spaces_between_special_tokens": False,
            },
            "return_logprob": True,
        }
    ]


def test_message_lists_are_rendered_with_the_template(server, checkpoint):
    args = make_args(checkpoint, server.port)
    messages = [{"role": "user", "content": "hi"}]
    run(generate(args, Sample(prompt=messages), params(args)))
    tokenizer = GenerateState(args).tokenizer
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert server.requests[0]["input_ids"] == tokenizer.encode(text, add_special_tokens=False)


def test_r13_ids_are_those_of_the_engine_whatever_its_text_is(server, checkpoint):
    args = make_args(checkpoint, server.port)
    server.text_of = lambda ids: "other letters" + str(len(ids))
    sample = Sample(index=0, prompt="hello")
    run(generate(args, sample, params(args)))
    first = list(sample.tokens)
    assert first[-3:] == [70, 71, 72] and sample.response == "other letters3"
    sample.status = Status.ABORTED
    run(generate(args, sample, params(args)))
    assert server.requests[1]["input_ids"] == first
    assert sample.tokens == [*first, 70, 71, 72] and sample.response_length == 6


def test_r1_a_continuation_gets_what_is_left_of_its_budget(server, checkpoint):
    args = make_args(checkpoint, server.port, rollout_max_response_len=8)
    sample = Sample(index=0, tokens=[1, 2, 3, 4, 5], response="ab", response_length=2)
    sample.rollout_log_probs, sample.loss_mask, sample.status = [-1.0, -2.0], [1, 1], Status.ABORTED
    server.answer = lambda payload: list(range(80, 100))
    run(generate(args, sample, params(args)))
    assert server.requests[0]["input_ids"] == [1, 2, 3, 4, 5]
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == 6
    assert sample.response_length == 8
    assert sample.rollout_log_probs == [-1.0, -2.0] + [-0.5] * 6
    assert sample.status is Status.TRUNCATED
    # Nothing is left now: no request is made.
    sample.status = Status.ABORTED
    run(generate(args, sample, params(args)))
    assert len(server.requests) == 1
    assert sample.status is Status.TRUNCATED


def test_r1_the_budget_is_limited_by_the_context_length(server, checkpoint):
    args = make_args(checkpoint, server.port, rollout_max_response_len=None)
    run(generate(args, Sample(tokens=[1] * 200), params(args)))
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == CONTEXT_LENGTH - 7 - 200
    SingletonMeta.clear_instances()
    args = make_args(checkpoint, server.port, rollout_max_context_len=100)
    run(generate(args, Sample(tokens=[1] * 95), params(args)))
    assert server.requests[1]["sampling_params"]["max_new_tokens"] == 5


def test_r23_ids_outside_the_vocabulary_never_reach_the_engine(server, checkpoint):
    args = make_args(checkpoint, server.port)
    run(generate(args, Sample(tokens=[1, 2, 3]), params(args)))
    for bad in (VOCAB_SIZE, -1):
        with pytest.raises(UserError, match=rf"sample 7: token id {bad} at position 2 .* vocabulary of {VOCAB_SIZE}"):
            run(generate(args, Sample(index=7, tokens=[1, 2, bad]), params(args)))
    assert [request["input_ids"] for request in server.requests] == [[1, 2, 3]]


@pytest.mark.parametrize("name, value", [("enable-deterministic-inference", True), ("speculative-algorithm", "EAGLE")])
def test_r23_min_p_that_ends_an_engine_or_is_not_heeded_never_reaches_it(server, checkpoint, name, value):
    args = make_args(checkpoint, server.port, **{f"sglang_{name.replace('-', '_')}": value})
    with pytest.raises(UserError, match=f"min_p 0.1 .* with --sglang-{name}"):
        run(generate(args, Sample(tokens=[1]), {**params(args), "min_p": 0.1}))
    assert server.requests == []


def test_a_prompt_beyond_the_context_fails_with_a_reason_and_trains_nothing(server, checkpoint):
    args = make_args(checkpoint, server.port, reward_key="acc")
    sample = run(generate_and_rm(args, Sample(index=3, prompt="x" * CONTEXT_LENGTH), params(args)))
    assert sample.status is Status.FAILED
    assert sample.remove_sample
    assert (
        f"the prompt has {CONTEXT_LENGTH} tokens, and with its response it may have {CONTEXT_LENGTH - 7}"
        in (sample.metadata["fail_reason"])
    )
    assert sample.get_reward_value(args) == 0.0
    assert server.requests == []


def test_a_400_of_the_engine_stops_with_its_body(server, checkpoint):
    args = make_args(checkpoint, server.port)
    server.refuse = lambda payload: "the temperature is bad"
    with pytest.raises(HttpError, match="answered 400: the temperature is bad"):
        run(generate(args, Sample(tokens=[1]), params(args)))
    assert len(server.requests) == 1


def test_group_gives_sessions_rewards_and_seeds_by_position(server, checkpoint):
    args = make_args(checkpoint, server.port, sglang_enable_deterministic_inference=True, rollout_seed=100)
    group = [Sample(index=i, prompt="p") for i in range(3)]
    result = run(generate_and_rm_group(args, group, params(args)))
    assert all(sample.reward in (0.0, 1.0) for sample in result)
    assert len({sample.session_id for sample in result}) == 3
    seeds = sorted(request["sampling_params"]["sampling_seed"] for request in server.requests)
    assert seeds == [100, 101, 102]


def test_consistent_hashing_sends_the_session(server, checkpoint):
    args = make_args(checkpoint, server.port, router_policy="consistent_hashing")
    sample = Sample(tokens=[1], session_id="abc")
    run(generate(args, sample, params(args)))
    assert server.headers[0]["X-SMG-Routing-Key"] == "abc"


def test_finished_samples_are_not_generated_again(server, checkpoint):
    args = make_args(checkpoint, server.port)
    done = Sample(index=1, tokens=[1, 2], response_length=1, status=Status.COMPLETED, reward=0.25)
    assert run(generate_and_rm(args, done, params(args))).reward == 0.25
    assert server.requests == []


def returned_group(args):
    """A failed sample, a finished one and an execution with a failed leaf, as a user may hand them to a data source."""
    failed, finished, *pair = (Sample(index=i, prompt=f"p{i}") for i in range(4))
    for sample, status in ((failed, Status.FAILED), (finished, Status.COMPLETED), (pair[0], Status.COMPLETED)):
        sample.tokens = GenerateState(args).prompt_ids(sample)
        sample.append_response_tokens(args, tokens=[90, 91], log_probs=[-1.0, -1.0], text="Z[")
        sample.status, sample.reward = status, 0.25
    pair[1].status, pair[1].reward = Status.FAILED, 0.25
    failed.remove_sample = True
    return [failed, finished, pair]


def test_failed_entries_of_a_group_start_from_their_prompts_wherever_it_comes_from(server, checkpoint):
    args = make_args(checkpoint, server.port)
    group = returned_group(args)
    result = run(generate_and_rm_group(args, group, params(args)))
    assert [sample.response for sample in result] == ["FGH", "Z[", "FGH"]
    assert [sample.index for sample in result] == [0, 1, 2]
    new = {name: value for name, value in result[1].to_dict().items() if name != "trace"}
    assert new == {**group[1].to_dict(), "session_id": result[1].session_id}
    assert result[1].reward == 0.25
    assert not result[0].remove_sample and result[0].reward in (0, 1)
    prompts = [GenerateState(args).prompt_ids(sample) for sample in (result[0], result[2])]
    assert sorted(request["input_ids"] for request in server.requests) == sorted(prompts)
    # What was handed in is left as it is: whoever kept it may still look at it.
    assert (group[0].status, group[0].response) == (Status.FAILED, "Z[")


def test_failed_entries_give_up_their_answers_when_the_step_is_over_before_they_start(server, checkpoint):
    args = make_args(checkpoint, server.port)
    GenerateState(args).aborted = True
    result = run(generate_and_rm_group(args, returned_group(args), params(args)))
    assert [(sample.status, sample.response) for sample in result] == [
        (Status.ABORTED, ""), (Status.COMPLETED, "Z["), (Status.ABORTED, "")
    ]  # fmt: skip
    assert server.requests == []


def test_no_request_starts_after_the_abort_flag(server, checkpoint):
    args = make_args(checkpoint, server.port)
    GenerateState(args).aborted = True
    sample = run(generate_and_rm(args, Sample(prompt="p"), params(args)))
    assert (sample.status, sample.tokens, sample.reward) == (Status.ABORTED, [], None)
    group = run(generate_and_rm_group(args, [Sample(prompt="p"), Sample(prompt="p")], params(args)))
    assert [s.status for s in group] == [Status.ABORTED] * 2
    assert server.requests == []


def test_the_semaphore_limits_requests_and_rewards_run_outside_it(server, checkpoint, tmp_path):
    server.delay_s = 0.02
    path = plugin(
        tmp_path,
        "from slime.rollout.generate_state import GenerateState\nfree = []\n"
        "async def fn(args, sample, **kwargs):\n"
        "    free.append(not GenerateState(args).semaphore.locked())\n    return 1.0\n",
    )
    args = make_args(checkpoint, server.port, sglang_server_concurrency=3, custom_rm_path=path)
    group = [Sample(index=i, prompt="p") for i in range(12)]
    server.hold = lambda payload: True

    async def graded():
        task = asyncio.create_task(generate_and_rm_group(args, group, params(args)))
        await until(lambda: server.in_flight == 3)
        server.release()
        return await task

    result = run(graded())
    assert server.max_in_flight == 3
    assert [sample.reward for sample in result] == [1.0] * 12
    assert group == [Sample(index=i, prompt="p") for i in range(12)], "the prompts stay as they are"


@pytest.mark.parametrize("plain", [False, True])
def test_a_generate_function_may_generate_through_the_framework(server, checkpoint, tmp_path, plain):
    source = (
        "from slime.rollout.generation import generate_and_rm\nfrom slime.utils import async_utils\n"
        "async def ask(args, sample, sampling_params):\n"
        "    question = Sample(index=sample.index, prompt=sample.prompt + '?')\n"
        "    return await generate_and_rm(args, question, sampling_params)\n"
    )
    body = "async_utils.run(ask(args, sample, params))" if plain else "await ask(args, sample, params)"
    source += f"{'' if plain else 'async '}def fn(args, sample, params):\n    return {body}\n"
    # One slot, which the function holds while what it asks for needs one.
    args = make_args(checkpoint, server.port, sglang_server_concurrency=1)
    group = [Sample(index=i, prompt="p", generate_function_path=plugin(tmp_path, source)) for i in range(3)]

    async def main():
        try:
            return await asyncio.wait_for(generate_and_rm_group(args, group, params(args)), 60)
        finally:
            await close_http_client()

    try:
        assert [sample.response for sample in async_utils.run(main())] == ["FGH"] * 3
    finally:
        async_utils.stop_async_loop()


def test_hooks_run_on_every_leaf_before_the_reward(server, checkpoint, tmp_path):
    (tmp_path / "hooks.py").write_text(
        "import asyncio\n"
        "def first(args, sample, *, rollout_id=None):\n    sample.metadata['seen'] = [sample.reward, rollout_id]\n"
        "async def second(args, sample, evaluation=False):\n"
        "    sample.metadata['seen'].append(evaluation)\n    return sample\n"
        "def wrong(args, sample):\n    return 3\n"
    )
    hooks = [f"{tmp_path}/hooks.py:first", f"{tmp_path}/hooks.py:second"]
    args = make_args(checkpoint, server.port, rollout_sample_hook_path=hooks)
    GenerateState(args).rollout_id = 5
    sample = run(generate_and_rm(args, Sample(index=0, prompt="p"), params(args), evaluation=True))
    assert sample.metadata["seen"] == [None, 5, True]
    args.rollout_sample_hook_path = [f"{tmp_path}/hooks.py:wrong"]
    with pytest.raises(TypeError, match="expected Sample or None"):
        run(generate_and_rm(args, Sample(index=0, prompt="p"), params(args)))


def test_r9_group_grading_reaches_the_leaves_of_fan_outs(server, checkpoint, tmp_path):
    (tmp_path / "both.py").write_text(
        "import copy\nfrom slime.utils.types import Sample\n"
        "async def generate(args, sample, sampling_params):\n"
        "    parts = [copy.deepcopy(sample) for _ in range(2)]\n"
        "    for part in parts:\n"
        "        part.append_response_tokens(args, tokens=[5], log_probs=[-1.0])\n"
        "        part.status = Sample.Status.COMPLETED\n"
        "    return parts\n"
        "calls = []\n"
        "def reward(args, samples):\n    calls.append(len(samples))\n    return [float(i) for i in range(len(samples))]\n"
    )
    args = make_args(
        checkpoint,
        server.port,
        group_rm=True,
        custom_generate_function_path=f"{tmp_path}/both.py:generate",
        custom_rm_path=f"{tmp_path}/both.py:reward",
    )
    group = [Sample(index=i, prompt="p", tokens=[1]) for i in (10, 11)]
    result = run(generate_and_rm_group(args, group, params(args)))
    assert [[s.reward for s in entry] for entry in result] == [[0.0, 1.0], [2.0, 3.0]]
    assert [[s.rollout_id for s in entry] for entry in result] == [[10, 10], [11, 11]]


def test_an_aborted_sibling_leaves_the_whole_execution_ungraded(server, checkpoint, tmp_path):
    path = plugin(
        tmp_path,
        "def fn(args, sample, sampling_params):\n"
        "    done = Sample(tokens=[1, 2], response_length=1, status=Sample.Status.COMPLETED)\n"
        "    return [done, Sample(tokens=[1], status=Sample.Status.ABORTED)]\n",
    )
    args = make_args(checkpoint, server.port, custom_generate_function_path=path)
    entry = run(generate_and_rm(args, Sample(index=0, prompt="p"), params(args)))
    assert [sample.reward for sample in entry] == [None, None]


def test_engines_are_asked_for_the_experts_that_the_sample_does_not_have(server, checkpoint, monkeypatch):
    """A stock engine honours the start and does not repeat it."""
    args = make_args(checkpoint, server.port, use_rollout_routing_replay=True)
    args.num_layers, args.moe_router_topk = 2, 1
    asked = []

    async def answer(url, payload, **options):
        start, end = payload.get("routed_experts_start_len"), len(payload["input_ids"]) + 1
        if start is None:
            return {"meta_info": {"routed_experts": []}}  # this router hands such requests on
        asked.append((payload["return_routed_experts"], start))
        rows = [[position, position] for position in range(start, end)]
        meta_info = {
            "output_token_logprobs": [[-0.5, 70], [-0.5, 71]], "finish_reason": {"type": "abort"}, "routed_experts": rows,
        }  # fmt: skip
        return {"text": "FG", "meta_info": meta_info}

    monkeypatch.setattr("slime.rollout.engine_request.post_generate", answer)
    sample = Sample(index=0, tokens=[65, 66, 67])
    for _ in range(2):
        run(generate(args, sample, params(args)))
    assert asked == [(True, 0), (True, 4)]
    assert sample.rollout_routed_experts[:, :, 0].tolist() == [[position] * 2 for position in range(6)]


def kept_answers(monkeypatch, asked):
    """An engine that tells its sets to whom asks for them."""

    async def answer(url, payload, **options):
        asked.append(bool(payload.get("return_sampling_mask")))
        meta_info = {"output_token_logprobs": [[-0.5, 70], [-0.5, 71]], "finish_reason": {"type": "abort"}}
        if asked[-1]:
            meta_info |= {"output_token_sampling_mask": [[70, 5], [71]], "output_token_sampling_logprobs": [-0.25, 0.0]}
        return {"text": "FG", "meta_info": meta_info}

    monkeypatch.setattr("slime.rollout.engine_request.post_generate", answer)


@pytest.mark.parametrize("limit", [{"rollout_top_p": 0.9, "rollout_top_k": 50}, {"rollout_top_k": 2}])
def test_engines_are_asked_for_the_tokens_that_they_kept_but_not_for_an_evaluation(
    server, checkpoint, monkeypatch, limit
):
    asked, sample = [], Sample(index=0, tokens=[65, 66, 67])
    kept_answers(monkeypatch, asked)
    args = make_args(checkpoint, server.port, **limit)
    for _ in range(2):
        run(generate(args, sample, params(args)))
    assert sample.rollout_top_p_token_ids.tolist() == [70, 5, 71] * 2
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3, 5, 6]
    assert sample.rollout_log_probs == [-0.25, 0.0] * 2
    assert asked == [True] * 3, "the first one tells whether the router hands it on"
    evaluated = Sample(index=1, tokens=[65])
    with GenerationCall(evaluation=True).under_way(), GenerationCall().under_way():
        run(generate(args, evaluated, params(args)))
    assert asked[3:] == [False] and evaluated.rollout_top_p_token_offsets is None


@pytest.mark.parametrize(("first", "second"), [(0.9, 1.0), (1.0, 0.9)])
def test_a_sample_begun_under_another_top_p_starts_again(server, checkpoint, monkeypatch, first, second):
    kept_answers(monkeypatch, [])
    begun = Sample(index=0, prompt="p")
    for top_p in (first, second):
        SingletonMeta.clear_instances()
        args = make_args(checkpoint, server.port, rollout_top_p=top_p, rollout_top_k=-1 if top_p == 1 else 50)
        begun = run(generate_and_rm(args, begun, params(args)))
        assert begun.response_length == 2 and (begun.rollout_top_p_token_offsets is None) == (top_p == 1)
        begun.status = Status.ABORTED


@pytest.mark.parametrize(("first", "second"), [(0.9, 1.0), (1.0, 0.9)])
def test_so_does_a_sibling_that_was_finished_then(server, checkpoint, monkeypatch, first, second):
    kept_answers(monkeypatch, [])
    args = make_args(checkpoint, server.port, rollout_top_p=first, rollout_top_k=-1 if first == 1 else 50)
    finished = run(generate_and_rm(args, Sample(index=0, prompt="p"), params(args)))
    finished.status = Status.COMPLETED
    SingletonMeta.clear_instances()
    args = make_args(checkpoint, server.port, rollout_top_p=second, rollout_top_k=-1 if second == 1 else 50)
    again = run(generate_and_rm(args, finished, params(args)))
    assert (again.rollout_top_p_token_offsets is None) == (second == 1)


def held_bytes(sample):
    """What the per-token fields and the text of `sample` keep in memory, shared objects counted once."""
    objects = {}
    for name in ("tokens", "loss_mask", "rollout_log_probs", "response"):
        value = vars(sample)[name]
        objects[id(value)] = value.nbytes if isinstance(value, np.ndarray) else sys.getsizeof(value)
        if isinstance(value, list):
            objects.update((id(entry), sys.getsizeof(entry)) for entry in value)
    return sum(objects.values())


def test_a_long_answer_is_parsed_off_the_event_loop_and_held_in_forty_bytes_per_token(server, checkpoint, monkeypatch):
    args = make_args(checkpoint, server.port, rollout_max_response_len=5000, sglang_context_length=8192)
    server.context_length = args.sglang_context_length
    ids = [257 + i % 40 for i in range(4000)]
    server.answer = lambda payload: ids
    parsed = []
    decode = http_utils._decode
    monkeypatch.setattr(
        http_utils, "_decode", lambda content: parsed.append((threading.get_ident(), len(content))) or decode(content)
    )

    async def main():
        return threading.get_ident(), await generate(args, Sample(index=0, prompt="hello"), params(args))

    loop_thread, sample = run(main())
    ((thread, size),) = parsed
    assert thread != loop_thread
    assert size < 8 * len(ids), "the table of log-probs is no longer part of what is parsed as JSON"
    assert held_bytes(sample) <= 40 * len(sample.tokens)
    assert sample.tokens[-4000:] == ids and sample.rollout_log_probs == [-0.5] * 4000


@pytest.mark.parametrize("messages", [False, True])
def test_a_group_renders_and_tokenises_its_prompt_once_and_off_the_event_loop(
    server, checkpoint, monkeypatch, messages
):
    args = make_args(checkpoint, server.port)
    calls = []

    def recorded(name, function):
        return lambda *arguments, **keywords: (
            calls.append((name, threading.get_ident())) or function(*arguments, **keywords)
        )

    module = "slime.rollout.generate_state"
    monkeypatch.setattr(f"{module}.require_chat_template", lambda tokenizer, subject: None)
    monkeypatch.setattr(f"{module}.render_chat", recorded("render", lambda tokenizer, chat, *_: chat[0]["content"]))

    async def main():
        tokenizer = GenerateState(args).encoder_tokenizer
        monkeypatch.setattr(tokenizer, "encode", recorded("encode", tokenizer.encode))
        prompt = [{"role": "user", "content": "hello"}] if messages else "hello"
        group = [Sample(index=i, group_index=0, prompt=prompt) for i in range(2)]
        return threading.get_ident(), await generate_and_rm_group(args, group, params(args))

    loop_thread, group = run(main())
    assert [name for name, _ in calls] == (["render", "encode"] if messages else ["encode"])
    assert loop_thread not in {thread for _, thread in calls}
    assert group[0].tokens == group[1].tokens and group[0].tokens is not group[1].tokens


def test_no_request_starts_when_the_abort_comes_while_the_prompt_is_tokenised(server, checkpoint, monkeypatch):
    args = make_args(checkpoint, server.port)

    async def main():
        state = GenerateState(args)
        encode = state.encoder_tokenizer.encode
        monkeypatch.setattr(
            state.encoder_tokenizer, "encode", lambda *a, **k: setattr(state, "aborted", True) or encode(*a, **k)
        )
        return await generate_and_rm(args, Sample(index=0, prompt="hello"), params(args))

    assert run(main()).status is Status.ABORTED and server.requests == []


def test_siblings_share_one_way_to_the_encoder_and_none_takes_it_from_another(checkpoint, monkeypatch, caplog):
    SingletonMeta.clear_instances()
    state = GenerateState(make_args(checkpoint))
    encode, encoded, go_on = state.encoder_tokenizer.encode, [], threading.Event()

    def slow_encode(text, **options):
        encoded.append(text)
        assert go_on.wait(30)
        if len(encoded) <= 2:
            raise MemoryError("not now")
        return encode(text, **options)

    monkeypatch.setattr(state.encoder_tokenizer, "encode", slow_encode)

    async def siblings():
        tasks = [asyncio.ensure_future(state.encode_prompt(Sample(prompt="hello"))) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def given_up():
        task = asyncio.ensure_future(state.encode_prompt(Sample(prompt="hello")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        go_on.set()
        await state.in_encoder(go_on.clear)

    async def twice():
        return await siblings(), await siblings()

    asyncio.run(given_up())
    (cancelled, *failed), (_, first, second) = asyncio.run(twice())
    assert isinstance(cancelled, asyncio.CancelledError) and [type(one) for one in failed] == [MemoryError] * 2
    assert first is second and first.tolist() == encode("hello")
    # And of what is there, in another event loop.
    assert asyncio.run(state.encode_prompt(Sample(prompt="hello"))) is first
    assert encoded == ["hello"] * 3
    SingletonMeta.clear_instances()
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_users_may_pad_and_truncate_with_the_tokenizer_while_prompts_are_encoded(checkpoint):
    SingletonMeta.clear_instances()
    state, text = GenerateState(make_args(checkpoint)), "word " * 2000
    whole = len(state.tokenizer.encode(text))

    async def main():
        encoding = [asyncio.ensure_future(state.encode_prompt(Sample(prompt=text + str(i)))) for i in range(30)]
        calls = 0
        while not all(task.done() for task in encoding):
            assert len(state.tokenizer(text, truncation=True, max_length=10)["input_ids"]) == 10
            state.tokenizer.pad({"input_ids": [[1], [1, 2]]}, padding=True)
            calls += 1
            await asyncio.sleep(0)
        assert calls
        return await asyncio.gather(*encoding)

    assert all(len(ids) > whole for ids in asyncio.run(main()))
    SingletonMeta.clear_instances()


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    "value", [datetime.date(2024, 1, 2), Colour.RED, float("nan"), (1, 2), np.float64(1.5), 2**70, "\ud800"]
)
def test_a_template_gets_the_values_of_the_messages_unchanged(checkpoint, monkeypatch, value):
    SingletonMeta.clear_instances()
    seen = []
    module = "slime.rollout.generate_state"
    monkeypatch.setattr(f"{module}.require_chat_template", lambda tokenizer, subject: None)
    monkeypatch.setattr(f"{module}.render_chat", lambda tokenizer, chat, *_: seen.append(chat[0]["content"]) or "hello")
    GenerateState(make_args(checkpoint)).prompt_ids(Sample(prompt=[{"role": "user", "content": value}]))
    assert type(seen[0]) is type(value) and repr(seen[0]) == repr(value)
    SingletonMeta.clear_instances()


def test_a_router_that_drops_the_field_of_log_probs_stops_the_run(server, checkpoint, monkeypatch):
    server.drops_log_probs = True
    args = make_args(checkpoint, server.port)
    expected = (
        rf"behind http://127.0.0.1:{server.port} generated \d+ tokens .* output_token_logprobs.*--sglang-router-ip"
    )
    with pytest.raises(UserError, match=expected):
        run(generate_and_rm(args, Sample(prompt="hello"), params(args)))
    # An answer that was aborted while it waited has none either, and is no sign of such a router.
    meta_info = {"finish_reason": {"type": "abort"}, "completion_tokens": 2}

    async def post(url, payload, **options):
        return {"text": "", "meta_info": meta_info}

    monkeypatch.setattr("slime.rollout.engine_request.post_generate", post)
    assert run(generate_and_rm(args, Sample(prompt="hello"), params(args))).status is Status.ABORTED


@pytest.mark.parametrize("log_prob", [None, float("nan"), float("-inf")])
def test_a_token_without_a_finite_log_prob_is_generated_once_more_and_never_trained(
    server, checkpoint, monkeypatch, log_prob
):
    answers = []

    async def post(url, payload, **options):
        value = -0.5 if len(answers) == recovers_at else log_prob
        answers.append(value)
        rows = [[-0.5, 70, None], [value, 71, None]]
        finish = {"type": "stop"}
        return {"text": "FG", "meta_info": {"output_token_logprobs": rows, "finish_reason": finish}}

    monkeypatch.setattr("slime.rollout.engine_request.post_generate", post)
    args = make_args(checkpoint, server.port)
    recovers_at = None
    failed = run(generate_and_rm(args, Sample(index=3, prompt="hello"), params(args)))
    assert failed_and_masked(failed) and failed.response_length == 0 and len(answers) == 2
    assert "response token 1 (id 71) of sample 3 the log-prob" in failed.metadata["fail_reason"]
    recovers_at = 3
    good = run(generate_and_rm(args, Sample(index=4, prompt="hello"), params(args)))
    assert (good.status, good.rollout_log_probs) == (Status.COMPLETED, [-0.5, -0.5])
