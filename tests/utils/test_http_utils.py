"""The HTTP client against a real local server."""

import asyncio
import contextlib
import json
import logging
import pickle
import threading
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from slime.utils import engine_answers, http_exchange, http_utils
from slime.utils.http_utils import (
    HttpError,
    close_http_client,
    get,
    init_http_client,
    noting_request_ids,
    post,
    post_control,
    post_generate,
    post_generate_stream,
    trust_engine_urls,
)
from tests.support.processes.http_server import answering, forget_everything, make_args, serving


@pytest.fixture(autouse=True)
def new_client(monkeypatch):
    forget_everything(monkeypatch)


def test_post_sends_json_and_parses_the_answer():
    async def main():
        async def echo(request):
            return web.json_response(await request.json())

        async with serving(echo) as url:
            payload = {"ids": [1, 2], "x": 0.5, "array": np.arange(3), 7: None}
            assert await post(f"{url}/a", payload) == {"ids": [1, 2], "x": 0.5, "array": [0, 1, 2], "7": None}
            assert await post(f"{url}/a", json=[1]) == [1]
            assert await post(f"{url}/a", {"big": 2**70}) == {"big": 2**70}

    asyncio.run(main())


def test_a_stream_that_comes_too_late_is_left_at_once():
    """An engine goes on with an answer as long as its connection is there."""

    async def main():
        left = asyncio.Event()

        async def begin(request):
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b'data: {"meta_info": {}}\n\n')
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.01)
            left.set()
            return response

        async with serving(begin) as url:
            # A busy machine connects within it, too.
            init_http_client(make_args(http_request_timeout=1.0))
            with pytest.raises(HttpError, match="did not answer within 1 s") as caught:
                await post_generate_stream(f"{url}/generate", {}, lambda answer: None)
            # Nothing is thrown away before the test ends.
            await asyncio.wait_for(left.wait(), 60)
            del caught

    asyncio.run(main())


def test_an_answer_that_is_no_json_is_returned_as_text():
    async def main():
        async def text(request):
            return web.Response(text={"/nan": "[NaN]", "/t": "fine", "/e": ""}[request.path])

        async with serving(text) as url:
            assert await get(f"{url}/t") == "fine"
            assert await get(f"{url}/e") == ""
            assert np.isnan((await get(f"{url}/nan"))[0])

    asyncio.run(main())


def test_a_long_answer_is_parsed_when_its_slot_is_free_again(monkeypatch):
    served = threading.Event()

    def decode(content, decode_json):
        assert served.wait(60), "the second request never got the slot"
        return len(decode_json(content)["text"])

    monkeypatch.setattr(engine_answers, "decode_engine_answer", decode)

    async def handler(request):
        if (await request.json())["number"] == 2:
            served.set()
        return web.json_response({"text": "x" * 20_000})

    async def main():
        init_http_client(make_args(sglang_server_concurrency=1, rollout_num_engines=1))
        async with serving(handler) as url:
            first = asyncio.create_task(post_generate(url, {"number": 1}))
            second = asyncio.create_task(post_generate(url, {"number": 2}))
            return await asyncio.gather(first, second)

    assert asyncio.run(main()) == [20_000, 20_000]


@pytest.mark.parametrize("length", [3, 20_000])
def test_an_engines_answer_that_is_no_json_is_returned_as_text(length):
    async def handler(request):
        return web.Response(text="?" * length)

    async def main():
        init_http_client(make_args())
        async with serving(handler) as url:
            return await post_generate(url, {})

    assert asyncio.run(main()) == "?" * length


