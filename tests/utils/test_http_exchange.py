"""Exchanges over the connections of a session, against servers that answer byte by byte as they are told."""

import asyncio
import contextlib
import gzip
import socket
import zlib
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from slime.utils import http_exchange
from slime.utils.http_exchange import Exchanges, Response, new_session
from tests.support.processes.http_server import serving


def run(main):
    return asyncio.run(asyncio.wait_for(main, 60))


FINE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@contextlib.asynccontextmanager
async def told(*answers):
    """(URL, what came on each connection) of a server with an answer for each request; None: it never answers."""
    left, connections = list(answers), []

    async def serve(reader, writer):
        connections.append(received := [])
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
                received.append(head + await reader.readexactly(int(length[0].split(b":")[1]) if length else 0))
                answer = left.pop(0)
                if answer is not None:
                    writer.write(answer)
                    await writer.drain()
                if answer == b"":
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/generate?a=1", connections
    finally:
        server.close()


async def ask(exchanges, url, data=b"{}", headers=None, method="POST"):
    response = await exchanges.request(method, url, data=data, headers=headers or {})
    try:
        return response, await response.read()
    finally:
        response.release()


def test_requests_follow_each_other_on_one_connection_with_all_that_a_session_sends():
    async def main():
        async with told(FINE, FINE, FINE) as (url, connections), new_session() as session:
            exchanges = Exchanges(session)
            response, content = await ask(exchanges, url, headers={"X-Request-Id": "7"})
            assert isinstance(response, Response) and (response.status, content) == (200, b"ok")
            await ask(exchanges, url, data=None)
            async with session.post(url, data=b"{}", headers={"X-Request-Id": "7"}) as other:
                await other.read()
            return connections

    ((ours, empty, theirs),) = run(main())
    assert ours.startswith(b"POST /generate?a=1 HTTP/1.1\r\n") and ours.endswith(b"\r\n\r\n{}")
    assert sorted(ours.split(b"\r\n")) == sorted(theirs.split(b"\r\n"))
    assert b"\r\nContent-Length: 0\r\n" in empty and empty.endswith(b"\r\n\r\n")


def test_where_aiohttp_is_another_one_the_session_asks(monkeypatch):
    async def main():
        async with told(FINE, FINE) as (url, connections), new_session() as session:
            ours, _ = await ask(Exchanges(session), url)
            monkeypatch.setattr(aiohttp, "__version__", "3.15.0")
            theirs, content = await ask(Exchanges(session), url)
            return type(ours), type(theirs), content

    assert run(main()) == (Response, aiohttp.ClientResponse, b"ok")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
        b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + FINE,
        b"HTTP/1.1 300 Multiple Choices\r\nContent-Length: 2\r\n\r\nok",
    ],
)
def test_answers_of_every_kind_are_read_to_their_end(answer):
    async def main():
        async with told(answer, FINE) as (url, connections), new_session() as session:
            first = await ask(Exchanges(session), url)
            assert [content for _, content in (first, await ask(Exchanges(session), url))] == [b"ok"] * 2
            assert len(connections) == 1

    run(main())


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_an_answer_that_a_server_on_the_way_compressed_is_read_as_it_was(encoding):
    content = b"a long answer " * 1000
    packed = gzip.compress(content) if encoding == "gzip" else zlib.compress(content)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(packed)}\r\n\r\n"

    async def main():
        async with told(head.encode() + packed, FINE) as (url, connections), new_session() as session:
            exchanges = Exchanges(session)
            assert (await ask(exchanges, url))[1] == content and (await ask(exchanges, url))[1] == b"ok"
            assert len(connections) == 1 and encoding.encode() in connections[0][0]

    run(main())


def test_a_connection_that_its_server_wants_closed_is_not_used_again():
    async def main():
        last = FINE.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")
        async with told(last, FINE) as (url, connections), new_session() as session:
            exchanges = Exchanges(session)
            assert [(await ask(exchanges, url))[1] for _ in range(2)] == [b"ok"] * 2
            assert len(connections) == 2

    run(main())


def test_bytes_behind_an_answer_are_not_taken_for_the_next_one():
    async def main():
        async with told(FINE + FINE.replace(b"ok", b"no"), FINE) as (url, connections), new_session() as session:
            exchanges = Exchanges(session)
            assert [(await ask(exchanges, url))[1] for _ in range(2)] == [b"ok"] * 2
            assert len(connections) == 2

    run(main())


def test_a_kept_connection_that_its_server_has_closed_is_replaced():
    async def main():
        closed = asyncio.Event()

        async def serve(reader, writer):
            await reader.readuntil(b"{}")
            writer.write(FINE)
            await writer.drain()
            writer.close()
            closed.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, new_session() as session:
            exchanges, url = Exchanges(session), f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            for _ in range(3):
                assert (await ask(exchanges, url))[1] == b"ok"
                await closed.wait()
                # A turn of the loop for our side to see the end.
                await asyncio.sleep(0.05)

    run(main())


