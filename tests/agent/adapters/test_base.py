"""The way of a turn, whatever protocol it came by: its prompt, what is recorded, what is refused, who ends it."""

import asyncio
import contextlib
import logging
import socket
import threading

import pytest
import requests

from slime.agent.adapters import OpenAIAdapter
from slime.agent.adapters.base import BaseAdapter, routing_message
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.trajectory import TurnRecord
from slime.utils.errors import UserError
from slime.utils.http_utils import noting_request_ids
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample
from tests.support.models.tokenizer import CHATML_TEMPLATE, build_tokenizer
from tests.support.processes.agent_endpoint import END, endpoint
from tests.support.processes.waiting import wait_until

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "question"}
FIRST_PROMPT = "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"
REPLY = {"role": "user", "content": "go on"}
REPLIED = "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
# What stood before `</think>` is left out of all answers but the last, as reasoning templates do.
FORGETFUL = CHATML_TEMPLATE.replace(
    "message.content + '<|im_end|>", "message.content.split('</think>')[-1] + '<|im_end|>"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def talking(*says, **options):
    return endpoint(OpenAIAdapter, PATH, says, **options)


def messages_after(reply, *more):
    return [USER, reply.json()["choices"][0]["message"], *more]


def converse(agent, **more):
    """Two turns; the answers to both."""
    first = agent.ask({"messages": [USER], **more})
    return first, agent.ask({"messages": messages_after(first, REPLY), **more})


def ids_of(agent):
    return [payload["input_ids"] for payload in agent.engine.requests]


# -- prompts and records -----------------------------------------------------------------------------------------------


def test_two_turns_are_one_sample_of_the_engines_ids():
    with talking(f"hello there{END}", f"bye{END}") as agent:
        first, second = converse(agent)
        assert first.json()["choices"][0]["message"]["content"] == "hello there"
        assert second.json()["choices"][0]["message"]["content"] == "bye"
        assert agent.prompts() == [FIRST_PROMPT, FIRST_PROMPT + f"hello there{END}" + REPLIED]
        (sample,) = agent.finish(reward=0.5)
    encode = agent.adapter.tokenizer.encode
    answers = [encode(f"hello there{END}"), encode(f"bye{END}")]
    assert sample.tokens == ids_of(agent)[1] + answers[1]
    between = len(sample.tokens) - len(encode(FIRST_PROMPT)) - len(answers[0]) - len(answers[1])
    assert sample.loss_mask == [1] * len(answers[0]) + [0] * between + [1] * len(answers[1])
    assert sample.rollout_log_probs == [-0.5 * one for one in sample.loss_mask]
    assert sample.response == f"hello there{END}{REPLIED}bye{END}"
    assert (sample.index, sample.rollout_id, sample.reward, sample.weight_versions) == (5, 5, 0.5, ["1", "1"])
    assert sample.status is Sample.Status.COMPLETED


def test_ids_that_no_text_gives_stay_what_they_are():
    """The model spells `hello`, which is one token, in five."""
    spelt = build_tokenizer().convert_tokens_to_ids([*"hello", END])
    with talking(spelt, f"bye{END}") as agent:
        converse(agent)
        first, second = ids_of(agent)
        assert second[: len(first) + 6] == first + spelt
        (sample,) = agent.finish()
        assert sum(sample.loss_mask[:6]) == 6 and sample.response.startswith(f"hello{END}")


def test_a_call_goes_into_the_next_prompt_as_the_model_wrote_it():
    """Not as a client says it again, whose spaces are its own."""
    call = '<tool_call>{"name":"f",   "arguments":{}}</tool_call>'
    with talking(f"so {call}{END}", f"bye{END}") as agent:
        first = agent.ask({"messages": [USER], "tools": [TOOL]})
        tool = {"role": "tool", "tool_call_id": "x", "content": "42"}
        agent.ask({"messages": messages_after(first, tool), "tools": [TOOL]})
        assert agent.prompts()[1].startswith(
            agent.prompts()[0] + f"so {call}{END}\n<|im_start|>user\n<tool_response>\n42"
        )
        (sample,) = agent.finish()
    assert sample.metadata["use_tool"] and not sample.metadata["ill_formed"] and sample.metadata["round_number"] == 2


def test_g3_a_template_that_leaves_reasoning_out_renders_the_next_prompt():
    with talking(f"<think>hm</think>4{END}", f"5{END}", f"6{END}", template=FORGETFUL) as agent:
        first, second = converse(agent)
        assert first.json()["choices"][0]["message"]["reasoning_content"] == "hm"
        assert agent.prompts()[1] == FIRST_PROMPT + f"4{END}" + REPLIED
        agent.ask({"messages": messages_after(first, REPLY, second.json()["choices"][0]["message"], REPLY)})
        assert agent.prompts()[2] == agent.prompts()[1] + f"5{END}" + REPLIED
        (sample,) = agent.finish()
    encode = agent.adapter.tokenizer.encode
    context = [0] * len(encode(f"4{END}{REPLIED}"))
    assert sample.loss_mask == [*context, 1, 1, *[0] * len(encode(REPLIED)), 1, 1], "the turn with reasoning is masked"


def test_the_last_answer_goes_in_as_it_was_written_where_an_earlier_one_was_not_sent_so():
    """Of the first the template leaves the reasoning out, and the client the blanks, which the prompt has lacked since."""
    call = '<tool_call>{"name":"f",   "arguments":{}}</tool_call>'
    with talking(f"<think>hm</think>  4{END}", f"so {call}{END}", f"6{END}", template=FORGETFUL) as agent:
        first = agent.ask({"messages": [USER], "tools": [TOOL]})
        messages = messages_after(first, REPLY)
        second = agent.ask({"messages": messages, "tools": [TOOL]}).json()["choices"][0]["message"]
        agent.ask({"messages": [*messages, second, REPLY], "tools": [TOOL]})
        prompts = agent.prompts()
    assert prompts[1] == prompts[0] + f"4{END}" + REPLIED and prompts[2] == prompts[1] + f"so {call}{END}" + REPLIED


def test_turns_that_end_with_another_token_than_the_template_writes_are_trained():
    """As base models end theirs. The token stays behind the model's words, and the template's own follows it."""
    says = [f"hello there{end}" for end in ("<|endoftext|>", END, "<|endoftext|>", END)]
    with talking(*says) as agent:
        encode, decode = agent.adapter.tokenizer.encode, agent.adapter.tokenizer.decode
        agent.engine.matched = lambda payload: encode(says[len(agent.engine.requests) - 1])[-1]
        messages = [USER]
        for _ in says:
            reply = agent.ask({"messages": messages}).json()["choices"][0]["message"]
            assert reply["content"] == "hello there"
            messages = [*messages, reply, REPLY]
        (sample,) = agent.finish()
    other, own = f"hello there<|endoftext|>{END}{REPLIED}", f"hello there{END}{REPLIED}"
    assert decode(ids_of(agent)[3]) == FIRST_PROMPT + other + own + other
    response = sample.tokens[-sample.response_length :]
    assert [token for token, mask in zip(response, sample.loss_mask, strict=True) if mask] == encode("".join(says))
    assert not agent.adapter.trajectories.counts


def test_a_template_that_takes_calls_as_clients_send_them_only():
    """It writes what the model wrote, whose ids are kept."""
    written = "'<tool_call>' + (message.tool_calls[0].function | tojson) + '</tool_call>'"
    assistant = (
        "{%- elif message.role == 'assistant' -%}"
        "{%- if '<tool_call>' in message.content %}{{ raise_exception('send calls as tool_calls') }}{% endif -%}"
        "{{ '<|im_start|>assistant\n' + message.content + ("
        + written
        + " if message.tool_calls else '') + '<|im_end|>\n' }}"
    )
    place = "{%- elif message.role != 'system' or not loop.first -%}"
    template = CHATML_TEMPLATE.replace(place, assistant + place)
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    # `hello` would be one token.
    spelt = [*build_tokenizer().convert_tokens_to_ids([*"hello"]), *build_tokenizer().encode(call + END)]
    with talking(spelt, f"bye{END}", template=template) as agent:
        first = agent.ask({"messages": [USER], "tools": [TOOL]})
        again = agent.ask({"messages": messages_after(first, {"role": "tool", "content": "42"}), "tools": [TOOL]})
        assert again.status_code == 200, again.text
        (before, after), samples = ids_of(agent), agent.finish()
    assert after[: len(before) + len(spelt)] == before + spelt and len(samples) == 1


def test_prompts_are_rendered_by_the_arguments_of_the_adapter_and_of_a_session():
    template = CHATML_TEMPLATE + "{{ first }}{{ second }}"
    options = {"template": template, "chat_template_kwargs": {"first": "run ", "second": "run"}}
    with talking(f"a{END}", f"b{END}", f"c{END}", **options) as agent:
        agent.adapter.open_session("own", chat_template_kwargs={"second": "own"})
        converse(agent)
        agent.ask({"messages": [USER]}, key="own")
        prompts = agent.prompts()
    assert [prompt.endswith("assistant\nrun run") for prompt in prompts] == [True, True, False]
    assert prompts[2] == FIRST_PROMPT + "run own"


def test_a_template_that_opens_the_reasoning():
    opening = CHATML_TEMPLATE.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
    assert opening != CHATML_TEMPLATE
    with talking(f"hm</think>4{END}", "hm", template=opening) as agent:
        whole = agent.ask({"messages": [USER]}).json()["choices"][0]["message"]
        assert (whole["reasoning_content"], whole["content"]) == ("hm", "4")
        cut = agent.ask({"messages": [USER], "max_tokens": 2}).json()["choices"][0]["message"]
        assert (cut["reasoning_content"], cut["content"]) == ("hm", "")


def test_an_answer_that_the_client_rewrites_is_sent_as_the_client_has_it():
    with talking(f"hello  there{END}", f"bye{END}") as agent:
        agent.ask({"messages": [USER]})
        agent.ask({"messages": [USER, {"role": "assistant", "content": "hello there"}, REPLY]})
        assert agent.prompts()[1] == FIRST_PROMPT + f"hello there{END}" + REPLIED
        (sample,) = agent.finish()
        assert sum(sample.loss_mask) == len(agent.adapter.tokenizer.encode(f"bye{END}"))


def test_messages_are_told_apart_without_reasoning_ids_and_further_calls():
    calls = [{"id": name, "function": {"name": name, "arguments": {"a": 1}}} for name in "fg"]
    told = {"role": "assistant", "content": "text", "reasoning_content": "hm", "tool_calls": calls}
    routed = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}
    assert routing_message(told) == routed == routing_message(told | {"content": None, "tool_calls": calls[:1]})
    assert routing_message({"role": "tool", "content": "4", "tool_call_id": "x"}) == {"role": "tool", "content": "4"}


