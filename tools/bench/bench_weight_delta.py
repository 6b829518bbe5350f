"""A push of changed bytes beside a push of all weights, both through files, in one run.

    python tools/bench/bench_weight_delta.py --megabytes 512 --changed 0.01

The trainer's time is that of its transport: from the first bucket until the directory that engines may read is on the disk.
The time in which a host patches its copy (or copies all files) has a column of its own. The time in which an engine loads its
copy is the same for both and is not measured. Rounds take turns, and the least time of each is printed. Under other load,
processor seconds are more reliable than wall-clock seconds: comparing and compressing computes, writing waits for a disk.
"""

import argparse
import platform
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import save_file

from slime.weights.buckets import split_into_buckets
from slime.weights.local_checkpoint import LocalCheckpoint
from slime.weights.source import WeightSource
from slime.weights.transports import transport_of

TENSOR_BYTES = 16 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--changed", type=float, default=0.01, help="share of bytes that change, at random places")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench-weight-delta-"))
    try:
        tell(options, directory)
    finally:
        shutil.rmtree(directory)


def tell(options: argparse.Namespace, directory: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"layers.{index}.weight": torch.randn(TENSOR_BYTES // 2, generator=generator).bfloat16()
        for index in range(options.megabytes * 2**20 // TENSOR_BYTES)
    }
    (directory / "hf").mkdir()
    (directory / "hf/config.json").write_text("{}")
    save_file(weights, directory / "hf/model.safetensors")
    ways = {name: Way(directory, name, weights) for name in ("full", "xor", "overwrite")}
    random = np.random.default_rng(0)
    for version in range(1, options.rounds + 2):
        if version > 1:  # the first push only makes the copies of the hosts
            for tensor in weights.values():
                data = tensor.view(torch.uint8).numpy()
                places = random.choice(len(data), int(options.changed * len(data)), replace=False)
                data[places] ^= random.integers(1, 256, len(places), dtype=np.uint8)
        for way in ways.values():
            way.push(version)
    total = sum(tensor.nbytes for tensor in weights.values())
    print(f"{processor()}, {total / 1e6:.0f} MB, {options.changed:.1%} of the bytes changed")
    print("way          trainer s   of full   processor s   wire share   host s")
    for name, way in ways.items():
        trainer, host = min(way.trainer_seconds), min(way.host_seconds)
        share = trainer / min(ways["full"].trainer_seconds)
        computed = min(way.processor_seconds)
        print(f"{name:12}{trainer:10.3f}{share:10.2f}{computed:14.3f}{way.wire_bytes / total:13.4f}{host:9.3f}")


class Way:
    """A trainer and a host with directories of their own."""

    def __init__(self, directory: Path, name: str, weights: dict[str, torch.Tensor]) -> None:
        mode = "full" if name == "full" else "delta"
        self._args = SimpleNamespace(
            hf_checkpoint=str(directory / "hf"), update_weight_transport="disk", update_weight_mode=mode, colocate=False,
            update_weight_disk_dir=str(directory / name), update_weight_disk_keep_files=False, release_train=False,
            update_weight_delta_encoding=name, update_weight_delta_checksum="xxh3-128",
            update_weight_local_checkpoint_dir=str(directory / f"{name}-host"), distributed_timeout_minutes=10,
        )  # fmt: skip
        transport = transport_of(self._args)(self._args, 0, 1)
        self._source = WeightSource(lambda: split_into_buckets(weights.items(), 512 * 2**20), transport)
        self._host = LocalCheckpoint(self._args.update_weight_local_checkpoint_dir, self._args.hf_checkpoint, 600)
        self.trainer_seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.host_seconds: list[float] = []
        self.wire_bytes = 0

    def push(self, version: int) -> None:
        started, computed = time.perf_counter(), time.process_time()
        sent = self._source.send(version)
        written, computed = time.perf_counter(), time.process_time() - computed
        refusal = self._host.bring_to(transport_of(self._args).directory(self._args, version))
        assert refusal is None, refusal
        applied = time.perf_counter()
        self._source.settle()
        if version > 1:
            self.trainer_seconds.append(written - started)
            self.processor_seconds.append(computed)
            self.host_seconds.append(applied - written)
            self.wire_bytes = sent.num_bytes if sent.delta is None else sent.delta.wire_bytes


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
