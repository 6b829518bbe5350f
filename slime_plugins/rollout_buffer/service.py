"""The HTTP service, which takes items and gives whole groups.

| Request | Body → answer |
|---|---|
| `POST /start_rollout` | what `run_rollout` is given, with `task_type`, `num_repeat_per_sample` → `{run_id, started, status}` |
| `POST /buffer/write` | an item, or `{items: [...]}`, `[run_id]` → `{written, known}`; 429: enough groups wait, come again |
| `POST /get_rollout_data` | `{request_id, num_groups[, run_id, received, wait_s]}` → `{groups, meta_info, status}` |
| `POST /stop_rollout` | `{[run_id]}` → `{status}`: the generator is ended, what there is stays |
| `GET /status` | → `{run_id, task_type, generator, groups, trajectories, failure, refused}` |

Bodies are JSON and must be declared as JSON, because a browser does not let a web page send that to a foreign service.

Errors are `{"error": text}`: 400 the body is wrong, 401 no key, 408 too slow, 409 another run has the buffer, 413 too long,
415 no JSON, 422 a function of the generator failed, 500 the service itself failed.

A request for groups is answered with all of them or with none. If it is made again it gets the same groups, until a later
request of the run names it in `received`; then they are forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from slime.utils.child_process import ChildProcess, environment_for_python
from slime.utils.errors import UserError
from slime_plugins.rollout_buffer.generator_process import ENGINE_KEY
from slime_plugins.rollout_buffer.generators import Generator, find_generators
from slime_plugins.rollout_buffer.items import Item, ItemError, checked_item
from slime_plugins.rollout_buffer.store import Store

logger = logging.getLogger("rollout_buffer")

LONGEST_WAIT_S = 30.0
_WATCH_S = 0.2
_END_S = 10.0
# For a trajectory that has taken as long as it may to be sent.
_SENDING_S = 60.0
_SECRET = "remote_engine_api_key"
_JSON = "application/json"


class Busy(Exception):
    """Enough groups wait, so the item has to come later."""


class WrongRun(Exception):
    """The buffer belongs to another run."""


class FunctionFailed(Exception):
    """A function of the generator's module raised, or returned something unusable."""