def test_branches_of_a_session_share_the_turns_before_them():
    with talking(f"a{END}", f"b{END}", f"c{END}") as agent:
        first = agent.ask({"messages": [USER]})
        for content in ("go on", "do otherwise"):
            agent.ask({"messages": messages_after(first, {"role": "user", "content": content})})
        one, other = agent.finish()
    assert (one.loss_mask[:2], other.loss_mask[:2]) == ([1, 1], [0, 0]) and one.rollout_id == other.rollout_id == 5


def test_a_call_that_cannot_be_read_is_flagged():
    with talking(f"<tool_call>{{</tool_call>{END}") as agent:
        assert agent.ask({"messages": [USER], "tools": [TOOL]}).json()["choices"][0]["finish_reason"] == "stop"
        assert agent.finish()[0].metadata["ill_formed"]


def test_who_looks_at_turns_does_not_end_them(caplog):
    seen = []

    def look(told):
        seen.append(told)
        raise RuntimeError("no disk")

    with talking(f"a{END}", f"b{END}", debug_callback=look) as agent:
        assert [reply.status_code for reply in converse(agent)] == [200, 200]
        # A turn is recorded when its reply is written.
        wait_until(lambda: len(seen) == 2)
        assert [told["output"].text for told in seen] == ["a", "b"] and seen[0]["session_id"] == "s"
    assert "debug_callback raised" in caplog.text


