"""An engine that computes nothing: it answers every `/generate` at once, with the same body."""

import asyncio
import contextlib
import multiprocessing
import random
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import orjson
from aiohttp import web

_LIFE_SECONDS = 24 * 3600

# Token ids of answers are below it.
VOCABULARY = 150_000


@contextlib.contextmanager
def null_engine(tokens: int) -> Iterator[str]:
    """Yields the URL of a process that serves during the block. An answer has text, and `tokens` ids with their log-probs."""
    context = multiprocessing.get_context("spawn")
    connection, of_server = context.Pipe()
    server = context.Process(target=_serve, args=(of_server, tokens), daemon=True)
    server.start()
    # While this end is open here, reading does not notice that the server has failed.
    of_server.close()
    try:
        yield f"http://127.0.0.1:{connection.recv()}/generate"
    finally:
        connection.close()
        server.join(10)


def _serve(connection: Connection, tokens: int) -> None:
    """Send the port, and serve until the other side closes the pipe."""
    body = _body(tokens)

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        connection.send(site._server.sockets[0].getsockname()[1])
        await asyncio.get_running_loop().run_in_executor(None, connection.poll, _LIFE_SECONDS)
        await runner.cleanup()

    asyncio.run(main())


def _body(tokens: int) -> bytes:
    """The body of every answer. Its log-probs have as many digits as an engine's float32 values."""
    rng = random.Random(0)
    log_probs = np.log(np.random.default_rng(0).random(tokens)).astype(np.float32).tolist()
    entries = [[log_prob, rng.randrange(1000, VOCABULARY), None] for log_prob in log_probs]
    meta_info = {"output_token_logprobs": entries, "finish_reason": {"type": "stop"}, "completion_tokens": tokens}
    return orjson.dumps({"text": "word" * tokens, "meta_info": meta_info})
