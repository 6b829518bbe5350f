"""The HTTP client of a process: one aiohttp session, thin on purpose.

Invariants:
- At most `max_connections` requests of `post` are in flight; there is no smaller hidden pool. Control requests
  (`get`, `post_control`) are not counted: an abort must pass while every generation slot is busy.
- Proxies of the environment are ignored.
- Connection errors, answers that are not HTTP, 429, 5xx, and 408 of our router, in whose queue the request stood for too long,
  are tried again after one second, up to the limit; but a server of others that earlier requests have not reached for as long
  is tried once. Every other status from 400 on fails at once with the body of the answer. So does a request that exceeds its
  total time, or whose URL, or that of a redirect, is none. Nothing else retries: neither the router nor the caller.
  All attempts bear one `X-Request-Id`.
- If dead engines and routers are replaced (`set_engine_supply`), a generation waits while there is none, and an attempt that
  failed because one died does not count. A request that outlives several is suspected of ending them, and fails.
- An answer that is parsed in a thread (`post_generate`) is parsed after its slot and its connection are free again.
- The bearer token travels only to the router and the engines of this run, and appears in no message. A request to them that has
  no `ROUTING_KEY` gets one of its own: a router hashes the token instead, which all share, and would ask one engine alone.
- Other processes may send for this one (`send_through`). Each makes the exchange of one attempt, for generation that is not
  streamed. All of the above still holds, except that such a process parses the answer itself.
"""

import asyncio
import contextlib
import contextvars
import functools
import json as standard_json
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, Protocol

import aiohttp
import numpy as np
import orjson

from slime.utils import env
from slime.utils.async_utils import Slots, time_limit, until_true
from slime.utils.engine_protocol import is_multiplied, num_prompts
from slime.utils.errors import RunError
from slime.utils.http_carriers import CarriedAnswer, CarrierLost, Carriers, ExchangeFailed
from slime.utils.http_exchange import Exchanges, Outages, Response, new_session
from slime.utils.misc import get_host_info as get_host_info
from slime.utils.misc import unique_hex
from slime.utils.ports import find_available_port as find_available_port
from slime.utils.ports import host_for_url
from slime.utils.ports import is_port_available as is_port_available

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 1.0
# The header by which a router with `consistent_hashing` chooses an engine.
ROUTING_KEY = "X-SMG-Routing-Key"
# A request fails when so many engines died under it; fewer may have died of other requests.
SURVIVED_ENGINES = 5
_SUPPLY_POLL_SECONDS = 0.2
# A failure of the same address and status is logged as a warning again after this time.
_SAME_FAILURE_SECONDS = 30.0
_BODY_CHARACTERS_IN_MESSAGES = 2000
# Below this a thread costs more than parsing: 400 tokens, a tenth of a millisecond.
THREAD_FROM_BYTES = 16 * 2**10
_ORJSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


class HttpError(RunError):
    """A request failed for good. `status` is None when no answer came, `body` is the text of the answer."""

    def __init__(self, message: str, *, url: str = "", status: int | None = None, body: str = "") -> None:
        super().__init__(message)
        self.url = url
        self.status = status
        self.body = body


class _FailedForNow(HttpError):
    """Ends an attempt whose answer is a failure that is retried; it also tells the context manager of the address."""


@dataclass(frozen=True)
class HttpSettings:
    """The settings that `init_http_client` takes from the flags. Times in seconds; 0 connections means no limit."""

    max_connections: int = 0
    request_timeout: float = 14400.0
    control_timeout: float = 300.0
    max_retries: int = 60
    api_key: str | None = field(default=None, repr=False)
    trusted_origins: frozenset[str] = frozenset()


class EngineSupply(Protocol):
    """The owner of the engines behind a router, as requests see it. Methods may be called from any thread."""

    def is_serving(self) -> bool:
        """Whether a request would find an engine."""
        ...

    def has_router(self) -> bool:
        """Whether the router is there, and has its engines."""
        ...

    def doubt_all(self, cause: str) -> None:
        """Check all engines, because a request failed with `cause`."""
        ...

    def is_decided(self) -> bool:
        """Whether no engine is in doubt: each one, and the router, is known to live or to be dead."""
        ...

    def deaths(self) -> int:
        """How many engines, and routers in front of them, have died so far."""
        ...


