"""Packing and the data-parallel schedule on log-normal lengths (σ 1).

    python tools/bench/bench_schedule.py [--repeats 5] [--seeds 5]

1. It packs 4,096 lengths into bins of 16k tokens, with best-fit and with a plain first-fit loop: number of bins, milliseconds.
   Bars: at most one bin above the bound of total / capacity, at least 4 times faster.
2. It makes the full schedule with FLOPs-balanced ranks: milliseconds, fill as a fraction of the reachable fill (bar 0.98), and
   slowest/mean FLOPs over the lower bound that the longest sample and equal micro-batch counts allow (bar 1.02). The worst of
   the seeds counts. "flops" is --balance-by-flops, which trades fill for micro-batches of equal cost.
   The bound assumes that the rank of the longest sample has the lightest of the formed micro-batches beside it.
"""

import argparse
import math
import time
from collections.abc import Callable

import numpy as np

from slime.estimates.flops import model_flops
from slime.estimates.shape import ModelShape
from slime.scheduling.dp_schedule import BatchingRule, DPSchedule, build_schedule
from slime.scheduling.packing import best_fit_pack, first_fit_pack

QWEN3_4B = model_flops(
    ModelShape(
        num_layers=36,
        hidden_size=2560,
        ffn_hidden_size=9728,
        num_attention_heads=32,
        num_query_groups=8,
        head_dim=128,
        vocab_size=151936,
        padded_vocab_size=151936,
    )
)


def log_normal_lengths(count: int, mean: float, cap: int, seed: int) -> list[int]:
    generator = np.random.default_rng(seed)
    return np.clip(generator.lognormal(math.log(mean) - 0.5, 1.0, count), 1, cap).astype(int).tolist()


def naive_first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    loads: list[int] = []
    for item, length in enumerate(lengths):
        for number, load in enumerate(loads):
            if load + length <= capacity:
                bins[number].append(item)
                loads[number] += length
                break
        else:
            bins.append([item])
            loads.append(length)
    return bins


def best_milliseconds(function: Callable[[], object], repeats: int) -> float:
    durations = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        durations.append(time.perf_counter() - start)
    return 1e3 * min(durations)


def report_packing(repeats: int) -> None:
    capacity = 16384
    lengths = log_normal_lengths(4096, 3900, capacity, seed=0)
    print(f"4096 lengths into bins of {capacity}: bound {math.ceil(sum(lengths) / capacity)} bins")
    naive_time = best_milliseconds(lambda: naive_first_fit(lengths, capacity), repeats)
    for name, pack in [
        ("naive first-fit", naive_first_fit),
        ("first_fit_pack", first_fit_pack),
        ("best_fit_pack", best_fit_pack),
    ]:
        duration = best_milliseconds(lambda pack=pack: pack(lengths, capacity), repeats)
        count = len(pack(lengths, capacity))
        print(f"  {name:16s} {count} bins {duration:7.2f} ms   {naive_time / duration:5.1f} x naive")


def fill_and_imbalance(schedule: DPSchedule, lengths: list[int], budget: int) -> tuple[float, float]:
    dp_size = len(schedule.partitions)
    over_long = [length for length in lengths if length > budget]
    fewest = len(over_long) + math.ceil((sum(lengths) - sum(over_long)) / budget)
    reachable_count = math.ceil(fewest / dp_size) * dp_size
    fill = reachable_count / (sum(schedule.num_microbatches) * dp_size)

    flops = [QWEN3_4B.forward_flops(length) for length in lengths]
    per_rank = [sum(flops[sample] for sample in partition) for partition in schedule.partitions]
    per_micro_batch = sorted(
        sum(flops[partition[item]] for item in members)
        for partition, micro_batches in zip(schedule.partitions, schedule.micro_batch_indices, strict=True)
        for members in micro_batches
    )
    others = sum(per_micro_batch[: sum(schedule.num_microbatches) - 1])
    return fill, max(per_rank) / max(sum(per_rank) / dp_size, max(flops) + others)


def report_schedule(repeats: int, seeds: int) -> None:
    print("ranks samples  mean  budget packing         ms   fill/reachable   slowest/bound")
    for dp_size, count, mean, budget in [
        (64, 512, 2000, 32768),
        (64, 512, 2000, 16384),
        (64, 4096, 3600, 16384),
        (8, 512, 2000, 32768),
        (8, 512, 2000, 16384),
    ]:
        for packing in ("first-fit", "best-fit", "flops"):
            rule = BatchingRule(packing, token_budget=budget, flops_model=QWEN3_4B)
            measured = []
            for seed in range(seeds):
                lengths = log_normal_lengths(count, mean, 32768, seed)
                schedule = build_schedule(lengths, range(count), rule, global_batch_size=count, dp_size=dp_size)
                measured.append(fill_and_imbalance(schedule, lengths, budget))
            duration = best_milliseconds(
                lambda lengths=lengths, rule=rule, count=count, dp_size=dp_size: build_schedule(
                    lengths, range(count), rule, global_batch_size=count, dp_size=dp_size
                ),
                repeats,
            )
            fill, imbalance = min(fill for fill, _ in measured), max(imbalance for _, imbalance in measured)
            print(
                f"{dp_size:5d} {count:7d} {mean:5d} {budget:7d} {packing:10s} {duration:7.1f}   {fill:14.3f} {imbalance:15.4f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    report_packing(options.repeats)
    report_schedule(options.repeats, options.seeds)


if __name__ == "__main__":
    main()
