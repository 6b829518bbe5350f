"""Applications in threads of their own: where they listen, how they start and end, and what their log leaves out."""

import asyncio
import logging
import threading

import psutil
import pytest
import requests
from aiohttp import web

from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.utils.errors import RunError
from tests.support.processes.waiting import wait_until


def application(**routes):
    app = web.Application()
    for path, status in routes.items():

        async def handler(request, status=status):
            return web.json_response({}, status=status)

        app.router.add_get(f"/{path}", handler)
    return app


def test_an_application_is_served_on_loopback_until_it_is_stopped():
    served = run_app_in_thread(application(healthz=200), thread_name="of the test")
    try:
        assert requests.get(f"{served.url}/healthz", timeout=30).status_code == 200
        listening = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr.port == served.port]
        assert set(listening) == {"127.0.0.1"}
    finally:
        served.stop()
    assert "of the test" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{served.url}/healthz", timeout=30)
    served.stop()


def test_a_port_that_is_taken_is_told():
    served = run_app_in_thread(application())
    try:
        with pytest.raises(RunError, match=f"cannot be served at 127.0.0.1:{served.port}: .*in use"):
            run_app_in_thread(application(), port=served.port)
    finally:
        served.stop()


def test_a_start_that_takes_too_long_is_given_up():
    app = application()

    async def forever(app):
        await asyncio.Event().wait()

    app.on_startup.append(forever)
    with pytest.raises(RunError, match="it did not start within 0.05 s"):
        run_app_in_thread(app, start_timeout_sec=0.05, thread_name="never")
    assert "never" not in [thread.name for thread in threading.enumerate()]


def test_health_checks_that_went_well_are_not_logged(caplog):
    served = run_app_in_thread(application(healthz=200, health=500, other=200))
    try:
        with caplog.at_level(logging.INFO, "aiohttp.access"):
            for path in ("healthz", "health", "other"):
                requests.get(f"{served.url}/{path}", timeout=30)
            # It is written when the answer has gone already.
            wait_until(lambda: "other " in caplog.text)
    finally:
        served.stop()
    assert [path for path in ("healthz ", "health ", "other ") if path in caplog.text] == ["health ", "other "]