# -- what is asked for -------------------------------------------------------------------------------------------------

ALWAYS = {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}


def test_a_request_to_the_engine():
    fields = {"return_sampling_mask": True}
    with talking(f"a{END}", defaults={"temperature": 0.7, "top_k": None}, request_fields=fields) as agent:
        agent.ask({"messages": [USER], "stop": ["###"]})
        (payload,), (headers,) = agent.engine.requests, agent.engine.headers
    assert payload["sampling_params"] == ALWAYS | {"temperature": 0.7, "max_new_tokens": 4096, "stop": ["###"]}
    assert payload["return_logprob"] and payload["return_sampling_mask"] and payload["rid"]
    assert headers["X-SMG-Routing-Key"] == "s"


def test_g1_the_sampling_of_clients_is_ignored_and_that_is_told_once(caplog):
    asked = {"messages": [USER], "temperature": 0.1, "top_p": 0.2, "top_k": 3, "seed": 1}
    with caplog.at_level(logging.WARNING), talking(f"a{END}", f"b{END}", defaults={"temperature": 1.0}) as agent:
        for _ in range(2):
            agent.ask(asked)
        params = [payload["sampling_params"] for payload in agent.engine.requests]
    assert params == [ALWAYS | {"temperature": 1.0, "max_new_tokens": 4096}] * 2
    assert caplog.text.count("temperature of requests is ignored") == 1 and "seed of requests" in caplog.text
    with talking(f"a{END}", defaults={"temperature": 1.0}, allow_client_sampling=True) as agent:
        agent.ask(asked)
        (payload,) = agent.engine.requests
    heeded = {"temperature": 0.1, "top_p": 0.2, "top_k": 3}
    assert payload["sampling_params"] == ALWAYS | heeded | {"max_new_tokens": 4096}


