"""The speed at which the weights of a model become the flat buckets of a push on one GPU, beside a plain copy.

    python tools/bench/gpu/buckets.py [--shapes qwen3-0.6B qwen3-1.7B] [--repeats 5]
    python tools/bench/gpu/buckets.py --device cpu --tiny

The walk over the weights is that of a push: Megatron's parameters become the tensors of a Hugging Face checkpoint, one after
the other, and flattening copies these into buckets of `--update-weight-buffer-size`. Nothing is sent. A plain copy of the same
bytes reads and writes each byte once, and so does flattening: at best it is as fast.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import torch

from slime.weights.buckets import BucketFlattener, split_into_buckets
from tools.bench.gpu.common import Report, best_seconds, run
from tools.bench.gpu.measured_rank import Case, make_shape_parser, measured_rank, of_every_case


def main() -> int:
    parser = make_shape_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    return run(measure, parser)


def measure(options: argparse.Namespace) -> Report:
    """Measure every shape."""
    rows, stopped = of_every_case(options, lambda case: _of_case(case, options.repeats))
    notes = ["GB/s count each byte once, though it is read and written", *stopped]
    return Report("buckets", rows, notes, failed=bool(stopped))


def _of_case(case: Case, repeats: int) -> list[dict[str, Any]]:
    with measured_rank(case) as rank:
        rank.run_until("load")
        walk, size = rank.backend.stage_tensors(), rank.args.update_weight_buffer_size
        flattener = BucketFlattener(max_bytes=size)
        buckets = list(split_into_buckets(walk(), size))
        total = sum(tensor.nbytes for bucket in buckets for _, tensor in bucket)
        # A tensor larger than a bucket is a bucket of its own and is not copied.
        large = sum(bucket[0][1].nbytes for bucket in buckets if bucket[0][1].nbytes > size)
        source = torch.empty(total, dtype=torch.uint8, device=rank.device)
        target = torch.empty_like(source)
        calls = {
            "copy": lambda: target.copy_(source),
            "walk": lambda: sum(1 for _ in walk()),
            "flatten": lambda: [flattener.flatten(bucket).nbytes for bucket in buckets],
            "walk and flatten": lambda: [
                flattener.flatten(bucket).nbytes for bucket in split_into_buckets(walk(), size)
            ],
        }
        best, number = best_seconds(calls, repeats), len(buckets)
    copied = {"copy": total, "walk": 0, "flatten": total - large, "walk and flatten": total - large}
    return rows_of(case.name, number, copied, best)


def rows_of(shape: str, buckets: int, copied: dict[str, int], seconds: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each way to handle the model's weights, from the bytes that it copies and its seconds."""
    speeds = {what: copied[what] / seconds[what] for what in seconds}
    return [
        {
            "shape": shape,
            "what": what,
            "buckets": buckets,
            "MB copied": copied[what] / 1e6,
            "ms": 1e3 * seconds[what],
            "GB/s": speed / 1e9 if speed else None,
            "of the copy's speed": speed / speeds["copy"] if speed else None,
        }
        for what, speed in speeds.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
