"""Requests that outlive engines: the client and whoever replaces the engines that die."""

import asyncio

import pytest
from aiohttp import web

from slime.utils import http_utils
from slime.utils.http_utils import (
    HttpError,
    get,
    init_http_client,
    post,
    post_control,
)
from tests.support.processes.http_server import answering, forget_everything, make_args, serving
from tests.support.processes.waiting import until


@pytest.fixture(autouse=True)
def new_client(monkeypatch):
    forget_everything(monkeypatch)


class Supply:
    """Engines as requests see them. A failed request leaves it open whether one has died, until the test says so."""

    def __init__(self):
        self.served, self.routed, self.dead, self.decided, self.doubts = True, True, 0, True, []

    def is_serving(self):
        return self.served

    def has_router(self):
        return self.routed

    def is_decided(self):
        return self.decided

    def deaths(self):
        return self.dead

    def doubt_all(self, cause):
        self.doubts.append(cause)


@pytest.mark.parametrize(
    ("missing", "ask"),
    [("served", lambda url: post(url, {}, max_retries=1)), ("routed", lambda url: get(url, max_retries=1))],
    ids=["a request for an engine", "a question for a router that has its engines"],
)
def test_an_attempt_waits_for_who_answers_it(missing, ask):
    async def main():
        seen, supply = [], Supply()
        setattr(supply, missing, False)
        async with serving(answering([], seen)) as url:
            http_utils.set_engine_supply(url, supply)
            waiting = asyncio.create_task(ask(url))
            await asyncio.sleep(0.1)
            assert seen == [] and not waiting.done()
            setattr(supply, missing, True)
            assert await waiting == {"status": 200}

    asyncio.run(main())


def test_each_attempt_of_a_question_waits_for_a_router():
    """One that has just started answers before it has its engines."""

    async def main():
        seen, supply = [], Supply()

        async def handler(request):
            seen.append(supply.routed)
            if len(seen) > 1:
                return web.json_response({"workers": []})
            supply.routed = False
            request.transport.close()

        async with serving(handler) as url:
            http_utils.set_engine_supply(url, supply)
            waiting = asyncio.create_task(get(f"{url}/workers", max_retries=3))
            await until(lambda: not supply.routed)
            await asyncio.sleep(0.1)
            supply.routed = True
            assert await waiting == {"workers": []} and seen == [True, True]

    asyncio.run(main())


def test_a_request_does_not_wait_for_what_becomes_of_a_doubted_engine_while_it_has_not_failed():
    """It may compile for minutes, and others serve."""

    async def main():
        supply = Supply()
        supply.decided = False
        async with serving(answering([], [])) as url:
            http_utils.set_engine_supply(url, supply)
            assert await asyncio.wait_for(post(f"{url}/generate", {}), 60) == {"status": 200}

    asyncio.run(main())


def test_an_attempt_that_an_engine_took_into_its_death_does_not_count():
    async def main():
        seen, supply = [], Supply()

        def doubt_all(cause):
            supply.doubts.append(cause)
            supply.decided = False

        supply.doubt_all = doubt_all
        async with serving(answering([502, 502, 500, 500], seen)) as url:
            http_utils.set_engine_supply(url, supply)
            request = asyncio.create_task(post(f"{url}/generate", {}, max_retries=2))
            for number in (1, 2):
                await until(lambda number=number: len(supply.doubts) == number)
                # Time for an attempt that did not wait until it is known what became of the engine.
                await asyncio.sleep(0.15)
                assert len(seen) == len(supply.doubts) == number
                assert "answered 502" in supply.doubts[-1]
                supply.dead, supply.decided = number, True
            for number in (3, 4):
                await until(lambda number=number: len(supply.doubts) == number)
                supply.decided = True  # nobody died of these
            with pytest.raises(HttpError, match=r"answered 500.*\(2 attempts\)"):
                await request
            assert len(seen) == 4

    asyncio.run(main())


def test_a_request_that_outlives_several_engines_fails_and_is_named():
    async def main():
        seen, supply = [], Supply()

        async def handler(request):
            seen.append(request.headers["X-Request-Id"])
            supply.dead += 1
            request.transport.close()

        async with serving(handler) as url:
            http_utils.set_engine_supply(url, supply)
            with pytest.raises(HttpError) as error:
                await post(f"{url}/generate", {}, max_retries=60)
            assert len(seen) == http_utils.SURVIVED_ENGINES
            assert f"request {seen[0]} was under way when engines or routers died, 5 times" in str(error.value)

    asyncio.run(main())


def test_an_engine_that_dies_while_a_request_waits_for_its_slot_is_not_outlived_by_it():
    async def main():
        supply, started, may_end = Supply(), asyncio.Event(), asyncio.Event()

        async def handler(request):
            if await request.json() == "first":
                started.set()
                await may_end.wait()
                return web.json_response({})
            return web.json_response({}, status=500)

        init_http_client(make_args(sglang_server_concurrency=1, rollout_num_engines=1))
        async with serving(handler) as url:
            http_utils.set_engine_supply(url, supply)
            first = asyncio.create_task(post(url, "first"))
            await started.wait()
            second = asyncio.create_task(post(url, "second", max_retries=1))
            await asyncio.sleep(0.1)
            supply.dead += 1
            may_end.set()
            await first
            with pytest.raises(HttpError, match=r"answered 500: \{\}$"):
                await second
            assert len(supply.doubts) == 1

    asyncio.run(main())


def test_a_request_waits_no_longer_than_it_may_take():
    async def main():
        supply = Supply()
        supply.served = False
        async with serving(answering([], [])) as url:
            init_http_client(make_args(http_request_timeout=0.1))
            http_utils.set_engine_supply(url, supply)
            with pytest.raises(HttpError, match=r"no engine served requests for 0.1 s \(--http-request-timeout\)"):
                await post(f"{url}/generate", {})

    asyncio.run(main())


@pytest.mark.parametrize("waiting_for", ["an engine", "a verdict"])
def test_one_task_looks_for_all_requests_that_wait(waiting_for):
    """To look asks about all engines: thousands that do so several times a second would hold up everything else."""

    async def main():
        supply, looks = Supply(), []
        supply.served, supply.decided = waiting_for != "an engine", waiting_for != "a verdict"

        def looking(name):
            looks.append(asyncio.current_task())
            return getattr(supply, name)

        if waiting_for == "an engine":
            supply.is_serving = lambda: looking("served")
        else:
            supply.is_decided = lambda: looking("decided")
        async with serving(answering([500] * 20 if waiting_for == "a verdict" else [])) as url:
            http_utils.set_engine_supply(url, supply)
            asked = [asyncio.create_task(post(f"{url}/generate", {}, max_retries=2)) for _ in range(20)]
            await until(lambda: set(asked) <= set(looks))
            begun = len(looks)
            await until(lambda: len(looks) >= begun + 20)
            assert len(set(looks[begun : begun + 20])) == 1
            supply.served = supply.decided = True
            assert await asyncio.wait_for(asyncio.gather(*asked), 30) == [{"status": 200}] * 20

    asyncio.run(main())


def test_only_requests_to_its_own_router_ask_the_supply():
    async def main():
        supply = Supply()
        supply.served = False
        http_utils.set_engine_supply("http://127.0.0.1:1", supply)
        async with serving(answering([], [])) as url:
            assert await post(url, {}) == {"status": 200}
            http_utils.set_engine_supply(url, supply)
            assert await get(url) == await post_control(url) == {"status": 200}, "an abort must not wait for an engine"
            http_utils.set_engine_supply(url, None)
            assert await post(url, {}) == {"status": 200}

    asyncio.run(main())