def test_what_a_request_asks_for_in_vain_is_told_once(caplog):
    asked = {
        "chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "high", "thinking": {"type": "enabled"},
        "min_tokens": 2, "stop_token_ids": [5], "ignore_eos": True, "logprobs": True, "functions": [TOOL["function"]],
    }  # fmt: skip
    with caplog.at_level(logging.WARNING), talking(f"a{END}", f"b{END}", f"c{END}") as agent:
        agent.ask({"messages": [USER], "logprobs": False, "ignore_eos": False})
        assert "of requests is ignored" not in caplog.text
        for _ in range(2):
            agent.ask({"messages": [USER], **asked})
        params = [payload["sampling_params"] for payload in agent.engine.requests]
    assert params == [ALWAYS | {"max_new_tokens": 4096}] * 3
    assert [caplog.text.count(f"{name} of requests is ignored") for name in asked] == [1] * len(asked)


@pytest.mark.parametrize(("own", "asked", "limit"), [(None, 9000, 4096), (100, 50, 50), (100, 200, 100)])
def test_a_request_may_only_lower_the_limit(own, asked, limit):
    with talking(f"a{END}", defaults={"max_new_tokens": own}) as agent:
        agent.ask({"messages": [USER], "max_tokens": asked})
        assert agent.engine.requests[0]["sampling_params"]["max_new_tokens"] == limit


def test_a_minimum_is_never_above_the_limit_of_a_request():
    with talking(f"a{END}", defaults={"min_new_tokens": 50}) as agent:
        agent.ask({"messages": [USER], "max_tokens": 20})
        (payload,) = agent.engine.requests
    assert (payload["sampling_params"]["min_new_tokens"], payload["sampling_params"]["max_new_tokens"]) == (20, 20)


