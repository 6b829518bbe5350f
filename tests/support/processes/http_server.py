"""A local server for tests of the HTTP client, its handlers, the client's arguments, and a reset of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from slime.utils import http_utils
from slime.utils.http_utils import close_http_client

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_args(**overrides: Any) -> SimpleNamespace:
    values = {
        "sglang_server_concurrency": 4,
        "rollout_num_engines": 2,
        "http_request_timeout": 10.0,
        "http_control_timeout": 10.0,
        "http_max_retries": 3,
        "router_api_key": None,
        "sglang_router_ip": None,
        "sglang_router_port": None,
    }
    return SimpleNamespace(**{**values, **overrides})


def forget_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the client to the state of a new process, with short delays, until the test ends."""
    monkeypatch.setattr(http_utils, "RETRY_DELAY_S", 0.01)
    monkeypatch.setattr(http_utils, "_settings", http_utils.HttpSettings())
    monkeypatch.setattr(http_utils, "_engine_origins", set())
    monkeypatch.setattr(http_utils, "_supplies", {})
    monkeypatch.setattr(http_utils, "_carriers", None)
    monkeypatch.setattr(http_utils.outages, "_failures", {})
    monkeypatch.setattr(http_utils, "_SUPPLY_POLL_SECONDS", 0.01)
    http_utils._warn_of_lost_ids.cache_clear()


async def status_with_token(url: str, token: bytes) -> int:
    """The status of a GET with any bytes as bearer token. HTTP libraries would only send text."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n\r\n" % (parts.path.encode(), token))
    status = await asyncio.wait_for(reader.readline(), 60)
    writer.close()
    return int(status.split()[1])


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Yields the URL of a server that answers with `handler`."""
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{tail:.*}", handler)
    async with serving_app(app) as url:
        yield url


@asynccontextmanager
async def serving_app(app: web.Application) -> AsyncIterator[str]:
    """Yields the URL of a server of `app`. The client is closed before the server ends."""
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await close_http_client()
        await runner.cleanup()


def answering(statuses: Iterable[int], seen: list[web.Request] | None = None) -> Handler:
    """A handler that answers with these statuses in turn, then 200."""
    remaining = list(statuses)

    async def handler(request):
        if seen is not None:
            seen.append(request)
        status = remaining.pop(0) if remaining else 200
        return web.json_response({"status": status}, status=status)

    return handler
