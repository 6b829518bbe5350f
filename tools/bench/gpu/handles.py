"""Weights by shared handles on one GPU: another process maps the buckets of a push and copies them, beside a plain copy.

    python tools/bench/gpu/handles.py [--shapes qwen3-0.6B qwen3-1.7B] [--repeats 5]
    python tools/bench/gpu/handles.py --device cpu --tiny

The walk over the weights, the buckets and the handles (CUDA IPC; shared memory on the host) are those of a push, and so is the
order: while the other process copies a bucket into its own memory, the next one is made. It opens a handle as an engine does.
At the end both processes compute the checksum of every tensor. All else that an engine does with the bytes is left out.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import multiprocessing
import pickle
import sys
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import torch

from slime.utils.device import get_accelerator
from slime.weights.buckets import BucketFlattener, split_into_buckets
from slime.weights.transports.shared_handles import SharedMemory, handle_of
from tools.bench.gpu.common import Report, best_seconds, enter, run
from tools.bench.gpu.measured_rank import Case, make_shape_parser, measured_rank, of_every_case

TARGET = 0.5
_SECONDS = 60.0
_PIECE = 2**26


def main() -> int:
    parser = make_shape_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    return run(measure, parser)


def measure(options: argparse.Namespace) -> Report:
    """Measure every shape."""
    rows, stopped = of_every_case(options, lambda case: [_of_case(case, options)])
    met = None if options.tiny or not rows else all(row["of the copy's speed"] >= TARGET for row in rows)
    wrong = [f"{row['shape']}: {row['different']} tensors arrived with other bytes" for row in rows if row["different"]]
    target = f"at least {TARGET:g} of the speed of a copy"
    return Report("handles", rows, [*stopped, *wrong], target, met, failed=bool(stopped or wrong))


def _of_case(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    with measured_rank(case) as rank:
        rank.run_until("load")
        walk, size = rank.backend.stage_tensors(), rank.args.update_weight_buffer_size
        total = sum(tensor.nbytes for _, tensor in walk())
        source = torch.empty(total, dtype=torch.uint8, device=rank.device)
        target = torch.empty_like(source)
        receiver = _Receiver(options.device)
        try:
            flattener = BucketFlattener(2, size, SharedMemory())
            push = lambda: receiver.push(flattener, split_into_buckets(walk(), size))  # noqa: E731
            best = best_seconds({"copy": lambda: target.copy_(source), "push": push}, options.repeats)
            arrived = receiver.checksums()
            flattener.release()
        finally:
            receiver.close()
        sent = {name: checksum(tensor) for name, tensor in walk()}
    return row_of(case.name, total, best, sent, arrived)


def row_of(
    shape: str, total: int, seconds: dict[str, float], sent: dict[str, int], arrived: dict[str, int]
) -> dict[str, Any]:
    """The figures of `total` bytes, and the number of tensors that arrived with other bytes."""
    return {
        "shape": shape,
        "MB": total / 1e6,
        "ms": 1e3 * seconds["push"],
        "GB/s": total / seconds["push"] / 1e9,
        "of the copy's speed": seconds["copy"] / seconds["push"],
        "different": sum(sent.get(name) != arrived.get(name) for name in sent.keys() | arrived.keys()),
    }


def checksum(tensor: torch.Tensor) -> int:
    """A checksum of the tensor's bytes and their places, computed on its device, in pieces that need little memory."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for number, piece in enumerate(data.split(_PIECE)):
        places = torch.arange(1, piece.numel() + 1, device=data.device) + number * _PIECE
        total += (piece * (places * 2654435761 % 2**31)).sum()
    return int(total)


class _Receiver:
    """The process that receives the pushed weights."""

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_receive, args=(theirs, device), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def push(self, flattener: BucketFlattener, buckets: Iterable[Any]) -> None:
        """Send all buckets. As in a push, at most two are on their way at a time."""
        on_their_way = 0
        for bucket in buckets:
            if on_their_way == 2:
                self._answer()
                on_their_way -= 1
            flat = flattener.flatten(bucket)
            self._send(handle_of(flat))
            on_their_way += 1
            if not flat.is_copy:
                # The bucket is the memory of a tensor, and the walk may free it after this turn.
                while on_their_way:
                    self._answer()
                    on_their_way -= 1
        for _ in range(on_their_way):
            self._answer()

    def checksums(self) -> dict[str, int]:
        """The checksum of every tensor that arrived, by name."""
        self._send(None)
        return self._answer()

    def close(self) -> None:
        self._connection.close()
        self._process.join(_SECONDS)
        if self._process.is_alive():
            self._process.kill()
        get_accelerator().collect_shared_memory()

    def _send(self, handle: str | None) -> None:
        with _while_it_lives():
            self._connection.send(handle)

    def _answer(self) -> Any:
        with _while_it_lives():
            if self._connection.poll(_SECONDS):
                return self._connection.recv()
        raise RuntimeError(f"the process that takes the weights said nothing for {_SECONDS:g} s")


@contextlib.contextmanager
def _while_it_lives() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        raise RuntimeError("the process that takes the weights ended; the lines above say why") from None


def _receive(connection: Connection, device: str) -> None:
    """Copy every tensor that arrives into memory of this process, allocated at its first arrival, until the sender closes."""
    accelerator = enter(device)
    if device == "cuda":
        _number_devices_by_uuid()
    kept: dict[str, torch.Tensor] = {}
    connection.send("ready")
    while True:
        try:
            handle = connection.recv()
        except EOFError:
            return
        if handle is None:
            connection.send({name: checksum(tensor) for name, tensor in kept.items()})
            continue
        opened = pickle.loads(base64.b64decode(handle))
        for entry in opened["metadata"]:
            stored = opened["flattened_tensor"][entry.start_idx : entry.end_idx].view(entry.dtype).view(entry.shape)
            if entry.name not in kept:
                kept[entry.name] = torch.empty_like(stored, device=accelerator.current_device())
            kept[entry.name].copy_(stored)
            del stored
        accelerator.synchronize()
        del opened
        connection.send("copied")


def _number_devices_by_uuid() -> None:
    """Let torch open handles that name a GPU by its UUID: it only knows device numbers."""
    from torch.multiprocessing import reductions

    rebuild = reductions.rebuild_cuda_tensor
    numbers = {get_accelerator().device_uuid(number): number for number in range(torch.cuda.device_count())}

    def rebuild_by_uuid(*arguments: Any) -> torch.Tensor:
        return rebuild(*(numbers.get(value, value) if isinstance(value, str) else value for value in arguments))

    reductions.rebuild_cuda_tensor = rebuild_by_uuid


if __name__ == "__main__":
    sys.exit(main())