def test_prompt_and_answer_fit_the_context_and_no_room_is_an_empty_answer():
    length = len(build_tokenizer().encode(FIRST_PROMPT))
    with talking("abcdefgh", max_context_tokens=length + 3) as agent:
        first = agent.ask({"messages": [USER]}).json()
        assert first["choices"][0]["message"]["content"] == "abc" and first["choices"][0]["finish_reason"] == "length"
        assert first["usage"] == {"prompt_tokens": length, "completion_tokens": 3, "total_tokens": length + 3}
        second = agent.ask({"messages": [USER, first["choices"][0]["message"], REPLY]}).json()
        assert second["choices"][0]["message"]["content"] == "" and second["choices"][0]["finish_reason"] == "length"
        assert len(agent.engine.requests) == 1
        (sample,) = agent.finish()
    assert sample.truncated and sum(sample.loss_mask) == 3 and len(sample.tokens) <= length + 3
    assert sample.metadata["round_number"] == 2


def test_no_sample_is_longer_than_the_context():
    """Neither where an engine writes more than it was asked for, nor by a larger limit of `finish_session`."""
    length = len(build_tokenizer().encode(FIRST_PROMPT))
    for limit, expected in ((0, length + 3), (length + 100, length + 3), (length + 1, length + 1)):
        with talking(max_context_tokens=length + 3) as agent:
            prompt = agent.adapter.tokenizer.encode(FIRST_PROMPT)
            turn = TurnRecord(prompt, [7] * 9, "stop", [-0.5] * 9)
            said = {"role": "assistant", "content": "a"}
            agent.adapter.trajectories.record_turn("s", turn=turn, prompt_messages=[USER], response_message=said)
            (sample,) = agent.finish(max_sample_tokens=limit)
        assert len(sample.tokens) == expected and sample.truncated


def test_a_stop_text_ends_the_answer_and_stays_with_its_tokens():
    with talking("four###", f"bye{END}") as agent:
        agent.engine.matched = lambda payload: "###" if len(agent.engine.requests) == 1 else None
        first, _ = converse(agent)
        assert first.json()["choices"][0]["message"]["content"] == "four"
        assert agent.prompts()[1] == FIRST_PROMPT + f"four###{END}" + REPLIED


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_sessions_that_are_not_there_closed_or_at_their_cap():
    with talking(f"a{END}", f"b{END}", max_turns_per_sid=2) as agent:
        assert agent.ask({"messages": [USER]}, key="other").status_code == 503
        assert agent.ask({"messages": [USER]}, key="").status_code == 503
        with pytest.raises(ValueError, match="'s' has no name, or is there already"):
            agent.adapter.open_session("s")
        with pytest.raises(ValueError, match="'' has no name"):
            agent.adapter.open_session("")
        assert [reply.status_code for reply in converse(agent)] == [200, 200]
        capped = agent.ask({"messages": [USER]})
        assert capped.status_code == 429 and "has had its 2 turns" in capped.json()["error"]["message"]
        asyncio.run(agent.adapter.shutdown_session("s"))
        assert agent.ask({"messages": [USER]}).status_code == 503
        assert len(agent.finish()) == 1
        with pytest.raises(ValueError, match="there is no session 's'"):
            agent.finish()
        agent.adapter.drop_session("s")
        agent.adapter.open_session("s")
        assert agent.adapter.trajectories.counts == {"refused_503": 3, "refused_429": 1}


