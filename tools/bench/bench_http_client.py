"""CPU time per request of our HTTP client beside a bare aiohttp session, in one run.

    python tools/bench/bench_http_client.py [--requests 4096] [--repeats 5] [--in-flight 64 256 1024] [--response-tokens 128]

A `null_engine` answers, and the bench measures the client's own CPU time. Both clients send and parse the same bodies and take
turns; their medians are compared. The bar is a ratio of at most 1.15.
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from slime.utils.http_utils import close_http_client, init_http_client, post
from tools.bench.null_engine import null_engine


async def run_requests(send, payload: dict, requests: int, in_flight: int) -> float:
    """CPU milliseconds of this process per request."""
    remaining = iter(range(requests))

    async def worker() -> None:
        for _ in remaining:
            await send(payload)

    started = time.process_time()
    await asyncio.gather(*[worker() for _ in range(in_flight)])
    return (time.process_time() - started) / requests * 1000


async def compare(url: str, options: argparse.Namespace, in_flight: int) -> tuple[float, float]:
    payload = {
        "input_ids": list(range(1000, 1000 + options.prompt_tokens)),
        "sampling_params": {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": options.response_tokens},
        "return_logprob": True,
    }
    init_http_client(
        SimpleNamespace(
            sglang_server_concurrency=in_flight,
            rollout_num_engines=1,
            http_request_timeout=600,
            http_control_timeout=60,
            http_max_retries=1,
        )
    )
    bare_times, our_times = [], []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight)) as session:

        async def bare(body: dict) -> dict:
            async with session.post(url, json=body) as response:
                return await response.json()

        async def ours(body: dict) -> dict:
            return await post(url, body)

        # The first round opens the connections and is not counted.
        for round_number in range(options.repeats + 1):
            for send, times in ((bare, bare_times), (ours, our_times)):
                cost = await run_requests(send, payload, options.requests, in_flight)
                if round_number:
                    times.append(cost)
    await close_http_client()
    return statistics.median(bare_times), statistics.median(our_times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--response-tokens", type=int, default=128)
    options = parser.parse_args()
    with null_engine(options.response_tokens) as url:
        print(f"{'in flight':>9}  {'bare ms':>8}  {'ours ms':>8}  {'ratio':>6}")
        for in_flight in options.in_flight:
            bare, ours = asyncio.run(compare(url, options, in_flight))
            print(f"{in_flight:9d}  {bare:8.3f}  {ours:8.3f}  {ours / bare:6.3f}")


if __name__ == "__main__":
    main()