def test_an_answer_that_comes_byte_by_byte_is_one_answer():
    async def main():
        async def serve(reader, writer):
            await reader.readuntil(b"{}")
            for byte in b"HTTP/1.1 100 Continue\r\n\r\n" + FINE:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, new_session() as session:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            response, content = await ask(Exchanges(session), url)
            assert (response.status, content) == (200, b"ok")

    run(main())


def test_two_exchanges_at_once_one_of_them_large_have_connections_and_answers_of_their_own():
    large = bytes(range(256)) * 2**17

    async def main():
        async def serve(reader, writer):
            body = await reader.readuntil(b"}")
            answer = large if body.endswith(b"{large}") else b"ok"
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, new_session() as session:
            exchanges, url = Exchanges(session), f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            bodies = (b"{large}", b"{}", b"{large}")
            answers = await asyncio.gather(*[ask(exchanges, url, data=body) for body in bodies])
            assert [content for _, content in answers] == [large, b"ok", large]

    run(main())


def test_a_session_does_not_repeat_a_request_whose_kept_connection_breaks():
    async def main():
        async with told(FINE, b"", FINE) as (url, connections), new_session() as session:
            async with session.get(url) as response:
                await response.read()
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await session.get(url)
            assert [len(received) for received in connections] == [2]

    run(main())


def test_a_redirect_without_a_place_is_an_answer_and_one_with_a_place_frees_its_connection():
    async def main():
        nowhere = FINE.replace(b"200 OK", b"301 Moved")
        elsewhere = nowhere.replace(b"Moved\r\n", b"Moved\r\nLocation: /new\r\n")
        async with told(nowhere, elsewhere, FINE) as (url, connections), new_session() as session:
            exchanges = Exchanges(session)
            response, content = await ask(exchanges, url)
            assert (response.status, content) == (301, b"ok")
            assert (await ask(exchanges, url))[1] == b"ok" and not session.connector._acquired

    run(main())


def test_what_many_targets_have_in_common_is_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(http_exchange, "_MOST_TARGETS", 2)

    async def main():
        async with told(*[FINE] * 5) as (url, _), new_session() as session:
            exchanges = Exchanges(session)
            for number in range(5):
                assert (await ask(exchanges, f"{url}{number}"))[1] == b"ok" and len(exchanges._targets) <= 2

    run(main())


def test_a_long_body_arrives_whole():
    async def main():
        async with told(FINE) as (url, connections), new_session() as session:
            await ask(Exchanges(session), url, data=b"x" * 2_000_000)
            assert connections[0][0].endswith(b"\r\n\r\n" + b"x" * 2_000_000)

    run(main())


@pytest.mark.parametrize(
    "kind",
    [web.HTTPMovedPermanently, web.HTTPFound, web.HTTPSeeOther, web.HTTPTemporaryRedirect, web.HTTPPermanentRedirect],
)
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_a_redirect_is_followed_as_a_session_follows_it(kind, elsewhere, method):
    async def main():
        asked, places = [], []

        async def handler(request):
            asked.append(request.path)
            if request.path == "/old":
                raise kind(f"{places[0]}/new")
            key = request.headers.get("Authorization")
            return web.Response(text=f"{request.method} {await request.text()} {key} {request.headers['X-Request-Id']}")

        async with serving(handler) as url, serving(handler) as other, new_session() as session:
            places.append(other if elsewhere else "")
            headers = {"X-Request-Id": "7", "Authorization": "Bearer key"}
            _, ours = await ask(Exchanges(session), f"{url}/old", headers=headers, method=method)
            async with session.request(method, f"{url}/old", data=b"{}", headers=headers) as response:
                theirs = await response.read()
        assert ours == theirs and ours.endswith(b" None 7" if elsewhere else b" Bearer key 7")
        assert asked == ["/old", "/new"] * 2

    run(main())


@pytest.mark.parametrize("name", ["content-type", "Connection"])
def test_headers_that_say_otherwise_than_the_session_are_sent_by_it(name):
    async def main():
        async with told(FINE) as (url, connections), new_session() as session:
            headers = {name: "own"}
            response = await Exchanges(session).request("POST", url, data=b"{}", headers=headers)
            await response.read()
            response.release()
            (request,) = connections[0]
            assert request.lower().count(name.lower().encode()) == 1 and b": own\r\n" in request

    run(main())


