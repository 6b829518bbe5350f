"""How long training waits for a save, with `--async-save` and without, on CPU.

    SLIME_ACCELERATOR=cpu python tools/bench/bench_save.py

Ranks with the product's own trainer, in Gloo processes, save a model of 102 M parameters with its optimizer to `--directory`.
Rounds take turns. The bench prints the least seconds of a whole save; the least seconds for which training stops at the start
and at the end of a save in the background; and how much longer steps take while files are written, since the processes that
write need cores too.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.bench_memory_plan import case_words, run_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layout", choices=("1 rank", "DP 2", "TP 2"), default="1 rank")
    parser.add_argument("--directory", help="on the disk that is to be measured; unset: that of temporary files")
    options = parser.parse_args()
    os.environ["SLIME_ACCELERATOR"] = "cpu"
    directory = tempfile.mkdtemp(prefix="bench-save-", dir=options.directory)
    try:
        words = [*case_words("wide", options.layout), "--save", directory]
        ranks = 1 if options.layout == "1 rank" else 2
        found = run_ranks(words, ranks, functools.partial(seconds_of_saves, rounds=options.rounds))
    finally:
        shutil.rmtree(directory)
    of = {name: max(rank[name] for rank in found) for name in found[0]}
    print(f"{of['bytes'] / 1e9:.2f} GB on the rank with most; a step takes {of['step']:.2f} s")
    print(f"whole save {of['whole']:.2f} s")
    print(f"in the background: stop {of['stop']:.2f} s, {of['stop'] / of['whole']:.2f} of the whole save")
    print(
        f"finish when all is written {of['finish']:.2f} s; steps beside it take {of['step beside'] / of['step']:.2f} as long"
    )


def seconds_of_saves(words: Sequence[str], rounds: int) -> dict[str, float]:
    """The least seconds of each part on this rank, and the bytes that it writes. The environment names the process group."""
    import torch

    torch.set_num_threads(1)
    from slime.arguments import parse_args
    from slime.arguments.checkpoints import WeightSource
    from slime.training.backend import make_backend
    from slime.training.train_step import train_one_step
    from tools.bench.bench_memory_plan import batch_of_rank

    args = parse_args(argv=list(words))
    backend = make_backend(args)
    backend.place()
    backend.load(WeightSource("random"))
    batch, least = batch_of_rank(args), {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        least[name] = min(least.get(name, float("inf")), time.perf_counter() - start)
        return result

    step = functools.partial(train_one_step, args, backend, batch, 0, 0)
    step()
    for rollout_id in range(rounds):
        timed("step", step)
        timed("whole", lambda rollout_id=rollout_id: backend.save(2 * rollout_id).finish())
        unfinished = timed("stop", lambda rollout_id=rollout_id: backend.save(2 * rollout_id + 1))
        least["bytes"] = unfinished.bytes_on_host
        timed("step beside", step)
        while not unfinished.has_ended():
            time.sleep(0.05)
        timed("finish", unfinished.finish)
    backend.close()
    return least


if __name__ == "__main__":
    main()
