"""Tokens per second of one engine without a GPU: our batched attention and SGLang's own, taking turns in one run.

    python tools/bench/bench_generation.py                                    # 1.25 M parameters, 128 answers of 64 tokens
    python tools/bench/bench_generation.py --hidden-size 512 --num-layers 8   # other sizes, for tools/make_toy_task.py
    python tools/bench/bench_generation.py --lengths 32 256                   # log-normal: median, cap

Both engines are real servers on this machine. A round asks each in turn for the same answers, with log-probs, and the best
round of each counts. The engine that waits takes no processor time.
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from slime.backends.sglang_utils.server_arguments import environment_on_cpu
from slime.utils.child_process import ChildProcess, environment_for_python
from slime.utils.ports import random_port_start, reserve_port
from tools.serve_on_cpu import SERVE, command_line
from tools.tied import ROOT, tied

WITHOUT_OURS = (
    "from slime.backends.sglang_utils import cpu_runtime\n"
    "del cpu_runtime._PATCHES['sglang.srt.layers.attention.attention_registry']\n"
)
SECONDS_TO_START = 180


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[64], help="tokens of every answer, or median and cap"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    options, model = parser.parse_known_args()
    lengths = answer_lengths(options)
    with tempfile.TemporaryDirectory(prefix="bench-generation-") as directory, contextlib.ExitStack() as servers:
        subprocess.run([sys.executable, ROOT / "tools/make_toy_task.py", Path(directory) / "task", *model], check=True)
        kinds = {"torch_native": WITHOUT_OURS + SERVE, "batched": SERVE}
        urls = {
            kind: servers.enter_context(server(code, Path(directory) / "task/model", options))
            for kind, code in kinds.items()
        }
        best = asyncio.run(rounds(urls, lengths, options))
    print(f"{options.answers} answers, {sum(lengths)} tokens, {options.threads} thread(s)")
    for kind, seconds in best.items():
        print(
            f"{kind:14} {seconds:8.2f} s  {sum(lengths) / seconds:9.0f} tokens/s  x{best['torch_native'] / seconds:.2f}"
        )


def answer_lengths(options: argparse.Namespace) -> list[int]:
    """One length for all answers, or log-normal lengths with the median and the cap of `--lengths`."""
    if len(options.lengths) == 1:
        return options.lengths * options.answers
    median, cap = options.lengths
    draw = random.Random(0)
    return [min(cap, max(1, round(draw.lognormvariate(math.log(median), 1.0)))) for _ in range(options.answers)]


@contextlib.contextmanager
def server(code: str, model: Path, options: argparse.Namespace) -> Iterator[str]:
    """Yields the address of a server that lives as long as the block."""
    with reserve_port("127.0.0.1", random_port_start(20000)) as reservation:
        port = reservation.port
    words = ["--model-path", str(model), "--port", str(port), "--max-running-requests", str(options.answers)]
    environment = {**environment_on_cpu(environment_for_python(), 1), "OMP_NUM_THREADS": str(options.threads)}
    program = tied([sys.executable, "-c", code, *command_line(words)])
    process = ChildProcess("server", program, model.parent / f"server-{port}.log", environment)
    process.start()
    try:
        asyncio.run(until_healthy(f"http://127.0.0.1:{port}", process))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate(30)


async def until_healthy(url: str, process: ChildProcess) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/health_generate") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.5)  # between two questions
    raise SystemExit(f"the server at {url} did not start within {SECONDS_TO_START} s: {process.describe_end()}")


async def rounds(urls: dict[str, str], lengths: list[int], options: argparse.Namespace) -> dict[str, float]:
    """The seconds of the best round of each server."""
    best = dict.fromkeys(urls, math.inf)
    connector = aiohttp.TCPConnector(limit=options.answers)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        for number in range(options.rounds + 1):
            for kind, url in urls.items():
                started = time.perf_counter()
                await asyncio.gather(
                    *(ask(session, url, number, index, length, options) for index, length in enumerate(lengths))
                )
                if number:  # the first round warms up
                    best[kind] = min(best[kind], time.perf_counter() - started)
    return best


async def ask(
    session: aiohttp.ClientSession, url: str, number: int, index: int, length: int, options: argparse.Namespace
) -> None:
    draw = random.Random(f"{number} {index // 8}")
    sampling = {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True}
    body = {
        "input_ids": [draw.randrange(256) for _ in range(options.prompt_tokens)],
        "sampling_params": sampling,
        "return_logprob": True,
    }
    async with session.post(f"{url}/generate", json=body) as answer:
        answer.raise_for_status()
        got = len(json.loads(await answer.read())["meta_info"]["output_token_logprobs"])
    if got != length:
        raise SystemExit(f"{url} gave {got} of {length} tokens")


if __name__ == "__main__":
    main()