def test_every_attempt_of_a_request_has_an_id_of_its_own_until_it_is_answered():
    """An engine that still works on the attempt before would refuse the same id."""
    seen, known = [], set()

    async def handler(request):
        payload = await request.json()
        seen.append(payload.pop("rid"))
        assert payload == {"number": 1} and seen[-1] in known
        return web.json_response({}, status=503 if len(seen) < 3 else 200)

    async def main():
        init_http_client(make_args())
        async with serving(handler) as url:
            await post_generate(url, {"number": 1}, request_ids=known)
            assert len(set(seen)) == 3 and known == set()
            with pytest.raises(HttpError):
                await post_generate("http://127.0.0.1:1", {}, request_ids=known)
            assert known == set()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("payload", "suffixes"),
    [
        ({"text": "a"}, [""]),
        ({"input_ids": [1, 2, 3]}, [""]),
        ({"input_ids": np.array([1, 2, 3])}, [""]),
        ({"input_ids": [1, 2], "sampling_params": {"n": 1}}, [""]),
        ({"input_embeds": [[0.5, 0.25], [0.5, 0.75]]}, [""]),
        ({"text": ["a", "b"]}, ["_0", "_1"]),
        ({"input_ids": [[1, 2], [3], [4]]}, ["_0", "_1", "_2"]),
        ({"input_ids": np.array([[1, 2]])}, ["_0"]),
        ({"input_embeds": [[[0.5, 0.25]], [[0.5, 0.75]]]}, ["_0", "_1"]),
        # The engine draws ids of its own, and takes none.
        ({"text": "a", "sampling_params": {"n": 4}}, None),
        ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]}, None),
    ],
)
def test_requests_of_several_prompts_are_known_by_the_ids_that_the_engine_makes_of_theirs(payload, suffixes):
    """What a user's function posts. Its engine is told these ids one by one where another call goes on."""
    known, noted = set(), []

    async def handler(request):
        noted.append(((await request.json()).get("rid"), set(known)))
        return web.json_response([])

    async def main():
        init_http_client(make_args())
        async with serving(handler) as url:
            trust_engine_urls([url])
            with noting_request_ids(known):
                await post(f"{url}/generate", payload)
        assert known == set()

    asyncio.run(main())
    [(sent, ids)] = noted
    assert (sent is None) == (suffixes is None)
    assert ids == {f"{sent}{suffix}" for suffix in suffixes or []}


@pytest.mark.parametrize("way", ["post", "post_generate", "post_generate_stream"])
def test_a_router_that_drops_the_ids_of_requests_is_told_of_once(way, caplog):
    """Whoever aborts a single request would miss it, without a word."""
    ids = ["as sent", None, "drawn by the engine", "drawn by the engine", "as sent"]

    async def handler(request):
        sent, known = (await request.json())["rid"], ids.pop(0)
        answer = {"meta_info": {} if known is None else {"id": sent if known == "as sent" else known}}
        if way == "post_generate_stream":
            return web.Response(body=b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(answer).encode())
        return web.json_response(answer)

    async def main():
        init_http_client(make_args())
        async with serving(handler) as url:
            trust_engine_urls([url])
            for count in (0, 0, 1, 1, 1):
                with noting_request_ids(set()):
                    if way == "post":
                        await post(f"{url}/generate", {"text": "a"})
                    elif way == "post_generate":
                        await post_generate(f"{url}/generate", {"text": "a"}, request_ids=set())
                    else:
                        await post_generate_stream(
                            f"{url}/generate", {"text": "a"}, lambda answer: None, request_ids=set()
                        )
                assert caplog.text.count(f"{url}/generate: engines know requests by other ids") == count
            # Whoever gives an id of his own has it from his own answers.
            with noting_request_ids(set()):
                ids.append("another")
                await post(f"{url}/generate", {"text": "a", "rid": "mine"})

    asyncio.run(main())
    assert ids == [] and caplog.text.count("drops their field `rid`") == 1


def test_arrays_are_sent_as_lists_beside_values_that_only_the_standard_library_writes():
    for ids in (np.array([1, 2]), np.arange(6, dtype=np.int32)[::2]):
        for value in (1, 2**70):
            body = json.loads(http_utils._encode({"input_ids": ids, "value": value}))
            assert body == {"input_ids": ids.tolist(), "value": value}
    with pytest.raises(TypeError, match="object cannot be sent as JSON"):
        http_utils._encode({"value": object()})


