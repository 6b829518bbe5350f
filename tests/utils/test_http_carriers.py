"""Which process sends a request: shares, turns, loss; and what the client makes of what others have sent."""

import asyncio
import contextlib
import logging

import numpy as np
import pytest
from aiohttp import web

from slime.utils import http_utils
from slime.utils.engine_answers import TokenLogProbs
from slime.utils.http_carriers import CarrierLost, Carriers, ExchangeFailed, _is_of_this_machine
from slime.utils.http_utils import (
    HttpError,
    close_http_client,
    get,
    init_http_client,
    post,
    post_control,
    post_generate,
    post_generate_stream,
    send_through,
    set_engine_supply,
    trust_engine_urls,
)
from tests.support.processes.http_server import forget_everything, make_args, serving

# Nothing is there, so that what this process sends itself fails.
ELSEWHERE = "http://10.0.0.1:1/generate"


@pytest.fixture(autouse=True)
def new_client(monkeypatch):
    forget_everything(monkeypatch)


class Plain:
    """Sends what it is given by a session of its own; `answers` come in their place, and errors among them are raised."""

    def __init__(self, name="one", is_here=True, answers=()):
        self.name, self.is_here = name, is_here
        self.answers = list(answers)
        self.seen, self.most, self.now = [], 0, 0

    async def exchange(self, method, url, body, headers, parse):
        self.seen.append((method, url, body, headers, parse))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if self.answers:
                # All that come at the same time are under way then.
                await asyncio.sleep(0)
                answer = self.answers.pop(0)
                if isinstance(answer, Exception):
                    raise answer
                return answer
            async with http_utils.new_session() as session:
                response = await session.request(method, url, data=body, headers=headers)
                return response.status, await response.read()
        finally:
            self.now -= 1


def run(main):
    async def whole():
        try:
            await main()
        finally:
            await close_http_client()

    asyncio.run(whole())


async def echo(request):
    return web.json_response(await request.json() if request.can_read_body else "nothing")


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_they_take_turns_within_their_shares_and_the_limit_is_that_of_the_client():
    async def main():
        in_flight, most, go_on = 0, 0, asyncio.Event()

        async def handler(request):
            nonlocal in_flight, most
            in_flight += 1
            most = max(most, in_flight)
            if in_flight == 5:
                go_on.set()
            await go_on.wait()
            in_flight -= 1
            return web.json_response({})

        init_http_client(make_args(sglang_server_concurrency=5, rollout_num_engines=1))
        carriers = [Plain(str(number)) for number in range(2)]
        send_through(Carriers(carriers))
        async with serving(handler) as url:
            await asyncio.wait_for(asyncio.gather(*[post(url, {"n": n}) for n in range(11)]), 30)
        # At most three of five each.
        assert most == 5 and sum(len(one.seen) for one in carriers) == 11
        assert [one.most for one in carriers] in ([3, 2], [3, 3], [2, 3])
        assert [one.seen[0][2] for one in carriers] == [b'{"n":0}', b'{"n":1}']

    run(main)


def test_one_that_is_added_takes_the_share_of_one_that_was_lost_and_else_one_of_its_own():
    async def main():
        carriers = Carriers([Plain("lost", answers=[CarrierLost("it is gone")]), Plain("stays")])
        send = carriers.send
        with pytest.raises(CarrierLost):
            await send(6, False, "POST", ELSEWHERE, lambda: b"", {})
        shares = []
        for name in ("instead", "one more"):
            carriers.add(Plain(name, answers=[(200, b"")] * 20))
            carriers._turns[0].carrier.answers = [(200, b"")] * 20
            sent = await asyncio.gather(*[send(6, False, "POST", ELSEWHERE, lambda: b"", {}) for _ in range(8)])
            shares.append(len([answer for answer in sent if answer is not None]))
        # Two of three each, and then three of two; nobody has room for more than the limit.
        assert shares == [6, 6]
        assert [turn.carrier.most for turn in sorted(carriers._turns, key=lambda turn: turn.carrier.name)] == [3, 2, 3]

    run(main)


