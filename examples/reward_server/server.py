"""A reward service for `--rm-type remote_rm`: requests one by one, grading in batches.

    SLIME_RM_API_KEY=… python examples/reward_server/server.py --grader my_judge.py:grade --max-batch 64

POST /grade takes `{"prompt", "response", "label"}` and answers with the reward as JSON. What arrives while a batch is being
graded is the next one, so a judge on a GPU is busy with full batches and a lone request waits for nobody.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from slime.rollout.rm_hub import grade_answer_verl
from slime.utils.child_process import exit_when_parent_dies
from slime.utils.errors import UserError
from slime.utils.plugin_loader import load_function
from slime.utils.reward_types import checked_label

logger = logging.getLogger("reward_server")

Grader = Callable[[list[dict[str, Any]]], Sequence[Any]]
FIELDS = ("prompt", "response", "label")


def grade(requests: list[dict[str, Any]]) -> list[float | UserError]:
    """1.0 where the last box of the response is the label, else 0.0: the place for a judge of your own."""
    return [_boxed(request) for request in requests]


def _boxed(request: dict[str, Any]) -> float | UserError:
    """The grade of one request. What a label lacks fails its own request, not the others of the call."""
    try:
        return float(grade_answer_verl(request["response"], checked_label(request["label"])))
    except UserError as error:
        return error


class Batcher:
    """Gathers requests and has them graded together, by one call of the grader at a time, in a thread."""

    def __init__(self, grader: Grader, max_batch: int, max_waiting: int) -> None:
        self._grader = grader
        self._max_batch = max_batch
        self._waiting: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[Any]]] = asyncio.Queue(max_waiting)

    async def grade(self, request: dict[str, Any]) -> Any:
        """The reward of `request`. Raises asyncio.QueueFull where too many wait, and whatever the grader raises."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((request, answer))
        return await answer

    async def run(self) -> None:
        """Grade until cancelled."""
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self._max_batch and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            # Whoever gave up waiting needs no grade.
            batch = [(request, answer) for request, answer in batch if not answer.done()]
            if batch:
                await self._grade_batch(batch)

    async def _grade_batch(self, batch: list[tuple[dict[str, Any], asyncio.Future[Any]]]) -> None:
        try:
            rewards = list(await asyncio.to_thread(self._grader, [request for request, _ in batch]))
            if len(rewards) != len(batch):
                raise ValueError(f"the grader returned {len(rewards)} rewards for {len(batch)} requests")
        except Exception as error:
            logger.exception("a batch of %d could not be graded", len(batch))
            rewards = [error] * len(batch)
        for (_, answer), reward in zip(batch, rewards, strict=True):
            if answer.done():
                continue
            if isinstance(reward, Exception):
                answer.set_exception(reward)
            else:
                answer.set_result(reward)


def make_app(
    grader: Grader, *, api_key: str | None, timeout: float, max_batch: int, max_waiting: int, max_bytes: int
) -> web.Application:
    """The service. `timeout` in seconds is that of one request; `max_waiting` requests may wait, `max_bytes` long each."""
    batcher = Batcher(grader, max_batch, max_waiting)

    async def answer(request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "")
        if api_key is not None and not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
            return refusal(401, "a bearer token is needed, and this is not it")
        try:
            body = await request.json()
        except ValueError:
            return refusal(400, "the body is no JSON")
        if not isinstance(body, dict) or any(field not in body for field in FIELDS):
            return refusal(400, f"the body must be an object with {', '.join(FIELDS)}")
        if not isinstance(body["response"], str):
            return refusal(400, "response must be a string")
        try:
            async with asyncio.timeout(timeout):
                return web.json_response(await batcher.grade(body))
        except asyncio.QueueFull:
            return refusal(429, f"{max_waiting} requests wait already")
        except TimeoutError:
            return refusal(504, f"no grade within {timeout:g} s")
        except UserError as error:
            return refusal(400, str(error))
        except Exception as error:
            # Its text may hold the prompt; the log of the service has all of it.
            return refusal(500, f"the grader raised {type(error).__name__}")

    async def health(request: web.Request) -> web.Response:
        return web.json_response("ok")

    async def grading(app: web.Application) -> Any:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    app = web.Application(client_max_size=max_bytes)
    app.router.add_post("/grade", answer)
    app.router.add_get("/health", health)
    app.cleanup_ctx.append(grading)
    return app


def refusal(status: int, reason: str) -> web.Response:
    return web.Response(status=status, text=json.dumps({"error": reason}), content_type="application/json")


def main() -> None:
    exit_when_parent_dies()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; not loopback: give SLIME_RM_API_KEY")
    parser.add_argument("--port", type=int, default=8181)
    parser.add_argument("--grader", help="function of a list of requests, as file.py:function; default: boxed answers")
    parser.add_argument("--max-batch", type=int, default=64, help="requests in one call of the grader")
    parser.add_argument("--max-waiting", type=int, default=4096, help="further ones are told to come again (429)")
    parser.add_argument("--timeout", type=float, default=100.0, help="seconds for a request; remote_rm waits for 120")
    parser.add_argument("--max-bytes", type=int, default=16 * 2**20, help="longest request")
    given = parser.parse_args()
    api_key = os.environ.get("SLIME_RM_API_KEY") or None
    if api_key is None and given.host not in ("127.0.0.1", "::1", "localhost"):
        parser.error(f"--host {given.host}: everybody on the network could ask; set SLIME_RM_API_KEY")
    app = make_app(
        load_function(given.grader, flag="--grader") if given.grader else grade,
        api_key=api_key,
        timeout=given.timeout,
        max_batch=given.max_batch,
        max_waiting=given.max_waiting,
        max_bytes=given.max_bytes,
    )
    web.run_app(app, host=given.host, port=given.port, access_log=None)


if __name__ == "__main__":
    main()
