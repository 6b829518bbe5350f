"""The files with the weights of a Hugging Face checkpoint."""

import json
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
