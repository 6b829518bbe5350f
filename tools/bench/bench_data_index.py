"""The cost of making the prompts of a large file available, by an index of its rows and by holding all of them in memory, as
ratios to reading its lines in the same run.

    python tools/bench/bench_data_index.py [--rows 1000000] [--characters 150] [--reads 20000]

Each way runs in a process of its own; its memory is the peak of that process, less what the process had before. Then the index
reads rows in the order of a shuffled epoch. Bars: 1 M rows within 20 s and 1 GiB.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from slime.utils.dataset import Dataset, RowKeys, StreamedDataset


def read_lines(path: str) -> None:
    with open(path, "rb") as lines:
        for _ in lines:
            pass


def in_memory(path: str) -> Dataset:
    return Dataset(path, None, None, None)


def streamed(path: str) -> StreamedDataset:
    return StreamedDataset(
        path, None, None, keys=RowKeys(None, None, None, None), seed=1, apply_chat_template=False,
        apply_chat_template_kwargs=None, allow_bad_rows=False,
    )  # fmt: skip


def measure(way: Callable[[str], Any], path: str, reads: int) -> tuple[float, float, float]:
    """Returns (seconds, MiB, µs per row read in a shuffled order; 0 for a way that reads none)."""
    before, started = _peak_mib(), time.perf_counter()
    dataset = way(path)
    seconds, mib = time.perf_counter() - started, _peak_mib() - before
    if dataset is None:
        return seconds, mib, 0.0
    dataset.shuffle(0)
    started = time.perf_counter()
    for position in range(min(reads, len(dataset))):
        _ = dataset[position]
    return seconds, mib, (time.perf_counter() - started) / min(reads, len(dataset)) * 1e6


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--characters", type=int, default=150, help="of a prompt")
    parser.add_argument("--reads", type=int, default=20_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.jsonl"
        with path.open("w") as lines:
            for number in range(options.rows):
                lines.write(json.dumps({"prompt": f"{number} {'x' * options.characters}", "label": str(number)}) + "\n")
        print(f"{options.rows} rows, {path.stat().st_size / 2**20:.0f} MiB")
        spawned = multiprocessing.get_context("spawn")
        baseline = None
        for way in (read_lines, streamed, in_memory):
            with spawned.Pool(1) as pool:
                seconds, mib, row_us = pool.apply(measure, (way, str(path), options.reads))
            baseline = baseline or seconds
            print(
                f"{way.__name__:10} {seconds:7.2f} s ({seconds / baseline:6.2f} of reading the lines)  {mib:8.1f} MiB  "
                f"{row_us:6.1f} us per row read"
            )


if __name__ == "__main__":
    main()
