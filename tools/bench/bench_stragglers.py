"""What the longest answers of a step cost: idle slots of an engine, with and without over-sampling and partial rollouts.

    python tools/bench/bench_stragglers.py [--steps 6] [--groups 16] [--slots 64] [--median 100] [--picture FILE.svg]

A server speaks the engines' protocol and computes nothing: each of its slots gives a token per `--token-ms`, and answers have
log-normal lengths (sigma 1, from 50 to 1,000 tokens) in an order that is the same in every way. The loop is ours: data
source, default rollout function, abort. Where a way draws more than it keeps, slots whose answers are finished go to others
until enough groups are there. `idle` is the share of slots times seconds in which a slot had nothing to do, `thrown away` that
of generated tokens that no step was given. A real engine is faster with fewer requests in its batch; so this is the most that
can be won.
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from slime.rollout.base_types import leaves
from slime.rollout.generate_state import GenerateState
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils import async_utils
from slime.utils.http_utils import close_http_client
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.models.rollout_args import CountingDataSource, make_args, make_checkpoint

SAMPLES_PER_PROMPT = 4
SHORTEST, LONGEST = 50, 1000
WAYS = {
    "all of a step": {},
    "half as many groups more": {"over_sampling": 1.5},
    "and partial rollouts": {"over_sampling": 1.5, "partial_rollout": True, "keep_surplus_groups": True},
}


@dataclass
class SlotEngine:
    """`slots` answers at a time, the others wait. Usable as a context manager."""

    slots: int
    token_seconds: float
    median: float
    port: int = 0
    # (seconds since the start, answers that are being written)
    occupancy: list[tuple[float, int]] = field(default_factory=list)
    generated: int = 0

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._aborted = asyncio.Event()
        self._busy = 0
        self._free = asyncio.Semaphore(self.slots)
        self._lengths = random.Random(0)
        self.start_clock()

    def start_clock(self) -> None:
        """Seconds are counted from now on."""
        self._started = time.perf_counter()

    def __enter__(self) -> "SlotEngine":
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(60)
        return self

    def __exit__(self, *exc_info: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/workers", self._workers)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"id": "1", "url": f"http://127.0.0.1:{self.port}"}]})

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self._busy, "num_waiting_reqs": 0}]})

    async def _abort(self, request: web.Request) -> web.Response:
        self._aborted.set()
        self._aborted = asyncio.Event()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.Response:
        payload = await request.json()
        ids, aborted = payload["input_ids"], self._aborted
        # A token that was generated is the length of its answer, so that a continuation tells how much is left.
        begun = ids[-1] >= SHORTEST
        length = ids[-1] if begun else self._new_length()
        left = length - (
            next((i for i, token in enumerate(reversed(ids)) if token != length), len(ids)) if begun else 0
        )
        count = await self._write(left, aborted)
        self.generated += count
        reason = "stop" if count == left else "abort"
        meta_info = {"output_token_logprobs": [[-1.0, length, None]] * count, "finish_reason": {"type": reason}}
        return web.json_response({"text": "x" * count, "meta_info": meta_info})

    def _new_length(self) -> int:
        length = round(self._lengths.lognormvariate(math.log(self.median), 1.0))
        return min(LONGEST, max(SHORTEST, length))

    async def _write(self, tokens: int, aborted: asyncio.Event) -> int:
        """How many of `tokens` were written before an abort."""
        waiting = asyncio.ensure_future(aborted.wait())
        slot = asyncio.ensure_future(self._free.acquire())
        await asyncio.wait([waiting, slot], return_when=asyncio.FIRST_COMPLETED)
        if not slot.done():
            slot.cancel()
            return 0
        started = time.perf_counter()
        self._note(1)
        await asyncio.wait([waiting], timeout=tokens * self.token_seconds)
        self._note(-1)
        self._free.release()
        waiting.cancel()
        return min(tokens, round((time.perf_counter() - started) / self.token_seconds))

    def _note(self, change: int) -> None:
        self._busy += change
        self.occupancy.append((time.perf_counter() - self._started, self._busy))

    def idle_share(self) -> float:
        """Of slots times seconds, from the first answer to now."""
        ends = [*[at for at, _ in self.occupancy[1:]], time.perf_counter() - self._started]
        busy = sum(count * (end - at) for (at, count), end in zip(self.occupancy, ends, strict=True))
        return 1 - busy / (self.slots * (ends[-1] - self.occupancy[0][0]))


@contextlib.contextmanager
def stepping(
    checkpoint: str, way: dict[str, Any], options: argparse.Namespace
) -> Iterator[tuple[SlotEngine, Any, Any]]:
    """An engine, the arguments of a step against it, and its source."""
    SingletonMeta.clear_instances()
    over_sampling = round(options.groups * way.get("over_sampling", 1))
    flags = {name: value for name, value in way.items() if name != "over_sampling"}
    with SlotEngine(options.slots, options.token_ms / 1000, options.median) as engine:
        args = make_args(
            checkpoint, engine.port, rollout_batch_size=options.groups, over_sampling_batch_size=over_sampling,
            n_samples_per_prompt=SAMPLES_PER_PROMPT, rollout_max_response_len=None, sglang_server_concurrency=4096, **flags,
        )  # fmt: skip
        # The tokenizer is loaded and modules are imported before the clock starts.
        GenerateState(args).prompt_ids(Sample(prompt="a prompt"))
        engine.start_clock()
        yield engine, args, CountingDataSource(SAMPLES_PER_PROMPT)
        async_utils.run(close_http_client())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--groups", type=int, default=16, help="of a step")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--median", type=float, default=100.0, help="tokens of an answer")
    parser.add_argument("--token-ms", type=float, default=4.0)
    parser.add_argument("--picture", type=Path, help="file for the slots in use over time (.svg)")
    options = parser.parse_args()
    print(f"{'':28}  s per step   tokens/s   idle   thrown away")
    curves = {}
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = make_checkpoint(Path(directory))
        limits = {"vocab_size": LONGEST + 1, "max_position_embeddings": 10 * LONGEST}
        (Path(checkpoint) / "config.json").write_text(json.dumps(limits))
        for name, way in WAYS.items():
            with stepping(checkpoint, way, options) as (engine, args, source):
                trained, started = 0, time.perf_counter()
                for rollout_id in range(options.steps):
                    groups = generate_rollout(args, rollout_id, source).samples
                    trained += sum(sample.response_length for sample in leaves(groups))
                seconds, idle = time.perf_counter() - started, engine.idle_share()
                kept = sum(sample.response_length for group in source.returned for sample in leaves(group))
                curves[name] = engine.occupancy
                print(
                    f"{name:28}  {seconds / options.steps:10.2f}  {trained / seconds:9.0f}  {idle:5.0%}  "
                    f"{max(0.0, 1 - (trained + kept) / engine.generated):12.0%}",
                    flush=True,
                )
    if options.picture:
        options.picture.write_text(picture(curves, options.slots))


def picture(curves: dict[str, list[tuple[float, int]]], slots: int) -> str:
    """Slots in use over time, a panel for each way, on one axis of time."""
    width, height, gap = 640, 90, 34
    longest = max(curve[-1][0] for curve in curves.values())
    parts = []
    for number, (name, curve) in enumerate(curves.items()):
        top = number * (height + gap) + 20
        path, level, drawn = f"M0 {top + height}", 0, 0.0
        for at, count in curve:
            x = at / longest * width
            if x - drawn < 0.7:  # of steps that nobody could see, the last one
                level = count
                continue
            drawn = x
            path += (
                f" L{x:.1f} {top + height * (1 - level / slots):.1f} L{x:.1f} {top + height * (1 - count / slots):.1f}"
            )
            level = count
        parts += [
            f'<text x="0" y="{top - 6}" font-size="12">{name}: slots in use over {curve[-1][0]:.0f} s</text>',
            f'<rect x="0" y="{top}" width="{width}" height="{height}" fill="none" stroke="#ccc"/>',
            f'<path d="{path} L{curve[-1][0] / longest * width:.1f} {top + height} Z" fill="#4878d0" fill-opacity="0.6"/>',
        ]
    total = len(curves) * (height + gap) + 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-5 0 {width + 10} {total}" font-family="sans-serif">'
    return head + '<rect x="-5" width="100%" height="100%" fill="white"/>' + "".join(parts) + "</svg>\n"


if __name__ == "__main__":
    main()
