"""When the attempts of a request are made, on a clock that nobody waits for."""

import asyncio

import aiohttp
import pytest

from slime.utils import http_utils
from slime.utils.http_utils import HttpError, HttpSettings, close_http_client, get, post, post_control, post_generate
from tests.support.processes.clocks import run_in_no_time


@pytest.mark.parametrize("ask", [post, post_control, post_generate, get])
def test_attempts_are_a_second_apart_and_sixty_at_most(monkeypatch, ask):
    times = []

    async def request(self, method, url, **options):
        times.append(asyncio.get_running_loop().time())
        raise aiohttp.ClientConnectionError("refused")

    async def main():
        with pytest.raises(HttpError, match=r"refused \(60 attempts\)"):
            await ask("http://router:1/x", *([] if ask is get else [{}]))
        await close_http_client()

    monkeypatch.setattr(http_utils.Exchanges, "request", request)
    monkeypatch.setattr(http_utils, "_settings", HttpSettings())
    monkeypatch.setattr(http_utils.outages, "_failures", {})
    run_in_no_time(main())
    assert times == [float(second) for second in range(60)]
