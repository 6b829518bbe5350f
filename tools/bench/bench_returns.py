"""Advantages and returns in chunks beside the serial recurrence, in one run.

    python tools/bench/bench_returns.py [--rows 128] [--steps 8192] [--repeats 7] [--threads 1]
                                        [--device cpu]

Prints milliseconds (best of the repeats, runs interleaved) and the ratios serial / chunked; the bar is 10 at 128 x 8192
on CPU. The default is one thread: the recurrence has no use for more.
"tuned serial" is the same recurrence as the fastest loop over steps: it computes the differences of all steps at once, in
float32, with one operator per step. It is no bar, but shows how much of the ratio is the loop's own overhead.
"""

import argparse
import time
from collections.abc import Callable

import torch

from slime.algorithms.advantages import (
    chunked_discounted_returns,
    chunked_gae,
    vanilla_discounted_returns,
    vanilla_gae,
)

GAMMA, LAMBD = 0.99, 0.95


def tuned_serial_scan(terms: torch.Tensor, decay: float) -> torch.Tensor:
    columns = list(terms.unbind(1))
    for step in reversed(range(len(columns) - 1)):
        columns[step] = torch.add(columns[step], columns[step + 1], alpha=decay)
    return torch.stack(columns, dim=1)


def tuned_serial_gae(rewards: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    deltas = rewards - values
    deltas[:, :-1].add_(values[:, 1:], alpha=GAMMA)
    advantages = tuned_serial_scan(deltas, GAMMA * LAMBD)
    return advantages, advantages + values


def milliseconds(function: Callable[[], object], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    generator = torch.Generator().manual_seed(0)
    shape = (options.rows, options.steps)
    rewards = torch.randn(shape, generator=generator).to(options.device)
    values = torch.randn(shape, generator=generator).to(options.device)
    contenders: dict[str, Callable[[], object]] = {
        "GAE, serial": lambda: vanilla_gae(rewards, values, GAMMA, LAMBD),
        "GAE, tuned serial": lambda: tuned_serial_gae(rewards, values),
        "GAE, chunked": lambda: chunked_gae(rewards, values, GAMMA, LAMBD),
        "discounted returns, serial": lambda: vanilla_discounted_returns(rewards, GAMMA),
        "discounted returns, tuned serial": lambda: tuned_serial_scan(rewards, GAMMA),
        "discounted returns, chunked": lambda: chunked_discounted_returns(rewards, GAMMA),
    }
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(options.repeats + 1):
        for name, contender in contenders.items():
            best[name] = min(best[name], milliseconds(contender, options.device))

    print(f"[{options.rows} x {options.steps}] on {options.device}, {torch.get_num_threads()} threads")
    for name, value in best.items():
        estimator = name.split(",")[0]
        print(f"{name:34s} {value:9.2f} ms   {value / best[f'{estimator}, chunked']:6.1f} x chunked")

    serial, chunked = vanilla_gae(rewards, values, GAMMA, LAMBD), chunked_gae(rewards, values, GAMMA, LAMBD)
    difference = max(float((one - other).abs().max()) for one, other in zip(serial, chunked, strict=True))
    print(f"largest difference of advantages and returns: {difference:.1e}")


if __name__ == "__main__":
    main()
