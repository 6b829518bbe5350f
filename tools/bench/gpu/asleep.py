"""The speed at which a training rank frees its memory on one GPU and takes it back, beside plain copies of the same bytes.

    python tools/bench/gpu/asleep.py [--shapes qwen3-0.6B qwen3-1.7B] [--tokens 8192]
    python tools/bench/gpu/asleep.py --device cpu --tiny

The rank takes a step, moves its memory to the host (`--offload-train`) and takes it back. It does this a second time, when the
host memory is allocated already. The bench compares all tensors of the model with their values from before. On the CPU, the
memory is that of the process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import torch

from slime.scheduling.device_turns import Holds
from slime.utils.device import clear_memory, get_accelerator
from tools.bench.gpu.common import Report, best_seconds, run
from tools.bench.gpu.handles import checksum
from tools.bench.gpu.measured_rank import Case, MeasuredRank, make_shape_parser, measured_rank, of_every_case

MIB = 2**20
TARGET = 0.5
_COPIED, _TINY_COPIED = 2**30, 2**20


def main() -> int:
    return run(measure, make_shape_parser(__doc__))


def measure(options: argparse.Namespace) -> Report:
    """Measure every shape."""
    bytes_per_second = _copies(_TINY_COPIED if options.tiny else _COPIED)
    rows, stopped = of_every_case(options, lambda case: list(_of_case(case, bytes_per_second)))
    again = [row["of the copy's speed"] for row in rows if row["turn"].startswith("second")]
    met = None if options.tiny or not rows else all(share >= TARGET for share in again)
    wrong = [
        f"{row['shape']}: {row['different']} tensors came back with other bytes" for row in rows if row["different"]
    ]
    target = f"the second time at least {TARGET:g} of the speed of a copy"
    return Report("asleep", rows, [*stopped, *wrong], target, met, failed=bool(stopped or wrong))


def _copies(size: int) -> dict[str, float]:
    """Bytes per second of a copy from the device to pinned host memory, and back."""
    accelerator = get_accelerator()
    host, device = (
        accelerator.host_buffer(size),
        torch.empty(size, dtype=torch.uint8, device=accelerator.current_device()),
    )
    calls = {
        "gives": lambda: host.copy_(device, non_blocking=True),
        "takes": lambda: device.copy_(host, non_blocking=True),
    }
    return {name: size / seconds for name, seconds in best_seconds(calls, 5).items()}


def _of_case(case: Case, bytes_per_second: dict[str, float]) -> Iterator[dict[str, Any]]:
    accelerator = get_accelerator()
    with measured_rank(case) as rank:
        rank.run_until("step")
        clear_memory()
        for turn in ("first", "second"):
            # Gradients are freed and allocated anew, so they are not copied.
            residents = rank.residents()
            storages = [tensor.untyped_storage() for tensor in (*residents.weights, *residents.optimizer)]
            moved = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
            del storages, residents
            before, checksums = accelerator.memory_allocated(), _checksums(rank)
            gives = _seconds(lambda: rank.memory.hold(Holds.NOTHING))
            left = accelerator.memory_allocated()
            takes = _seconds(lambda: rank.memory.hold(Holds.ALL))
            after = _checksums(rank)
            different = sum(checksums[name] != after[name] for name in checksums)
            for way, seconds in (("gives", gives), ("takes", takes)):
                yield {
                    "shape": case.name,
                    "turn": f"{turn}, {way}",
                    "MiB before": before / MIB,
                    "MiB left": left / MIB,
                    "seconds": seconds,
                    "MB copied": moved / 1e6,
                    "GB/s": moved / seconds / 1e9,
                    "of the copy's speed": moved / seconds / bytes_per_second[way],
                    "different": different,
                }


def _checksums(rank: MeasuredRank) -> dict[str, int]:
    residents = rank.residents()
    tensors = [*residents.weights, *residents.optimizer]
    return {str(number): checksum(tensor) for number, tensor in enumerate(tensors)}


def _seconds(call: Callable[[], Any]) -> float:
    accelerator = get_accelerator()
    accelerator.synchronize()
    started = time.perf_counter()
    call()
    accelerator.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
