"""Costs and gains of `--use-distributed-post` for the process that generates: its own requests beside those of client actors.

    python tools/bench/bench_distributed_post.py [--actors 2] [--tokens 64 2048 16384] [--in-flight 256] [--repeats 3]

A `null_engine` answers at once with `--tokens` tokens and their log-probs. `post_generate` asks it, in turns from this process
and through actors of the bench's own Ray, all on this machine. The table shows the best repeat of each way: answers per second,
and the CPU milliseconds that an answer costs this process, including Ray's threads. If the engine and the actors share few
processors with this process, only the milliseconds mean something.
"""

import argparse
import asyncio
import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import ray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from slime.ray.request_actors import RequestActors
from slime.utils.http_carriers import Carriers
from slime.utils.http_utils import close_http_client, init_http_client, post_generate, send_through
from slime.utils.misc import collect_garbage_rarely
from tools.bench.null_engine import null_engine

PAYLOAD = {"input_ids": list(range(1000, 1128)), "sampling_params": {"temperature": 1.0}, "return_logprob": True}


async def ask(url: str, answers: int, in_flight: int) -> tuple[float, float]:
    """Returns (wall-clock seconds, CPU seconds of this process) per answer."""
    remaining = iter(range(answers))

    async def worker() -> None:
        for _ in remaining:
            await post_generate(url, PAYLOAD)

    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*[worker() for _ in range(in_flight)])
    return (time.perf_counter() - started) / answers, (time.process_time() - cpu) / answers


async def compare(url: str, carriers: Carriers, options: argparse.Namespace) -> list[list[float]]:
    """The least (wall-clock seconds, CPU seconds) per answer: of requests from this process, then through `carriers`."""
    least = [[float("inf")] * 2, [float("inf")] * 2]
    for number in range(options.repeats + 1):
        for way, seconds in zip((None, carriers), least, strict=True):
            send_through(way)
            spent = await ask(url, options.answers, options.in_flight)
            if number:  # the first round opens connections
                seconds[:] = map(min, seconds, spent)
    send_through(None)
    await close_http_client()
    return least


def memory_of(actors: RequestActors) -> float:
    """The memory of the first actor, in MiB."""
    resident = actors._clients[0].actor.__ray_call__.remote(lambda actor: psutil.Process().memory_info().rss)
    return ray.get(resident, timeout=60) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 2048, 16384])
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--answers", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    collect_garbage_rarely()  # as the manager does
    limits = {"http_request_timeout": 600, "http_control_timeout": 60, "http_max_retries": 1}
    init_http_client(SimpleNamespace(sglang_server_concurrency=options.in_flight, rollout_num_engines=1, **limits))
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    actors = RequestActors(options.actors)
    try:
        carriers = actors.wait_ready()
        print(f"{options.in_flight} in flight, {options.actors} actors")
        print(
            f"resident memory of an actor that has done nothing, most of it of libraries: {memory_of(actors):.0f} MiB"
        )
        print("tokens   answers/s: from here   actors   ratio   CPU ms: from here   actors   ratio")
        for tokens in options.tokens:
            with null_engine(tokens) as url:
                (clock, cpu), (their_clock, their_cpu) = asyncio.run(compare(url, carriers, options))
            print(
                f"{tokens:6}  {1 / clock:21.0f}  {1 / their_clock:7.0f}  {clock / their_clock:6.2f}"
                f"  {cpu * 1e3:18.3f}  {their_cpu * 1e3:7.3f}  {their_cpu / cpu:6.2f}",
                flush=True,
            )
    finally:
        actors.end()
        ray.shutdown()


if __name__ == "__main__":
    main()
