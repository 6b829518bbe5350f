"""The teacher's HTTP server: what clients may ask and when, and what an answer looks like.

The ranks do one thing at a time, in the order of the requests, in one thread beside the event loop. States:

    starting ──► serving ◄──► updating        any ──► ended

Invariants
- From the moment an update is accepted no further question is accepted; the update begins when those before it are answered. If
  nobody waits for it any more before it begins it is dropped, and serving goes on.
- A question whose client has gone is dropped, unless it is under way.
- A failure on a rank ends the server, because it is unknown what the other ranks do. A refusal changes nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
from aiohttp import web

from slime.arguments.checkpoints import WeightSource, checkpoint_source
from slime.arguments.hf_config import CHOICES, read_hf_config
from slime.models.families import model_args_from_hf
from slime.utils.errors import UserError
from slime.utils.finite_number import finite_number
from slime.utils.misc import unique_hex
from tools.teacher.ranks import BEAT_SECONDS, fixed
from tools.teacher.scoring import Question

logger = logging.getLogger(__name__)

MOST_BYTES = 64 * 2**20
MOST_WAITING = 1024
# The most numbers in an answer beside the log-probs of the tokens.
MOST_NUMBERS = 2**24
_WITHOUT_TOKEN = ("/detect", "/healthz")
_PATHS = ("model_path", "path", "load")
_FIELDS = ("input_ids", "sample_n", "label_token_ids", "temperature", "seed")
# The fields with which an engine is asked for log-probs of a prompt; the answer then has `input_token_logprobs`.
_FIELDS_OF_ENGINES = ("sampling_params", "return_logprob", "logprob_start_len", "return_text_in_logprobs")
_SAMPLING_PARAMS = ("temperature", "max_new_tokens", "skip_special_tokens")


class Refused(Exception):
    """The request is answered with another status than 200, for a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Asked:
    """A body of /generate: the question, whether the answer has an engine's form, and whether that has tokens' texts."""

    question: Question
    as_engine: bool = False
    with_text: bool = False


def read_question(body: bytes, vocab_size: int, max_length: int) -> Asked:
    """The question in a body. `max_length`: the most tokens, 0 for any number. Raises Refused if the body is wrong."""
    asked = _read_object(body)
    unknown = sorted(asked.keys() - {*_FIELDS, *_FIELDS_OF_ENGINES})
    if unknown:
        raise Refused(400, f"unknown fields {unknown}; known are {[*_FIELDS, *_FIELDS_OF_ENGINES]}")
    tokens = _ids(asked.get("input_ids"), "input_ids", vocab_size, 1)
    if max_length and len(tokens) > max_length:
        raise Refused(413, f"input_ids has {len(tokens)} tokens; --megatron-server-max-length is {max_length}")
    if len(tokens) < 2:
        raise Refused(400, "input_ids needs two tokens at least: the first one cannot be predicted")
    params = asked.get("sampling_params", {})
    if not isinstance(params, dict) or params.keys() - {*_SAMPLING_PARAMS}:
        raise Refused(400, f"sampling_params must be an object with some of {[*_SAMPLING_PARAMS]}")
    if params.get("max_new_tokens", 0) != 0 or asked.get("logprob_start_len", 0) != 0:
        raise Refused(400, "a teacher scores whole sequences: max_new_tokens and logprob_start_len must be 0")
    temperature = finite_number(asked.get("temperature", params.get("temperature", 1.0)))
    if temperature is None or not temperature > 0:
        raise Refused(400, "temperature must be a number above 0")
    sample_n, seed = _whole(asked, "sample_n", 0), _whole(asked, "seed", secrets.randbits(63))
    labels = asked.get("label_token_ids")
    if labels is not None:
        labels = _ids(labels, "label_token_ids", vocab_size, 2)
        if len(labels) != len(tokens) - 1:
            raise Refused(
                400, f"label_token_ids has {len(labels)} rows for {len(tokens)} input_ids, one fewer is needed"
            )
    numbers = (len(tokens) - 1) * (sample_n + (0 if labels is None else labels.shape[1]))
    if numbers > MOST_NUMBERS:
        raise Refused(
            413, f"{numbers} numbers are asked for beside log_probs; give them in parts of {MOST_NUMBERS} at most"
        )
    question = Question(tokens, temperature, sample_n, seed, labels)
    return Asked(question, bool(asked.get("return_logprob")), bool(asked.get("return_text_in_logprobs")))


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        asked = orjson.loads(body)
    except ValueError as error:
        raise Refused(400, f"the body is no JSON: {error}") from None
    if not isinstance(asked, dict):
        raise Refused(400, "the body must be an object")
    return asked


