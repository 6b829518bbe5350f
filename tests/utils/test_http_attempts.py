"""When the attempts of a request are made, on a clock that nobody waits for; and how many requests are under way."""

import asyncio

import aiohttp
import pytest

from slime.utils import http_utils
from slime.utils.http_utils import (
    HttpError,
    HttpSettings,
    close_http_client,
    get,
    init_http_client,
    post,
    post_control,
    post_generate,
)
from tests.support.processes.clocks import run_in_no_time
from tests.support.processes.http_server import answering, forget_everything, make_args, serving


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


def test_what_the_queue_of_a_router_gave_up_is_tried_again(monkeypatch):
    """It answers 408 then. That of others says that the request itself takes too long there."""
    forget_everything(monkeypatch)

    async def main():
        seen, elsewhere = [], []
        async with serving(answering([408], seen)) as router, serving(answering([408], elsewhere)) as other:
            init_http_client(make_args(sglang_router_ip="127.0.0.1", sglang_router_port=int(router.rpartition(":")[2])))
            assert await post(f"{router}/generate", {}) == {"status": 200}
            with pytest.raises(HttpError, match="answered 408"):
                await post(f"{other}/generate", {})
        return len(seen), len(elsewhere)

    assert asyncio.run(main()) == (2, 1)


@pytest.mark.parametrize("models", [0, 1, 3])
def test_a_function_may_ask_each_model_as_often_at_a_time_as_one(monkeypatch, models):
    forget_everything(monkeypatch)
    routers = {f"model {number}": ("127.0.0.1", 1 + number) for number in range(models)}
    init_http_client(make_args(sglang_server_concurrency=5, rollout_num_engines=2, sglang_model_routers=routers))
    assert http_utils._settings.max_connections == 10 * max(1, models)


@pytest.mark.parametrize("ask", [post, post_generate])
def test_each_request_to_a_router_has_a_routing_key_which_a_given_one_replaces(monkeypatch, ask):
    forget_everything(monkeypatch)

    async def main():
        seen, elsewhere = [], []
        async with serving(answering([500], seen)) as router, serving(answering([], elsewhere)) as other:
            init_http_client(make_args(sglang_router_ip="127.0.0.1", sglang_router_port=int(router.rpartition(":")[2])))
            for given in ("X-SMG-Routing-Key", "x-smg-routing-key", None, None):
                await ask(f"{router}/generate", {}, headers=given and {given: "session"})
            await ask(f"{other}/generate", {})
        return [request.headers.getall("X-SMG-Routing-Key", []) for request in seen + elsewhere]

    *given, (first,), (second,), none = asyncio.run(main())
    # The first request is made twice.
    assert given == [["session"]] * 3 and first != second and none == []