def test_one_whose_share_is_used_up_misses_its_turn_and_what_nobody_takes_is_sent_from_here():
    async def main():
        began, go_on = asyncio.Semaphore(0), asyncio.Event()

        class Held(Plain):
            async def exchange(self, *request):
                self.seen.append(request)
                began.release()
                await go_on.wait()
                return 200, b"{}"

        # Of several event loops each has the limit for itself.
        one, other = Held(), Held()
        carriers = Carriers([one, other])
        calls = [asyncio.create_task(carriers.send(2, False, "POST", ELSEWHERE, lambda: b"{}", {})) for _ in range(2)]
        for _ in calls:
            await asyncio.wait_for(began.acquire(), 10)
        assert (len(one.seen), len(other.seen)) == (1, 1)
        async with asyncio.timeout(10):
            assert await carriers.send(2, False, "POST", ELSEWHERE, lambda: b"{}", {}) is None
        # Without a limit nobody has a share.
        calls += [asyncio.create_task(carriers.send(0, False, "POST", ELSEWHERE, lambda: b"{}", {})) for _ in range(4)]
        for _ in range(4):
            await asyncio.wait_for(began.acquire(), 10)
        assert (len(one.seen), len(other.seen)) == (3, 3)
        go_on.set()
        assert [answer.status for answer in await asyncio.gather(*calls)] == [200] * 6
        assert await Carriers([]).send(2, False, "POST", ELSEWHERE, lambda: b"{}", {}) is None

    run(main)


def test_answers_errors_and_attempts_are_those_of_the_client():
    async def main():
        answers = [
            (503, b"busy"),
            ExchangeFailed("ClientOSError: gone"),
            (429, b"later"),
            (200, b'{"a": 1}'),
            (404, b"no such"),
            (200, b"text"),
        ]
        one, ids = Plain(answers=answers), set()
        send_through(Carriers([one]))
        init_http_client(
            make_args(router_api_key="key", sglang_router_ip="10.0.0.1", sglang_router_port=1, http_max_retries=4)
        )
        assert await post_generate(ELSEWHERE, {"text": "t"}, {"X-SMG-Routing-Key": "s"}, request_ids=ids) == {"a": 1}
        bodies = [body for _, _, body, _, _ in one.seen]
        assert len(set(bodies)) == 4 and all(b'"rid":' in body for body in bodies) and not ids
        headers = [headers for *_, headers, _ in one.seen]
        assert len({each["X-Request-Id"] for each in headers}) == 1
        assert headers[0]["Authorization"] == "Bearer key" and headers[0]["X-SMG-Routing-Key"] == "s"
        with pytest.raises(HttpError, match="answered 404: no such") as error:
            await post(ELSEWHERE, {})
        assert (error.value.status, error.value.body, len(one.seen)) == (404, "no such", 5)
        assert await post(ELSEWHERE, {}) == "text"
        # It goes to no service of others.
        one.answers = [(200, b"{}")]
        await post("http://10.0.0.2:1/", {})
        assert "Authorization" not in one.seen[-1][3]
        one.answers = [ExchangeFailed("ClientOSError: gone")] * 4
        with pytest.raises(HttpError, match=r"^POST \S+ failed: ClientOSError: gone \(4 attempts\)$"):
            await post(ELSEWHERE, {})

    run(main)


def test_an_answer_that_was_parsed_where_it_arrived_is_not_parsed_again():
    async def main():
        parsed = {"meta_info": {"output_token_logprobs": TokenLogProbs(np.zeros(1), np.ones(1))}}
        one = Plain(answers=[(200, parsed), (200, b'{"a": [1]}')])
        send_through(Carriers([one]))
        init_http_client(make_args())
        assert await post_generate(ELSEWHERE, {}) is parsed
        assert await post(ELSEWHERE, {}) == {"a": [1]}
        # Of a service of the user's nobody knows how it answers.
        assert [parse for *_, parse in one.seen] == [True, False]

    run(main)


def test_what_a_lost_one_had_goes_out_again_from_here_as_no_further_attempt(caplog):
    async def main():
        lost, other = Plain("lost one", answers=[CarrierLost("killed")] * 3), Plain("other")
        send_through(Carriers([lost, other]))
        init_http_client(make_args(http_max_retries=1))
        async with serving(echo) as url:
            trust_engine_urls([url])
            answers = await asyncio.gather(*[post(url, {"n": n}) for n in range(6)])
            assert answers == [{"n": n} for n in range(6)]
            assert len(lost.seen) == len(other.seen) == 3
            assert await post(url, {"n": 9}) == {"n": 9} and len(lost.seen) == 3

    run(main)
    [told] = warnings_in(caplog)
    assert told.startswith("lost one is lost (killed): its 3 requests in flight go out again") and "1 of 2" in told


