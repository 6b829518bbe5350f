"""The router in front of the engines: started as our child, or one that already runs.

The router is the `sglang_router` package. It is ready when its health endpoint answers; a worker is ready when the
router lists it as healthy. Both are polled with a deadline, and the process is watched meanwhile.

With `--use-fault-tolerance` a router of ours that dies or hangs comes back: another process starts at the same address and is
told of the same engines. A caller that was telling it of engines waits meanwhile, and tells the new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from slime.serving.fleet import why_no_router_follows
from slime.serving.router_process import environment_of_router
from slime.utils.child_process import ChildProcess
from slime.utils.errors import RunError
from slime.utils.filesystem import make_scratch_directory, remove_scratch_directory
from slime.utils.misc import SharedAnswer
from slime.utils.ports import PortReservation, engine_url, host_for_url

logger = logging.getLogger(__name__)

# A router has to be asked again and again: it tells nobody that it is ready, or that an engine has come that a person started.
_POLL_SECONDS = 0.05
_ARRIVAL_POLL_SECONDS = 0.5
REQUEST_SECONDS = 10.0
# How many engines a router is told of at the same time.
_TOLD_AT_A_TIME = 64
_SHUTDOWN_SECONDS = 3.0
_START_SECONDS = 60.0
# How often we look whether our router has ended.
_LOOK_SECONDS = 0.2
# How long a router waits for what keeps it from coming back, which a person may put right, and how often it looks.
_OBSTACLE_SECONDS = 300.0
_OBSTACLE_POLL_SECONDS = 1.0
# How long after its last answer a router is asked whether it answers, and how often in a row it may be late: beside much other
# work an answer takes long.
_WATCH_SECONDS = 10.0
_WATCH_TIMEOUT_SECONDS = 30.0
_LATE_ANSWERS = 4
_ARGUMENTS_FILE = "arguments.json"


@dataclasses.dataclass(frozen=True)
class Worker:
    """An engine as a router is told of it.

    `role`: the worker type of its group; `bootstrap_port`: where those that decode meet one that prefills.
    """

    url: str
    role: str = "regular"
    bootstrap_port: int | None = None


class _Obstacle(RunError):
    """Something keeps any process from starting, such as a full disk."""


class EnginesLacking(RunError):
    """A router lacks engines that it was told of. `reasons`: why, by URL."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        urls_of: dict[str, list[str]] = {}
        for url, reason in self.reasons.items():
            urls_of.setdefault(reason, []).append(url)
        super().__init__("; ".join(f"{reason}: {', '.join(sorted(urls))}" for reason, urls in urls_of.items()))

    def of(self, url: str) -> EnginesLacking:
        """The error of one of the engines."""
        return EnginesLacking({url: self.reasons[url]})