@pytest.fixture
def left_to_sessions(monkeypatch):
    """What sessions are asked for, by URL and headers, when no exchange has a connection; they give None."""
    asked = []

    async def request(self, method, url, *, data, headers):
        assert not self.connector._acquired
        asked.append((str(url), headers))

    monkeypatch.setattr(aiohttp.ClientSession, "request", request)
    return asked


@pytest.mark.parametrize(
    "name", ["Connection", "Content-Encoding", "Content-Length", "Expect", "Transfer-Encoding", "Upgrade"]
)
def test_headers_that_change_how_a_request_is_read_are_left_to_the_session(left_to_sessions, name):
    async def main():
        async with told(FINE) as (url, connections), new_session() as session:
            assert await Exchanges(session).request("POST", url, data=b"{}", headers={name: "x"}) is None
            assert left_to_sessions == [(url, {name: "x"})] and connections == []

    run(main())


@pytest.mark.parametrize(
    ("place", "keeps"),
    [
        ("http://127.0.0.1:{port}/new", True),
        ("https://127.0.0.1:{port}/new", False),
        ("http://127.0.0.2:{port}/new", False),
        ("http://127.0.0.1:1/new", False),
    ],
)
def test_a_redirect_takes_keys_to_no_other_origin(left_to_sessions, place, keeps):
    """Scheme, host and port are an origin together."""

    async def main():
        keys = {"Authorization": "a", "cookie": "b", "Proxy-Authorization": "c"}
        async with asyncio.timeout(30), new_session() as session:
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            places.append(place.format(port=port))
            url = f"http://127.0.0.1:{port}/old"
            await Exchanges(session).request("POST", url, data=b"{}", headers={**keys, "X-Request-Id": "7"})
            assert left_to_sessions == [(places[0], {**(keys if keeps else {}), "X-Request-Id": "7"})]
            server.close()

    async def serve(reader, writer):
        await reader.readuntil(b"{}")
        writer.write(f"HTTP/1.1 307 Elsewhere\r\nLocation: {places[0]}\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    places = []
    run(main())


def test_a_redirect_gives_its_connection_back_before_its_body_is_there(left_to_sessions):
    async def main():
        async with told(b"HTTP/1.1 307 Elsewhere\r\nLocation: /new\r\nContent-Length: 9\r\n\r\nno") as (url, _):
            async with new_session() as session:
                assert await Exchanges(session).request("POST", url, data=b"{}", headers={}) is None
                assert [place for place, _ in left_to_sessions] == [url.replace("generate?a=1", "new")]

    run(main())


def test_a_redirect_to_no_url_is_told_as_a_session_tells_it():
    async def main():
        nowhere = b"HTTP/1.1 307 Elsewhere\r\nLocation: http://[\r\nContent-Length: 0\r\n\r\n"
        async with told(nowhere, nowhere) as (url, _), new_session() as session:
            with pytest.raises(aiohttp.InvalidUrlRedirectClientError) as ours:
                await ask(Exchanges(session), url)
            with pytest.raises(aiohttp.InvalidUrlRedirectClientError) as theirs:
                await session.post(url, data=b"{}")
            assert str(ours.value.url) == str(theirs.value.url)

    run(main())


@pytest.mark.parametrize("closes", ["session", "connector"])
def test_what_was_closed_says_so_as_a_session_does(closes):
    async def main():
        async with told(FINE) as (url, connections), new_session() as session:
            await (session if closes == "session" else session.connector).close()
            with pytest.raises((RuntimeError, aiohttp.ClientError)) as ours:
                await ask(Exchanges(session), url)
            with pytest.raises((RuntimeError, aiohttp.ClientError)) as theirs:
                await session.post(url, data=b"{}")
            assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value)) and connections == []

    run(main())


def test_a_connection_that_is_lost_as_soon_as_it_is_there_is_one_that_broke(monkeypatch):
    closed = []

    async def connect(self, request, traces, timeout):
        return SimpleNamespace(protocol=None, transport=None, close=lambda: closed.append(1))

    async def main():
        async with new_session() as session:
            monkeypatch.setattr(aiohttp.TCPConnector, "connect", connect)
            with pytest.raises(aiohttp.ClientConnectionError, match="closed as soon as it was there"):
                await ask(Exchanges(session), "http://127.0.0.1:1/")
            assert closed == [1]

    run(main())


def test_a_server_that_takes_no_connection_is_given_up_as_a_session_gives_it_up(monkeypatch):
    monkeypatch.setattr(http_exchange, "CONNECT_TIMEOUT_S", 0.3)

    async def main():
        with contextlib.ExitStack() as stack:
            full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            port = full.getsockname()[1]
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.1", port))
            async with new_session() as session:
                with pytest.raises(aiohttp.ConnectionTimeoutError) as ours:
                    await ask(Exchanges(session), f"http://127.0.0.1:{port}/")
                with pytest.raises(aiohttp.ConnectionTimeoutError) as theirs:
                    await session.post(f"http://127.0.0.1:{port}/", data=b"{}")
                assert str(ours.value) == str(theirs.value)

    run(main())


