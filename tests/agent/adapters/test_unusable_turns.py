"""What goes wrong around a turn: whose fault it is said to be, and that neither a session nor a run ends by it."""

import asyncio
import contextlib
import json
import logging
import threading

import pytest
import requests

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter, asking
from slime.utils import http_utils
from slime.utils.http_utils import HttpSettings
from tests.support.processes.agent_endpoint import BASE, END, endpoint
from tests.support.processes.waiting import until, wait_until

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "question"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def talking(*says, **options):
    return endpoint(OpenAIAdapter, PATH, says, **options)


def messages_of_anthropic(*says, **options):
    return endpoint(AnthropicAdapter, "/v1/messages", says, **options)


def answering(agent, change):
    """The engine's answers, as `change` leaves them."""
    output = agent.engine._output

    def changed(payload, ids, reason):
        answer = output(payload, ids, reason)
        change(answer)
        return answer

    agent.engine._output = changed


def of_meta_info(**values):
    return lambda answer: answer["meta_info"].update(values)


# -- failures of ours --------------------------------------------------------------------------------------------------


def test_a_session_tells_of_a_failure_of_ours_until_a_turn_succeeds():
    with talking(f"a{END}", f"b{END}") as agent:
        assert agent.adapter.failure_of("s") is None and agent.adapter.failure_of("unknown") is None
        agent.engine.refuse = lambda payload: "out of memory"
        assert agent.ask({"messages": [USER]}).status_code == 502
        assert "out of memory" in agent.adapter.failure_of("s")
        # What an agent asks for wrongly changes nothing of that.
        assert agent.ask({}).status_code == 400
        assert "out of memory" in agent.adapter.failure_of("s")
        agent.engine.refuse = lambda payload: None
        assert agent.ask({"messages": [USER]}).status_code == 200
        wait_until(lambda: agent.adapter.failure_of("s") is None)
        assert agent.ask({"messages": "no list"}).status_code == 400 and agent.adapter.failure_of("s") is None
        assert len(agent.finish()) == 1


def test_a_turn_that_takes_too_long_is_given_up_and_is_a_failure_of_ours(monkeypatch):
    monkeypatch.setattr(asking, "READ_TIMEOUT_S", 0.0)
    monkeypatch.setattr(asking, "_LOOK_S", 0.01)
    with talking(f"a{END}") as agent:
        agent.engine.hold = lambda payload: True
        reply = agent.ask({"messages": [USER]})
        assert reply.status_code == 504 and "did not answer within 0 s" in reply.json()["error"]["message"]
        assert "did not answer within 0 s" in agent.adapter.failure_of("s")
        assert agent.adapter.trajectories.counts == {"refused_504": 1}
        # The request may not have reached the engine; where it did, it was let go.
        wait_until(lambda: agent.engine.aborted_ids == [request["rid"] for request in agent.engine.requests])
        assert agent.finish() == [] and agent.adapter.failure_of("s") is None


def test_an_error_of_our_own_is_a_failure_of_ours():
    with talking(f"a{END}") as agent:
        agent.adapter._build_reply = lambda body, output, turn: {}["id"]
        assert agent.ask({"messages": [USER]}).status_code == 500
        assert agent.adapter.failure_of("s") == "KeyError: 'id'"
        agent.adapter.drop_session("s")
        assert agent.adapter.failure_of("s") is None


# -- what engines answer -----------------------------------------------------------------------------------------------

UNUSABLE = {
    "no log-prob": of_meta_info(output_token_logprobs=[[-0.5, 7, None], [None, 8, None]]),
    "no number": of_meta_info(output_token_logprobs=[[float("nan"), 7, None]]),
    "infinite": of_meta_info(output_token_logprobs=[[float("-inf"), 7, None]]),
    "an id that is none": of_meta_info(output_token_logprobs=[[-0.5, "x", None]]),
    "an id beyond all": of_meta_info(output_token_logprobs=[[-0.5, 2**70, None]]),
    "entries without ids": of_meta_info(output_token_logprobs=[["x", 5]]),
    "no entries": of_meta_info(output_token_logprobs=[1, 2]),
    "an end as text": of_meta_info(finish_reason="stop"),
    "no ids": lambda answer: answer["meta_info"].pop("output_token_logprobs"),
    "fewer ids than tokens": lambda answer: answer["meta_info"]["output_token_logprobs"].pop(),
    "more ids than tokens": lambda answer: answer["meta_info"]["output_token_logprobs"].append([-0.5, 7, None]),
    "too few of kept sets": of_meta_info(output_token_sampling_logprobs=[-0.25]),
    "no meta_info": lambda answer: answer.pop("meta_info"),
}


