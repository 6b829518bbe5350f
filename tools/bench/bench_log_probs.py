"""Fused log-probs beside torch's own operators: time and memory of forward and backward on the same logits, in one run.

    python tools/bench/bench_log_probs.py [--tokens 512] [--vocab 151936] [--dtype bfloat16] [--repeats 5] [--device cpu]
    python tools/bench/bench_log_probs.py --tokens 16384 --repeats 0 --contenders fused_log_probs_and_entropy

Prints milliseconds (best of the repeats, runs interleaved), the peak bytes of tensors above those of the logits, and the time
of log-probs with entropy over that of `F.cross_entropy`, which computes no entropy; the bar is 1. The gradient is as large as
the logits, so no memory below 1.00 of the logits is possible. 16384 tokens in bfloat16 take 10 GB.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from slime.training.keep_set import KeptTokens
from slime.training.log_probs import calculate_log_probs_and_entropy
from slime.training.packed_stream import Rows
from slime.utils.device import get_accelerator
from tools.bench.live_tensors import LiveTensors

KEPT_PER_ROW = 20


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    torch.nn.functional.cross_entropy(logits, tokens, reduction="sum").backward()


def float32_cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    torch.nn.functional.cross_entropy(logits.float(), tokens, reduction="sum").backward()


def float32_log_probs_and_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    all_log_probs = torch.log_softmax(logits.float(), dim=-1)
    with torch.no_grad():
        torch.linalg.vecdot(all_log_probs.exp(), all_log_probs).neg_()
    all_log_probs.gather(1, tokens[:, None]).sum().backward()


def fused_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    calculate_log_probs_and_entropy(logits, tokens, None)[0].sum().backward()


def fused_log_probs_and_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    log_probs, _ = calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True, with_entropy_grad=False)
    log_probs.sum().backward()


def fused_kept_log_probs_and_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """Log-probs and entropy with kept sets of KEPT_PER_ROW tokens, as an engine reports them."""
    rows, vocab_size = logits.shape
    ids = torch.arange(KEPT_PER_ROW, dtype=torch.int32, device=logits.device)
    kept = KeptTokens(
        ((tokens[:, None] + ids) % vocab_size).flatten().int(),
        torch.arange(0, rows * KEPT_PER_ROW + 1, KEPT_PER_ROW, device=logits.device),
    )
    log_probs, _ = calculate_log_probs_and_entropy(logits, tokens, None, True, -1, kept, False)
    log_probs.sum().backward()


def fused_log_probs_and_entropy_of_half(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """Log-probs and entropy of the second half of the rows, as if the first half were a prompt."""
    rows = Rows.at([range(len(tokens) // 2, len(tokens))], logits.device)
    options = {"with_entropy": True, "with_entropy_grad": False, "rows": rows}
    log_probs, _ = calculate_log_probs_and_entropy(logits, tokens[rows.index], None, **options)
    log_probs.sum().backward()


CONTENDERS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    function.__name__: function
    for function in (
        cross_entropy,
        float32_cross_entropy,
        float32_log_probs_and_entropy,
        fused_log_probs,
        fused_log_probs_and_entropy,
        fused_log_probs_and_entropy_of_half,
        fused_kept_log_probs_and_entropy,
    )
}


def milliseconds(contender: Callable, logits: torch.Tensor, tokens: torch.Tensor) -> float:
    logits.grad = None
    if logits.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    contender(logits, tokens)
    if logits.is_cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def extra_bytes(contender: Callable, logits: torch.Tensor, tokens: torch.Tensor) -> int:
    """Peak bytes of tensors that live during forward and backward, without logits and tokens.

    The device's allocator counts them. Where there is no such counter, the bytes of live tensors are counted, and compiled
    contenders do not run.
    """
    accelerator = get_accelerator()
    is_there = logits.device.type == accelerator.current_device().type
    logits.grad = None
    if not is_there or accelerator.peak_memory_allocated() is None:
        with LiveTensors([logits, tokens]) as live:
            before = live.current
            contender(logits, tokens)
        return live.peak - before
    # The first call compiles, and its memory does not count.
    contender(logits, tokens)
    logits.grad = None
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory()
    contender(logits, tokens)
    return accelerator.peak_memory_allocated() - before


def make_case(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, options.dtype)
    logits = torch.empty(options.tokens, options.vocab, dtype=dtype, device=options.device)
    for chunk in logits.split(512):
        chunk.copy_(torch.randn(chunk.shape, generator=generator))
    tokens = torch.randint(options.vocab, (options.tokens,), generator=generator).to(options.device)
    return logits.requires_grad_(), tokens


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, int], int]:
    """Returns (milliseconds by contender, extra bytes by contender, bytes of the logits)."""
    logits, tokens = make_case(options)
    extra = {name: extra_bytes(CONTENDERS[name], logits, tokens) for name in options.contenders}
    best = dict.fromkeys(options.contenders, float("inf"))
    for _ in range(options.repeats):
        for name in options.contenders:
            best[name] = min(best[name], milliseconds(CONTENDERS[name], logits, tokens))
    return best, extra, logits.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5, help="0: one run, which measures memory")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    options = parser.parse_args()

    best, extra, logit_bytes = measure(options)
    print(
        f"[{options.tokens} x {options.vocab}] {options.dtype} on {options.device}, {torch.get_num_threads()} threads; "
        f"the logits take {logit_bytes / 2**20:.1f} MiB"
    )
    print(f"{'':34s} {'ms':>9s} {'extra MiB':>10s} {'of logits':>10s}")
    for name, value in best.items():
        print(f"{name:34s} {value:9.1f} {extra[name] / 2**20:10.1f} {extra[name] / logit_bytes:10.3f}")
    if {"cross_entropy", "fused_log_probs_and_entropy"} <= best.keys():
        print(f"ratio to cross_entropy: {best['fused_log_probs_and_entropy'] / best['cross_entropy']:.2f}")


if __name__ == "__main__":
    main()
