"""`--use-distributed-post`: actors on every node that send the rollout manager's requests, which `http_carriers` deals to them.

They take two things off the manager: its connections, and the parsing of long answers.

Invariants:
- An actor knows no limits, attempts or deadlines: it makes the exchange that it is told of, and ends it when it is told so.
- A long answer is parsed in the actor that receives it, and the manager gets arrays.
- A node that joins the cluster later gets actors too, which send as soon as they have started.
- Actors end with the manager. One that stops answering, or whose calls fail, is ended, and with it fail all its requests.
- Ray keeps no record of their calls, whose arguments hold the key of the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import threading
import time
from typing import Any

import aiohttp
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.utils.http_carriers import CarrierLost, Carriers, ExchangeFailed
from slime.utils.http_exchange import Exchanges, new_session
from slime.utils.http_utils import THREAD_FROM_BYTES, decode_generated
from slime.utils.ports import allow_many_connections

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0
# How often actors are asked whether they live, and how long one may take to answer. The sum of both bounds how long requests
# wait for an actor that hangs.
_ASK_EVERY_SECONDS = 10.0
_SILENT_SECONDS = 30.0
# The wait for answers is cut into so many short ones. If this process itself is halted for a while, one long wait would be
# over as soon as it goes on, with the answers still unread.
_WAITS = 10
# How long an actor may take to close the connection of a request that is given up.
_CLOSING_SECONDS = 5.0
# Ray's account of why an actor died is cut to so many characters.
_LONGEST_CAUSE = 300
_DID_NOT_START = "%s did not start (%s): the manager goes without it"
# Calls of one actor at a time. The manager has the exact limit; this one, which Ray wants, is never reached.
_AT_A_TIME = 1_000_000


class RequestActor:
    """Makes exchanges."""

    def __init__(self) -> None:
        allow_many_connections()
        self._exchanges: Exchanges | None = None

    def __repr__(self) -> str:
        return "requests"

    async def answer(self) -> None:
        """Say that it lives."""

    async def exchange(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str], parse: bool
    ) -> tuple[int, bytes, bool] | Exception:
        """(status, body of the answer, whether that is a pickle of the parsed body), or the error that `Carrier.exchange` is to
        raise. It is returned because Ray would replace an error that it cannot pickle by another one."""
        if self._exchanges is None:
            self._exchanges = Exchanges(new_session())
        try:
            response = await self._exchanges.request(method, url, data=body, headers=headers)
            try:
                content = await response.read()
            finally:
                response.release()
            if not parse or response.status >= 400 or len(content) < THREAD_FROM_BYTES:
                return response.status, content, False
            # Pickled here, so that Ray sees bytes alone: arrays would stay in its store for as long as a sample has them.
            return response.status, pickle.dumps(await decode_generated(content), protocol=5), True
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return ExchangeFailed(f"{type(error).__name__}: {error}")
        except aiohttp.ClientResponseError as error:
            # The error holds headers and responses, which cannot be pickled: so a bare one takes its place.
            sent = aiohttp.RequestInfo(error.request_info.url, method, {}, error.request_info.real_url)
            return type(error)(sent, (), status=error.status, message=error.message)
        except Exception as error:
            return error


class RequestClient:
    """The manager's side of a `RequestActor`: a `Carrier`."""

    def __init__(self, actor: Any, name: str, is_here: bool) -> None:
        self.actor = actor
        self.name = name
        self.is_here = is_here
        # Why the actor was ended, or will be when actors are asked next; None while it is in use.
        self.ended_for: str | None = None

    async def exchange(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str], parse: bool
    ) -> tuple[int, Any]:
        """See `Carrier.exchange`."""
        try:
            sent = self.actor.exchange.remote(method, url, body, headers, parse)
            try:
                answer = await sent
            except asyncio.CancelledError:
                ray.cancel(sent)
                # The engine must see the connection close before another request takes this one's place.
                with contextlib.suppress(TimeoutError, RayError):
                    await asyncio.wait_for(sent, _CLOSING_SECONDS)
                raise
        except RayTaskError as error:
            # The actor lives. Whether it has sent the request is unknown, so this counts as an attempt that failed.
            raise ExchangeFailed(_cause(error)) from error
        except RayError as error:
            # The actor may still live behind a broken network, and engines would go on with requests that others send again.
            self.ended_for = self.ended_for or _cause(error)
            raise CarrierLost(self.ended_for) from error
        if isinstance(answer, Exception):
            raise answer
        status, content, is_pickle = answer
        return status, pickle.loads(content) if is_pickle else content

    def end(self, why: str) -> None:
        """End the actor; what it still has is lost."""
        self.ended_for = self.ended_for or why
        ray.kill(self.actor)