def _ids(given: Any, name: str, vocab_size: int, axes: int) -> np.ndarray:
    shape = "a list of token ids" if axes == 1 else "one list of token ids for each token but the first, all as long"
    try:
        ids = np.array(given) if isinstance(given, list) else None
    except ValueError:
        ids = None
    if ids is None or ids.ndim != axes or ids.dtype != np.int64 or not ids.size:
        raise Refused(400, f"{name} must be {shape}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = int(ids.max()) if ids.min() >= 0 else int(ids.min())
        raise Refused(400, f"{name} has {wrong}; ids are from 0 to {vocab_size - 1}")
    return ids


def _whole(asked: dict[str, Any], name: str, default: int) -> int:
    value = asked.get(name, default)
    if type(value) is not int or not 0 <= value < 2**63:
        raise Refused(400, f"{name} must be a whole number from 0 to 2^63 - 1")
    return value


def write_answer(asked: Asked, found: dict[str, np.ndarray], texts: Sequence[str] | None) -> bytes:
    """The body of an answer. Raises Refused if the model gives a value that is not a finite number."""
    for name, values in found.items():
        if not np.isfinite(values).all():
            place = np.argwhere(~np.isfinite(values))[0].tolist()
            raise Refused(500, f"{name} is no finite number at {place}; the model's weights may be broken")
    answer: dict[str, Any] = {"request_id": unique_hex(), **found}
    if asked.as_engine:
        tokens = asked.question.tokens.tolist()
        rows = zip([None, *found["log_probs"].tolist()], tokens, texts or [None] * len(tokens), strict=True)
        answer["meta_info"] = {"id": answer["request_id"], "input_token_logprobs": [list(row) for row in rows]}
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def identity_of(source: WeightSource) -> tuple[str, int | None]:
    """The identity of a `fixed` source: its directory and, for a Megatron checkpoint, its iteration."""
    path = str(Path(source.path).resolve()) if source.path is not None else ""
    return path, source.step


def source_of_update(asked: dict[str, Any], hf_checkpoint: str) -> WeightSource:
    """The checkpoint that an update is to load. Raises Refused if it is no checkpoint, or one of another model."""
    given = [asked[name] for name in _PATHS if name in asked]
    if len(given) != 1 or not isinstance(given[0], str) or not given[0]:
        raise Refused(400, f"one of {', '.join(_PATHS)} must be the directory of a checkpoint")
    try:
        source = fixed(checkpoint_source(given[0], None, "model_path"))
        if source.kind == "hf":
            own, other = (model_args_from_hf(read_hf_config(path)) for path in (hf_checkpoint, given[0]))
            names = sorted((own.keys() | other.keys()) - CHOICES)
            differing = [
                f"{name} {other.get(name)} (served: {own.get(name)})"
                for name in names
                if own.get(name) != other.get(name)
            ]
            if differing:
                raise UserError(f"{given[0]} is another model than the one that is served: {', '.join(differing)}")
    except UserError as error:
        raise Refused(400, str(error)) from None
    return source


@dataclass(eq=False)
class _Update:
    """An update that was accepted, and how many wait for it."""

    identity: tuple[str, int | None]
    task: asyncio.Task[str | None] | None = None
    waiting: int = 0
    has_begun: bool = False


class TeacherServer:
    """Takes requests, and has the ranks do what they ask for.

    Args:
        lead: has all ranks do something, by its name; see `TeacherRank.lead`.
        facts: the answer of /info about the model.
        loaded: the identity of the weights that it starts with.
        decode: gives the texts of tokens, or None if there is no tokenizer.
        update_seconds: how long an update may take if its caller does not say.

    Attributes:
        ended: the exit status and, unless a caller asked for the end, the reason.
    """

    def __init__(
        self,
        lead: Callable[..., Any],
        facts: dict[str, Any],
        *,
        hf_checkpoint: str,
        vocab_size: int,
        max_length: int = 0,
        loaded: tuple[str, int | None] = ("", None),
        decode: Callable[[Sequence[int]], Sequence[str] | None] = lambda tokens: None,
        update_seconds: float = 3600.0,
        api_key: str | None = None,
    ) -> None:
        self._lead, self._facts, self._decode = lead, facts, decode
        self._hf_checkpoint, self._vocab_size, self._max_length = hf_checkpoint, vocab_size, max_length
        self._loaded, self._update_seconds, self._api_key = loaded, update_seconds, api_key
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank-0")
        self._update: _Update | None = None
        self._asked = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._takes_questions = self._is_ready = False
        self.ended: asyncio.Future[tuple[int, str | None]] = asyncio.get_running_loop().create_future()

    def app(self) -> web.Application:
        """The routes. Serve it with `handler_cancellation`, so that it hears of clients that go."""
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._refusals])
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/update_weights_from_disk", self._update_weights)
        for name in ("detect", "healthz", "info", "get_loads"):
            app.router.add_get(f"/{name}", getattr(self, f"_{name}"))
        return app

    def end(self, status: int, reason: str | None = None) -> None:
        """Have the server end. Only the first call counts."""
        if not self.ended.done():
            self.ended.set_result((status, reason))

    async def run(self, start: Callable[[], None], warm_up: Callable[[], Awaitable[None]] | None) -> None:
        """Start the model, ask the first question (`warm_up`), and then keep the ranks together for ever. An error ends it."""
        try:
            await self._in_thread(start)
            self._takes_questions = True
            if warm_up is not None:
                await warm_up()
            self._is_ready = True
            logger.info("teacher: ready")
            while True:
                await asyncio.sleep(BEAT_SECONDS)
                await self._of_ranks("beat")
        except Refused:
            return  # it has ended already
        except Exception as error:
            logger.debug("the start failed", exc_info=True)
            self.end(getattr(error, "exit_status", 1), f"{error}" or type(error).__name__)

    async def leave(self, seconds: float) -> None:
        """Have the ranks leave their groups, unless they still work after `seconds`."""
        await asyncio.wait_for(self._in_thread(self._lead, "leave"), seconds)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _of_ranks(self, name: str, *arguments: Any) -> Any:
        try:
            return await self._in_thread(self._lead, name, *arguments)
        except Exception as error:
            reason = f"{name} failed on rank 0: {type(error).__name__}: {error}"
            self.end(1, reason)
            raise Refused(500, f"{reason}; the server ends") from error

    @web.middleware
    async def _refusals(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> web.Response:
        # Whoever asks may send any bytes.
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        try:
            if self._api_key is not None and request.path not in _WITHOUT_TOKEN:
                if not hmac.compare_digest(given, f"Bearer {self._api_key}".encode()):
                    raise Refused(401, "a bearer token is needed, and this is not it")
            return await handler(request)
        except Refused as refusal:
            return web.json_response({"error": str(refusal)}, status=refusal.status)
        except web.HTTPRequestEntityTooLarge:
            return web.json_response({"error": f"the body has more than {MOST_BYTES} bytes"}, status=413)
        except web.HTTPException as error:
            return web.json_response({"error": error.reason}, status=error.status)

    async def _generate(self, request: web.Request) -> web.Response:
        self._require_serving()
        body = await request.read()
        asked = await asyncio.to_thread(read_question, body, self._vocab_size, self._max_length)
        # An update may have come meanwhile.
        self._require_serving()
        if self._asked >= MOST_WAITING:
            raise Refused(429, f"{MOST_WAITING} questions wait already")
        self._asked += 1
        self._idle.clear()
        try:
            found = await self._of_ranks("answer", asked.question)
        finally:
            self._asked -= 1
            if not self._asked:
                self._idle.set()
        return web.Response(body=await asyncio.to_thread(self._write, asked, found), content_type="application/json")

    def _write(self, asked: Asked, found: dict[str, np.ndarray]) -> bytes:
        return write_answer(asked, found, self._decode(asked.question.tokens.tolist()) if asked.with_text else None)

    def _require_serving(self) -> None:
        if not self._takes_questions:
            raise Refused(503, "the teacher is starting")
        if self._update is not None:
            raise Refused(503, f"the weights are updated from {self._update.identity[0]}")

    async def _update_weights(self, request: web.Request) -> web.Response:
        if not self._takes_questions:
            raise Refused(503, "the teacher is starting")
        asked = _read_object(await request.read())
        unknown = sorted(asked.keys() - {*_PATHS, "timeout_s"})
        seconds = finite_number(asked.get("timeout_s", self._update_seconds))
        if unknown or seconds is None or not seconds > 0:
            raise Refused(400, f"unknown fields {unknown}" if unknown else "timeout_s must be a number above 0")
        source = await asyncio.to_thread(source_of_update, asked, self._hf_checkpoint)
        identity = await asyncio.to_thread(identity_of, source)
        if self._update is None and identity == self._loaded:
            return _updated(identity, "these weights are loaded already")
        if self._update is None:
            self._update = _Update(identity)
            self._update.task = asyncio.create_task(self._load(self._update, source))
        if self._update.identity != identity:
            raise Refused(409, f"the weights are just updated from {self._update.identity[0]}")
        problem = await self._wait_for(self._update, seconds)
        if problem is not None:
            raise Refused(400, f"{problem}; the weights that were there before are served")
        return _updated(identity, "loaded")

    async def _load(self, update: _Update, source: WeightSource) -> str | None:
        try:
            await self._idle.wait()
            update.has_begun = True
            problem = await self._of_ranks("update", source, self._update_seconds)
            if problem is None:
                self._loaded = update.identity
            logger.info("teacher: weights of %s %s", source, "are loaded" if problem is None else f"refused: {problem}")
            return problem
        finally:
            self._forget(update)

    async def _wait_for(self, update: _Update, seconds: float) -> str | None:
        update.waiting += 1
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(update.task)
        except TimeoutError:
            state = "they are being loaded, and will be served" if update.has_begun else "questions are still answered"
            raise Refused(
                503, f"the weights are not updated after {seconds:g} s: {state}; ask again to wait on"
            ) from None
        finally:
            update.waiting -= 1
            if not update.waiting and not update.has_begun:
                update.task.cancel()
                self._forget(update)

    def _forget(self, update: _Update) -> None:
        if self._update is update:
            self._update = None

    async def _detect(self, request: web.Request) -> web.Response:
        state = "updating" if self._update is not None else "ready" if self._is_ready else "starting"
        return web.json_response({"status": state}, status=200 if state == "ready" else 503)

    async def _healthz(self, request: web.Request) -> web.Response:
        is_dead = self.ended.done()
        return web.json_response({"status": "ending" if is_dead else "ok"}, status=503 if is_dead else 200)

    async def _info(self, request: web.Request) -> web.Response:
        path, iteration = self._loaded
        known = {"model_path": path, "iteration": iteration, "vocab_size": self._vocab_size}
        return web.json_response({**known, "max_length": self._max_length, **self._facts})

    async def _get_loads(self, request: web.Request) -> web.Response:
        running = min(self._asked, 1)
        loads = {"num_reqs": self._asked, "num_running_reqs": running, "num_waiting_reqs": self._asked - running}
        return web.json_response({"loads": [loads]})


def _updated(identity: tuple[str, int | None], message: str) -> web.Response:
    return web.json_response({"success": True, "model_path": identity[0], "message": message})


async def ask_first(url: str, api_key: str | None, seconds: float) -> None:
    """The warm-up: a short question over HTTP, after which kernels are chosen and memory is taken.

    Raises:
        UserError: nobody answers there, or not so within the time.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    question, limit = {"input_ids": [0, 0, 0, 0], "sample_n": 1}, aiohttp.ClientTimeout(total=seconds)
    try:
        async with aiohttp.ClientSession(trust_env=False, timeout=limit, headers=headers) as session:
            async with session.post(f"{url}/generate", json=question) as answer:
                if answer.status == 200:
                    return
                reason = f"it answered {answer.status}: {(await answer.text())[:500]}"
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise UserError(
        f"the warm-up request to {url} failed: {reason}; --teacher-warmup-port says where it goes, "
        "--teacher-warmup-timeout-s how long it may take, --no-megatron-server-warmup leaves it out"
    )
