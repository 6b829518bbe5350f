"""Carriers: other processes that send requests for this one, each from its own node; and which of them sends which request.

A carrier makes the HTTP exchange of one attempt. Limits, retries, ids, the token and time limits stay with
`slime.utils.http_utils`, which asks here first, and itself sends the requests that no carrier takes.

Invariants:
- A carrier has at most ceil(limit ÷ carriers) requests at a time, where `limit` is that of all requests of this process.
- Carriers take turns. A request never waits for a carrier: if none has room, none takes it.
- A lost carrier gets no more requests, and is reported once. A new one takes the share of a lost one, if there is any.
- A request to this machine (`localhost`, 0.0.0.0) goes only through carriers on the node of this process.
"""

import functools
import ipaddress
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp

logger = logging.getLogger(__name__)


class CarrierLost(Exception):
    """A carrier's process or node is gone, or no longer answers. It is unknown whether the request was sent."""


class ExchangeFailed(aiohttp.ClientConnectionError):
    """A carrier's connection broke, or could not be made; the text is the name and text of the carrier's error."""


class Carrier(Protocol):
    """A process that sends requests.

    Attributes:
        name: for messages.
        is_here: whether it is on the node of this process.
    """

    name: str
    is_here: bool

    async def exchange(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str], parse: bool
    ) -> tuple[int, Any]:
        """(status, body of the answer as bytes). A cancelled call ends its request, and returns when the connection is closed.

        Args:
            parse: a long answer below status 400 may be parsed as by `slime.utils.http_utils.decode_generated`.

        Raises:
            CarrierLost: its process is gone.
            ExchangeFailed: there was no answer, or only a part of it.
            Exception: whatever else a client of this process would raise, for example about an address or a malformed answer.
        """
        ...


@dataclass(frozen=True)
class CarriedAnswer:
    """The answer of a carrier, with the members of a response that `http_utils` uses."""

    status: int
    content: Any

    async def read(self) -> Any:
        """The body, or its parsed value."""
        return self.content

    def release(self) -> None:
        """Do nothing, since the carrier has freed the connection already."""


@dataclass(eq=False)
class _Turn:
    """A carrier, and the number of its requests in flight."""

    carrier: Carrier
    in_flight: int = 0


class Carriers:
    """All carriers of this process. Methods may be called from several event loops."""

    def __init__(self, carriers: Sequence[Carrier]) -> None:
        self._count = len(carriers)
        # The carriers that are not lost; the first one is next.
        self._turns = deque(_Turn(carrier) for carrier in carriers)
        self._changing = threading.Lock()

    def add(self, carrier: Carrier) -> None:
        """Let one more carrier send requests."""
        with self._changing:
            self._turns.append(_Turn(carrier))
            self._count = max(self._count, len(self._turns))

    async def send(
        self,
        limit: int,
        parse: bool,
        method: str,
        url: str,
        body: Callable[[], bytes | None],
        headers: dict[str, str],
    ) -> CarriedAnswer | None:
        """The answer to a request with the body that `body` makes; None if no carrier takes it.

        Args:
            limit: how many requests this process may have in flight; 0: any number.
            parse: see `Carrier.exchange`.

        Raises:
            Exception: as `Carrier.exchange`.
        """
        turn = self._take(limit, _is_of_this_machine("/".join(url.split("/", 3)[:3])))
        if turn is None:
            return None
        try:
            return CarriedAnswer(*await turn.carrier.exchange(method, url, body(), headers, parse))
        except CarrierLost as error:
            self._lose(turn, error)
            raise
        finally:
            with self._changing:
                turn.in_flight -= 1

    def _take(self, limit: int, here: bool) -> _Turn | None:
        """The next carrier that can take one more request, which is counted; carriers that cannot take it miss their turn."""
        share = math.ceil(limit / self._count) if limit and self._count else math.inf
        with self._changing:
            for _ in range(len(self._turns)):
                turn = self._turns[0]
                self._turns.rotate(-1)
                if turn.in_flight < share and (turn.carrier.is_here or not here):
                    turn.in_flight += 1
                    return turn
        return None

    def _lose(self, turn: _Turn, error: CarrierLost) -> None:
        with self._changing:
            if turn not in self._turns:
                return
            self._turns.remove(turn)
            had, left = turn.in_flight, len(self._turns)
        logger.warning(
            "%s is lost (%s): its %d requests in flight go out again from the rollout manager, which sends from now on what "
            "it would have sent; %d of %d are left",
            turn.carrier.name, error, had, left, self._count,
        )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _is_of_this_machine(origin: str) -> bool:
    host = urlsplit(origin).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    # A server that listens on all interfaces may give its address as 0.0.0.0, which also leads to this machine.
    return address.is_loopback or address.is_unspecified