@dataclasses.dataclass(repr=False)
class RouterHandle:
    """A router at `ip:port`. Its `repr` shows none of its fields, some of which are keys.

    Attributes:
        process: None when somebody else has started the router.
        found: engines of this run that it served already; they stay when the run leaves it.
        comes_back: whether another router takes its place when it dies; to be set before `wait_ready`.
    """

    ip: str
    port: int
    api_key: str | None
    process: ChildProcess | None
    found: frozenset[str] = frozenset()
    comes_back: bool = False
    _reservations: tuple[PortReservation, ...] = ()
    # The directory of the arguments of the next start, and these arguments.
    _scratch: Path | None = None
    _fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    # The engines that it is to have, by URL; those of them that it lacks since it came back; and the ids of registrations.
    _told: dict[str, Worker] = dataclasses.field(default_factory=dict)
    _missing: frozenset[str] = frozenset()
    _registered: dict[str, str | None] = dataclasses.field(default_factory=dict)
    _worker_api_key: str | None = None
    # The thread that watches it, and how often in a row it did not answer.
    _guard: threading.Thread | None = None
    _late: int = 0
    _deaths: list[float] = dataclasses.field(default_factory=list)
    # Why no other takes its place any more; None while one would.
    _gave_up: str | None = None
    # Not set between its death and the start of another.
    _is_back: threading.Event = dataclasses.field(default_factory=threading.Event)
    _ending: threading.Event = dataclasses.field(default_factory=threading.Event)
    # Held while a process starts; none starts after `shutdown`.
    _changing: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    # When many engines die at once, as many threads want to know which ones it lists.
    _listing: SharedAnswer = dataclasses.field(default_factory=SharedAnswer)

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash."""
        return f"http://{host_for_url(self.ip)}:{self.port}"

    def wait_ready(self, timeout: float = _START_SECONDS) -> None:
        """Return when the router answers.

        Raises:
            RunError: our router ended or did not answer in time; holds the last lines of its log.
        """
        deadline = time.monotonic() + timeout
        try:
            while not self._answers(deadline):
                state = "" if self.process is None else f": {self.process.describe_end()}"
                if self.process is not None and self.process.poll() is not None:
                    raise RunError(f"the router failed to start{state}")
                if time.monotonic() > deadline:
                    raise RunError(f"the router {self.url} did not answer within {timeout:g} s{state}")
                time.sleep(_POLL_SECONDS)
        finally:
            self._remove_arguments()
        if self.process is not None and self._guard is None:
            self._is_back.set()
            self._guard = threading.Thread(target=self._watch_or_tell, daemon=True, name="router watch")
            self._guard.start()

    def trouble(self) -> str | None:
        """Why no router will serve any more: ours has ended, or lives and does not answer, and none takes its place. Returns at
        once; None while all is well."""
        return self._gave_up or (None if self.process is None or self.comes_back else self._fault())

    def serves(self) -> bool:
        """Whether requests find a router with all its engines, or at least one of each role. True for a router that does not
        come back: nobody has to wait for it."""
        if not self.comes_back:
            return True
        if not self._is_back.is_set() or self.process.poll() is not None:
            return False
        if not (missing := self._missing):
            return True
        told = list(self._told.values())
        return {worker.role for worker in told if worker.url not in missing} >= {worker.role for worker in told}

    @property
    def deaths(self) -> int:
        """How often it has died so far. One that `serves` again has counted its last death."""
        return len(self._deaths)

    def _fault(self) -> str | None:
        if self.process.poll() is not None:
            return f"the router died: {self.process.describe_end()}"
        if self._late >= _LATE_ANSWERS:
            late = f"{_LATE_ANSWERS} times in a row, with up to {_WATCH_TIMEOUT_SECONDS:g} s for each"
            return f"the router {self.url} lives and did not answer {late}; {self.process.describe_log()}"
        return None

    def workers(self, deadline: float | None = None) -> list[dict[str, Any]]:
        """The registered engines, each with `id`, `url` and `is_healthy`; asked for until `deadline` at most.

        A router may list the data-parallel groups of an engine instead of the engine. Then the engine is healthy when all of
        them are, and its `id` is that of its registration: by the id of a group the router takes nothing out.
        """
        engines: dict[str, dict[str, Any]] = {}
        with _told_in(self._call("GET", "/workers", None, deadline)) as listed:
            for worker in listed["workers"]:
                url = engine_url(worker["url"])
                if url != worker["url"]:
                    worker = {**worker, "url": url, "id": self._registered.get(url) or worker["id"]}
                others = engines.get(url)
                engines[url] = worker if others is None or not worker["is_healthy"] else others
        return list(engines.values())

    def _listed(self, deadline: float) -> dict[str, dict[str, Any]]:
        """`workers` by URL, as of now; raises as it."""
        try:
            ask = lambda: {worker["url"]: worker for worker in self.workers(deadline)}  # noqa: E731
            return self._listing.get(ask, _seconds_left(deadline))
        except TimeoutError:
            raise RunError(f"the router {self.url} did not list its engines in time") from None

    def add_workers(self, workers: Sequence[Worker], timeout: float = 60.0, worker_api_key: str | None = None) -> None:
        """Register engines that it does not list, and wait until the router calls every one of them healthy.

        `worker_api_key` is the key that the router shows to the engines; None: its own.

        Raises:
            EnginesLacking: some were refused or did not become healthy in time; the router has the others.
            RunError: the router itself failed.
        """
        self._worker_api_key = worker_api_key or self.api_key
        self._told |= {worker.url: worker for worker in workers}
        self._although_it_dies(lambda: self._register(workers, timeout))

    def _register(self, workers: Sequence[Worker], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        listed = self._listed(deadline)
        new = [worker for worker in workers if worker.url not in listed]
        reasons = dict(zip((worker.url for worker in new), self._tell(new, deadline), strict=True))
        reasons = {url: reason for url, reason in reasons.items() if reason is not None}
        accepted = {worker.url for worker in workers} - reasons.keys()
        late = self._left_at_last(
            # An engine may be taken out meanwhile, and is not waited for then.
            lambda: (
                (accepted & self._told.keys())
                - {url for url, worker in self._listed(deadline).items() if worker["is_healthy"]}
            ),
            deadline,
        )
        reasons |= dict.fromkeys(late, f"router {self.url}: workers not healthy after {timeout:g} s")
        if reasons:
            raise EnginesLacking(reasons)

    def _tell(self, workers: Sequence[Worker], deadline: float) -> list[str | None]:
        """Register engines, many at a time, since a router may be slow to answer. Returns what it answered where it refused."""

        def tell(worker: Worker) -> str | None:
            told = {
                "url": worker.url,
                "worker_type": worker.role,
                "bootstrap_port": worker.bootstrap_port,
                "api_key": self._worker_api_key,
            }
            told = {name: value for name, value in told.items() if value}
            try:
                if time.monotonic() > deadline:
                    # Many that wait for their turn would each have a moment more.
                    raise RunError(f"router {self.url}: no time was left to tell it of workers")
                with _told_in(self._call("POST", "/workers", told, deadline)) as accepted:
                    self._registered[worker.url] = accepted.get("worker_id")
            except RunError as error:
                return str(error)
            return None

        with ThreadPoolExecutor(max(1, min(len(workers), _TOLD_AT_A_TIME)), "telling a router") as threads:
            return list(threads.map(tell, workers))

    def wait_for_workers(self, timeout: float) -> int:
        """Return when the router calls engines healthy that somebody else has registered, and how many by then.

        Raises:
            RunError: there is none after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not (healthy := sum(worker["is_healthy"] for worker in self.workers(deadline))):
            if time.monotonic() > deadline:
                raise RunError(
                    f"no engine has registered at the router {self.url} within {timeout:g} s (--engine-start-timeout)"
                )
            time.sleep(min(_ARRIVAL_POLL_SECONDS, _seconds_left(deadline)))
        return healthy

    def other_workers(self, ours: Sequence[str]) -> dict[str, str]:
        """The engines that it sends requests to and that are not `ours`, by URL; each with the id by which it is taken out."""
        listed = self._although_it_dies(self.workers)
        return {worker["url"]: worker["id"] for worker in listed if worker["url"] not in ours}

    def remove_workers(self, urls: list[str], timeout: float = 60.0) -> None:
        """Take engines out of the router and wait until it has forgotten them; unknown ones are ignored.

        Raises:
            RunError: the router still lists one after `timeout` seconds.
        """
        for url in urls:
            self._told.pop(url, None)
        self._although_it_dies(lambda: self._take_out(urls, timeout))

    def _take_out(self, urls: list[str], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        listed = self._listed(deadline)
        for url in [url for url in urls if url in listed]:
            self._call("DELETE", f"/workers/{listed[url]['id']}", None, deadline)
        left = self._left_at_last(lambda: set(urls) & self._listed(deadline).keys(), deadline)
        if left:
            raise RunError(f"router {self.url}: workers not removed after {timeout:g} s: {', '.join(sorted(left))}")

    def shutdown(self) -> None:
        """End the router if it is ours."""
        self._ending.set()
        with self._changing:
            if self.process is not None:
                self.process.terminate(_SHUTDOWN_SECONDS)
            self._remove_arguments()
        for reservation in self._reservations:
            reservation.release()

    # -- its deaths -------------------------------------------------------------------------------------------------

    def _although_it_dies(self, ask: Callable[[], Any]) -> Any:
        """What `ask` gives; it is asked again where the router dies meanwhile, or hangs, and comes back."""
        while True:
            while self._guard is not None and not self._is_back.wait(_LOOK_SECONDS):
                if self._gave_up or self._ending.is_set():
                    raise RunError(self._gave_up or "the router ends with the run")
            deaths = self.deaths
            try:
                return ask()
            except RunError:
                if not self.comes_back or self._guard is None or (deaths == self.deaths and self._answers(None)):
                    raise
                # The watch finds out what became of it, and ends it if it does not answer for so long.
                limit = time.monotonic() + _LATE_ANSWERS * (_WATCH_SECONDS + _WATCH_TIMEOUT_SECONDS)
                while deaths == self.deaths and self._gave_up is None and not self._answers(None):
                    if time.monotonic() > limit or self._ending.wait(_LOOK_SECONDS):
                        raise

    def _watch_or_tell(self) -> None:
        try:
            self._keep_watch()
        except Exception as error:
            logger.debug("the watch over a router failed", exc_info=True)
            self._gave_up = f"the watch over the router {self.url} failed: {type(error).__name__}: {error}"
            self._is_back.clear()

    def _keep_watch(self) -> None:
        """See whether our router lives and answers, and start another one in its place if not. In a thread of its own: callers
        may be waiting for requests that hang."""
        session, asked = session_with(None), time.monotonic()
        while not self._ending.wait(min(_LOOK_SECONDS, _WATCH_SECONDS)):
            if self.process.poll() is None and time.monotonic() - asked >= _WATCH_SECONDS:
                try:
                    # Any status will do: it answers.
                    session.get(f"{self.url}/health", timeout=_WATCH_TIMEOUT_SECONDS)
                    self._late = 0
                except requests.RequestException:
                    self._late += 1
                asked = time.monotonic()
            if self.comes_back and self._gave_up is None:
                if fault := self._fault():
                    self._bring_back(fault)
                elif self._missing:
                    self._tell_again()

    def _bring_back(self, fault: str) -> None:
        """Have another router with the same engines in the place of one that died, or hangs; or give up."""
        self._is_back.clear()
        while not self._ending.is_set():
            # If it hangs rather than being dead, this makes requests to it fail, and they are sent again.
            self.process.terminate(0.0)
            self._deaths.append(time.monotonic())
            if why := why_no_router_follows(self._deaths):
                self._gave_up = f"{fault}\nno other router takes its place: {why}"
                return
            logger.warning("%s\nanother router starts in its place, at %s", fault, self.url)
            try:
                self._start_again()
                self._is_back.set()
                count = len(self._told.keys() - self._missing)
                logger.info("there is a router at %s again, with %d engines", self.url, count)
                return
            except _Obstacle as obstacle:
                self._gave_up = f"{fault}\nno other router takes its place: {obstacle}"
                return
            except Exception as error:
                self._remove_arguments()
                fault = f"no router starts in the place of the dead one: {error}"

    def _start_again(self) -> None:
        """Start another process at the same address, and tell it of the engines. What keeps any process from starting is no
        death of a router: it is told in the log, and waited for.

        Raises:
            _Obstacle: it lasted for too long.
            RunError: the process was started, and failed.
        """
        deadline, told = time.monotonic() + _OBSTACLE_SECONDS, ""
        while True:
            try:
                self._launch_again()
                self.wait_ready()
                self._missing = self._lacking(list(self._told.values()), _START_SECONDS, logging.WARNING)
                return
            except _Obstacle as obstacle:
                if str(obstacle) != told:
                    told = str(obstacle)
                    logger.warning("the router cannot start: %s", told)
                if time.monotonic() > deadline or self._ending.wait(_OBSTACLE_POLL_SECONDS):
                    raise _Obstacle(f"for {_OBSTACLE_SECONDS:g} s, {told}") from None

    def _launch_again(self) -> None:
        """Start another process at the same address.

        Raises:
            _Obstacle: something keeps it from that.
        """
        if self._reservations[0].is_taken():
            if self.process.pid is not None and self.process.poll() is None:
                raise _Obstacle(f"the dead one, which the kernel does not let go, has its port, {self.port}")
            raise _Obstacle(f"another process has taken its port, {self.port} (`ss -ltnp` names it); end that process")
        with self._meeting_obstacles():
            self.process, self._scratch = _new_process(self.process.name, self.process.log_path)
            self._late, self._missing = 0, frozenset()
            self._registered.clear()
            self._launch()

    @contextlib.contextmanager
    def _meeting_obstacles(self) -> Iterator[None]:
        """In the block a process starts.

        Raises:
            _Obstacle: the system refuses a file or a process.
        """
        try:
            yield
        except OSError as error:
            self._remove_arguments()
            way_out = "; free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise _Obstacle(f"{error.strerror} ({error.filename or self._scratch}){way_out}") from error

    def _lacking(self, workers: Sequence[Worker], timeout: float, level: int) -> frozenset[str]:
        """Register engines; those of all that it is to have that it lacks then, which is told at that level.

        Those that answer get requests. Whether the others live is seen where engines are looked after.

        Raises:
            RunError: the router itself failed.
        """
        try:
            self._register(workers, timeout)
            return frozenset()
        except RunError as error:
            if self._fault():
                raise
            # Engines that answer get requests. Whether the others live is the owner's business.
            logger.log(level, "the router lacks engines: %s", error)
            healthy = {worker["url"] for worker in self.workers() if worker["is_healthy"]}
            return frozenset(self._told.keys() - healthy)

    def _tell_again(self) -> None:
        """Tell the router once more of engines that it lacks. An engine that computes for long does not answer what it is, and
        a router that was told of it at such a time forgets it.

        All are told together: whether the router answers is looked at again only afterwards.
        """
        told = [worker for worker in list(self._told.values()) if worker.url in self._missing]
        try:
            lacking = self._lacking(told, _WATCH_SECONDS, logging.DEBUG)
        except Exception as error:
            logger.debug("the router could not be told of engines: %s", error)
            return
        self._missing = frozenset(worker.url for worker in told) & lacking
        for worker in told:
            if worker.url not in self._missing:
                logger.info("the router %s has the engine %s again", self.url, worker.url)

    def _launch(self) -> None:
        arguments_file = self._scratch / _ARGUMENTS_FILE
        with os.fdopen(os.open(arguments_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(self._fields, file)
        with self._changing:
            if self._ending.is_set():
                raise RunError("the router ends with the run")
            self.process.start()

    def _remove_arguments(self) -> None:
        """Remove the file of arguments: it holds the key, and is needed for the start alone."""
        if self._scratch is not None:
            remove_scratch_directory(self._scratch)

    def _answers(self, deadline: float | None) -> bool:
        try:
            return session_with(self.api_key).get(f"{self.url}/health", timeout=_seconds_left(deadline)).ok
        except requests.RequestException:
            return False

    def _left_at_last(self, remaining: Callable[[], set[str]], deadline: float) -> set[str]:
        """What remains when nothing does, or at the deadline: the router carries out later what it is asked for."""
        while (left := remaining()) and time.monotonic() <= deadline:
            time.sleep(_POLL_SECONDS)
        return left

    def _call(
        self, method: str, path: str, payload: dict[str, Any] | None = None, deadline: float | None = None
    ) -> requests.Response:
        seconds = _seconds_left(deadline)
        try:
            response = session_with(self.api_key).request(method, self.url + path, json=payload, timeout=seconds)
        except requests.RequestException as error:
            if self.process is not None and self.process.wait(1.0) is not None:
                raise RunError(f"the router is dead ({path}): {self.process.describe_end()}") from None
            raise RunError(f"the router {self.url} did not answer {path}: {error}") from None
        if not response.ok:
            raise RunError(f"the router answered {response.status_code} to {method} {path}: {_begin_of(response)}")
        return response


@contextlib.contextmanager
def _told_in(response: requests.Response) -> Iterator[Any]:
    """In the block an answer is taken apart, which may be the page of a proxy in front of a router that was given.

    Raises:
        RunError: it is not what a router answers.
    """
    try:
        yield response.json()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"no router answers at {response.url}: {_begin_of(response)}") from error


def _begin_of(response: requests.Response) -> str:
    """Of a text of any length, in which no encoding is looked for."""
    return response.content[:500].decode(errors="replace")


def _seconds_left(deadline: float | None) -> float:
    """How long a request may take: until `deadline` on the monotonic clock, and never longer than one usually may."""
    if deadline is None:
        return REQUEST_SECONDS
    return min(REQUEST_SECONDS, max(deadline - time.monotonic(), _POLL_SECONDS))


def launch_router(
    name: str,
    log_path: Path,
    fields: dict[str, Any],
    reservations: tuple[PortReservation, ...],
    api_key: str | None,
) -> RouterHandle:
    """Start a router with these fields of `RouterArgs`, at the first of its reserved ports; it need not answer yet."""
    process, scratch = _new_process(name, log_path)
    place = reservations[0]
    router = RouterHandle(place.host, place.port, api_key, process, _scratch=scratch, _fields=fields)
    router._reservations = reservations
    with router._meeting_obstacles():
        router._launch()
    return router


def _new_process(name: str, log_path: Path) -> tuple[ChildProcess, Path]:
    """A process of a router, which has not started, and the directory where it finds its arguments."""
    scratch = make_scratch_directory("router")
    argv = [sys.executable, "-m", "slime.serving.router_process", "--arguments-file", str(scratch / _ARGUMENTS_FILE)]
    return ChildProcess(name, argv, log_path, environment_of_router()), scratch


def session_with(api_key: str | None) -> requests.Session:
    session = requests.Session()
    session.trust_env = False
    if api_key:
        session.headers["Authorization"] = f"Bearer {api_key}"
    return session
