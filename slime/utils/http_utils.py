"""The HTTP client of a process: one aiohttp session, thin on purpose.

Invariants:
- At most `max_connections` requests of `post` are in flight; there is no smaller hidden pool. Control requests
  (`get`, `post_control`) are not counted: an abort must pass while every generation slot is busy.
- Proxies of the environment are ignored.
- Connection errors, 429 and 5xx are tried again after one second, up to the limit. Every other status from 400 on fails
  at once with the body of the answer. A request that exceeds its total time fails at once.
- What is parsed in a thread (`post_generate`) is parsed when its slot and its connection are free again.
- The bearer token travels only to the router and the engines of this run, and appears in no message.
"""

import asyncio
import contextlib
import json as standard_json
import logging
import socket
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import orjson

from slime.utils import env
from slime.utils.errors import RunError
from slime.utils.misc import get_current_node_ip
from slime.utils.ports import host_for_url

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 1.0
CONNECT_TIMEOUT_S = 30.0
# A failure of the same address and status is told of again after this time.
_SAME_FAILURE_SECONDS = 30.0
_BODY_CHARACTERS_IN_MESSAGES = 2000
# Below this a thread costs more than parsing: 400 tokens, a tenth of a millisecond.
_THREAD_FROM_BYTES = 16 * 2**10
_ORJSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


class HttpError(RunError):
    """A request failed for good. `status` is None when no answer came, `body` is the text of the answer."""

    def __init__(self, message: str, *, url: str = "", status: int | None = None, body: str = "") -> None:
        super().__init__(message)
        self.url = url
        self.status = status
        self.body = body


@dataclass(frozen=True)
class HttpSettings:
    """What `init_http_client` takes from the flags. Times in seconds; 0 connections means no limit."""

    max_connections: int = 0
    request_timeout: float = 14400.0
    control_timeout: float = 300.0
    max_retries: int = 60
    api_key: str | None = field(default=None, repr=False)
    trusted_origins: frozenset[str] = frozenset()


@dataclass
class _LoopClient:
    """The connections of one event loop. `settings` tells whether they are out of date.

    `retired` holds replaced sessions, which may still carry requests, until everything is closed.
    """

    settings: HttpSettings
    session: aiohttp.ClientSession
    # Bounds generation alone: a control request, above all an abort, must not queue behind what it is to end.
    generation_slots: contextlib.AbstractAsyncContextManager[Any]
    retired: list[aiohttp.ClientSession] = field(default_factory=list)


_UNLIMITED = contextlib.nullcontext()

_settings = HttpSettings()
# Parsing leaves the interpreter to others, so more threads than a few only help where cores are idle.
_decoders = ThreadPoolExecutor(max_workers=4, thread_name_prefix="slime-decode")
_engine_origins: set[str] = set()
_told_until: dict[tuple[str, int | None], float] = {}
_clients: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopClient]" = weakref.WeakKeyDictionary()


def get_rollout_num_engines(args: Any) -> int:
    """`args.rollout_num_engines` once the manager has set it, else the number that the flags ask for; at least 1."""
    engines = getattr(args, "rollout_num_engines", None)
    if engines is None:
        engines = (args.rollout_num_gpus or 0) // args.rollout_num_gpus_per_engine
    return max(1, engines)


def generation_concurrency(args: Any) -> int:
    """Generations in flight: `--sglang-server-concurrency` for each engine."""
    return args.sglang_server_concurrency * get_rollout_num_engines(args)


def init_http_client(args: Any) -> None:
    """Take limits, time limits and the token from `args`. Existing sessions are replaced at their next use."""
    global _settings
    routers = list((getattr(args, "sglang_model_routers", None) or {}).values())
    if getattr(args, "sglang_router_ip", None):
        routers.append((args.sglang_router_ip, args.sglang_router_port))
    settings = HttpSettings(
        max_connections=generation_concurrency(args),
        request_timeout=args.http_request_timeout,
        control_timeout=args.http_control_timeout,
        max_retries=args.http_max_retries,
        api_key=getattr(args, "router_api_key", None),
        trusted_origins=frozenset(f"http://{host_for_url(ip)}:{port}" for ip, port in routers),
    )
    if settings != _settings:
        _settings = settings


def trust_engine_urls(urls: Iterable[str]) -> None:
    """Send the bearer token to these servers as well: the engines that our router lists."""
    _engine_origins.update(_origin(url) for url in urls)


async def close_http_client() -> None:
    """Close the sessions of the running event loop."""
    client = _clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        for session in (client.session, *client.retired):
            await session.close()


async def post(
    url: str,
    payload: Any = None,
    max_retries: int | None = None,
    headers: dict[str, str] | None = None,
    *,
    json: Any = None,
) -> Any:
    """POST `payload` (or `json=`) as JSON within `--http-request-timeout`.

    Args:
        max_retries: number of attempts; None takes `--http-max-retries` (60).

    Returns:
        The parsed JSON of the answer, or its text when it is not JSON.

    Raises:
        HttpError: no success within the attempts, a status of 400 and above that is not retried, or too late.
    """
    client = _client()
    body = _encode(payload if json is None else json)
    timeout = _timeout(client.settings.request_timeout)
    return await _send(client.generation_slots, timeout, "POST", url, body, headers, max_retries)


