"""Samples per second from the data source to the train batch, beside a bare aiohttp loop that sends and parses the same bodies.

    python tools/bench/bench_rollout_step.py [--in-flight 64 1024 4096] [--samples 8192] [--repeats 3]
    python tools/bench/bench_rollout_step.py --in-flight 256 --sizes 1024 8192 102400   # cost per sample of larger steps
    python tools/bench/bench_rollout_step.py --in-flight 1024 --profile 30

A `null_engine` answers at once with 64 tokens and their log-probs. `bare` sends the body of a request and parses its answer
with orjson; `ours` is a whole step of the default rollout function, graded by a function of one line, and builds the columns of
the train batch. Both run in one process and take turns; the best repeat of each counts. Bars: 0.7 of the samples per second of
bare, and a cost per sample that is flat from 1k to 100k samples. On a shared machine the ratio of CPU seconds is the more
reliable one.
"""

import argparse
import asyncio
import cProfile
import json
import logging
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from slime.arguments import parse_args
from slime.rollout.base_types import leaves
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.train_data import convert_samples_to_train_batch
from slime.utils import async_utils
from slime.utils.http_utils import close_http_client
from slime.utils.misc import SingletonMeta, collect_garbage_rarely
from slime.utils.run_values import with_run_values
from tools.bench.null_engine import VOCABULARY, null_engine

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 64
SAMPLES_PER_PROMPT = 8


async def reward(args: Any, sample: Any) -> float:
    """A reward that costs nothing."""
    return float(sample.index % 2)


def arguments(task: Path, url: str, in_flight: int, samples: int) -> Any:
    """The arguments of a step of `samples` samples against the null engine."""
    batch = samples // SAMPLES_PER_PROMPT
    args = parse_args(
        argv=[
            "--hf-checkpoint", str(task / "model"), "--model-args-from-hf", "--prompt-data", str(task / "train.jsonl"),
            "--apply-chat-template", "--num-rollout", "1", "--rollout-batch-size", str(batch), "--n-samples-per-prompt",
            str(SAMPLES_PER_PROMPT), "--rollout-max-response-len", "96", "--rollout-num-gpus", "1",
            "--actor-num-gpus-per-node", "1", "--custom-rm-path", f"{Path(__file__).resolve()}:reward",
            "--sglang-server-concurrency", str(in_flight), "--log-level", "WARNING", "--rm-concurrency", str(in_flight),
        ]
    )  # fmt: skip
    # The answers have token ids that the toy model lacks.
    args = argparse.Namespace(**{**vars(args), "vocab_size": VOCABULARY})
    host, port = url.removeprefix("http://").removesuffix("/generate").split(":")
    models = {"default": (host, int(port))}
    return with_run_values(
        args, rollout_num_engines=1, sglang_router_ip=host, sglang_router_port=int(port), sglang_model_routers=models
    )


def ours(args: Any) -> Callable[[], int]:
    """A function that runs a step and builds its train batch. It returns the number of samples."""
    source = RolloutDataSourceWithBuffer(args)

    def step() -> int:
        groups = generate_rollout(args, 0, source).samples
        return len(convert_samples_to_train_batch(args, leaves(groups))["tokens"])

    return step


def bare(url: str, in_flight: int, samples: int, prompt: list[int]) -> Callable[[], int]:
    """A function that sends `samples` requests by `in_flight` workers. It returns the number of answers."""
    payload = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 96},
        "return_logprob": True,
    }
    headers = {"Content-Type": "application/json"}

    async def main() -> int:
        remaining = iter(range(samples))
        answered = []
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight)) as session:

            async def worker() -> None:
                for _ in remaining:
                    async with session.post(url, data=orjson.dumps(payload), headers=headers) as response:
                        answered.append(orjson.loads(await response.read()))

            await asyncio.gather(*[worker() for _ in range(min(in_flight, samples))])
        return len(answered)

    return lambda: async_utils.run(main())


def best_of(ways: Iterable[Callable[[], int]], samples: int, repeats: int) -> list[tuple[float, float]]:
    """For each way its least (wall-clock seconds, CPU seconds of this process) per sample. The ways take turns."""
    ways = list(ways)
    least = [[float("inf")] * 2 for _ in ways]
    for number in range(repeats + 1):
        for way, seconds in zip(ways, least, strict=True):
            started, cpu = time.perf_counter(), time.process_time()
            if way() != samples:
                raise SystemExit(f"not all of {samples} samples came back")
            spent = time.perf_counter() - started, time.process_time() - cpu
            if number:  # the first round warms up
                seconds[:] = map(min, seconds, [each / samples for each in spent])
    return [(clock, cpu) for clock, cpu in least]


def compare(task: Path, url: str, in_flight: int, samples: int, options: argparse.Namespace) -> None:
    """Measure both ways and print a line of the table."""
    SingletonMeta.clear_instances()
    args = arguments(task, url, in_flight, samples)
    step = ours(args)
    prompt = json.loads((task / "train.jsonl").read_text().splitlines()[0])["prompt"]
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    other = bare(url, in_flight, samples, [5] * (len(text) + 12))
    (our_clock, our_cpu), (bare_clock, bare_cpu) = best_of([step, other], samples, options.repeats)
    print(
        f"{in_flight:6} {samples:8}  {1 / our_clock:8.0f}  {1 / bare_clock:8.0f}  {bare_clock / our_clock:6.2f}"
        f"  {our_cpu * 1e6:8.0f}  {bare_cpu * 1e6:8.0f}  {bare_cpu / our_cpu:6.2f}",
        flush=True,
    )
    if options.profile:
        profile(step, options.profile)
    async_utils.run(close_http_client())


def profile(step: Callable[[], int], lines: int) -> None:
    """Print where the thread of the event loop spends the time of a step."""
    profiler = cProfile.Profile()

    async def switch(on: bool) -> None:
        (profiler.enable if on else profiler.disable)()

    async_utils.run(switch(True))
    step()
    async_utils.run(switch(False))
    pstats.Stats(profiler).sort_stats("tottime").print_stats(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--sizes", type=int, nargs="+", default=[], help="of steps, each at the first --in-flight")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", type=int, default=0, help="lines of a profile of our step")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    collect_garbage_rarely()  # as the manager does
    with tempfile.TemporaryDirectory(prefix="bench-step-") as directory, null_engine(TOKENS) as url:
        task = Path(directory) / "task"
        subprocess.run([sys.executable, ROOT / "tools/make_toy_task.py", task], check=True)
        print("in flight  samples    ours/s    bare/s   ratio   CPU us: ours   bare   ratio")
        rows = [(options.in_flight[0], size) for size in options.sizes] or [
            (in_flight, max(options.samples, 2 * in_flight)) for in_flight in options.in_flight
        ]
        for in_flight, samples in rows:
            compare(task, url, in_flight, samples, options)


if __name__ == "__main__":
    main()
