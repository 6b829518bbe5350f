"""Serves an aiohttp application in a thread and an event loop of its own, independently of what else the process does."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.web_log import AccessLogger

from slime.utils.errors import RunError
from slime.utils.http_utils import close_http_client
from slime.utils.ports import host_for_url

_HEALTH_PATHS = ("/health", "/healthz")
_STOP_SECONDS = 15.0


class FilteredAccessLogger(AccessLogger):
    """The access log of aiohttp without successful health checks, which come every few seconds."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if request.path not in _HEALTH_PATHS or response.status >= 400:
            super().log(request, response, time)


@dataclass(frozen=True)
class AppHandle:
    """An application that is served."""

    host: str
    port: int
    loop: asyncio.AbstractEventLoop
    _runner: web.AppRunner
    _thread: threading.Thread

    @property
    def url(self) -> str:
        """The base of its URLs."""
        return f"http://{host_for_url(self.host)}:{self.port}"

    def stop(self, timeout_sec: float = _STOP_SECONDS) -> None:
        """End the application and its thread; requests that are under way break off. A second call does nothing.

        Raises:
            RunError: it does not end in time.
        """
        if self.loop.is_closed():
            return
        _stop(self.loop, self._thread, self._runner, timeout_sec)


def run_app_in_thread(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    thread_name: str = "slime-app",
    start_timeout_sec: float = 15.0,
    runner_kwargs: dict[str, Any] | None = None,
) -> AppHandle:
    """Serve `app` until its handle is stopped, or the process ends.

    Args:
        host: address to listen at; loopback unless agents run on other machines.
        port: 0 for any free port; the handle has its number.
        runner_kwargs: passed to `aiohttp.web.AppRunner`.

    Raises:
        RunError: it cannot listen there, or its start-up fails or takes too long.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=thread_name, daemon=True)
    logged: dict[str, type[AbstractAccessLogger]] = {"access_log_class": FilteredAccessLogger}
    runner = web.AppRunner(app, **{**logged, "shutdown_timeout": 1.0, **(runner_kwargs or {})})

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        return runner.addresses[0][1]

    thread.start()
    try:
        bound = asyncio.run_coroutine_threadsafe(start(), loop).result(start_timeout_sec)
    except Exception as error:
        _stop(loop, thread, runner, _STOP_SECONDS)
        reason = f"it did not start within {start_timeout_sec:g} s" if isinstance(error, TimeoutError) else str(error)
        raise RunError(f"the application of {thread_name} cannot be served at {host}:{port}: {reason}") from error
    return AppHandle(host, bound, loop, runner, thread)


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, runner: web.AppRunner, timeout_sec: float) -> None:
    async def end() -> None:
        await runner.cleanup()
        # Nobody else uses the HTTP client of this loop.
        await close_http_client()

    try:
        asyncio.run_coroutine_threadsafe(end(), loop).result(timeout_sec)
    except TimeoutError as error:
        raise RunError(f"the application of {thread.name} did not end within {timeout_sec:g} s") from error
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout_sec)
        if not thread.is_alive():
            loop.close()