class RolloutBuffer:
    """The service without HTTP, for one event loop.

    Args:
        store: the groups and the run, perhaps of an earlier service, with whose run this one goes on.
        generators: the generators by task.
        directory: the place for generators' inputs and logs.
        trust_remote_code: whether generators may run code of a checkpoint; a request alone cannot allow it.
        trajectory_timeout: seconds for a trajectory of `BaseGenerator`; None: as long as it takes.
    """

    def __init__(
        self,
        store: Store,
        generators: dict[str, Generator],
        directory: str | Path,
        *,
        trust_remote_code: bool = False,
        trajectory_timeout: float | None = None,
    ) -> None:
        self.store = store
        self._generators = generators
        self._directory = Path(directory)
        self._trust_remote_code = trust_remote_code
        self._trajectory_timeout = trajectory_timeout
        self._process: ChildProcess | None = None
        self._ended: str | None = None
        self._failure: str | None = None
        # Why the last item or group that was refused was refused.
        self._refused: str | None = None
        # How many trajectories came since the generator was started, how many of them had failed, and when one was last sent.
        self._trajectories = self._failed = 0
        self._sent_at = time.monotonic()
        self._most_asked_for = 0
        self._starting = asyncio.Lock()
        self._changed = asyncio.Condition()

    async def start(self, data: dict[str, Any], url: str) -> dict[str, Any]:
        """Begin the run that `data` describes, with its generator; or go on with it if the buffer already has it.

        Raises:
            UserError: there is no such task, or a field is wrong.
        """
        data = {**data, "run_id": str(data.get("run_id") or uuid.uuid4().hex)}
        data.setdefault("remote_buffer_url", url)
        task = data.get("task_type")
        if task not in self._generators:
            raise UserError(
                f"task_type {task!r}: no generator has this TASK_TYPE (--rollout-task-type of the run); there is "
                f"{', '.join(sorted(self._generators))}. Give the service one more by --generator"
            )
        data["num_repeat_per_sample"] = _positive(data, "num_repeat_per_sample")
        data["max_waiting_groups"] = _positive(data, "max_waiting_groups", 1024)
        if not isinstance(data.setdefault("skip_instance_ids", []), list):
            raise UserError("skip_instance_ids: expected a list of instance ids")
        if data.get("trust_remote_code") and not self._trust_remote_code:
            raise UserError(
                "trust_remote_code: the service runs no code of a checkpoint; start it with --trust-remote-code, too, or "
                "the run without"
            )
        data["trust_remote_code"] = bool(data.get("trust_remote_code"))
        data["trajectory_timeout"] = self._trajectory_timeout
        key = data.pop(_SECRET, None)
        async with self._starting:
            known = self.store.run
            again = known is not None and known["run_id"] == data["run_id"]
            if again and (self._process is not None or self._ended is not None):
                return {"run_id": data["run_id"], "started": False, "status": self.status()}
            await self._end_process()
            if again:
                # Its generator ended with an earlier service, and so did the groups that it had begun.
                self.store.forget_open()
                done = self.store.finished_instances()
                data["skip_instance_ids"] = [*data["skip_instance_ids"], *done]
            else:
                self.store.begin({name: data[name] for name in data if name != "skip_instance_ids"})
                self._most_asked_for = 0
            self._ended = self._failure = self._refused = None
            self._trajectories = self._failed = 0
            self._sent_at = time.monotonic()
            self._process = await asyncio.to_thread(self._started, data, key)
        logger.info("run %s: generator %r %s", data["run_id"], task, "goes on" if again else "starts")
        await self._tell()
        return {"run_id": data["run_id"], "started": True, "status": self.status()}

    def _started(self, data: dict[str, Any], key: str | None) -> ChildProcess:
        self._directory.mkdir(parents=True, exist_ok=True)
        file = self._directory / f"{uuid.uuid4().hex}.json"
        file.write_text(json.dumps(data), encoding="utf-8")
        source = self._generators[data["task_type"]].source
        module = "slime_plugins.rollout_buffer.generator_process"
        environment = environment_for_python() | ({ENGINE_KEY: key} if key else {})
        process = ChildProcess(
            f"generator {data['task_type']}",
            [sys.executable, "-u", "-m", module, source, str(file)],
            self._directory / f"generator_{data['task_type']}.log",
            environment,
        )
        process.start()
        return process

    async def write(self, items: list[Any], run_id: str | None = None) -> dict[str, int]:
        """Keep items of the run `run_id` (None: whichever run there is). Items that are known already change nothing.

        Raises:
            WrongRun: they are of another run.
            ItemError: an item is wrong; none is kept then.
            Busy: an item would begin a group while enough groups wait; those before it are kept.
            UserError: there is no run.
            FunctionFailed: a function of the generator failed.
        """
        run = self._run(run_id)
        self._sent_at = time.monotonic()
        try:
            checked = [checked_item(item) for item in items]
        except ItemError as error:
            self._refused = f"an item was refused: {error}"
            raise
        settle = functools.partial(self._settle, self._generator_of(run))
        room = max(run["max_waiting_groups"], self._most_asked_for)
        before, written = self.store.waiting(), 0
        try:
            for item in checked:
                if self.store.waiting() >= room and not self.store.is_known(item):
                    raise Busy(f"{room} groups wait to be taken; send it again in a while")
                if self.store.add(item, settle):
                    written += 1
                    self._trajectories += 1
                    self._failed += item["reward"] is None
        except UserError as error:
            self._failure = str(error)
            raise FunctionFailed(str(error)) from error
        finally:
            # Waiting requests hear of items that were taken before one that was not, too.
            if self._failure is not None or self.store.waiting() != before:
                await self._tell()
        return {"written": written, "known": len(checked) - written}

    def _settle(self, generator: Generator, instance_id: str, items: list[Item]) -> list[Item] | None:
        settled = generator.settle(instance_id, items)
        if settled is None:
            errors = [item["extra_info"]["error"] for item in items if item["extra_info"].get("error")]
            self._refused = f"the group of instance {instance_id} was dropped" + (f": {errors[0]}" if errors else "")
            logger.info("%s", self._refused)
        return settled

    async def take(self, body: dict[str, Any]) -> dict[str, Any]:
        """Groups for a request, as soon as there are as many as it asks for; none when its time is over.

        Raises:
            UserError: a field is wrong.
            WrongRun: the run that asks does not have the buffer any more.
            FunctionFailed: a function of the generator failed; the request may be made again.
        """
        if self.store.run is None:
            # The caller has started a run on an earlier service, which kept it in memory and is gone.
            return {"groups": [], "meta_info": {}, "status": self.status()}
        run = self._run(body.get("run_id"))
        number, request_id, received = _positive(body, "num_groups"), body.get("request_id"), body.get("received", [])
        if not isinstance(request_id, str) or not request_id:
            raise UserError("request_id is missing: a text of your own, by which the request can be made again")
        if not isinstance(received, list) or not all(isinstance(name, str) for name in received):
            raise UserError("received: expected a list of request ids")
        wait = body.get("wait_s", 0.0)
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait <= LONGEST_WAIT_S:
            raise UserError(f"wait_s {wait!r}: expected seconds from 0 to {LONGEST_WAIT_S:g}")
        self.store.received(received)
        self._most_asked_for = max(self._most_asked_for, number)
        groups = self.store.hand_out(request_id, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait), self._changed:
                while not groups and self._failure is None and self._process is not None:
                    await self._changed.wait()
                    self._run(run["run_id"])
                    groups = self.store.hand_out(request_id, number)
        try:
            meta_info = self._generator_of(run).meta_info(groups) if groups else {}
        except UserError as error:
            raise FunctionFailed(str(error)) from error
        return {"groups": [group.to_json() for group in groups], "meta_info": meta_info, "status": self.status()}

    async def stop(self, run_id: str | None) -> None:
        """End the generator of a run.

        Raises:
            WrongRun: another run has the buffer.
        """
        async with self._starting:
            # Another run may have started meanwhile.
            self._run(run_id)
            await self._end_process()
            self._ended = self._ended or "it was told to stop"
        await self._tell()

    def status(self) -> dict[str, Any]:
        """The run, its generator (none, running, lost with an earlier service, ended, failed), groups by state, and how many
        trajectories the generator has sent since it was started, and how many of these without a reward."""
        run = self.store.run
        if run is None:
            generator = "none"
        elif self._process is not None:
            generator = "running"
        elif self._failure is not None:
            generator = "failed"
        else:
            generator = "lost" if self._ended is None else "ended"
        return {
            "run_id": None if run is None else run["run_id"],
            "task_type": None if run is None else run["task_type"],
            "generator": generator,
            "groups": self.store.counts(),
            "trajectories": {"sent": self._trajectories, "failed": self._failed},
            "failure": self._failure,
            "refused": self._refused,
        }

    async def watch(self) -> None:
        """Watch for the end of generators until cancelled, and then end the one that runs."""
        try:
            while True:
                await asyncio.sleep(_WATCH_S)
                try:
                    await self._look_after_process()
                except Exception as error:
                    # The run is told, since it would wait for ever otherwise.
                    told = f"the generator cannot be watched: {type(error).__name__}: {error}"
                    if told != self._failure:
                        logger.exception("%s", told)
                        self._failure = told
                        await self._tell()
        finally:
            await asyncio.shield(self._end_process())

    async def _look_after_process(self) -> None:
        process = self._process
        if process is None or self._starting.locked():
            return
        if process.poll() is None:
            await self._end_silent(process)
            return
        self._process = None
        if process.poll() == 0:
            self._ended = "it has nothing more to make"
            logger.info("%s has ended", process.name)
        else:
            self._failure = f"{process.name}: {process.describe_end()}"
            logger.error("%s", self._failure)
        await self._tell()

    async def _end_silent(self, process: ChildProcess) -> None:
        """End the generator if it has sent nothing for longer than a trajectory may take. One that waits for room sends on."""
        limit, silent = self._trajectory_timeout, time.monotonic() - self._sent_at
        if limit is None or silent <= limit + _SENDING_S:
            return
        self._failure = (
            f"{process.name}: it has sent no trajectory for {silent:.0f} s (--trajectory-timeout {limit:g} of the service): "
            f"does everything that it asks still answer, services of rewards and tools among it? {process.describe_log()}"
        )
        logger.error("%s", self._failure)
        await self._end_process()
        await self._tell()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.terminate, _END_S)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _run(self, run_id: str | None = None) -> dict[str, Any]:
        run = self.store.run
        if run is None:
            raise UserError("no run has been started; POST /start_rollout comes first")
        if run_id is not None and run_id != run["run_id"]:
            raise WrongRun(
                f"the buffer belongs to run {run['run_id']} now, and not to {run_id}: another run has started on it since; "
                "give each run a service of its own (--port)"
            )
        return run

    def _generator_of(self, run: dict[str, Any]) -> Generator:
        if run["task_type"] not in self._generators:
            raise UserError(
                f"the run wants the generator {run['task_type']!r}, which this service was not given (--generator)"
            )
        return self._generators[run["task_type"]]


