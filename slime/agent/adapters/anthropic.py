"""The endpoint for Anthropic's clients: messages, streamed or whole (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from slime.agent.adapters.asking import Chat
from slime.agent.adapters.base import BaseAdapter
from slime.agent.adapters.parsing import ModelOutput
from slime.agent.adapters.wire import bearer_token, text_of, write_events, write_json
from slime.agent.trajectory import Message, TurnRecord

_ERRORS = {400: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}
# A line at the start of a system prompt, by which a client is billed. It differs in every request, so with it no prompt would
# begin with the previous one.
_BILLING = "x-anthropic-billing-header"


class AnthropicAdapter(BaseAdapter):
    """`POST /v1/messages` and `/v1/messages/count_tokens`. A client's key, a bearer token or `x-api-key`, names its session."""

    def _register_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/messages", self.guarded(self.handle_turn))
        app.router.add_post("/v1/messages/count_tokens", self.guarded(self.count_tokens))

    def _session_id(self, request: web.Request, body: dict[str, Any]) -> str:
        return bearer_token(request) or request.headers.get("x-api-key", "")

    def _preprocess_body(self, body: dict[str, Any]) -> dict[str, Any]:
        system = body.get("system")
        if not isinstance(system, list):
            return body
        return body | {"system": [part for part in system if not part.get("text", "").startswith(_BILLING)]}

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        """The length of the prompt that a request for a turn would have."""
        body = await self.body_of(request)
        _, prompt_ids, _ = await self.prompt_of(self._session_id(request, body), body)
        return web.json_response({"input_tokens": len(prompt_ids)})

    def _translate(self, body: dict[str, Any]) -> Chat:
        system = text_of(body.get("system"))
        messages = [{"role": "system", "content": system}] if system else []
        for message in _without_system_messages(body["messages"]):
            messages += _translated(message["role"], message["content"])
        tools = self.offered(body.get("tools") or [], lambda tool: "input_schema" in tool)
        return Chat(
            messages=messages,
            tools=[
                {
                    "type": "function",
                    "function": {
                        "name": tool["name"],
                        "description": tool.get("description") or "",
                        "parameters": tool["input_schema"],
                    },
                }
                for tool in tools
            ],
            max_new_tokens=None if body.get("max_tokens") is None else int(body["max_tokens"]),
            stop=list(body.get("stop_sequences") or []),
        )

    def _build_reply(self, body: dict[str, Any], output: ModelOutput, turn: TurnRecord) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if output.reasoning:
            content.append({"type": "thinking", "thinking": output.reasoning, "signature": ""})
        if output.text or not output.tool_uses:
            content.append({"type": "text", "text": output.text})
        for use in output.tool_uses:
            call_id = use.id or f"toolu_{uuid.uuid4().hex[:24]}"
            content.append({"type": "tool_use", "id": call_id, "name": use.name, "input": use.arguments})
        stop_reason = "max_tokens" if turn.finish_reason == "length" else "end_turn"
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": body.get("model") or "",
            "content": content,
            "stop_reason": "tool_use" if output.tool_uses else stop_reason,
            "stop_sequence": None,
            "usage": {"input_tokens": len(turn.prompt_ids), "output_tokens": len(turn.output_ids)},
        }

    async def _respond(self, request: web.Request, body: dict[str, Any], reply: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return await write_json(request, reply)
        return await write_events(request, ((event["type"], event) for event in _events(reply)))

    def _error(self, status: int, message: str) -> dict[str, Any]:
        return {"type": "error", "error": {"type": _ERRORS.get(status, "api_error"), "message": message}}


def _without_system_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without those of the system, which become reminders in the next user message, or else in the last one."""
    kept: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "system":
            text = f"<system-reminder>\n{text_of(message['content'])}\n</system-reminder>"
            waiting.append({"type": "text", "text": text})
        elif message["role"] == "user":
            kept.append({"role": "user", "content": waiting + _blocks(message["content"])})
            waiting = []
        else:
            kept += _put_before(kept, waiting)
            kept.append(message)
            waiting = []
    return kept + _put_before(kept, waiting)


def _put_before(kept: list[dict[str, Any]], reminders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put reminders at the end of the last message if it is the user's. Otherwise return a user message with them, which the
    caller adds."""
    if reminders and kept and kept[-1]["role"] == "user":
        kept[-1] = {"role": "user", "content": _blocks(kept[-1]["content"]) + reminders}
        return []
    return [{"role": "user", "content": reminders}] if reminders else []


def _blocks(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])


def _translated(role: str, content: Any) -> list[Message]:
    """A message in the form of chat templates, in which results of tools are separate messages."""
    blocks = _blocks(content)
    if role == "assistant":
        message: Message = {"role": role, "content": text_of([b for b in blocks if b["type"] == "text"])}
        thoughts = "".join(block.get("thinking", "") for block in blocks if block["type"] == "thinking")
        calls = [
            {
                "id": block["id"],
                "type": "function",
                "function": {"name": block["name"], "arguments": block.get("input") or {}},
            }
            for block in blocks
            if block["type"] == "tool_use"
        ]
        return [
            message | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})
        ]
    messages: list[Message] = []
    texts: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] != "tool_result":
            texts.append(block)
            continue
        if texts:
            messages.append({"role": role, "content": text_of(texts)})
            texts = []
        result = {
            "role": "tool",
            "content": text_of(block.get("content")),
            "tool_call_id": block.get("tool_use_id", ""),
        }
        messages.append(result)
    return [*messages, {"role": role, "content": text_of(texts)}] if texts or not messages else messages


def _events(reply: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer."""
    usage = reply["usage"]
    begun = {"content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": reply | begun}
    for index, block in enumerate(reply["content"]):
        if block["type"] == "tool_use":
            empty = block | {"input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        else:
            empty = block | {block["type"]: ""}
            deltas = [{"type": f"{block['type']}_delta", block["type"]: block[block["type"]]}]
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": reply["stop_reason"], "stop_sequence": reply["stop_sequence"]}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}
