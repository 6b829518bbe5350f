"""Weight transfer over the process group beside a plain copy of the same bytes, in one run.

    python tools/bench/bench_weight_sync.py --megabytes 256

Two processes form a group as trainer and engine do (Gloo on CPU). The trainer flattens named tensors into buckets and
broadcasts them; the receiver views them as tensors again. The peer is `memcpy` of the same bytes by one thread.
"""

import argparse
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from slime.utils.process_groups import create_store, init_process_group
from slime.weights.buckets import BucketFlattener

ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--bucket-megabytes", type=int, default=64)
    options = parser.parse_args()
    timeout = timedelta(seconds=60)
    store = create_store("127.0.0.1", timeout)
    context = multiprocessing.get_context("spawn")
    sizes = [options.bucket_megabytes * 2**20] * (options.megabytes // options.bucket_megabytes)
    receiver = context.Process(target=receive, args=(store.port, sizes))
    receiver.start()
    group = init_process_group("gloo", store, 2, 0, "bench", timeout)
    seconds = [send(group, sizes) for _ in range(ROUNDS)]
    copies = [plain_copy(sum(sizes)) for _ in range(ROUNDS)]
    receiver.join(60)
    total = sum(sizes) / 1e9
    print(f"flatten and broadcast: {total / min(seconds):.2f} GB/s")
    print(f"memcpy of the same bytes: {total / min(copies):.2f} GB/s")
    print(f"ratio: {min(copies) / min(seconds):.2f}")


def send(group: dist.ProcessGroup, sizes: list[int]) -> float:
    flattener = BucketFlattener()
    tensors = [[(f"w{i}", torch.ones(size // 16, dtype=torch.float32)) for i in range(4)] for size in sizes]
    dist.barrier(group=group)
    started = time.perf_counter()
    for bucket in tensors:
        dist.broadcast(flattener.flatten(bucket).buffer, 0, group=group)
    dist.barrier(group=group)
    return time.perf_counter() - started


def receive(port: int, sizes: list[int]) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    group = init_process_group("gloo", store, 2, 1, "bench", timedelta(seconds=60))
    buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    for _ in range(ROUNDS):
        dist.barrier(group=group)
        for buffer in buffers:
            dist.broadcast(buffer, 0, group=group)
        dist.barrier(group=group)


def plain_copy(size: int) -> float:
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
