"""A small HTTP server that speaks the part of the router's and the engine's protocol that the generation loop uses.

It runs on a loop and thread of its own and is both the router and its only engine: it serves `/workers`, `/generate`,
`/abort_request`, `/v1/loads`, and the routes that a real router asks of a new engine. Functions of the test decide its answers.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tests.support.models.rollout_args import CONTEXT_LENGTH


class FakeGenerateServer:
    """The server, as a context manager.

    `answer(payload)` gives the response ids of a request and `text_of(ids)` their text. If `hold(payload)` is true, the request
    stays unfinished until it is aborted (it then returns the first id of its answer) or `release` is called.
    `break_after(payload)` gives the number of ids after which the connection of a stream breaks.

    Requests that SGLang 0.5.21 refuses for their lengths are refused here, too: `context_length` is the engine's, and
    `reserved` the number of tokens that an engine which drafts adds to every input.
    """

    def __init__(
        self,
        answer: Callable[[dict[str, Any]], list[int]] = lambda payload: [70, 71, 72],
        hold: Callable[[dict[str, Any]], bool] = lambda payload: False,
    ) -> None:
        self.answer = answer
        self.hold = hold
        self.text_of: Callable[[list[int]], str] = lambda ids: "".join(chr(i) for i in ids)
        self.refuse: Callable[[dict[str, Any]], str | None] = lambda payload: None  # text of a refusal
        self.refusal_status = 400
        self.context_length = CONTEXT_LENGTH
        self.cache_tokens = 2**30  # an answer is cut off where its sample has no room in them
        self.reserved = 0
        self.matched: Callable[[dict[str, Any]], Any] = lambda payload: None  # the stop id or text that ended an answer
        self.break_after: Callable[[dict[str, Any]], int | None] = lambda payload: None
        self.delay_s = 0.0
        self.always_busy = False
        self.loads_page: str | None = None  # the answer to `/v1/loads`, as of a proxy before the engine
        self.drops_log_probs = False  # answer without log-probs, as if return_logprob were lost on the way
        self.other_workers: list[str] = []  # listed beside this server
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.refused_aborts = 0  # number of aborts to refuse before one is carried out
        self.aborts = 0  # number of aborts of all requests at once
        self.aborted_ids: list[str] = []
        self.loads_asked = 0
        self.weight_version = "1"
        self.in_flight = 0
        self.max_in_flight = 0
        self.port = 0
        self._held: dict[str, asyncio.Event] = {}  # id of a held request -> event that an abort sets
        self._released = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeGenerateServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)
        return self

    def __exit__(self, *exc_info: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def release(self) -> None:
        """Let held requests finish as usual."""
        self._loop.call_soon_threadsafe(self._released.set)

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/workers", self._workers)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/v1/loads", self._loads)
        for path in ("/health", "/server_info", "/model_info"):
            app.router.add_get(path, self._about)
        self._runner = web.AppRunner(app, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        """Leave no task: one that still waits when it is thrown away is in the log of whatever test runs then."""
        await self._runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _workers(self, request: web.Request) -> web.Response:
        urls = [self.url, *self.other_workers]
        workers = [{"id": str(number), "url": url, "is_healthy": True} for number, url in enumerate(urls, start=1)]
        return web.json_response({"workers": workers})

    async def _about(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "fake", "served_model_name": "fake", "tp_size": 1, "dp_size": 1})

    async def _loads(self, request: web.Request) -> web.Response:
        self.loads_asked += 1
        if self.loads_page is not None:
            return web.Response(text=self.loads_page)
        running = 1 if self.always_busy else self.in_flight
        return web.json_response({"loads": [{"num_running_reqs": running, "num_waiting_reqs": 0}]})

    async def _abort(self, request: web.Request) -> web.Response:
        order = await request.json()
        if self.refused_aborts:
            self.refused_aborts -= 1
            return web.Response(status=503)
        if order == {"abort_all": True}:
            self.aborts += 1
            # Only requests that are held at this moment are aborted.
            aborted = list(self._held.values())
        else:
            self.aborted_ids.append(order.pop("rid"))
            assert order == {}
            aborted = [event for held, event in self._held.items() if held == self.aborted_ids[-1]]
        for event in aborted:
            event.set()
        return web.Response(status=200)

    async def _generate(self, request: web.Request) -> web.Response:
        payload = await request.json()
        self.requests.append(payload)
        self.headers.append(dict(request.headers))
        refusal = self.refuse(payload)
        if refusal is not None:
            return web.Response(status=self.refusal_status, text=refusal)
        refusal = self._misfit(payload)
        if refusal is not None:
            return web.json_response({"error": {"message": refusal}}, status=400)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            aborted = self.hold(payload) and await self._wait_for_end(payload)
        finally:
            self.in_flight -= 1
        ids = self.answer(payload)
        room = min(self.context_length, self.cache_tokens) - 2
        budget = min(payload["sampling_params"]["max_new_tokens"], room - _length(payload))
        reason = "abort" if aborted else "length" if len(ids) >= budget else "stop"
        ids = ids[:1] if aborted else ids[:budget]
        if payload.get("stream"):
            return await self._stream(request, payload, ids, reason)
        return web.json_response(self._output(payload, ids, reason))

    def _misfit(self, payload: dict[str, Any]) -> str | None:
        """Why an engine of this context length would refuse a request; None: it would not."""
        length, params = _length(payload), payload["sampling_params"]
        least, most = params.get("min_new_tokens") or 0, params.get("max_new_tokens", 128)
        if least > most:
            return f"min_new_tokens must be in [0, max_new_tokens({most})], got {least}."
        if max(length + 1, length + most) + self.reserved > self.context_length:
            return f"{length} tokens, {self.reserved} reserved ones and {most} new ones exceed {self.context_length}"
        if length >= self.context_length - 6:
            return (
                f"Input length ({length} tokens) exceeds the maximum allowed length ({self.context_length - 6} tokens)."
            )
        return None

    async def _stream(
        self, request: web.Request, payload: dict[str, Any], ids: list[int], reason: str
    ) -> web.StreamResponse:
        """Send an event for each id, with all ids so far."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for count in range(1, len(ids) + 1):
            if count - 1 == self.break_after(payload):
                request.transport.abort()
                return response
            output = self._output(payload, ids[:count], reason if count == len(ids) else None)
            await response.write(b"data: " + json.dumps(output).encode() + b"\n\n")
            # The pause keeps events apart, so that a client can read them one by one.
            await asyncio.sleep(0.01)
        await response.write(b"data: [DONE]\n\n")
        return response

    def _output(self, payload: dict[str, Any], ids: list[int], reason: str | None) -> dict[str, Any]:
        return {
            "text": self.text_of(ids),
            "meta_info": {
                **self._scores(payload),
                **({} if self.drops_log_probs else {"output_token_logprobs": [[-0.5, token, None] for token in ids]}),
                "finish_reason": reason and {"type": reason, "matched": self.matched(payload)},
                "weight_version": self.weight_version,
                "prompt_tokens": _length(payload),
                "completion_tokens": len(ids),
                "cached_tokens": 0,
            },
        }

    def _scores(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Log-probs of the prompt's tokens, -0.1 times their position, if a request says from where it wants them."""
        if payload.get("logprob_start_len") is None:
            return {}
        with_text = payload.get("return_text_in_logprobs")
        return {
            "input_token_logprobs": [
                [-0.1 * place if place else None, token, self.text_of([token]) if with_text else None]
                for place, token in enumerate(payload["input_ids"])
            ]
        }

    async def _wait_for_end(self, payload: dict[str, Any]) -> bool:
        """Wait for the end of a held request. True if it was aborted, False if it was released."""
        request_id = payload.get("rid", f"request {id(payload)}")
        event = self._held[request_id] = asyncio.Event()
        aborted = asyncio.ensure_future(event.wait())
        released = asyncio.ensure_future(self._released.wait())
        await asyncio.wait([aborted, released], return_when=asyncio.FIRST_COMPLETED, timeout=300)
        del self._held[request_id]
        was_aborted = aborted.done()
        aborted.cancel()
        released.cancel()
        return was_aborted


def _length(payload: dict[str, Any]) -> int:
    return len(payload.get("input_ids", ()))