class RequestActors:
    """`on_each_node` actors on every node that is alive. They start at once, and are asked from then on whether they live."""

    def __init__(self, on_each_node: int) -> None:
        self._on_each_node = on_each_node
        # Nodes that have got their actors, which may have ended since.
        self._nodes: set[str] = set()
        # Actors that start: the answer that shows that one has started → the actor, and until when that answer may come.
        self._starting: dict[ray.ObjectRef, tuple[RequestClient, float]] = {}
        self._carriers = Carriers([])
        self._clients = self._begin()
        self._ended = threading.Event()

    def _begin(self) -> list[RequestClient]:
        """Actors on every node that has none."""
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in self._nodes]
        if not nodes:
            return []
        here = ray.get_runtime_context().get_node_id()
        # They reserve no share of a processor, so that they also start on a node whose processors are all reserved by others.
        options = {"num_cpus": 0, "num_gpus": 0, "max_concurrency": _AT_A_TIME, "enable_task_events": False}
        remote_class = ray.remote(**options)(RequestActor)
        clients = []
        for node in nodes:
            self._nodes.add(node["NodeID"])
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            for number in range(self._on_each_node):
                actor = remote_class.options(scheduling_strategy=place).remote()
                name = f"client {number} of --use-distributed-post on node {node['NodeManagerAddress']}"
                clients.append(RequestClient(actor, name, node["NodeID"] == here))
        return clients

    def wait_ready(self) -> Carriers:
        """The actors that have started. The manager goes without the others, and a warning tells which."""
        started, others = self._ask(_START_SECONDS)
        for client in others:
            logger.warning(_DID_NOT_START, client.name, client.ended_for)
        logger.info("%d client processes send requests (--use-distributed-post)", len(started))
        self._carriers = Carriers(started)
        threading.Thread(target=self._watch, name="slime-request-actors", daemon=True).start()
        return self._carriers

    def end(self) -> None:
        """End them all."""
        self._ended.set()
        for client in [*self._clients, *(client for client, _ in list(self._starting.values()))]:
            # If Ray cannot end it now, it ends with the manager.
            with contextlib.suppress(RayError):
                client.end("the run ends")

    def _watch(self) -> None:
        while self._clients and not self._ended.wait(_ASK_EVERY_SECONDS):
            # Ray may be unable to do this now, say while its head restarts. Then the next round does it.
            with contextlib.suppress(RayError):
                self._ask(_SILENT_SECONDS)
            with contextlib.suppress(RayError):
                self._welcome()

    def _welcome(self) -> None:
        """Start actors on nodes that have joined, and take those into use that have started since."""
        until = time.monotonic() + _START_SECONDS
        self._starting |= {client.actor.answer.remote(): (client, until) for client in self._begin()}
        if not self._starting:
            return
        answered, _ = ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)
        for ref, (client, until) in list(self._starting.items()):
            if ref not in answered and time.monotonic() < until:
                continue
            del self._starting[ref]
            why = _problem(ref) if ref in answered else f"it did not answer for {_START_SECONDS:g} s"
            if self._ended.is_set():
                client.end("the run ends")
            elif why is None:
                self._clients.append(client)
                self._carriers.add(client)
                logger.info("%s sends requests as well", client.name)
            else:
                client.end(why)
                logger.warning(_DID_NOT_START, client.name, client.ended_for)

    def _ask(self, seconds: float) -> tuple[list[RequestClient], list[RequestClient]]:
        """(Actors that say within `seconds` that they live, the others). The others are ended, and not asked again."""
        asked = {client.actor.answer.remote(): client for client in self._clients}
        silent = list(asked)
        for _ in range(_WAITS):
            _, silent = ray.wait(silent, num_returns=len(silent), timeout=seconds / _WAITS)
            if not silent:
                break
        if not self._ended.is_set():
            living = []
            for ref, client in asked.items():
                why = f"it did not answer for {seconds:g} s" if ref in silent else client.ended_for or _problem(ref)
                if why is None:
                    living.append(client)
                else:
                    client.end(why)
            self._clients = living
        return self._clients, [client for client in asked.values() if client not in self._clients]


def _problem(answered: ray.ObjectRef) -> str | None:
    """Why an actor could not answer; None if it did."""
    try:
        ray.get(answered, timeout=_CLOSING_SECONDS)
    except RayError as error:
        return _cause(error)
    return None


def _cause(error: RayError) -> str:
    return " ".join(str(error).split())[:_LONGEST_CAUSE]
