"""Messages of Anthropic's protocol, as raw requests."""

import json

import pytest

from slime.agent.adapters import AnthropicAdapter
from tests.support.processes.agent_endpoint import END, endpoint, events_of
from tests.support.processes.waiting import wait_until

PATH = "/v1/messages"
USER = {"role": "user", "content": "question"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [
    {"name": "add", "description": "sums", "input_schema": SCHEMA},
    {"type": "web_search_20250305", "name": "search"},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
REMINDER = "<system-reminder>\nbe brief\n</system-reminder>"


def talking(*says, **options):
    return endpoint(AnthropicAdapter, PATH, says, **options)


def translated(*messages, **body):
    with talking() as agent:
        return agent.adapter._translate(agent.adapter._preprocess_body({"messages": list(messages), **body}))


def text(content):
    return {"type": "text", "text": content}


def test_messages_become_those_of_a_template(caplog):
    assistant = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        text("so"),
        {"type": "tool_use", "id": "x", "name": "add", "input": {"a": 1}},
    ]
    result = {"type": "tool_result", "tool_use_id": "x", "content": [text("2")]}
    chat = translated(
        USER, {"role": "assistant", "content": assistant}, {"role": "user", "content": [result, text("and now?")]},
        system=[text("be"), text("brief")], tools=TOOLS, max_tokens=9, stop_sequences=["###"],
    )  # fmt: skip
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert chat.messages == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
        {"role": "user", "content": "and now?"},
    ]
    function = {"name": "add", "description": "sums", "parameters": SCHEMA}
    assert chat.tools == [{"type": "function", "function": function}]
    assert caplog.text.count("tools of the type web_search_20250305 are left out") == 1
    assert (chat.max_new_tokens, chat.stop) == (9, ["###"])


@pytest.mark.parametrize(
    ("order", "contents"),
    [
        ("us", ["question\n" + REMINDER]),
        ("su", [REMINDER + "\nquestion"]),
        ("usu", ["question", REMINDER + "\nquestion"]),
        ("usau", ["question\n" + REMINDER, "said", "question"]),
        ("sa", [REMINDER, "said"]),
        ("asu", ["said", REMINDER + "\nquestion"]),
        ("as", ["said", REMINDER]),
    ],
)
def test_system_messages_within_the_list_are_reminders(order, contents):
    kinds = {
        "u": USER,
        "s": {"role": "system", "content": "be brief"},
        "a": {"role": "assistant", "content": "said"},
    }
    messages = translated(*[kinds[letter] for letter in order]).messages
    assert [message["content"] for message in messages] == contents


def test_the_line_by_which_clients_are_billed_is_no_part_of_the_prompt():
    billed = [text("x-anthropic-billing-header: cch=1;"), text("be brief")]
    assert translated(USER, system=billed).messages[0] == {"role": "system", "content": "be brief"}


def test_a_session_is_named_by_either_key():
    with talking(f"a{END}", f"b{END}") as agent:
        assert agent.ask({"messages": [USER]}).status_code == 200
        assert agent.ask({"messages": [USER]}, key="", **{"x-api-key": "s"}).status_code == 200
        refused = agent.ask({"messages": [USER]}, key="t")
        assert refused.status_code == 503 and refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "overloaded_error"


def test_a_whole_answer_with_a_call():
    with talking(f"<think>hm</think>so {CALL}{END}", f"It is 2{END}", "cut off") as agent:
        reply = agent.ask({"messages": [USER], "tools": TOOLS, "model": "m", "max_tokens": 500}).json()
        thinking, said, use = reply["content"]
        assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""} and said == text("so")
        assert use | {"id": ""} == {"type": "tool_use", "id": "", "name": "add", "input": {"a": 1}}
        assert (reply["type"], reply["role"], reply["model"], reply["stop_reason"]) == (
            "message",
            "assistant",
            "m",
            "tool_use",
        )
        assert reply["usage"]["input_tokens"] > reply["usage"]["output_tokens"] > 0
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "2"}
        messages = [USER, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]
        ended = agent.ask({"messages": messages, "tools": TOOLS}).json()
        assert (ended["content"], ended["stop_reason"]) == ([text("It is 2")], "end_turn")
        (sample,) = agent.finish()
        assert sample.metadata["round_number"] == 2 and f"so {CALL}{END}" in sample.response
        agent.adapter.open_session("s")
        assert agent.ask({"messages": [USER], "max_tokens": 3}).json()["stop_reason"] == "max_tokens"


def test_a_streamed_answer():
    with talking(f"<think>hm</think>so {CALL}{END}") as agent:
        reply = agent.ask({"messages": [USER], "tools": TOOLS, "stream": True})
        events = events_of(reply)
        names = [line.removeprefix("event: ") for line in reply.text.splitlines() if line.startswith("event: ")]
        wait_until(lambda: agent.adapter.trajectories.turn_count("s") == 1)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert (
        names == ["message_start", *block * 3, "message_delta", "message_stop"] == [event["type"] for event in events]
    )
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["output_tokens"] == 0
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in started] == ["thinking", "text", "tool_use"]
    assert (started[0]["thinking"], started[1]["text"], started[2]["input"], started[2]["name"]) == ("", "", {}, "add")
    first, second, third = (event["delta"] for event in events if event["type"] == "content_block_delta")
    assert first == {"type": "thinking_delta", "thinking": "hm"} and second == {"type": "text_delta", "text": "so"}
    assert third["type"] == "input_json_delta" and json.loads(third["partial_json"]) == {"a": 1}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 0


def test_tokens_are_counted_as_a_turn_would_have_them():
    body = {"messages": [USER], "tools": TOOLS, "system": "be brief"}
    with talking(f"a{END}") as agent:
        counted = agent.ask(body, path="/v1/messages/count_tokens").json()["input_tokens"]
        assert agent.ask(body, key="", path="/v1/messages/count_tokens").json()["input_tokens"] == counted
        assert agent.adapter.trajectories.turn_count("s") == 0
        assert agent.ask(body).json()["usage"]["input_tokens"] == counted > 10
        bad = agent.ask({}, path="/v1/messages/count_tokens")
        assert bad.status_code == 400 and bad.json()["error"]["type"] == "invalid_request_error"