@pytest.mark.parametrize("statuses", [[500, 503], [429, 429], [502]])
def test_5xx_and_429_are_tried_again(statuses):
    async def main():
        seen = []
        async with serving(answering(statuses, seen)) as url:
            init_http_client(make_args())
            assert await post(url, {}) == {"status": 200}
        assert len(seen) == len(statuses) + 1

    asyncio.run(main())


def test_the_number_of_attempts_is_limited_and_the_message_names_it():
    async def main():
        seen = []
        async with serving(answering([500] * 9, seen)) as url:
            init_http_client(make_args(http_max_retries=3))
            with pytest.raises(HttpError, match=r"answered 500.*3 attempts"):
                await post(url, {})
            assert len(seen) == 3
            with pytest.raises(HttpError):
                await post(url, {}, max_retries=1)
            assert len(seen) == 4

    asyncio.run(main())


def test_all_attempts_of_a_request_bear_one_id_and_no_two_requests_the_same():
    async def main():
        seen = []

        async def handler(request):
            seen.append(request.headers["X-Request-Id"])
            return web.json_response({}, status=503 if len(seen) < 3 else 200)

        async with serving(handler) as url:
            await post(url, {})
            await post(url, {})
        assert len(seen) == 4 and seen[0] == seen[1] == seen[2] != seen[3]

    asyncio.run(main())


def test_a_failure_of_all_requests_in_flight_is_told_once(caplog):
    async def main():
        async with serving(answering([500] * 40, [])) as url:
            init_http_client(make_args(http_max_retries=1))
            await asyncio.gather(*[post(url, {}, max_retries=2) for _ in range(20)], return_exceptions=True)

    asyncio.run(main())
    assert [record.levelname for record in caplog.records if "answered 500" in record.message] == ["WARNING"]


@pytest.mark.parametrize("status", [400, 401, 404, 408, 409, 422, 425])
def test_r15_other_4xx_fail_at_once_with_the_body(status):
    async def main():
        seen = []
        async with serving(answering([status] * 5, seen)) as url:
            with pytest.raises(HttpError, match=f'answered {status}: {{"status": {status}}}') as info:
                await post(url, {})
        assert info.value.status == status
        assert len(seen) == 1

    asyncio.run(main())


def test_errors_survive_the_way_between_processes():
    error = pickle.loads(pickle.dumps(HttpError("message", url="http://x", status=400, body="text")))
    assert (str(error), error.url, error.status, error.body) == ("message", "http://x", 400, "text")


def test_connection_errors_are_tried_again():
    async def main():
        closed = []

        async def handler(request):
            if len(closed) < 2:
                closed.append(1)
                request.transport.close()
            return web.json_response(1)

        async with serving(handler) as url:
            assert await post(url, {}, max_retries=5) == 1
        assert len(closed) == 2

    asyncio.run(main())


@pytest.mark.parametrize("begun", [False, True])
def test_a_request_that_is_cancelled_gives_back_its_slot_and_its_engine_sees_the_end(begun):
    async def main():
        held, left = asyncio.Event(), asyncio.Event()

        async def hold(request):
            if (await request.json())["number"]:
                return web.json_response("second")
            response = web.StreamResponse()
            if begun:
                await response.prepare(request)
                await response.write(b'"fi')
            held.set()
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.01)
            left.set()
            return response

        async with serving(hold) as url:
            init_http_client(make_args(sglang_server_concurrency=1, rollout_num_engines=1))
            first, second = (asyncio.create_task(post(f"{url}/x", {"number": number})) for number in (0, 1))
            await asyncio.wait_for(held.wait(), 10)
            await asyncio.wait([second], timeout=0.1)
            assert not second.done()
            first.cancel()
            assert await asyncio.wait_for(second, 60) == "second"
            await asyncio.wait_for(left.wait(), 60)
            assert first.cancelled()

    asyncio.run(main())