async def post_generate(url: str, payload: Any, headers: dict[str, str] | None = None) -> Any:
    """As `post`, for an engine's answer. A long one is parsed off the event loop, its token log-probs into `TokenLogProbs`.

    Those of a short one are lists of entries; `TokenLogProbs.of` takes both.
    """
    # Arrow takes a moment to load and is needed where engines are asked only.
    from slime.utils.engine_answers import decode_engine_answer

    client = _client()
    timeout = _timeout(client.settings.request_timeout)
    content = await _send(client.generation_slots, timeout, "POST", url, _encode(payload), headers, None, decode=False)
    if len(content) < _THREAD_FROM_BYTES:
        return _decode(content)
    return await asyncio.get_running_loop().run_in_executor(_decoders, decode_engine_answer, content, _decode)


async def post_control(url: str, payload: Any = None, max_retries: int | None = None) -> Any:
    """As `post`, for control requests: past the limit of generation, and within `--http-control-timeout`."""
    return await _send(
        _UNLIMITED, _timeout(_settings.control_timeout), "POST", url, _encode(payload), None, max_retries
    )


async def get(url: str, max_retries: int | None = None) -> Any:
    """GET within `--http-control-timeout`; returns and raises as `post`."""
    return await _send(_UNLIMITED, _timeout(_settings.control_timeout), "GET", url, None, None, max_retries)


async def _send(
    slots: contextlib.AbstractAsyncContextManager[Any],
    timeout: aiohttp.ClientTimeout,
    method: str,
    url: str,
    body: bytes | None,
    headers: dict[str, str] | None,
    max_retries: int | None,
    decode: bool = True,
) -> Any:
    """The answer: parsed, or its bytes."""
    session = _client().session
    headers = _with_token(url, headers)
    attempts = max(1, _settings.max_retries if max_retries is None else max_retries)
    for attempt in range(1, attempts + 1):
        try:
            async with slots, session.request(method, url, data=body, headers=headers, timeout=timeout) as response:
                content = await response.read()
                if response.status < 400:
                    return _decode(content) if decode else content
                failure = _status_error(method, url, response.status, content)
            if failure.status != 429 and failure.status < 500:
                raise failure
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            failure = HttpError(f"{method} {url} failed: {type(error).__name__}: {error}", url=url)
        except TimeoutError as error:
            raise HttpError(
                f"{method} {url} did not answer within {timeout.total:g} s "
                "(--http-request-timeout for generation, --http-control-timeout for control requests)",
                url=url,
            ) from error
        if attempt < attempts:
            told = attempt == 1 and _is_news(url, failure.status)
            logger.log(logging.WARNING if told else logging.DEBUG, "%s; attempt %d", failure, attempt)
            await asyncio.sleep(RETRY_DELAY_S)
    raise HttpError(f"{failure} ({attempts} attempts)", url=url, status=failure.status, body=failure.body)


def _is_news(url: str, status: int | None) -> bool:
    """Whether a failure of this kind was not told of lately: all requests in flight fail when an engine does."""
    now, key = time.monotonic(), (url, status)
    if now < _told_until.get(key, 0.0):
        return False
    _told_until[key] = now + _SAME_FAILURE_SECONDS
    return True


def _status_error(method: str, url: str, status: int, content: bytes) -> HttpError:
    body = content.decode("utf-8", "replace")
    if not env.debug_enabled():
        body = body[:_BODY_CHARACTERS_IN_MESSAGES]
    return HttpError(f"{method} {url} answered {status}: {body}", url=url, status=status, body=body)


def _encode(payload: Any) -> bytes | None:
    """JSON bytes. orjson takes a twentieth of the standard library's time on lists of token ids, but not every value."""
    if payload is None:
        return None
    try:
        return orjson.dumps(payload, option=_ORJSON_OPTIONS)
    except TypeError:
        return standard_json.dumps(payload, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")


def _decode(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return _decode_leniently(content.decode("utf-8", "replace"))


def _decode_leniently(text: str) -> Any:
    """The standard parser reads NaN and Infinity, which orjson refuses; what it cannot read is returned as text."""
    try:
        return standard_json.loads(text)
    except ValueError:
        return text


def _client() -> _LoopClient:
    loop = asyncio.get_running_loop()
    client = _clients.get(loop)
    if client is None or client.settings is not _settings or client.session.closed:
        retired = [] if client is None else [*client.retired, client.session]
        limit = _settings.max_connections
        client = _LoopClient(
            settings=_settings,
            session=_session(),
            generation_slots=asyncio.Semaphore(limit) if limit else _UNLIMITED,
            retired=retired,
        )
        _clients[loop] = client
    return client


def _timeout(total: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=total, sock_connect=CONNECT_TIMEOUT_S)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0),
        headers={"Content-Type": "application/json"},
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


def _with_token(url: str, headers: dict[str, str] | None) -> dict[str, str] | None:
    if _settings.api_key is None:
        return headers
    origin = _origin(url)
    if origin not in _settings.trusted_origins and origin not in _engine_origins:
        return headers
    return {"Authorization": f"Bearer {_settings.api_key}", **(headers or {})}


def _origin(url: str) -> str:
    """Scheme, host and port: what stands before the third slash."""
    return "/".join(url.split("/", 3)[:3])


def is_port_available(port: int) -> bool:
    """Whether a TCP server could bind `port` on all interfaces at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError):
            return False
        return True


def find_available_port(base: int) -> int:
    """The first free port from `base` upwards. It is not reserved: whoever needs it for certain binds it at once.

    Raises:
        RunError: every port up to 65535 is taken.
    """
    for port in range(base, 65536):
        if is_port_available(port):
            return port
    raise RunError(f"no free TCP port from {base} upwards")


def get_host_info() -> tuple[str, str]:
    """(host name, address under which other nodes reach this one)."""
    return socket.gethostname(), get_current_node_ip()
