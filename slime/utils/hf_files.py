"""The files with the weights of a Hugging Face checkpoint: their size, and how long a run waits for those who move them."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

INDEX_FILE = "model.safetensors.index.json"
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def checkpoint_bytes(directory: str | None) -> int:
    """Bytes of the weights of a Hugging Face checkpoint: the size of its files, else that in its index; 0 without either."""
    if directory is None:
        return 0
    path = Path(directory)
    for pattern in _WEIGHT_FILES:
        # The same weights may lie there in several formats, of which one is loaded.
        if size := sum(file.stat().st_size for file in path.glob(pattern) if file.is_file()):
            return size
    try:
        return int(json.loads((path / INDEX_FILE).read_text())["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


# A checkpoint of training beside the weights it trains, in bytes: 16-bit weights, and 12 bytes of optimizer state for each.
_TRAINING_CHECKPOINT = 7


@dataclass(frozen=True)
class _Limit:
    """A limit. seconds: for a model of no size. rate: bytes per second that even slow storage and a cold start reach."""

    seconds: float
    rate: float
    of_training: bool = False


# 0.2 GB/s is a network file system that many nodes read at the same time. A training checkpoint is read by all ranks, each
# its part, and moved or deleted file by file. In the worst case one rank writes all of it.
TIME_LIMITS = {
    "engine_start_timeout": _Limit(600, 0.2e9),
    "engine_load_timeout": _Limit(300, 0.2e9),
    "train_start_timeout": _Limit(1800, 1e9, of_training=True),
    "checkpoint_write_timeout": _Limit(600, 0.2e9, of_training=True),
    "checkpoint_publish_timeout": _Limit(300, 1e9, of_training=True),
}


def time_limits(size: int) -> dict[str, float]:
    """The limits of a run whose checkpoint has weights of `size` bytes, by the attribute of their flag, in whole seconds."""
    limits = {}
    for name, limit in TIME_LIMITS.items():
        read = size * (_TRAINING_CHECKPOINT if limit.of_training else 1)
        limits[name] = float(math.ceil(limit.seconds + read / limit.rate))
    return limits