def test_an_answer_that_is_not_http_is_a_failed_attempt_whoever_asks():
    """Say of another program that has the port of an engine that died."""

    async def main():
        asked = 0

        async def serve(reader, writer):
            nonlocal asked
            asked += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"SMTP ready\r\n\r\n" if asked < 3 else b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n7")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/abort_request"
        try:
            for number, ask in enumerate((get, post_control), start=1):
                with pytest.raises(HttpError, match=f"{url} failed: ClientResponseError"):
                    await ask(url, max_retries=1)
                assert asked == number
            asked = 1
            # An engine of ours, which is tried again however long ago the first failure was.
            trust_engine_urls([url])
            assert await post(url, {}, max_retries=2) == 7 and asked == 3
        finally:
            await close_http_client()
            server.close()

    asyncio.run(main())


@pytest.mark.parametrize("place", ["http://[", "ftp://127.0.0.1/"])
def test_a_url_that_leads_nowhere_fails_at_once_and_is_told(place):
    """Whether a flag gave it or a redirect."""

    async def main():
        async def elsewhere(request):
            return web.Response(status=307, headers={"Location": place})

        async with serving(elsewhere) as url:
            for asked in (f"{url}/old", place):
                with pytest.raises(HttpError, match=r"^POST .* failed: (InvalidUrl|NonHttpUrl)") as told:
                    await post(asked, {})
                assert told.value.url == asked and "attempts" not in str(told.value)

    asyncio.run(main())


def test_a_server_that_is_not_there_is_named():
    async def main():
        port = http_utils.find_available_port(20000)
        with pytest.raises(HttpError, match=rf"127.0.0.1:{port}.*2 attempts"):
            await get(f"http://127.0.0.1:{port}/health", max_retries=2)
        await close_http_client()

    asyncio.run(main())


def test_time_limits_of_generation_and_control_are_separate_and_not_retried():
    async def main():
        seen, others_are_late = [], asyncio.Event()

        async def slow(request):
            seen.append(request)
            await others_are_late.wait()
            return web.json_response(1)

        async with serving(slow) as url:
            # A busy machine connects within the shorter limit, too.
            init_http_client(make_args(http_request_timeout=60.0, http_control_timeout=2.0))
            answering = asyncio.create_task(post(url, {}))
            errors = await asyncio.gather(get(url), post_control(url, {}), return_exceptions=True)
            others_are_late.set()
            assert await answering == 1
        assert len(seen) == 3
        for error in errors:
            assert isinstance(error, HttpError) and "within 2 s (--http-request-timeout" in str(error), error

    asyncio.run(main())


def test_r16_in_flight_limit_is_exactly_concurrency_times_engines():
    async def main():
        running, peak = 0, 0
        full = asyncio.Event()

        async def handler(request):
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            if running == 150:
                full.set()
            await asyncio.wait_for(full.wait(), 60)
            await asyncio.sleep(0.01)
            running -= 1
            return web.json_response(1)

        async with serving(handler) as url:
            # More than the 100 connections that aiohttp would allow by itself.
            init_http_client(make_args(sglang_server_concurrency=75, rollout_num_engines=2))
            await asyncio.gather(*[post(url, {}) for _ in range(400)])
        assert peak == 150

    asyncio.run(main())


def test_control_requests_pass_while_every_generation_connection_is_busy():
    async def main():
        release = asyncio.Event()

        async def handler(request):
            if request.path == "/generate":
                await asyncio.wait_for(release.wait(), 120)
            return web.json_response(request.path)

        async with serving(handler) as url:
            init_http_client(make_args(sglang_server_concurrency=1, rollout_num_engines=1))
            busy = asyncio.create_task(post(f"{url}/generate", {}))
            await asyncio.sleep(0.05)
            assert await asyncio.wait_for(post_control(f"{url}/abort_request", {}), 60) == "/abort_request"
            release.set()
            assert await busy == "/generate"

    asyncio.run(main())


