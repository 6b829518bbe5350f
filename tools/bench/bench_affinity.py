"""Prefix-cache hits of dialogues behind two engines, with each policy of the router, in one run.

    python tools/bench/bench_affinity.py                                   # 64 dialogues of 4 turns, a calculator's replies
    python tools/bench/bench_affinity.py --policies round_robin consistent_hashing --dialogues 32

The dialogues are those of `slime.rollout.dialogue`, as in a run: each request carries the session of its sample. Each turn
sends everything that came before it, and an engine that has served the dialogue before computes only the new tokens. Between
two policies both engines flush their prefix caches and a new router starts. All dialogues begin with the same words and go on
with numbers of their own.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import requests

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from slime.arguments import parse_args
from slime.rollout.dialogue import dialogue
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation_call import GenerationCall
from slime.serving.model_routers import start_router
from slime.serving.router import Worker
from slime.utils.http_utils import close_http_client
from slime.utils.misc import SingletonMeta
from slime.utils.run_values import with_run_values
from slime.utils.types import Sample
from tools.bench.bench_generation import server
from tools.bench.learning_curves import markdown
from tools.serve_on_cpu import SERVE

ROOT = Path(__file__).resolve().parents[2]
# Runs refuse power_of_two, the fifth policy.
POLICIES = ("random", "round_robin", "cache_aware", "consistent_hashing")
ENGINES = 2


@dataclass(frozen=True)
class Hits:
    """The result of all dialogues with one policy.

    hit_rate: the share of the prompt tokens sent that were in an engine's cache.
    """

    hit_rate: float
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--dialogues", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args(argv)
    found = measure(options.policies, options.dialogues, options.turns)
    header = ("Policy", "Prompt tokens from the cache", "Seconds")
    rows = [[f"`{name}`", f"{hits.hit_rate:.3f}", f"{hits.seconds:.1f}"] for name, hits in found.items()]
    print(markdown(header, rows))
    return 0


def measure(policies: Sequence[str], dialogues: int, turns: int) -> dict[str, Hits]:
    """Policy → its result, on two engines that this function starts and ends."""
    with tempfile.TemporaryDirectory(prefix="bench-affinity-") as directory, contextlib.ExitStack() as servers:
        task = Path(directory) / "task"
        make = [
            sys.executable,
            ROOT / "tools/make_toy_task.py",
            task,
            "--train-size",
            "8",
            "--eval-size",
            "1",
            "--sft-size",
            "1",
        ]
        subprocess.run(make, check=True, stdout=sys.stderr)
        of_server = argparse.Namespace(answers=dialogues, threads=1)
        urls = [servers.enter_context(server(SERVE, task / "model", of_server)) for _ in range(ENGINES)]
        return {policy: with_policy(policy, urls, task, dialogues, turns) for policy in policies}


def with_policy(policy: str, urls: Sequence[str], task: Path, dialogues: int, turns: int) -> Hits:
    """Run all dialogues at once, behind a router with this policy."""
    for url in urls:
        requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    args = parse_args(argv=[
        "--hf-checkpoint", str(task / "model"), "--model-args-from-hf", "--prompt-data", str(task / "train.jsonl"),
        "--rm-type", "math", "--num-rollout", "1", "--rollout-batch-size", "1", "--n-samples-per-prompt", "1",
        "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", str(ENGINES), "--max-turns", str(turns),
        "--rollout-max-response-len", "1024", "--router-policy", policy,
    ])  # fmt: skip
    router = start_router(args, task.parent / policy)
    try:
        router.wait_ready(120)
        router.add_workers([Worker(url) for url in urls], 120)
        address = {"sglang_router_ip": router.ip, "sglang_router_port": router.port}
        models = {"sglang_model_routers": {"default": (router.ip, router.port)}}
        args = with_run_values(args, rollout_num_engines=ENGINES, **address, **models)
        SingletonMeta.clear_instances()
        started = time.perf_counter()
        samples = asyncio.run(talk(args, dialogues))
        seconds = time.perf_counter() - started
    finally:
        router.shutdown()
        SingletonMeta.clear_instances()
    sent = sum(sample.prefix_cache_info.total_prompt_tokens for sample in samples)
    hits = sum(sample.prefix_cache_info.cached_tokens for sample in samples)
    return Hits(hits / sent, seconds)


async def talk(args: argparse.Namespace, dialogues: int) -> list[Sample]:
    """Run dialogues in which a calculator answers each turn. The model is untrained: about one token in 16 ends its turn."""

    def reply(said: str) -> str:
        return f"\n{sum(map(ord, said)) % 10_000}\n"

    samples = [
        Sample(
            index=number,
            prompt=[{"role": "user", "content": f"What is {number}*{number + 7}+{number % 9}?"}],
            session_id=f"s{number}",
        )
        for number in range(dialogues)
    ]
    with GenerationCall().under_way():
        try:
            params = {**GenerateState(args).sampling_params, "stop_token_ids": list(range(16))}
            return await asyncio.gather(*(dialogue(args, sample, dict(params), reply) for sample in samples))
        finally:
            await close_http_client()


if __name__ == "__main__":
    sys.exit(main())