def test_a_dropped_session_leaves_nothing():
    with talking(f"a{END}") as agent:
        agent.ask({"messages": [USER]})
        agent.adapter.drop_session("s")
        assert not agent.adapter.trajectories.has_session("s") and agent.ask({"messages": [USER]}).status_code == 503


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "the request cannot be read (KeyError: 'messages')"),
        ({"messages": [{"content": "x"}]}, "the request cannot be read (KeyError: 'role')"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "parts of the type image_url"),
        ({"messages": [USER], "n": 2}, "n is 2"),
        ({"messages": [USER], "max_tokens": "many"}, "ValueError"),
        ([], "no JSON object"),
    ],
)  # fmt: skip
def test_bodies_that_cannot_be_read(body, message):
    with talking() as agent:
        reply = agent.ask(body)
        assert reply.status_code == 400 and message in reply.json()["error"]["message"]
        assert requests.post(agent.served.url + PATH, data="{", timeout=30).status_code == 400


def test_a_template_that_refuses_the_messages():
    template = "{{ raise_exception('roles must alternate') }}"
    with talking(template=template) as agent:
        reply = agent.ask({"messages": [USER]})
        assert reply.status_code == 400 and "roles must alternate" in reply.json()["error"]["message"]


def test_what_the_engine_refuses_is_told_and_not_recorded():
    with talking(f"a{END}") as agent:
        agent.engine.refuse = lambda payload: "too long"
        reply = agent.ask({"messages": [USER]})
        assert reply.status_code == 502 and "too long" in reply.json()["error"]["message"]
        assert agent.adapter.trajectories.turn_count("s") == 0


def test_an_adapter_that_cannot_work_is_refused_at_once():
    with pytest.raises(UserError, match="has no chat template"):
        OpenAIAdapter(build_tokenizer(None), "http://127.0.0.1:1")
    with pytest.raises(UserError, match="tool_parser 'quen'"):
        OpenAIAdapter(build_tokenizer(), "http://127.0.0.1:1", tool_parser="quen")


@pytest.mark.parametrize(
    ("defaults", "is_told"), [({}, True), ({"stop_token_ids": [266]}, False), ({"stop": END}, False)]
)
def test_a_template_that_ends_turns_where_engines_do_not_stop_is_told_of_once(tmp_path, caplog, defaults, is_told):
    tokenizer = build_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path)
    adapter = OpenAIAdapter(load_tokenizer(str(tmp_path)), "http://127.0.0.1:1")
    for sid in "ab":
        adapter.open_session(sid, defaults)
    assert caplog.text.count("give --rollout-stop-token-ids 266") == is_told


def test_health_models_and_bodies_of_many_megabytes():
    with talking(f"a{END}", model_label="policy") as agent:
        assert requests.get(f"{agent.served.url}/healthz", timeout=30).json() == {"status": "ok"}
        assert requests.get(f"{agent.served.url}/v1/models", timeout=30).json()["data"][0]["id"] == "policy"
        padded = {"messages": [USER], "padding": "x" * (5 * 2**20)}
        assert agent.ask(padded).status_code == 200
        with contextlib.suppress(requests.ConnectionError):  # the rest of a body may still be on its way
            assert agent.ask(padded | {"padding": "x" * (65 * 2**20)}).status_code == 413


# -- turns that end early ----------------------------------------------------------------------------------------------


def held(agent):
    """The engine holds what it is asked."""
    agent.engine.hold = lambda payload: True


@contextlib.contextmanager
def asked_beside(agent, replies):
    """A request by another thread, which the engine is working on."""
    known = len(agent.engine.requests)
    thread = threading.Thread(target=lambda: replies.append(agent.ask({"messages": [USER]})))
    thread.start()
    wait_until(lambda: len(agent.engine.requests) > known and agent.engine.in_flight)
    yield
    thread.join(60)


def test_g4_a_turn_whose_client_is_gone_is_aborted_and_not_recorded():
    with talking(f"a{END}") as agent:
        held(agent)
        with socket.create_connection(("127.0.0.1", agent.served.port)) as client:
            body = b'{"messages": [{"role": "user", "content": "question"}]}'
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            wait_until(lambda: agent.engine.requests)
        rid = agent.engine.requests[0]["rid"]
        wait_until(lambda: agent.engine.aborted_ids == [rid])
        wait_until(lambda: agent.adapter.trajectories.counts["refused_499"] == 1)
        assert agent.adapter.trajectories.turn_count("s") == 0 and agent.finish() == []


