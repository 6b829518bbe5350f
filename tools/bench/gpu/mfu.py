"""Model FLOPs utilisation of a training step on one GPU: our trainer over Megatron-Core, bfloat16, packed streams.

    python tools/bench/gpu/mfu.py [--shapes qwen3-0.6B qwen3-1.7B] [--tokens 8192] [--micro-batches 8] [--peak-tflops 989.5]
    python tools/bench/gpu/mfu.py --device cpu --tiny

A step is forward and backward over its micro-batches and one update of the weights, by `slime.training`. Its FLOPs are those of
the model (`slime/estimates/flops.py`): attention counts its causal half within each sample, and recomputation does not count.
The utilisation is these FLOPs divided by the time of the step and by the peak of the device. Another column compares the step
with the speed of a large matrix product in the same run. The layers are those of `--transformer-impl local`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from slime.utils.device import get_accelerator
from tools.bench.gpu.common import TERA, Report, best_seconds, matrix_product_flops_per_second, peak_tflops, run
from tools.bench.gpu.measured_rank import Case, flops_of_step, make_shape_parser, measured_rank, of_every_case

TARGET = 0.40
_PRODUCT, _TINY_PRODUCT = 8192, 256


def main() -> int:
    parser = make_shape_parser(__doc__, micro_batches=8)
    parser.add_argument("--repeats", type=int, default=5, help="steps that are timed; the fastest counts")
    parser.add_argument(
        "--peak-tflops", type=float, help="of the device, for dense bfloat16 products; unset: by its name"
    )
    return run(measure, parser)


def measure(options: argparse.Namespace) -> Report:
    """Measure the utilisation of every shape.

    Raises:
        UserError: the peak of the GPU is not known.
    """
    peak = options.peak_tflops
    if peak is None and options.device == "cuda":
        peak = peak_tflops(get_accelerator().device_name())
    product = matrix_product_flops_per_second(_TINY_PRODUCT if options.tiny else _PRODUCT)
    rows, stopped = of_every_case(options, lambda case: [_of_case(case, options.repeats, peak, product / TERA)])
    notes = [f"a matrix product of the same run reaches {product / TERA:.4g} TFLOP/s", *stopped]
    if peak is None:
        notes.append("the CPU has no peak here: its utilisation is not told")
    met = None if options.tiny or peak is None or not rows else all(row["MFU"] >= TARGET for row in rows)
    return Report("mfu", rows, notes, f"MFU of at least {TARGET:.0%}", met, failed=bool(stopped))


def _of_case(case: Case, repeats: int, peak: float | None, product: float) -> dict[str, Any]:
    with measured_rank(case) as rank:
        rank.run_until("first step")
        flops, tokens = flops_of_step(rank.args, rank.lengths), sum(rank.lengths)
        seconds = best_seconds({"step": rank.phases()["step"]}, repeats)["step"]
    return row(case.name, tokens, flops, seconds, peak, product)


def row(shape: str, tokens: int, flops: int, seconds: float, peak: float | None, product: float) -> dict[str, Any]:
    """The figures of a step of `flops` in `seconds`. `peak` is the device's, `product` a matrix product's speed, in TFLOP/s."""
    reached = flops / seconds / TERA
    return {
        "shape": shape,
        "tokens of a step": tokens,
        "model TFLOP": flops / TERA,
        "seconds": seconds,
        "tokens per second": tokens / seconds,
        "TFLOP/s": reached,
        "MFU": None if peak is None else reached / peak,
        "of a matrix product": reached / product,
    }


if __name__ == "__main__":
    sys.exit(main())
