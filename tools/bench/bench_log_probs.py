"""Fused log-probs beside torch's own operators: forward and backward on the same logits, in one run.

    python tools/bench/bench_log_probs.py [--tokens 2048] [--vocab 32000] [--dtype float32] [--repeats 5] [--device cpu]

Prints milliseconds (best of the repeats, runs interleaved) and the ratios ours / torch; the bar is 1.05.
"""

import argparse
import time
from collections.abc import Callable

import torch

from slime.training.log_probs import calculate_log_probs_and_entropy


def torch_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    torch.log_softmax(logits.float(), dim=-1).gather(1, tokens[:, None]).sum().backward()


def torch_cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    torch.nn.functional.cross_entropy(logits.float(), tokens, reduction="sum").backward()


def torch_log_probs_and_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    all_log_probs = torch.log_softmax(logits.float(), dim=-1)
    with torch.no_grad():
        torch.linalg.vecdot(all_log_probs.exp(), all_log_probs).neg_()
    all_log_probs.gather(1, tokens[:, None]).sum().backward()


def fused_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    calculate_log_probs_and_entropy(logits, tokens, None)[0].sum().backward()


def fused_log_probs_and_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    log_probs, _ = calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True, with_entropy_grad=False)
    log_probs.sum().backward()


CONTENDERS: list[Callable[[torch.Tensor, torch.Tensor], None]] = [
    torch_log_probs,
    torch_cross_entropy,
    fused_log_probs,
    torch_log_probs_and_entropy,
    fused_log_probs_and_entropy,
]


def milliseconds(contender: Callable, logits: torch.Tensor, tokens: torch.Tensor) -> float:
    logits.grad = None
    if logits.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    contender(logits, tokens)
    if logits.is_cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(options.tokens, options.vocab, generator=generator).to(
        options.device, getattr(torch, options.dtype)
    )
    logits.requires_grad_()
    tokens = torch.randint(options.vocab, (options.tokens,), generator=generator).to(options.device)

    best = {contender.__name__: float("inf") for contender in CONTENDERS}
    for _ in range(options.repeats + 1):
        for contender in CONTENDERS:
            best[contender.__name__] = min(best[contender.__name__], milliseconds(contender, logits, tokens))
    print(
        f"[{options.tokens} x {options.vocab}] {options.dtype} on {options.device}, {torch.get_num_threads()} threads"
    )
    for name, value in best.items():
        print(f"{name:32s} {value:9.1f} ms")
    print(f"log-probs:             {best['fused_log_probs'] / best['torch_log_probs']:.2f} of log_softmax")
    print(f"log-probs:             {best['fused_log_probs'] / best['torch_cross_entropy']:.2f} of cross_entropy")
    with_entropy = best["fused_log_probs_and_entropy"] / best["torch_log_probs_and_entropy"]
    print(f"log-probs and entropy: {with_entropy:.2f} of log_softmax with entropy")


if __name__ == "__main__":
    main()