def test_the_end_of_a_session_waits_for_turns_that_are_under_way():
    with talking(f"a{END}") as agent:
        held(agent)
        replies = []
        with asked_beside(agent, replies):
            finishing = threading.Thread(target=lambda: replies.append(agent.finish(wait_timeout=60)))
            finishing.start()
            wait_until(lambda: not agent.adapter._sessions["s"].is_open)
            assert agent.ask({"messages": [USER]}).status_code == 503
            agent.engine.release()
            finishing.join(60)
        samples = next(reply for reply in replies if isinstance(reply, list))
        assert len(samples) == 1 and {reply.status_code for reply in replies if reply is not samples} == {200}


def test_turns_that_outlast_the_wait_are_ended():
    with talking(f"a{END}") as agent:
        held(agent)

        def ask_in_vain():
            with contextlib.suppress(requests.ConnectionError):
                agent.ask({"messages": [USER]})

        thread = threading.Thread(target=ask_in_vain)
        thread.start()
        wait_until(lambda: agent.engine.requests)
        assert agent.finish(wait_timeout=0.05) == []
        thread.join(60)
        assert not thread.is_alive()
        assert wait_until(lambda: agent.engine.aborted_ids) == [agent.engine.requests[0]["rid"]]
        assert not agent.adapter.trajectories.has_session("s")


def test_a_turn_that_is_aborted_closes_its_session():
    """By whoever winds the rollout call down, who knows the request by its id."""
    noted = set()
    with talking(f"a{END}", f"b{END}") as agent:
        with noting_request_ids(noted):
            agent.adapter.open_session("noted")
        agent.ask({"messages": [USER]}, key="noted")
        held(agent)
        replies = []
        thread = threading.Thread(target=lambda: replies.append(agent.ask({"messages": [USER]}, key="noted")))
        thread.start()
        wait_until(lambda: noted and agent.engine.in_flight)
        assert noted == {agent.engine.requests[1]["rid"]}
        requests.post(f"{agent.engine.url}/abort_request", json={"rid": noted.copy().pop()}, timeout=30)
        thread.join(60)
        assert replies[0].status_code == 503 and noted == set()
        assert agent.ask({"messages": [USER]}, key="noted").status_code == 503
        (sample,) = agent.finish("noted", reward=1.0)
        assert sample.status is Sample.Status.ABORTED and sample.reward is None and sample.response_length == 2


def test_a_session_whose_first_turn_is_aborted_gives_an_aborted_sample():
    with talking(f"a{END}") as agent:
        held(agent)
        replies = []
        with asked_beside(agent, replies):
            requests.post(f"{agent.engine.url}/abort_request", json={"abort_all": True}, timeout=30)
        (sample,) = agent.finish()
    assert sample.status is Sample.Status.ABORTED and (sample.index, sample.tokens) == (5, [])


class OfAnotherProtocol(BaseAdapter):
    """The least that one has."""

    def _register_routes(self, app):
        app.router.add_post("/ask", self.guarded(self.handle_turn))

    def _session_id(self, request, body):
        return body["who"]

    _translate = _build_reply = _respond = None


def test_an_endpoint_of_another_protocol_refuses_in_plain_words_and_lacks_nothing():
    adapter = OfAnotherProtocol(build_tokenizer(), "http://127.0.0.1:1")
    served = run_app_in_thread(adapter.app, thread_name="another-protocol")
    try:
        refused = requests.post(f"{served.url}/ask", json={"who": "nobody"}, timeout=60)
    finally:
        served.stop()
    assert refused.status_code == 503 and refused.json()["error"]["code"] == 503
    with pytest.raises(TypeError, match="abstract method"):
        BaseAdapter(build_tokenizer(), "http://127.0.0.1:1")