def make_app(
    buffer: RolloutBuffer, *, api_key: str | None = None, max_bytes: int = 2**26, timeout: float = 60.0
) -> web.Application:
    """The service over `buffer`. `max_bytes`: limit of a body. `timeout`: seconds of a request, but for its wait for groups."""

    async def started(body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        return await buffer.start(body, str(request.url.origin()))

    async def written(body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        run_id = body.pop("run_id", None)
        items = body["items"] if set(body) == {"items"} else [body]
        if not isinstance(items, list):
            raise ItemError(f"`items` is {type(items).__name__}; expected a list")
        return await buffer.write(items, run_id)

    async def taken(body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        return await buffer.take(body)

    async def stopped(body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        await buffer.stop(body.get("run_id"))
        return {"status": buffer.status()}

    async def status(request: web.Request) -> web.Response:
        return web.json_response(buffer.status())

    def posted(do: Callable[[dict[str, Any], web.Request], Awaitable[dict[str, Any]]]) -> Callable[[web.Request], Any]:
        async def handler(request: web.Request) -> web.Response:
            if request.content_type != _JSON:
                raise web.HTTPUnsupportedMediaType(
                    text=f"the body is {request.content_type}; send JSON with the header Content-Type: {_JSON}"
                )
            async with asyncio.timeout(timeout):
                content = await request.read()
            try:
                body = json.loads(content or b"{}")
            except ValueError as error:
                raise UserError(f"the body is no JSON: {error}") from error
            if not isinstance(body, dict):
                raise UserError(f"the body is a JSON {type(body).__name__}; expected an object")
            async with asyncio.timeout(timeout + LONGEST_WAIT_S):
                return web.json_response(await do(body, request))

        return handler

    @web.middleware
    async def guarded(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        # A client may send any bytes.
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if api_key is not None and not hmac.compare_digest(given, f"Bearer {api_key}".encode()):
            return _refusal(401, "a bearer token is needed, and this is not it (SLIME_BUFFER_API_KEY)")
        try:
            return await handler(request)
        except Busy as error:
            return _refusal(429, str(error))
        except WrongRun as error:
            return _refusal(409, str(error))
        except FunctionFailed as error:
            return _refusal(422, str(error))
        except (ItemError, UserError) as error:
            return _refusal(400, str(error))
        except TimeoutError:
            return _refusal(408, f"not done within {timeout:g} s")
        except web.HTTPException as error:
            return _refusal(error.status, error.text or error.reason)
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            return _refusal(500, f"{type(error).__name__}: {error}")

    async def watching(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(buffer.watch())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    app = web.Application(client_max_size=max_bytes, middlewares=[guarded])
    for path, do in (
        ("/start_rollout", started),
        ("/buffer/write", written),
        ("/get_rollout_data", taken),
        ("/stop_rollout", stopped),
    ):
        app.router.add_post(path, posted(do))
    app.router.add_get("/status", status)
    app.cleanup_ctx.append(watching)
    return app


@contextlib.contextmanager
def serving(
    sources: Sequence[str], directory: str | Path, *, trust_remote_code: bool = False
) -> Iterator[tuple[str, dict[str, Generator]]]:
    """A service in a thread of this process, on a free port of loopback; gives (its URL, its generators by task).

    `trust_remote_code`: see `RolloutBuffer`.

    Raises:
        UserError: a source is no generator.
    """
    generators = find_generators(sources)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="rollout-buffer", daemon=True)
    thread.start()

    async def start() -> tuple[web.AppRunner, Store]:
        store = Store()
        buffer = RolloutBuffer(store, generators, directory, trust_remote_code=trust_remote_code)
        runner = web.AppRunner(make_app(buffer), shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, store

    async def end(runner: web.AppRunner, store: Store) -> None:
        await runner.cleanup()
        store.close()

    runner, store = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", generators
    finally:
        asyncio.run_coroutine_threadsafe(end(runner, store), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def _refusal(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status)


def _positive(values: dict[str, Any], name: str, default: int | None = None) -> int:
    """The entry `name`, a whole number above 0 that may be given as text."""
    value = values.get(name, default)
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} is {value!r}; expected a whole number above 0")
    return value
