"""HTTP exchanges over the connections of an aiohttp session, for half of the processor's time that its own requests take.

aiohttp connects, keeps the connections, and parses the answers. Its objects for requests and responses are not used, because
nearly everything in them is the same for every request to a URL; here that is made once. Whatever goes beyond plain HTTP is
left to the session: TLS, a password in the URL, headers that replace the session's own, and redirects. So is every request if
aiohttp has another version than the one whose inner names are used here.
"""

import asyncio
import functools
import re
import time
from typing import Any

import aiohttp
from aiohttp.client_reqrep import ClientRequest
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

CONNECT_TIMEOUT_S = 30.0
# An outage of which nothing was heard for so long may be over. Attempts at a service are at most 30 s apart.
_REMEMBERED_S = 45.0
# In these versions `connector.connect`, `protocol.set_response_params` and `protocol.read` are as they are used here.
_KNOWN_VERSIONS = "3.14."
# For so many URLs a session keeps what their requests have in common.
_MOST_TARGETS = 1024
_REDIRECTS = (301, 302, 303, 307, 308)
# Only the origin that a request was meant for may see these headers.
_OF_ONE_ORIGIN = frozenset({"authorization", "cookie", "proxy-authorization"})
# A body up to this length is sent in one piece with its head; a longer one is not copied.
_JOINED_BYTES = 64 * 2**10
_BREAKS_A_LINE = re.compile(r"[\r\n\0]")
# These headers say how the rest of a request is to be read, or what becomes of the connection.
_OF_THE_WAY = frozenset({"connection", "content-encoding", "content-length", "expect", "transfer-encoding", "upgrade"})


