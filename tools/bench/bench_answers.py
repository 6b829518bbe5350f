"""The cost of long answers for the event loop and the memory: our client beside orjson on the loop, in one run.

    python tools/bench/bench_answers.py [--answers 4096] [--plain-answers 256] [--tokens 32768] [--in-flight 64]

Each client runs in a process of its own, keeps `--in-flight` requests to a `null_engine` open, and holds all samples until
the end. `plain` parses with orjson on the loop and keeps lists; `ours` is the path of the default generate function. Plain gets
fewer answers: the garbage collector walks over every pair that it parsed again and again, so at full size it would not end
within the hour. The printed figures are per answer and per token.

A stop is the time by which a heartbeat of one millisecond was late, less the time for which the kernel gave the thread no
processor (schedstat). Bars: at most 40 bytes per token; loop CPU at most a quarter, and stops at most half, of plain; CPU of
all threads at most 1.2 times that of `parsed`, which parses with orjson and keeps nothing.
"""

import argparse
import asyncio
import gc
import multiprocessing
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import numpy as np
import orjson
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from slime.rollout.generation import append_engine_output
from slime.utils.http_utils import close_http_client, init_http_client, post_generate
from slime.utils.misc import collect_garbage_rarely
from slime.utils.types import Sample
from tools.bench.null_engine import null_engine

PAYLOAD = {"input_ids": [1, 2, 3], "sampling_params": {"temperature": 1.0}, "return_logprob": True}
HEADERS = {"Content-Type": "application/json"}
# A loop that stands still sees its own connections time out.
PATIENCE = aiohttp.ClientTimeout(total=3600, sock_connect=3600)
HEARTBEAT_S = 0.001


async def plain(session: aiohttp.ClientSession, url: str, sample: Sample) -> None:
    async with session.post(url, data=orjson.dumps(PAYLOAD), headers=HEADERS, timeout=PATIENCE) as response:
        output = orjson.loads(await response.read())
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        tokens=[pair[1] for pair in pairs],
        log_probs=[pair[0] for pair in pairs],
        meta_info=output["meta_info"],
        text=output["text"],
    )


async def parsed(session: aiohttp.ClientSession, url: str, sample: Sample) -> None:
    async with session.post(url, data=orjson.dumps(PAYLOAD), headers=HEADERS, timeout=PATIENCE) as response:
        orjson.loads(await response.read())


async def ours(session: aiohttp.ClientSession, url: str, sample: Sample) -> None:
    append_engine_output(None, sample, await post_generate(url, PAYLOAD))


class Heartbeat:
    """Records by how many seconds it was late: the worst case and the sum."""

    def __init__(self) -> None:
        self.longest = self.total = 0.0
        self._waiting = open(f"/proc/self/task/{threading.get_native_id()}/schedstat")  # noqa: SIM115
        self._task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            started, queued = time.perf_counter(), self._queued_s()
            await asyncio.sleep(HEARTBEAT_S)
            late = time.perf_counter() - started - HEARTBEAT_S - (self._queued_s() - queued)
            self.longest, self.total = max(self.longest, late), self.total + max(0.0, late)

    def _queued_s(self) -> float:
        self._waiting.seek(0)
        return int(self._waiting.read().split()[1]) / 1e9

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._waiting.close()


async def measure(client, url: str, answers: int, options: argparse.Namespace) -> dict[str, float]:
    concurrency = {"sglang_server_concurrency": options.in_flight, "rollout_num_engines": 1}
    limits = {"http_request_timeout": 3600, "http_control_timeout": 60, "http_max_retries": 60}
    init_http_client(SimpleNamespace(**concurrency, **limits))
    samples = [Sample(index=i, tokens=[1, 2, 3]) for i in range(answers)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=options.in_flight)) as session:
        # These requests open connections and load what is loaded at the first use. They are not counted.
        await asyncio.gather(*[client(session, url, Sample(tokens=[1])) for _ in range(min(4, options.in_flight))])
        gc.collect()
        memory, cpu, started = psutil.Process().memory_info().rss, time.thread_time(), time.perf_counter()
        all_threads = time.process_time()
        heartbeat, remaining = Heartbeat(), iter(samples)

        async def worker() -> None:
            for sample in remaining:
                await client(session, url, sample)

        await asyncio.gather(*[worker() for _ in range(options.in_flight)])
        cpu, seconds = time.thread_time() - cpu, time.perf_counter() - started
        all_threads = time.process_time() - all_threads
        await heartbeat.stop()
    await close_http_client()
    gc.collect()
    # Tokens that the client keeps; `parsed` keeps none.
    tokens = max(1, sum(sample.response_length for sample in samples))
    return {
        "longest stop, ms": heartbeat.longest * 1e3,
        "stopped per answer, ms": heartbeat.total / answers * 1e3,
        "loop CPU per answer, ms": cpu / answers * 1e3,
        "CPU per answer, ms": all_threads / answers * 1e3,
        "bytes per token, counted": held_bytes(samples[0]) * answers / tokens,
        "bytes per token, resident": (psutil.Process().memory_info().rss - memory) / tokens,
        "seconds per 1,000 answers": seconds / answers * 1e3,
    }


def held_bytes(sample: Sample) -> int:
    """The bytes of the per-token fields and the text, counted object by object."""
    total = 0
    for name in ("tokens", "loss_mask", "rollout_log_probs", "response"):
        value = vars(sample)[name]
        total += value.nbytes if isinstance(value, np.ndarray) else sys.getsizeof(value)
        if isinstance(value, list):
            # CPython holds the integers 0 and 1 once for all lists.
            total += sum(sys.getsizeof(entry) for entry in value if entry not in (0, 1))
    return total


def run_client(connection, name: str, url: str, options: argparse.Namespace) -> None:
    client, answers = {
        "plain": (plain, options.plain_answers),
        "parsed": (parsed, options.answers),
        "ours": (ours, options.answers),
    }[name]
    if name == "parsed":
        # This client keeps no objects, so the collector would find nothing.
        gc.disable()
    else:
        collect_garbage_rarely()  # as the manager does
    connection.send(asyncio.run(measure(client, url, answers, options)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=4096)
    parser.add_argument("--plain-answers", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--in-flight", type=int, default=64)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = {}
    with null_engine(options.tokens) as url:
        for name in ("plain", "parsed", "ours"):
            receiver, sender = context.Pipe(duplex=False)
            client = context.Process(target=run_client, args=(sender, name, url, options), daemon=True)
            client.start()
            # While this end is open in the parent, reading does not notice that a client has failed.
            sender.close()
            results[name] = receiver.recv()
            client.join(60)
    counts = f"{options.answers} answers (plain: {options.plain_answers})"
    print(f"{counts} of {options.tokens} tokens, {options.in_flight} in flight")
    print(f"{'':28}{'plain':>10}{'ours':>10}{'ratio':>8}")
    for name, value in results["plain"].items():
        own = results["ours"][name]
        print(f"{name:28}{value:10.2f}{own:10.2f}{own / value:8.3f}")
    parsing, own = (results[client]["CPU per answer, ms"] for client in ("parsed", "ours"))
    print(f"{'CPU, beside parsed':28}{parsing:10.2f}{own:10.2f}{own / parsing:8.3f}")


if __name__ == "__main__":
    main()