@dataclass
class _LoopClient:
    """The connections of one event loop. `settings` tells whether they are out of date.

    `retired` holds replaced sessions, which may still carry requests, until everything is closed.
    """

    settings: HttpSettings
    session: aiohttp.ClientSession
    exchanges: Exchanges
    # It bounds generation alone, because a control request, above all an abort, must not queue behind what it is to end.
    generation_slots: contextlib.AbstractAsyncContextManager[Any]
    retired: list[aiohttp.ClientSession] = field(default_factory=list)


_UNLIMITED = contextlib.nullcontext()
# A context manager that gives the URL of an engine for one request, and ends with that request.
Address = contextlib.AbstractAsyncContextManager[str]

_settings = HttpSettings()
# Parsing releases the interpreter's lock; more than a few threads would help only if cores are idle.
_decoders = ThreadPoolExecutor(max_workers=4, thread_name_prefix="slime-decode")
_engine_origins: set[str] = set()
# The set into which the call that this code works for notes the ids of its requests.
_noted_ids: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("noted_ids", default=None)
_supplies: dict[str, EngineSupply] = {}
_carriers: Carriers | None = None
_told_until: dict[tuple[str, int | None], float] = {}
outages = Outages()
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
    models = getattr(args, "sglang_model_routers", None) or {}
    routers = [*models.values(), (getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None))]
    settings = HttpSettings(
        # A user's function may ask every other model as often.
        max_connections=generation_concurrency(args) * max(1, len(models)),
        request_timeout=args.http_request_timeout,
        control_timeout=args.http_control_timeout,
        max_retries=args.http_max_retries,
        api_key=getattr(args, "router_api_key", None),
        trusted_origins=frozenset(f"http://{host_for_url(ip)}:{port}" for ip, port in routers if ip),
    )
    # The same settings stay the same object, which sessions are compared by.
    if settings != _settings:
        _settings = settings


def trust_engine_urls(urls: Iterable[str], listed_by: str | None = None) -> None:
    """Send the bearer token to these servers as well: the engines that our router lists.

    Args:
        listed_by: the URL of the router that lists them. If it is not ours nothing changes; None: it is ours.
    """
    if listed_by is None or _is_trusted(listed_by):
        _engine_origins.update(origin_of(url) for url in urls)


def set_engine_supply(router_url: str, supply: EngineSupply | None) -> None:
    """Let requests to this router ask `supply` about the engines behind it; with None they no longer do."""
    if supply is None:
        _supplies.pop(origin_of(router_url), None)
    else:
        _supplies[origin_of(router_url)] = supply