def new_session() -> aiohttp.ClientSession:
    """A session of the running event loop, without a limit of connections."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0),
        headers={"Content-Type": "application/json"},
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        # A `time_limit` around each attempt bounds its total time.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
    )
    # By itself a session repeats a GET whose connection broke, possibly to a router that has come back without engines.
    session._retry_connection = False
    return session


class Outages:
    """For how long servers, by their origin, have not been reached, so that not every request to a dead one tries as long as
    the first did."""

    def __init__(self) -> None:
        # Each origin has the times of the first failure since its last answer, and of the last one.
        self._failures: dict[str, tuple[float, float]] = {}

    def seconds(self, origin: str) -> float:
        """The time for which requests have not reached the server; 0 if it was reached, or nobody has asked it lately."""
        first, last = self._failures.get(origin, (0.0, 0.0))
        return last - first if time.monotonic() - last <= _REMEMBERED_S else 0.0

    def failed(self, origin: str) -> None:
        """Note that a request was not answered, because the connection failed."""
        now = time.monotonic()
        first, last = self._failures.get(origin, (now, now))
        self._failures[origin] = (first if now - last <= _REMEMBERED_S else now, now)

    def answered(self, origin: str) -> None:
        """Note that the server is there, whatever it answers."""
        self._failures.pop(origin, None)


class Response:
    """An answer whose head has come; its attributes and methods are as those of `aiohttp.ClientResponse`."""

    def __init__(self, url: URL, connection: Any, status: int, content: aiohttp.StreamReader) -> None:
        self.url = url
        self.status = status
        self.content = content
        self._connection = connection

    async def read(self) -> bytes:
        """The whole body."""
        # A short one comes along with its head.
        return self.content.read_nowait() if self.content.is_eof() else await self.content.read()

    def release(self) -> None:
        """Let others use the connection; it is closed if the body was not read to its end."""
        self._connection.release()


class _Request(ClientRequest):
    """It stands for all requests of a target where aiohttp is given one, so the key of their connections is made once."""

    @functools.cached_property
    def connection_key(self) -> Any:
        return super().connection_key


class _Target:
    """The parts that all requests by `method` to a URL have in common."""

    def __init__(self, session: aiohttp.ClientSession, method: str, url: str) -> None:
        loop = asyncio.get_running_loop()
        self.request = _Request(method, URL(url), headers=session.headers, loop=loop, session=session)
        self.url = self.request.url
        headers = self.request.headers
        headers.pop("Content-Length", None)
        self.names = _OF_THE_WAY | {name.lower() for name in headers}
        lines = [f"{method} {self.url.raw_path_qs} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        self.head = "".join(f"{line}\r\n" for line in lines)


class Exchanges:
    """Requests over the connections of `session`, on its event loop."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session, self._timeout = session, session.timeout
        self._targets: dict[tuple[str, str], _Target] = {}

    async def request(
        self, method: str, url: str, *, data: bytes | None, headers: dict[str, str]
    ) -> Response | aiohttp.ClientResponse:
        """The answer to a request, as soon as its head is there. The caller has to release it.

        Raises:
            aiohttp.ClientConnectionError: there is no connection, or it broke.
            aiohttp.ClientResponseError: the answer is not HTTP.
        """
        target = self._targets.get((method, url)) or self._new_target(method, url)
        connector = self._session.connector
        is_closed = connector is None or connector.closed
        if target is None or is_closed or not target.names.isdisjoint(map(str.lower, headers)):
            return await self._session.request(method, url, data=data, headers=headers)
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if len(_BREAKS_A_LINE.findall(lines)) != 2 * len(headers):
            raise ValueError(f"headers with line breaks or zeros: {lines!r}")
        length = "" if data is None and method == "GET" else f"Content-Length: {len(data or b'')}\r\n"
        head, body = f"{target.head}{lines}{length}\r\n".encode(), data or b""
        try:
            connection = await connector.connect(target.request, [], self._timeout)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {url}") from error
        try:
            protocol, transport = connection.protocol, connection.transport
            if transport is None:
                raise aiohttp.ClientConnectionResetError("the connection was closed as soon as it was there")
            protocol.set_response_params(read_until_eof=True)
            for piece in (head + body,) if len(body) <= _JOINED_BYTES else (head, body):
                transport.write(piece)
            message, content = await protocol.read()
            while message.code < 200 and message.code != 101:
                message, content = await protocol.read()
        except BaseException as error:
            connection.close()
            if not isinstance(error, HttpProcessingError):
                raise
            raise aiohttp.ClientResponseError(
                target.request.request_info, (), status=error.code, message=error.message, headers=error.headers
            ) from error
        response = Response(target.url, connection, message.code, content)
        if message.code in _REDIRECTS and "Location" in message.headers:
            response.release()
            return await self._follow(message.headers["Location"], message.code, method, target.url, data, headers)
        return response

    async def _follow(
        self, location: str, code: int, method: str, url: URL, data: bytes | None, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        """Have the session ask where an answer of `url` redirects to, as it would have: in most redirects a POST becomes a GET,
        and keys do not go to another origin. Whatever redirects come then it follows by itself."""
        try:
            place = url.join(URL(location))
        except ValueError as error:
            raise aiohttp.InvalidUrlRedirectClientError(location, "no URL") from error
        if code == 303 or (code in (301, 302) and method == "POST"):
            method, data = "GET", None
        if (place.scheme, place.host, place.port) != (url.scheme, url.host, url.port):
            headers = {name: value for name, value in headers.items() if name.lower() not in _OF_ONE_ORIGIN}
        return await self._session.request(method, place, data=data, headers=headers)

    def _new_target(self, method: str, url: str) -> _Target | None:
        """The target of a URL; None if its requests are left to the session, which also tells what is wrong with a URL."""
        if not aiohttp.__version__.startswith(_KNOWN_VERSIONS) or not url.startswith("http://") or "@" in url:
            return None
        try:
            target = _Target(self._session, method, url)
        except ValueError:
            return None
        if len(self._targets) >= _MOST_TARGETS:
            self._targets.clear()
        self._targets[method, url] = target
        return target