def test_r17_proxies_of_the_environment_are_ignored(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def main():
        async with serving(answering([])) as url:
            assert await post(url, {}, max_retries=1) == {"status": 200}
            assert await get(url, max_retries=1) == {"status": 200}

    asyncio.run(main())


def test_the_token_goes_to_router_and_engines_only_and_into_no_log(caplog):
    caplog.set_level(logging.DEBUG)

    async def main():
        seen = []
        async with serving(answering([500], seen)) as router, serving(answering([], seen)) as other:
            port = int(router.rpartition(":")[2])
            args = make_args(router_api_key="sesame-key", sglang_router_ip="127.0.0.1", sglang_router_port=port)
            init_http_client(args)
            await post(f"{router}/generate", {}, headers={"X-A": "1"})
            await post(f"{other}/generate", {})
            http_utils.trust_engine_urls([other])
            await post(f"{other}/generate", {})
        tokens = [request.headers.get("Authorization") for request in seen]
        assert tokens == ["Bearer sesame-key", "Bearer sesame-key", None, "Bearer sesame-key"]
        assert seen[0].headers["X-A"] == "1"

    asyncio.run(main())
    assert "sesame-key" not in caplog.text
    assert "sesame-key" not in repr(http_utils._settings)


def test_number_of_engines_follows_the_manager_then_the_flags():
    assert http_utils.get_rollout_num_engines(make_args(rollout_num_engines=3)) == 3
    flags = SimpleNamespace(rollout_num_gpus=8, rollout_num_gpus_per_engine=2)
    assert http_utils.get_rollout_num_engines(flags) == 4
    assert http_utils.get_rollout_num_engines(SimpleNamespace(rollout_num_gpus=0, rollout_num_gpus_per_engine=1)) == 1


def test_ports_and_hosts():
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not http_utils.is_port_available(port)
        assert http_utils.find_available_port(port) > port
    name, address = http_utils.get_host_info()
    assert name and address


@pytest.mark.parametrize("entries", [1, 10_000])
def test_short_and_long_answers_have_the_same_log_probs(entries):
    rows = [[-0.5 - i, 100 + i, None] for i in range(entries)]

    async def handler(request):
        return web.json_response({"text": "x", "meta_info": {"output_token_logprobs": rows}})

    async def main():
        init_http_client(make_args())
        async with serving(handler) as url:
            return await post_generate(url, {})

    entries_or_table = asyncio.run(main())["meta_info"]["output_token_logprobs"]
    assert isinstance(entries_or_table, list) == (entries == 1), "the two forms that are promised"
    found = engine_answers.TokenLogProbs.of(entries_or_table)
    assert (found.tokens.tolist(), found.log_probs.tolist()) == ([row[1] for row in rows], [row[0] for row in rows])


@pytest.mark.parametrize("other", [1, 2**70])
def test_single_numbers_of_numpy_are_sent_whoever_writes_them(other):
    body = http_utils._encode({"id": np.int64(3), "value": np.float32(0.5), "other": other})
    assert json.loads(body) == {"id": 3, "value": 0.5, "other": other}


def test_a_server_of_others_that_was_not_reached_for_long_is_tried_once_until_it_answers(monkeypatch):
    now, attempts, is_there = [0.0], [], False
    body = b"{}"

    async def request(self, method, url, **options):
        attempts.append(url)
        now[0] += 0.02
        if not is_there:
            raise aiohttp.ClientConnectionError("refused")

        async def read():
            return body

        return SimpleNamespace(status=200, read=read, release=lambda: None)

    async def tried(url):
        attempts.clear()
        with contextlib.suppress(HttpError):
            await post_control(f"{url}/grade", {})
        return len(attempts)

    async def main():
        nonlocal is_there
        init_http_client(make_args(sglang_router_ip="127.0.0.1", sglang_router_port=7))
        counts = [await tried("http://a:1") for _ in range(3)]
        assert counts == [3, 1, 1], "three attempts take longer than two pauses of 0.01 s"
        assert await tried("http://b:1") == 3, "another server"
        assert [await tried("http://127.0.0.1:7") for _ in range(2)] == [3, 3], "a router of ours is replaced"
        now[0] += 46
        assert [await tried("http://a:1") for _ in range(2)] == [3, 1], "nobody knows how it was meanwhile"
        is_there = True
        assert await tried("http://a:1") == 1
        is_there = False
        assert await tried("http://a:1") == 3
        await close_http_client()

    monkeypatch.setattr(http_exchange, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(http_utils.Exchanges, "request", request)
    asyncio.run(main())
