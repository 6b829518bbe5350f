"""Our RMSNorm and rotary embedding beside the plain chains of operators, forward and backward, in turns, on CPU.

    python tools/bench/bench_operators.py [--operators rotation norm] [--repeats 60] [--threads 1]

`plain` is PyTorch's `rms_norm`, which has no fused kernel on a CPU, and Megatron-Core's own rotation, both with autograd.
Megatron's rotation computes cosines and sines at every call; ours computes them once for all layers, whose frequencies are the
same. Everything is in float32. The bench first fails if results or gradients of the two differ by more than 1e-5 of the largest
number of their tensor, then prints milliseconds (best of the repeats).
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench.learning_curves import markdown

if TYPE_CHECKING:
    import torch

    Contenders = Mapping[str, Callable[[torch.Tensor], torch.Tensor]]

TOKENS = 2048
# (heads, width of a head)
ROTATIONS = ((4, 32), (8, 40), (8, 64), (16, 128))
# (rows, width)
NORMS = ((2048, 128), (8192, 32), (2048, 512), (16384, 64))
TOLERANCE = 1e-5


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=list(OPERATORS))
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    import torch

    from slime.backends.megatron_utils import cpu_runtime
    from slime.utils.device import get_accelerator

    # Megatron warns at length about every optional package that is missing.
    warnings.simplefilter("ignore")
    cpu_runtime.install()
    torch.set_num_threads(options.threads)
    # Training ranks do the same.
    get_accelerator().keep_freed_memory()
    for name in options.operators:
        sizes, make, header = OPERATORS[name]
        rows = []
        for size in sizes:
            inputs, leaves, contenders = make(*size)
            plain, ours = best_milliseconds(inputs, leaves, contenders, options.repeats)
            rows.append(
                [" × ".join(f"{number:,}" for number in size), f"{plain:.2f}", f"{ours:.2f}", f"{ours / plain:.2f}"]
            )
        print(f"{name}, {options.threads} thread(s), best of {options.repeats}")
        print(markdown((header, "Plain, ms", "Ours, ms", "Ours of plain"), rows), flush=True)


def rotation(heads: int, width: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], Contenders]:
    """Returns (channels [TOKENS, 1, heads, width], other tensors with a gradient: none, contenders that rotate channels)."""
    import torch

    from slime.backends.megatron_utils import attention

    half = torch.rand(TOKENS, 1, 1, width // 2) * 6
    frequencies = torch.cat([half, half], dim=-1)
    contenders = {
        "plain": lambda channels: attention._megatrons_rotation(channels, frequencies, False),
        "ours": lambda channels: attention.rotate(channels, frequencies),
    }
    return torch.randn(TOKENS, 1, heads, width), (), contenders


def norm(rows: int, width: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], Contenders]:
    """Returns (hidden states [rows, width], other tensors with a gradient: the norm's weight, contenders that normalise)."""
    import torch

    from slime.backends.megatron_utils.layer_spec import RMSNorm

    config = SimpleNamespace(
        normalization="RMSNorm", layernorm_zero_centered_gamma=False, params_dtype=torch.float32, sequence_parallel=False,
        fp32_residual_connection=False,
    )  # fmt: skip
    ours = RMSNorm(config, width)
    torch.nn.init.normal_(ours.weight)
    contenders = {
        "plain": lambda hidden: torch.nn.functional.rms_norm(hidden, (width,), ours.weight, ours.eps),
        "ours": ours,
    }
    return torch.randn(rows, width), (ours.weight,), contenders


OPERATORS = {"rotation": (ROTATIONS, rotation, "Heads × width"), "norm": (NORMS, norm, "Rows × width")}


def best_milliseconds(
    inputs: torch.Tensor, leaves: Sequence[torch.Tensor], contenders: Contenders, repeats: int
) -> list[float]:
    """The best milliseconds of forward and backward of each contender, in turns, with gradients of `inputs` and `leaves`.

    Raises:
        SystemExit: their results or gradients differ.
    """
    import torch

    inputs = inputs.detach().requires_grad_()
    leaves = (inputs, *leaves)
    slope = torch.randn_like(inputs)

    def run(contender: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        output = contender(inputs)
        return output.detach(), *torch.autograd.grad(output, leaves, slope)

    first, *others = (run(contender) for contender in contenders.values())
    for name, other in zip(list(contenders)[1:], others, strict=True):
        for expected, found in zip(first, other, strict=True):
            error = float((found - expected).abs().max() / expected.abs().max())
            # Written so that NaN fails as well.
            if not error <= TOLERANCE:
                sys.exit(f"{name} differs from {next(iter(contenders))} by {error:.1e}: this is not the same operator")
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats):
        for name, contender in contenders.items():
            start = time.perf_counter()
            run(contender)
            best[name] = min(best[name], time.perf_counter() - start)
    return [1e3 * seconds for seconds in best.values()]


if __name__ == "__main__":
    main()
