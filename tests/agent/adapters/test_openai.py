"""Chat completions, as raw requests and by OpenAI's own client."""

import json

import pytest

from slime.agent.adapters import OpenAIAdapter, parsing
from slime.agent.adapters.openai import _events
from tests.support.processes.agent_endpoint import END, endpoint, events_of
from tests.support.processes.waiting import wait_until

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "question"}
ADD = {"name": "add", "description": "sums", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": ADD}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def talking(*says, **options):
    return endpoint(OpenAIAdapter, PATH, says, **options)


def translated(**body):
    with talking() as agent:
        return agent.adapter._translate(body)


def test_calls_of_a_model_whose_format_has_ids_get_such(monkeypatch):
    """They count the calls of a conversation, over all tools."""
    monkeypatch.setattr(parsing, "_parsers_of_sglang", lambda: None)
    with talking(f"{CALL}{CALL}{END}", f"{CALL}{END}", f"{CALL}{END}", tool_parser="kimi_k2") as agent:
        messages, ids = [USER], []
        for _ in range(2):
            said = agent.ask({"messages": messages, "tools": TOOLS}).json()["choices"][0]["message"]
            ids.append([call["id"] for call in said["tool_calls"]])
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in said["tool_calls"]]
            messages = [*messages, said, *results]
        assert ids == [["functions.add:0", "functions.add:1"], ["functions.add:2"]]


def test_tools_that_cannot_be_offered_are_told_once_for_each_type(caplog):
    others = [{"type": "custom", "name": "patch"}, {"type": "custom", "name": "other"}, {"type": "web_search"}]
    with talking() as agent:
        for _ in range(2):
            assert agent.adapter._translate({"messages": [USER], "tools": [*others, *TOOLS]}).tools == TOOLS
    assert [caplog.text.count(f"tools of the type {kind} are left out") for kind in ("custom", "web_search")] == [1, 1]


def test_messages_become_those_of_a_template():
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "1+1"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "2"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "y", "function": {"name": "add", "arguments": "{"}}],
        },
    ]
    assert translated(messages=messages).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1\n?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "y", "function": {"name": "add", "arguments": "{"}}],
        },
    ]


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ({}, None),
        ({"max_output_tokens": 3}, 3),
        ({"max_tokens": 2, "max_output_tokens": 3}, 2),
        ({"max_completion_tokens": 1, "max_tokens": 2}, 1),
        ({"max_completion_tokens": None, "max_tokens": 0}, 0),
    ],
)
def test_limits_have_several_names(limits, limit):
    chat = translated(messages=[USER], tools=[*TOOLS, {"type": "web_search"}], stop="###", **limits)
    assert (chat.max_new_tokens, chat.stop, chat.tools) == (limit, ["###"], TOOLS)


def test_a_session_is_named_by_the_key_else_by_the_body():
    with talking(*[f"a{END}"] * 4) as agent:
        for named in ({"metadata": {"session_id": "s"}}, {"user": "s"}, {"metadata": {"session_id": "s"}, "user": "t"}):
            assert agent.ask({"messages": [USER], **named}, key="").status_code == 200
        assert agent.ask({"messages": [USER], "user": "t"}).status_code == 200
        assert agent.ask({"messages": [USER], "user": "s"}, key="t").status_code == 503


def test_a_whole_answer_with_a_call():
    with talking(f"<think>hm</think>so {CALL}{END}") as agent:
        reply = agent.ask({"messages": [USER], "tools": TOOLS, "model": "m"}).json()
    (choice,) = reply["choices"]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1}
    assert (choice["finish_reason"], reply["object"], reply["model"]) == ("tool_calls", "chat.completion", "m")
    usage = reply["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > usage["completion_tokens"] > 0


def test_a_streamed_answer():
    with talking(f"<think>hm</think>so {CALL}{END}") as agent:
        reply = agent.ask({"messages": [USER], "tools": TOOLS, "stream": True})
        assert reply.headers["Content-Type"] == "text/event-stream"
        *chunks, done = events_of(reply)
        wait_until(lambda: agent.adapter.trajectories.turn_count("s") == 1)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert done == "[DONE]" and {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [set(choice["delta"]) for choice in choices] == [
        {"role", "content"}, {"reasoning_content"}, {"content"}, {"tool_calls"}, set(),
    ]  # fmt: skip
    assert choices[3]["delta"]["tool_calls"][0]["index"] == 0
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["tool_calls"]
    assert chunks[-1]["usage"]["completion_tokens"] > 0 and len({chunk["id"] for chunk in chunks}) == 1


def test_an_answer_without_text_has_no_chunk_for_it():
    message = {"role": "assistant", "content": ""}
    reply = {
        "id": "1",
        "created": 1,
        "model": "",
        "usage": {},
        "choices": [{"message": message, "finish_reason": "stop"}],
    }
    assert [data["choices"][0]["delta"] for _, data in [*_events(reply)][:-1]] == [
        {"role": "assistant", "content": ""},
        {},
    ]


def test_openais_own_client_streams_and_does_not():
    # Its import takes a second, which nobody else needs.
    import openai

    with talking(f"so {CALL}{END}", f"It is 2{END}") as agent:
        with openai.OpenAI(base_url=f"{agent.served.url}/v1", api_key="s", max_retries=0, timeout=60) as client:
            first = client.chat.completions.create(model="m", messages=[USER], tools=TOOLS)
            said = first.choices[0].message
            assert (said.content, said.tool_calls[0].function.name) == ("so", "add")
            result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "2"}
            messages = [USER, said.model_dump(exclude_none=True), result]
            chunks = [*client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True)]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "It is 2"
            assert chunks[-1].choices[0].finish_reason == "stop" and chunks[-1].usage.completion_tokens > 0
            with pytest.raises(openai.InternalServerError, match="no such session"):
                client.with_options(api_key="t").chat.completions.create(model="m", messages=[USER])
        (sample,) = agent.finish()
    assert sample.metadata["round_number"] == 2 and sample.metadata["use_tool"]
    assert sample.response.endswith(f"It is 2{END}") and sample.response.startswith(f"so {CALL}{END}")