def test_what_is_asked_of_one_url_by_another_method_is_another_request():
    async def main():
        async with told(FINE, FINE, FINE) as (url, connections), new_session() as session:
            exchanges = Exchanges(session)
            for method, data in (("POST", b"{}"), ("GET", None), ("GET", b"{}")):
                response, _ = await ask(exchanges, url, data=data, method=method)
                assert str(response.url) == url
            return connections

    ((post, get, with_body),) = run(main())
    assert [request.split()[0] for request in (post, get, with_body)] == [b"POST", b"GET", b"GET"]
    assert b"Content-Length" not in get and b"\r\nContent-Length: 2\r\n" in with_body and with_body.endswith(b"{}")


def test_an_answer_without_a_length_ends_with_its_connection():
    async def main():
        async def serve(reader, writer):
            await reader.readuntil(b"{}")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nok")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, new_session() as session:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            assert (await ask(Exchanges(session), url))[1] == b"ok"

    run(main())


def test_a_server_that_would_speak_another_protocol_is_answered_by_its_status():
    async def main():
        switching = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: other\r\n\r\n"
        async with told(switching) as (url, _), new_session() as session:
            response = await Exchanges(session).request("POST", url, data=b"{}", headers={})
            response.release()
            assert response.status == 101

    run(main())


def test_a_session_keeps_no_cookies_and_asks_no_proxy_of_the_environment(monkeypatch):
    """For the requests that are left to it."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)

    async def main():
        given = FINE.replace(b"OK\r\n", b"OK\r\nSet-Cookie: who=me\r\n")
        async with told(given, FINE) as (url, connections), new_session() as session:
            # Of an address without a name no session takes cookies.
            url = url.replace("127.0.0.1", "localhost")
            for _ in range(2):
                async with session.post(url, data=b"{}") as response:
                    await response.read()
            return connections

    assert b"ookie" not in b"".join(request for received in run(main()) for request in received)


@pytest.mark.parametrize("value", ["a\r\nX-Other: b", "a\nb", "a\0b"])
def test_a_header_cannot_become_two(value):
    async def main():
        async with told(FINE) as (url, connections), new_session() as session:
            with pytest.raises(ValueError, match="headers with line breaks or zeros"):
                await ask(Exchanges(session), url, headers={"X-Request-Id": value})
            assert connections == []

    run(main())


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", aiohttp.ServerDisconnectedError),
        (b"SMTP ready\r\n\r\n", aiohttp.ClientResponseError),
    ],
)
def test_what_breaks_an_exchange_is_what_a_session_raises(answer, kind):
    async def main():
        async with told(answer, answer, FINE) as (url, connections), new_session() as session:
            exchanges = Exchanges(session)
            with pytest.raises(kind) as ours:
                await ask(exchanges, url)
            with pytest.raises(kind) as theirs:
                await session.post(url, data=b"{}")
            assert type(ours.value) is type(theirs.value) and str(ours.value) == str(theirs.value)
            # And the connection is no longer used.
            assert (await ask(exchanges, url))[1] == b"ok" and len(connections) == 3

    run(main())


def test_an_answer_that_ends_too_early_is_no_answer():
    async def main():
        async def serve(reader, writer):
            await reader.readuntil(b"{}")
            writer.write(FINE[:-1])
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, new_session() as session:
            with pytest.raises(aiohttp.ClientPayloadError):
                await ask(Exchanges(session), f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")

    run(main())


@pytest.mark.parametrize("begun", [None, FINE[:-1]])
def test_one_that_is_cancelled_leaves_no_connection_to_the_next(begun):
    async def main():
        async with told(begun, FINE) as (url, connections), new_session() as session:
            exchanges = Exchanges(session)
            task = asyncio.ensure_future(ask(exchanges, url))
            while not connections or not connections[0]:
                await asyncio.sleep(0.001)
            await asyncio.wait([task], timeout=0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await ask(exchanges, url))[1] == b"ok" and len(connections) == 2

    run(main())


@pytest.mark.parametrize("url", ["http://", "ftp://h/", "http://127.0.0.1:1/", "http://u:p@127.0.0.1:1/", "nowhere"])
def test_a_url_that_leads_nowhere_raises_what_the_session_raises(url):
    async def main():
        async with new_session() as session:
            with pytest.raises(aiohttp.ClientError) as ours:
                await ask(Exchanges(session), url)
            with pytest.raises(aiohttp.ClientError) as theirs:
                await session.post(url, data=b"{}")
            assert type(ours.value) is type(theirs.value)

    run(main())
