"""What the protocols share: reading texts and keys of requests, and writing answers. An answer is written to its end before its
turn counts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from slime.agent.adapters.asking import Refusal


def text_of(content: Any) -> str:
    """The text of a message's content, which is a string, a list of text parts (joined by newlines), or None. Raises Refusal if
    a part is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    other = sorted({part["type"] for part in content if "text" not in part})
    if other:
        raise Refusal(400, f"a message has parts of the type {', '.join(other)}; this endpoint takes text")
    return "\n".join(part["text"] for part in content)


def bearer_token(request: web.Request) -> str:
    """The token of the header `Authorization`, "" for none."""
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


async def write_json(request: web.Request, reply: dict[str, Any]) -> web.StreamResponse:
    """Write a whole reply."""
    response = web.json_response(reply)
    await response.prepare(request)
    await response.write_eof()
    return response


async def write_events(request: web.Request, events: Iterable[tuple[str | None, Any]]) -> web.StreamResponse:
    """Write server-sent events, each (its name, if it has one; a text, or an object that becomes JSON)."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for name, data in events:
        # ASCII, because a lone surrogate, which a model may write, cannot be encoded.
        text = data if isinstance(data, str) else json.dumps(data)
        head = f"event: {name}\n" if name else ""
        await response.write(f"{head}data: {text}\n\n".encode())
    await response.write_eof()
    return response