def test_what_ends_one_does_not_end_the_next_and_no_engine_is_doubted():
    class Supply:
        doubts = 0

        def is_serving(self):
            return True

        def doubt_all(self, cause):
            self.doubts += 1

        def is_decided(self):
            return True

        def deaths(self):
            return 0

    async def main():
        every = [Plain(str(number), answers=[CarrierLost("killed")]) for number in range(3)]
        send_through(Carriers(every))
        supply = Supply()
        async with serving(echo) as url:
            trust_engine_urls([url])
            set_engine_supply(url, supply)
            assert await post_generate(f"{url}/generate", {"n": 1}, request_ids=set()) != {}
        assert [len(one.seen) for one in every] == [1, 0, 0] and supply.doubts == 0

    run(main)


def test_what_may_be_sent_only_once_is_not_sent_again():
    """It may have reached a service of the user's, which is nobody's engine."""

    async def main():
        one, served = Plain(answers=[CarrierLost("killed")] * 2), []

        async def handler(request):
            served.append(request.path)
            return web.json_response({})

        async with serving(handler) as url:
            send_through(Carriers([one]))
            with pytest.raises(HttpError, match=r"^POST \S+ failed: killed$"):
                await post(f"{url}/once", {}, max_retries=1)
            send_through(Carriers([one]))
            await post(f"{url}/often", {}, max_retries=2)
            assert served == ["/often"]

    run(main)


def test_localhost_is_that_of_this_node_and_control_requests_and_streams_stay():
    async def main():
        async def handler(request):
            if request.path == "/stream":
                return web.Response(text='data: {"meta_info": {}}\n\ndata: [DONE]\n\n')
            return await echo(request)

        far, near = Plain(is_here=False), Plain(is_here=True)
        send_through(Carriers([far]))
        async with serving(handler) as url:
            assert await post(url, {"n": 1}) == {"n": 1} and not far.seen
            send_through(Carriers([far, near]))
            assert await post(url.replace("127.0.0.1", "localhost"), {"n": 1}) == {"n": 1}
            assert (len(far.seen), len(near.seen)) == (0, 1)
            answers = []
            await post_generate_stream(f"{url}/stream", {}, answers.append)
            assert answers == [{"meta_info": {}}]
            assert await get(url) == "nothing" and await post_control(url, {}) == {} and len(near.seen) == 1

    run(main)


@pytest.mark.parametrize(
    ("origin", "is_here"),
    [
        ("http://localhost:80", True),
        ("http://LOCALHOST", True),
        ("http://127.8.0.1:80", True),
        ("http://[::1]:80", True),
        ("http://0.0.0.0:80", True),
        ("http://[::]:80", True),
        ("http://10.0.0.1:80", False),
        ("http://localhost.example:80", False),
        ("no address", False),
    ],
)
def test_addresses_that_every_machine_has_are_those_of_this_one(origin, is_here):
    assert _is_of_this_machine(origin) is is_here


@pytest.mark.parametrize("late", [True, False])
def test_one_that_comes_too_late_or_is_cancelled_is_ended(late):
    async def main():
        began, ended, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        class Slow(Plain):
            async def exchange(self, *request):
                began.set()
                try:
                    await closed.wait()
                finally:
                    # Its connection is closed a moment later.
                    await closed.wait()
                    ended.set()

        send_through(Carriers([Slow(is_here=False)]))
        init_http_client(
            make_args(http_request_timeout=0.5 if late else 60, sglang_server_concurrency=1, rollout_num_engines=1)
        )
        asking = asyncio.create_task(post(ELSEWHERE, {}))
        await asyncio.wait_for(began.wait(), 60)
        if not late:
            asking.cancel()
        # Until then its slot is no other's.
        done, _ = await asyncio.wait([asking], timeout=0.8)
        locked = http_utils._client().generation_slots.locked()
        closed.set()
        assert not done and locked
        expected = pytest.raises(HttpError, match="did not answer within 0.5 s") if late else contextlib.nullcontext()
        with expected, contextlib.suppress(asyncio.CancelledError):
            await asking
        assert ended.is_set() and not http_utils._client().generation_slots.locked()

    run(main)
