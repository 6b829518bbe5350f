"""Work on the rows of a large tensor, chunk by chunk, with one chunk per thread at a time on a CPU.

An operation that PyTorch spreads over threads ends with a barrier. Many short operations on a chunk that fits into a cache
would mostly wait there, above all where other processes want the same cores. So each thread takes whole chunks: operations of
a worker thread do not spread, and nothing waits until all rows are done.

Invariants
- A chunk is computed by the same operations whoever does it, so results do not depend on the number of threads.
- The number of threads of everybody else stays as it is.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

# Below so many elements there is nothing to gain from threads.
MIN_ELEMENTS = 1 << 20
_START_TIMEOUT_SECONDS = 60.0

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()


def for_row_chunks(
    rows_TV: torch.Tensor,
    rows_per_chunk: int,
    compute: Callable[..., None],
    make_scratch: Callable[[], Sequence[torch.Tensor]],
) -> None:
    """Call `compute(start, stop, *scratch)` for row ranges of at most `rows_per_chunk` rows that cover `rows_TV` once.

    Calls run side by side, in any order, without gradient; each thread has a scratch of its own. Returns when all have;
    raises what one of them raised.
    """
    row_count = len(rows_TV)
    # One iterator for all threads: whoever is free takes the next chunk.
    starts = iter(range(0, row_count, rows_per_chunk))

    def work(scratch: Sequence[torch.Tensor]) -> None:
        for start in starts:
            compute(start, min(start + rows_per_chunk, row_count), *scratch)

    threads = _thread_count(rows_TV, rows_per_chunk)
    if threads == 1:
        with torch.no_grad():
            work(make_scratch())
        return
    inference = torch.is_inference_mode_enabled()

    def work_in_thread(scratch: Sequence[torch.Tensor]) -> None:
        # Modes belong to threads.
        with torch.inference_mode() if inference else contextlib.nullcontext(), torch.no_grad():
            work(scratch)

    pool = _pool(threads)
    futures = [pool.submit(work_in_thread, make_scratch()) for _ in range(threads)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def _thread_count(rows_TV: torch.Tensor, rows_per_chunk: int) -> int:
    if rows_TV.device.type != "cpu" or rows_TV.numel() < MIN_ELEMENTS:
        return 1
    return max(min(torch.get_num_threads(), -(-len(rows_TV) // rows_per_chunk)), 1)


def _pool(threads: int) -> ThreadPoolExecutor:
    # Threads do not survive a fork: a child makes its own.
    key = (os.getpid(), threads)
    with _pools_lock:
        if key not in _pools:
            _pools[key] = _start_pool(threads)
        return _pools[key]


def _start_pool(threads: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(threads, thread_name_prefix="row-chunks")
    all_started = threading.Barrier(threads)
    outside = torch.get_num_threads()

    def start() -> None:
        # PyTorch keeps the number per thread, and once more for threads that begin later: a thread takes that one when it
        # first asks, also over a number of its own that was set before.
        torch.get_num_threads()
        torch.set_num_threads(1)
        all_started.wait(_START_TIMEOUT_SECONDS)

    try:
        for future in [pool.submit(start) for _ in range(threads)]:
            future.result()
    finally:
        torch.set_num_threads(outside)
    return pool
