"""Time limits of what takes the longer the larger the model is, from the size of its checkpoint where none is typed."""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_INDEX = "model.safetensors.index.json"
# A checkpoint of training beside the weights it trains, in bytes: 16-bit weights, and 12 bytes of optimizer state for each.
_TRAINING_CHECKPOINT = 7


@dataclass(frozen=True)
class _Limit:
    """seconds: for a model of no size. rate: bytes per second that even slow storage and a cold start reach."""

    seconds: float
    rate: float
    of_training: bool = False


# 0.2 GB/s is a network file system that many nodes read at the same time. A training checkpoint is read by all ranks, each
# its part, and moved or deleted file by file.
TIME_LIMITS = {
    "engine_start_timeout": _Limit(600, 0.2e9),
    "engine_load_timeout": _Limit(300, 0.2e9),
    "train_start_timeout": _Limit(1800, 1e9, of_training=True),
    "checkpoint_publish_timeout": _Limit(300, 1e9, of_training=True),
}


def derive_time_limits(args: argparse.Namespace) -> None:
    """Fill the limits that were not typed, in whole seconds."""
    size = checkpoint_bytes(args.hf_checkpoint)
    for name, limit in TIME_LIMITS.items():
        if getattr(args, name) is None:
            read = size * (_TRAINING_CHECKPOINT if limit.of_training else 1)
            setattr(args, name, float(math.ceil(limit.seconds + read / limit.rate)))


def time_limit_violations(args: argparse.Namespace) -> Iterator[str]:
    """A limit has to leave some time."""
    for name, limit in TIME_LIMITS.items():
        seconds = getattr(args, name)
        if not 0 < seconds < math.inf:
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} {seconds:g}: must be a number of seconds above 0; its least default is {limit.seconds:g}"


def checkpoint_bytes(directory: str | None) -> int:
    """Bytes of the weights of a Hugging Face checkpoint: of its files, else what its index says; 0 where neither is there."""
    if directory is None:
        return 0
    path = Path(directory)
    for pattern in _WEIGHT_FILES:
        # Formats of the same weights may lie side by side: one is loaded.
        if size := sum(file.stat().st_size for file in path.glob(pattern) if file.is_file()):
            return size
    try:
        return int(json.loads((path / _INDEX).read_text())["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
