"""The endpoint for OpenAI's clients: chat completions, streamed or whole
(https://platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from slime.agent.adapters.asking import Chat, Refusal
from slime.agent.adapters.base import BaseAdapter
from slime.agent.adapters.parsing import ModelOutput
from slime.agent.adapters.wire import bearer_token, text_of, write_events, write_json
from slime.agent.trajectory import Message, TurnRecord

# Names of the limit of an answer; the first one that a request has counts.
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class OpenAIAdapter(BaseAdapter):
    """`POST /v1/chat/completions`. A client's key names its session, or else `metadata.session_id` or `user` of the body."""

    def _register_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.guarded(self.handle_turn))

    def _session_id(self, request: web.Request, body: dict[str, Any]) -> str:
        metadata = body.get("metadata")
        named = metadata.get("session_id") if isinstance(metadata, dict) else None
        return bearer_token(request) or str(named or body.get("user") or "")

    def _translate(self, body: dict[str, Any]) -> Chat:
        if body.get("n") not in (None, 1):
            raise Refusal(400, f"n is {body['n']}; a turn has one answer")
        stop = body.get("stop") or []
        return Chat(
            messages=[_translated(message) for message in body["messages"]],
            tools=self.offered(body.get("tools") or [], lambda tool: tool.get("type") == "function"),
            max_new_tokens=next((int(body[name]) for name in _LIMITS if body.get(name) is not None), None),
            stop=[stop] if isinstance(stop, str) else list(stop),
        )

    def _build_reply(self, body: dict[str, Any], output: ModelOutput, turn: TurnRecord) -> dict[str, Any]:
        # With calls and no text the content is None, because clients concatenate the texts that they get.
        content = output.text if output.text or not output.tool_uses else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if output.reasoning:
            message["reasoning_content"] = output.reasoning
        if output.tool_uses:
            message["tool_calls"] = [
                {
                    "id": use.id or f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": use.name, "arguments": json.dumps(use.arguments)},
                }
                for use in output.tool_uses
            ]
        finish_reason = "tool_calls" if output.tool_uses else "length" if turn.finish_reason == "length" else "stop"
        prompt, answer = len(turn.prompt_ids), len(turn.output_ids)
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model") or "",
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer},
        }

    async def _respond(self, request: web.Request, body: dict[str, Any], reply: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return await write_json(request, reply)
        return await write_events(request, _events(reply))

    def _error(self, status: int, message: str) -> dict[str, Any]:
        kinds = {400: "invalid_request_error", 429: "rate_limit_exceeded"}
        return {"error": {"message": message, "type": kinds.get(status, "server_error"), "param": None, "code": status}}


def _translated(message: dict[str, Any]) -> Message:
    """A message in the form of chat templates."""
    role = "system" if message["role"] == "developer" else message["role"]
    translated: Message = {"role": role, "content": text_of(message.get("content"))}
    kept = {name: message[name] for name in ("reasoning_content", "tool_call_id", "name") if message.get(name)}
    if message.get("tool_calls"):
        kept["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _as_object(call["function"].get("arguments"))}}
            for call in message["tool_calls"]
        ]
    return translated | kept


def _as_object(arguments: Any) -> Any:
    """The arguments of a call as an object; they stay as they are if they are no JSON object."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _events(reply: dict[str, Any]) -> Iterator[tuple[str | None, Any]]:
    """The chunks of a streamed answer: its role, reasoning, content, calls, and how it ended with its usage."""
    (choice,) = reply["choices"]
    message = choice["message"]
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", []))]
    deltas = [
        {"role": "assistant", "content": ""},
        *[{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)],
        *[{"tool_calls": [call]} for call in calls],
    ]
    common = {name: reply[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for delta in deltas:
        yield None, common | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    ended = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    yield None, common | {"choices": [ended], "usage": reply["usage"]}
    yield None, "[DONE]"