def send_through(carriers: Carriers | None) -> None:
    """Have `carriers` make the exchanges of generation from now on; None: this process makes them itself."""
    global _carriers
    _carriers = carriers


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
        HttpError: no success within the attempts, a status of 400 and above that is not retried, too late, or `url` is none.
    """
    content, ids = payload if json is None else json, _noted_ids.get()
    asks_engines = url.endswith("/generate") and _is_trusted(url) and isinstance(content, dict)
    with _Body(content, ids if asks_engines and "rid" not in content else None) as body:
        return body.known_in(await _generation(url, body, headers=headers, max_retries=max_retries, parse=False), url)


async def post_generate(
    url: str,
    payload: dict[str, Any],
    headers: dict[str, str] | None = None,
    *,
    request_ids: set[str] | None = None,
    engine: Callable[[], Address] | None = None,
) -> Any:
    """As `post`, for an engine's answer. A long answer is parsed off the event loop, its token log-probs into `TokenLogProbs`.

    The log-probs of a short one are lists of entries; `TokenLogProbs.of` takes both.

    Args:
        url: the router's.
        request_ids: a set that holds the ids (`rid`) by which engines know this request, until it is answered.
        engine: gives a context manager for each attempt, with the URL of an engine behind the router to which it goes instead.
            It sees an exception if the attempt broke, came late, or was answered by 429 or 5xx.
    """
    with _Body(payload, request_ids) as body:
        content = await _generation(url, body, headers=headers, receive=methodcaller("read"), engine=engine, parse=True)
    # The process that sent the request may have parsed the answer.
    return body.known_in(await decode_generated(content) if isinstance(content, bytes) else content, url)


async def decode_generated(content: bytes) -> Any:
    """The answer of an engine; one of `THREAD_FROM_BYTES` or more is parsed in a thread, as `post_generate` says."""
    # Arrow takes a moment to load, and only processes that ask engines need it.
    from slime.utils.engine_answers import decode_engine_answer

    if len(content) < THREAD_FROM_BYTES:
        return _decode(content)
    return await asyncio.get_running_loop().run_in_executor(_decoders, decode_engine_answer, content, _decode)


async def post_generate_stream(
    url: str,
    payload: dict[str, Any],
    on_answer: Callable[[dict[str, Any]], None],
    headers: dict[str, str] | None = None,
    *,
    request_ids: set[str] | None = None,
    engine: Callable[[], Address] | None = None,
) -> None:
    """As `post_generate`, for a request with `stream`: `on_answer` gets the answer so far, again and again as it grows.

    Answers are cumulative, so if several have arrived only the last one is read. After the first one the request is not sent
    again: if its connection breaks, the call returns with what came before. A stream that ends before is a failed attempt. A
    status that the engine tells in the stream, as the reason of its end, counts as one that it answers with.

    Raises:
        HttpError: as `post`; or the engine tells of an error in the stream.
    """
    with _Body(payload, request_ids) as body:
        receive = functools.partial(_receive_events, lambda answer: on_answer(body.known_in(answer, url)))
        await _generation(url, body, headers=headers, receive=receive, engine=engine, parse=None)


async def _receive_events(on_answer: Callable[[dict[str, Any]], None], response: Response) -> None:
    """Read server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), each with one line of data."""
    begin, rest, answered = b"", bytearray(), False
    try:
        async for piece in response.content.iter_any():
            begin = begin or piece[:_BODY_CHARACTERS_IN_MESSAGES]
            # A long event comes in thousands of pieces: what is there of it is not copied for each.
            rest += piece
            *lines, rest = rest.split(b"\n") if b"\n" in piece else (rest,)
            events = [event for line in lines if line.startswith(b"data:") and (event := line[5:].strip()) != b"[DONE]"]
            if not events:
                continue
            answer = _decode(events[-1])
            if not isinstance(answer, dict) or "meta_info" not in answer:
                text = events[-1].decode("utf-8", "replace")[:_BODY_CHARACTERS_IN_MESSAGES]
                raise HttpError(f"POST {response.url} streamed {text}", url=str(response.url), body=text)
            told = answer["meta_info"].get("finish_reason")
            if isinstance(told, dict) and told.get("status_code") is not None:
                raise _status_error("POST", str(response.url), told["status_code"], str(told.get("message")).encode())
            answered = True
            on_answer(answer)
        if not answered:
            raise aiohttp.ClientPayloadError(f"the stream brought no answer, but {begin.decode(errors='replace')!r}")
    except (aiohttp.ClientError, _FailedForNow) as error:
        if not answered:
            raise
        logger.warning("POST %s: the stream broke (%s: %s)", response.url, type(error).__name__, error)


@contextlib.contextmanager
def noting_request_ids(ids: set[str]) -> Iterator[None]:
    """In the block, requests that `post` sends to engines of this run in their own protocol get ids, which `ids` holds until
    they are answered, as in `post_generate`. Tasks that start in the block inherit this."""
    token = _noted_ids.set(ids)
    try:
        yield
    finally:
        _noted_ids.reset(token)


def noted_request_ids() -> set[str] | None:
    """The set that `noting_request_ids` fills here, for requests made elsewhere on behalf of this code; None outside such a
    block."""
    return _noted_ids.get()


class _Body:
    """Makes the body of each attempt, with an id that `ids`, if it is given, holds until the end of the block. Each attempt has
    its own id, since an engine refuses one on which it still works, as it may after a connection broke."""

    def __init__(self, payload: Any, ids: set[str] | None = None) -> None:
        self._payload = payload
        self._own: set[str] = set()
        self._ids = None if ids is None or is_multiplied(payload) else ids
        self._plain = _encode(payload) if self._ids is None else None

    def __enter__(self) -> "_Body":
        return self

    def __call__(self) -> bytes | None:
        if self._ids is None:
            return self._plain
        request_id, prompts = unique_hex(), num_prompts(self._payload)
        # SGLang numbers the prompts of a list behind the id, and knows none by the id alone. The router takes no list of ids.
        names = {request_id} if prompts is None else {f"{request_id}_{place}" for place in range(prompts)}
        self._own |= names
        # Methods, not operators: the set may be of a class that does more in these methods than hold ids.
        self._ids.update(names)
        return _encode({**self._payload, "rid": request_id})

    def __exit__(self, *error: object) -> None:
        if self._ids is not None:
            self._ids.difference_update(self._own)

    def known_in(self, answer: Any, url: str) -> Any:
        """`answer`. Warns, once for each `url`, if the engine knows the request by an id that was not sent."""
        meta_info = answer.get("meta_info") if isinstance(answer, dict) else None
        known = meta_info.get("id") if isinstance(meta_info, dict) else None
        if self._own and known is not None and known not in self._own:
            _warn_of_lost_ids(url)
        return answer


@functools.cache
def _warn_of_lost_ids(url: str) -> None:
    logger.warning(
        "%s: engines know requests by other ids than they were sent with: a router on the way drops their field `rid`. Single "
        "requests cannot be aborted so: those of an agent that is gone, or of a rollout beside which another or an evaluation "
        "is under way, go on to their ends. Give --sglang-router-ip a router that hands `rid` on, or leave it out", url,
    )  # fmt: skip


async def post_control(
    url: str, payload: Any = None, max_retries: int | None = None, headers: dict[str, str] | None = None
) -> Any:
    """As `post`, for control requests, which do not count for the limit of generation, within `--http-control-timeout`."""
    client = _client()
    limit = client.settings.control_timeout
    return await _send(client.exchanges, _UNLIMITED, limit, "POST", url, _Body(payload), headers, max_retries)


async def get(url: str, max_retries: int | None = None) -> Any:
    """GET within `--http-control-timeout`; each attempt waits for a router if it has died. Otherwise as `post`."""
    client, supply = _client(), _supplies.get(origin_of(url))
    limit, ready = client.settings.control_timeout, supply and supply.has_router
    return await _send(client.exchanges, _UNLIMITED, limit, "GET", url, _Body(None), None, max_retries, ready=ready)


def _generation(url: str, body: "_Body", *, parse: bool | None, **options: Any) -> Awaitable[Any]:
    """`_send` within the limits of generation, to a router whose engines may be replaced.

    `parse`: whether carriers may parse the answer; None: this process sends the request itself.
    """
    client, supply = _client(), _supplies.get(origin_of(url))
    options |= {"supply": supply, "ready": supply and supply.is_serving}
    slots, limit = client.generation_slots, client.settings.request_timeout
    if _carriers is not None and parse is not None:
        options["carry"] = functools.partial(_carriers.send, client.settings.max_connections, parse)
    return _send(client.exchanges, slots, limit, "POST", url, body, **options)


async def _send(
    exchanges: Exchanges,
    slots: contextlib.AbstractAsyncContextManager[Any],
    limit: float,
    method: str,
    url: str,
    body: "_Body",
    headers: dict[str, str] | None,
    max_retries: int | None = None,
    *,
    receive: Callable[[Response], Awaitable[Any]] | None = None,
    supply: EngineSupply | None = None,
    ready: Callable[[], bool] | None = None,
    engine: Callable[[], Address] | None = None,
    carry: Callable[..., Awaitable[CarriedAnswer | None]] | None = None,
) -> Any:
    """The result of `receive` for the answer, which by default is parsed. Each attempt first waits for `ready`, and then may
    take `limit` seconds."""
    request_id, trusted, headers = unique_hex(), _is_trusted(url), headers or {}
    ours = {"Authorization": f"Bearer {_settings.api_key}"} if trusted and _settings.api_key is not None else {}
    if trusted and ROUTING_KEY.lower() not in map(str.lower, headers):
        ours[ROUTING_KEY] = request_id
    headers = {"X-Request-Id": request_id, **ours, **headers}
    attempts = max(1, _settings.max_retries if max_retries is None else max_retries)
    if not trusted and outages.seconds(origin_of(url)) > attempts * RETRY_DELAY_S:
        attempts = 1
    attempt, survived = 1, 0
    while True:
        address = url
        if ready is not None:
            await _wait_until(ready, url, _settings.request_timeout)
        try:
            async with slots:
                # Counted only now: engines that died while the request waited for its slot did not die of it.
                deaths = 0 if supply is None else supply.deaths()
                async with contextlib.nullcontext(url) if engine is None else engine() as address:
                    with time_limit(limit):
                        response = None if carry is None else await carry(method, address, body, headers)
                        if response is None:
                            response = await exchanges.request(method, address, data=body(), headers=headers)
                        outages.answered(origin_of(address))
                        try:
                            if response.status < 400:
                                return await receive(response) if receive else _decode(await response.read())
                            failure = _status_error(method, address, response.status, await response.read())
                        except HttpError as error:
                            # A stream has told of a failure.
                            failure = error
                        finally:
                            # Unlike the end of an `async with`, this does not wait after the answer was read to its end.
                            response.release()
                    if isinstance(failure, _FailedForNow):
                        raise failure
            raise failure
        except _FailedForNow:
            pass
        except CarrierLost as error:
            if attempts == 1 and not _is_trusted(address):
                raise HttpError(f"{method} {address} failed: {error}", url=address) from error
            # A generation has no effect but its answer, so it may be made twice. This process sends it now, because what ended
            # one carrier should not end the next.
            carry = None
            continue
        except aiohttp.ClientError as error:
            cause = error if isinstance(error, ExchangeFailed) else f"{type(error).__name__}: {error}"
            failure = HttpError(f"{method} {address} failed: {cause}", url=address)
            if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
                raise failure from error
            outages.failed(origin_of(address))
        except TimeoutError as error:
            raise HttpError(
                f"{method} {address} did not answer within {limit:g} s "
                "(--http-request-timeout for generation, --http-control-timeout for control requests)",
                url=address,
            ) from error
        if supply is not None:
            supply.doubt_all(str(failure))
        if attempt < attempts or supply is not None:
            level = logging.WARNING if attempt == 1 and is_news(address, failure.status) else logging.DEBUG
            logger.log(level, "%s; attempt %d of request %s", failure, attempt, request_id)
            await asyncio.sleep(RETRY_DELAY_S)
        if supply is not None:
            await _wait_until(supply.is_decided, url, limit)
            if supply.deaths() != deaths:
                survived += 1
                if survived == SURVIVED_ENGINES:
                    raise HttpError(
                        f"{failure} (request {request_id} was under way when engines or routers died, {survived} times: it "
                        "may be what they die of)", url=address, status=failure.status, body=failure.body,
                    )  # fmt: skip
                continue
        if attempt == attempts:
            tried = f"{failure} ({attempts} attempts)" if attempts > 1 else str(failure)
            raise HttpError(tried, url=address, status=failure.status, body=failure.body)
        attempt += 1


async def _wait_until(condition: Callable[[], bool], url: str, limit: float) -> None:
    """Wait until `condition`, about a router or the engines behind it, is true; HttpError after `limit` seconds."""
    try:
        with time_limit(limit):
            await until_true(condition, _SUPPLY_POLL_SECONDS)
    except TimeoutError:
        raise HttpError(f"{url}: no engine served requests for {limit:g} s (--http-request-timeout)", url=url) from None


def is_news(url: str, status: int | None) -> bool:
    """Whether no failure like this one was reported lately. When an engine fails, all its requests in flight do."""
    now, key = time.monotonic(), (url, status)
    if now < _told_until.get(key, 0.0):
        return False
    _told_until[key] = now + _SAME_FAILURE_SECONDS
    return True


def _status_error(method: str, url: str, status: int, content: bytes) -> HttpError:
    passes = status == 429 or status >= 500 or (status == 408 and _is_trusted(url))
    body, kind = content.decode("utf-8", "replace"), _FailedForNow if passes else HttpError
    if not env.debug_enabled():
        body = body[:_BODY_CHARACTERS_IN_MESSAGES]
    return kind(f"{method} {url} answered {status}: {body}", url=url, status=status, body=body)


def _encode(payload: Any) -> bytes | None:
    """JSON bytes. orjson takes a twentieth of the standard library's time on lists of token ids, but not every value."""
    if payload is None:
        return None
    try:
        return orjson.dumps(payload, option=_ORJSON_OPTIONS)
    except TypeError:
        return standard_json.dumps(payload, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")


def _decode(content: bytes) -> Any:
    """The parsed JSON. The standard parser reads NaN and Infinity, which orjson refuses; what neither reads stays text."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        text = content.decode("utf-8", "replace")
    try:
        return standard_json.loads(text)
    except ValueError:
        return text


def _client() -> _LoopClient:
    loop = asyncio.get_running_loop()
    client = _clients.get(loop)
    if client is None or client.settings is not _settings or client.session.closed:
        retired = [] if client is None else [*client.retired, client.session]
        limit, session = _settings.max_connections, new_session()
        client = _LoopClient(
            settings=_settings,
            session=session,
            exchanges=Exchanges(session),
            generation_slots=Slots(limit) if limit else _UNLIMITED,
            retired=retired,
        )
        _clients[loop] = client
    return client


def _is_trusted(url: str) -> bool:
    origin = origin_of(url)
    return origin in _settings.trusted_origins or origin in _engine_origins


@functools.lru_cache(maxsize=1024)
def origin_of(url: str) -> str:
    """Scheme, host and port: what stands before the third slash."""
    return "/".join(url.split("/", 3)[:3])