@pytest.mark.parametrize("change", UNUSABLE.values(), ids=UNUSABLE)
def test_an_answer_that_no_turn_can_be_made_of_is_told_and_not_recorded(change):
    with talking(f"ab{END}") as agent:
        answering(agent, change)
        reply = agent.ask({"messages": [USER]})
        assert reply.status_code == 502 and "engine" in reply.json()["error"]["message"], reply.text
        assert agent.adapter.failure_of("s") in reply.json()["error"]["message"]
        assert agent.adapter.trajectories.turn_count("s") == 0 and agent.finish() == []


def test_log_probs_beside_kept_sets_are_those_of_the_turn():
    with talking(f"a{END}") as agent:
        answering(agent, of_meta_info(output_token_sampling_logprobs=[-0.25, -0.125]))
        assert agent.ask({"messages": [USER]}).status_code == 200
        (sample,) = agent.finish()
    assert sample.rollout_log_probs == [-0.25, -0.125]


# -- what agents ask for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speaks", "body"),
    [
        (messages_of_anthropic, {"messages": [USER], "system": ["abc"]}),
        (messages_of_anthropic, {"messages": [USER], "system": [{"text": None}]}),
        (messages_of_anthropic, {"messages": [USER], "tools": [{"name": None, "input_schema": {}}]}),
        (messages_of_anthropic, {"messages": [USER], "tools": [{"name": "f", "input_schema": [1]}]}),
        (talking, {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}),
        (talking, {"messages": [USER], "tools": [{"type": "function", "function": None}]}),
        (talking, {"messages": [USER], "tools": [{"type": "function"}]}),
        (talking, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_in_the_protocol(speaks, body):
    with speaks(f"a{END}") as agent:
        reply = agent.ask(body)
        assert reply.status_code == 400 and "the request cannot be read" in reply.json()["error"]["message"], reply.text


def test_a_body_that_is_nested_beyond_reading():
    with talking() as agent:
        headers = {"Authorization": "Bearer s"}
        reply = requests.post(agent.served.url + PATH, data="[" * 100_000, headers=headers, timeout=30)
        assert reply.status_code == 400 and "no JSON" in reply.json()["error"]["message"]


def test_arguments_that_are_nested_beyond_reading_stay_a_text():
    call = {"id": "x", "function": {"name": "f", "arguments": "[" * 100_000}}
    with talking(f"a{END}") as agent:
        messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
        assert agent.ask({"messages": messages, "max_tokens": 5}).status_code == 200


def test_half_a_character_within_a_text_is_replaced():
    """Clients cut texts by units of UTF-16, two of which are one character outside the first plane."""
    with talking(f"a{END}", f"b{END}") as agent:
        cut = {"role": "user", "content": "cut \ud83d"}
        first = agent.ask({"messages": [cut]})
        assert first.status_code == 200, first.text
        said = first.json()["choices"][0]["message"]
        assert agent.ask({"messages": [cut, said, USER]}).status_code == 200
        encode = agent.adapter.tokenizer.encode
        prompts = [request["input_ids"] for request in agent.engine.requests]
        assert prompts[0] == encode("<|im_start|>user\ncut \ufffd<|im_end|>\n<|im_start|>assistant\n")
        assert prompts[1][: len(prompts[0])] == prompts[0] and len(agent.finish()) == 1


@pytest.mark.parametrize("speaks", [talking, messages_of_anthropic])
def test_half_a_character_within_a_call_is_streamed(speaks):
    call = '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d", "b": "\u00e9"}}</tool_call>'
    tools = [TOOL] if speaks is talking else [{"name": "f", "input_schema": {"type": "object"}}]
    with speaks(call + END) as agent:
        reply = agent.ask({"messages": [USER], "tools": tools, "stream": True})
        assert reply.status_code == 200 and "ud83d" in reply.text
        wait_until(lambda: agent.adapter.trajectories.turn_count("s") == 1)
    data = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    found = [one for one in map(json.loads, data) if "ud83d" in json.dumps(one)]
    assert len(found) == 1
    if speaks is talking:
        arguments = found[0]["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"]
    else:
        arguments = found[0]["delta"]["partial_json"]
    # A client can send it again, whose encoder takes no half characters.
    assert arguments.encode() and json.loads(arguments) == {"a": "\ud83d", "b": "\u00e9"}


# -- sessions that end meanwhile ---------------------------------------------------------------------------------------


def test_a_session_is_finished_once():
    async def twice(adapter):
        return await asyncio.gather(
            *[adapter.finish_session("s", base_sample=BASE) for _ in range(2)], return_exceptions=True
        )

    with talking(f"a{END}") as agent:
        agent.engine.hold = lambda payload: True
        thread = threading.Thread(target=lambda: agent.ask({"messages": [USER]}))
        thread.start()
        wait_until(lambda: agent.engine.in_flight)

        async def finished():
            both = asyncio.create_task(twice(agent.adapter))
            await until(lambda: not agent.adapter._sessions["s"].is_open)
            agent.engine.release()
            return await both

        found = asyncio.run(finished())
        thread.join(60)
    (samples,) = [one for one in found if isinstance(one, list)]
    (error,) = [one for one in found if one is not samples]
    assert len(samples) == 1 and isinstance(error, ValueError) and "there is no session 's'" in str(error)


def test_a_turn_of_a_session_that_is_dropped_meanwhile_is_ended_and_leaves_nothing():
    with talking(f"a{END}") as agent:
        agent.engine.hold = lambda payload: True

        def ask_in_vain():
            with contextlib.suppress(requests.ConnectionError):
                agent.ask({"messages": [USER]})

        thread = threading.Thread(target=ask_in_vain)
        thread.start()
        wait_until(lambda: agent.engine.in_flight)
        agent.adapter.drop_session("s")
        assert wait_until(lambda: agent.engine.aborted_ids) == [agent.engine.requests[0]["rid"]]
        thread.join(60)
        assert not thread.is_alive() and not agent.adapter.trajectories.has_session("s")
        # Another of that name has none of its turns.
        agent.adapter.open_session("s")
        assert agent.finish() == []


def test_the_first_refusal_of_each_kind_is_told(caplog):
    reasons = {
        "502: the turn was not answered by an engine": {"messages": [USER]},
        "400: n is 2": {"messages": [USER], "n": 2},
        "400: the request cannot be read": {},
    }
    with caplog.at_level(logging.WARNING), talking() as agent:
        for number in range(2):
            # The engine's own words are others each time.
            agent.engine.refuse = lambda payload, number=number: f"request {number} is too long"
            for body in reasons.values():
                agent.ask(body)
        assert agent.adapter.trajectories.counts == {"refused_502": 2, "refused_400": 4}
    assert [caplog.text.count(f"a request of an agent was refused with status {one}") for one in reasons] == [1, 1, 1]


def test_a_turn_whose_session_ends_while_its_reply_is_written_is_not_recorded(caplog):
    with talking(f"a{END}") as agent:
        respond = agent.adapter._respond

        async def dropped_meanwhile(request, body, reply):
            response = await respond(request, body, reply)
            agent.adapter._sessions.pop("s")
            return response

        agent.adapter._respond = dropped_meanwhile
        assert agent.ask({"messages": [USER]}).status_code == 200
        wait_until(lambda: agent.adapter.trajectories.counts == {"not_delivered": 1}, 20)
        wait_until(lambda: "the turn is lost" in caplog.text)
        assert not agent.adapter.trajectories.has_session("s")


def test_a_turn_whose_client_goes_while_its_reply_is_written_is_not_recorded():
    with talking(f"a{END}") as agent:
        respond = agent.adapter._respond

        async def gone_meanwhile(request, body, reply):
            response = await respond(request, body, reply)
            request.transport.abort()
            return response

        agent.adapter._respond = gone_meanwhile
        with contextlib.suppress(requests.ConnectionError):
            agent.ask({"messages": [USER]})
        wait_until(lambda: agent.adapter.trajectories.counts == {"not_delivered": 1}, 20)
        assert agent.finish() == []


# -- whom the key of the engines is sent to ----------------------------------------------------------------------------


@pytest.mark.parametrize("trusted", [True, False])
def test_only_what_a_router_of_the_run_lists_gets_the_key(trusted, monkeypatch):
    monkeypatch.setattr(http_utils, "_engine_origins", set())
    monkeypatch.setattr(asking, "READ_TIMEOUT_S", 0.0)
    monkeypatch.setattr(asking, "_LOOK_S", 0.01)
    with talking(f"a{END}") as agent:
        origins = frozenset({agent.engine.url} if trusted else ())
        monkeypatch.setattr(http_utils, "_settings", HttpSettings(api_key="sesame", trusted_origins=origins))
        agent.engine.hold = lambda payload: True
        agent.engine.other_workers = ["http://127.0.0.1:9"]
        assert agent.ask({"messages": [USER]}).status_code == 504
        listed = {agent.engine.url, "http://127.0.0.1:9"}
        assert http_utils._engine_origins == (listed if trusted else set())
