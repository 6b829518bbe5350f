"""A whole weight push to real SGLang engines beside a plain copy of the same bytes by one thread, in one run.

    python tools/bench/bench_weight_sync.py                                 # a model as small as the toy task's
    python tools/bench/bench_weight_sync.py --layers 10 --hidden-size 1024  # 0.5 GB
    python tools/bench/bench_weight_sync.py --engines 1 2 4 --ways group

The time of a push runs from the pause of the engines to the order to go on (`perf/update_weights_time`). The trainer is one
process that holds the tensors of a checkpoint and sends them as a rank does; it gathers nothing. Pushes and copies take turns,
so that other load on the machine meets both. Under much load, processor seconds are more reliable than wall-clock seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import psutil
import ray

from slime.arguments import parse_args
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.weights.push import Opening, WeightPush
from slime.weights.source import Sent
from slime.weights.transports import Receiver
from tools.toy_model import write_model

START_SECONDS = 300.0
SAMPLE_SECONDS = 0.002
# How weights travel → the flags that choose it.
WAYS = {"group": [], "handles": ["--colocate"]}
# Bars for a push to one engine: the least share of a copy's speed, by way, and the most seconds where the requests, not the
# bytes, take the time.
SHARES = {"group": 0.25, "handles": 0.5}
SMALL_BYTES, SMALL_SECONDS = 10e6, 0.03


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--engines", type=int, nargs="+", default=[1])
    parser.add_argument("--pushes", type=int, default=5)
    parser.add_argument("--buffer-size", type=int, default=2**29, help="--update-weight-buffer-size")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-weights-") as directory:
        args_of = make_args(Path(directory) / "model", options)
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=2)
        actor_class = ray.remote(num_cpus=0, max_concurrency=5)(SGLangEngine)
        engines = [actor_class.remote(args_of["group"], rank, directory) for rank in range(max(options.engines))]
        try:
            ray.get([engine.init.remote() for engine in engines], timeout=START_SECONDS)
            measure(options, args_of, engines)
        finally:
            ray.get([engine.shutdown.remote() for engine in engines])
            ray.shutdown()


def make_args(model: Path, options: argparse.Namespace) -> dict[str, argparse.Namespace]:
    """Write a model with random weights. Returns the arguments of a run with it, by the way that weights travel."""
    hidden, head = options.hidden_size, max(32, options.hidden_size // 16)
    shape = SimpleNamespace(
        hidden_size=hidden, ffn_hidden_size=3 * hidden, num_layers=options.layers, num_attention_heads=hidden // head,
        num_key_value_heads=hidden // head, head_dim=head, max_position_embeddings=2048, seed=1,
    )  # fmt: skip
    write_model(model, shape)
    prompts = model.with_name("prompts.jsonl")
    prompts.write_text('{"prompt": "1 + 1", "label": "2"}\n')
    gpus = str(max(options.engines))
    words = [
        "--hf-checkpoint", str(model), "--model-args-from-hf", "--prompt-data", str(prompts), "--num-rollout", "1",
        "--rollout-batch-size", "4", "--rm-type", "math", "--actor-num-gpus-per-node", gpus, "--rollout-num-gpus", gpus,
        "--update-weight-buffer-size", str(options.buffer_size),
    ]  # fmt: skip
    return {way: parse_args(argv=[*words, *flags]) for way, flags in WAYS.items()}


def measure(options: argparse.Namespace, args_of: dict[str, argparse.Namespace], engines: Sequence[Any]) -> None:
    environment = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    trainer = ray.remote(num_cpus=0, max_concurrency=2, runtime_env=environment)(Trainer).remote(args_of["group"])
    names = ray.get(trainer.names.remote())
    receivers = [Receiver(rank, engine, 1, rank) for rank, engine in enumerate(engines)]
    roles = {
        "trainer": [ray.get(trainer.pid.remote())],
        "servers": ray.get([one.server_pid.remote() for one in engines]),
    }
    for count in options.engines:
        for way in options.ways:
            ray.get(trainer.open.remote(args_of[way]))
            ray.get(trainer.watch_memory.remote())
            push = WeightPush(args_of[way], Sources(trainer, names))
            # The first push makes buffers and connections that later ones use again.
            metrics = [push.push(receivers[:count]).metrics]
            copies, computed = [], []
            for _ in range(options.pushes):
                copies.append(ray.get(trainer.copy.remote()))
                before = processor_seconds(roles)
                report = push.push(receivers[:count])
                after = processor_seconds(roles)
                computed.append({role: after[role] - before[role] for role in roles})
                if report.failed:
                    sys.exit(str(report.failed))
                metrics.append(report.metrics)
            tell(way, count, metrics, copies, computed, ray.get(trainer.memory_seen.remote()))
            ray.get(trainer.close.remote())


def processor_seconds(roles: dict[str, list[int]]) -> dict[str, float]:
    """Role → processor seconds of its processes and of all their descendants."""
    found = {}
    for role, pids in roles.items():
        processes = [
            one for pid in pids for one in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))
        ]
        found[role] = sum(sum(process.cpu_times()[:2]) for process in processes)
    return found


def bar(way: str, size: float) -> str:
    """What the best push of `size` bytes to one engine has to reach."""
    return f"at most {SMALL_SECONDS} s" if size <= SMALL_BYTES else f"ratio of at least {SHARES[way]}"


def verdict(way: str, size: float, best: float, copy: float) -> str:
    """Whether the best push, and the best copy of as many bytes, in seconds, meet the bar."""
    met = best <= SMALL_SECONDS if size <= SMALL_BYTES else copy / best >= SHARES[way]
    return "met" if met else "missed"


def tell(
    way: str,
    engines: int,
    metrics: Sequence[dict[str, float]],
    copies: Sequence[float],
    computed: Sequence[dict[str, float]],
    memory: int,
) -> None:
    seconds = [of_push["perf/update_weights_time"] for of_push in metrics]
    size, parts = metrics[0]["perf/update_weights_bytes"], metrics[0]["perf/update_weights_parts"]
    best, median = min(seconds[1:]), sorted(seconds[1:])[len(seconds[1:]) // 2]
    copy = min(copies)
    of_bar = (
        f"  bar {bar(way, size)}: {verdict(way, size, best, copy)}" if engines == 1 else "  no bar for several engines"
    )
    lines = (
        f"{way}, {engines} engine(s): {size / 1e6:.1f} MB in {parts:.0f} parts",
        f"  first push {seconds[0]:.4f} s; then best {best:.4f} s, median {median:.4f} s",
        f"  copy {copy:.4f} s ({size / copy / 1e9:.1f} GB/s); ratio {copy / best:.2f}",
        of_bar,
        "  processor: "
        + ", ".join(f"{role} {min(of_push[role] for of_push in computed):.3f} s" for role in computed[0]),
        f"  peak of the trainer: {memory / 1e6:.1f} MB above its weights",
    )
    print("\n".join(lines), flush=True)


class Trainer:
    """A training rank that holds the tensors of a checkpoint in memory."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from safetensors.torch import load_file

        torch.set_num_threads(1)
        path = Path(args.hf_checkpoint) / "model.safetensors"
        self._tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        self._size = sum(tensor.nbytes for tensor in self._tensors.values())
        self._copied = [torch.ones(self._size, dtype=torch.uint8) for _ in range(2)]
        self._source: Any = None

    def pid(self) -> int:
        return os.getpid()

    def names(self) -> set[str]:
        return set(self._tensors)

    def open(self, args: argparse.Namespace) -> None:
        from slime.weights.buckets import split_into_buckets
        from slime.weights.source import WeightSource
        from slime.weights.transports import transport_of

        way = transport_of(args)
        size = way.bucket_bytes(args)
        self._source = WeightSource(
            lambda: split_into_buckets(self._tensors.items(), size), way(args, 0, 1), set(self._tensors)
        )

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._source, method)(*arguments)

    def copy(self) -> float:
        """Seconds of a copy of as many bytes, between memory that was written before."""
        source, target = self._copied
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started

    def watch_memory(self) -> None:
        """Read the memory of this process every few milliseconds, until `memory_seen` is called."""
        process = psutil.Process()
        self._first = self._peak = process.memory_info().rss
        self._watching = True

        def watch() -> None:
            while self._watching:
                self._peak = max(self._peak, process.memory_info().rss)
                time.sleep(SAMPLE_SECONDS)

        threading.Thread(target=watch, daemon=True).start()

    def memory_seen(self) -> int:
        """Bytes of the peak above the memory at the call of `watch_memory`, when the process held the weights."""
        self._watching = False
        return self._peak - self._first

    def close(self) -> None:
        self._source.close()


class Sources:
    """The trainer, as the `Sources` of a push."""

    def __init__(self, trainer: Any, names: set[str]) -> None:
        self._trainer, self._names = trainer, names

    def open_weight_push(self) -> Opening:
        return Opening(1, 0, self._names)

    def connect_engines(self, source: int, engines: Sequence[Receiver]) -> dict[int, str]:
        return ray.get(self._trainer.call.remote("connect", engines))

    def send_weights(self, source: int, version: int, whole: bool) -> Sent:
        return ray.get(self._trainer.call.remote("send", version, whole))

    def weights_pushed(self, version: int) -> None:
        ray.get(self._trainer.call.remote("settle"))


if __name__ == "__main__":
    main()
