"""The layout of a directory of checkpoints, which is Megatron's: a directory for each iteration, and a pointer file, which is
written last.

The metadata in an iteration's directory, also written last, name the backend that wrote it.
"""

import json
import os
from pathlib import Path

from slime.utils.errors import UserError

POINTER = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"
# The file with the version of its weights' push, or of the last push before it.
WEIGHT_VERSION = "weight_version.json"
# The name of the FSDP backend in the metadata; checkpoints of Megatron have torch_dist.
FSDP2 = "fsdp2"


def is_megatron_checkpoint(path: str | os.PathLike[str]) -> bool:
    return (Path(path) / POINTER).is_file()


def latest_iteration(path: str | os.PathLike[str]) -> int:
    """The iteration that the pointer file of a Megatron checkpoint names.

    Raises:
        UserError: the pointer holds no number.
    """
    text = (Path(path) / POINTER).read_text().strip()
    if not text.isdigit():
        raise UserError(f"{Path(path) / POINTER} holds {text!r}, not an iteration number")
    return int(text)


def iteration_directory(path: str | os.PathLike[str], iteration: int) -> Path:
    return Path(path) / f"iter_{iteration:07d}"


def sharded_backend(directory: Path) -> str | None:
    """The backend that has written an iteration's checkpoint, by its metadata; None if it is incomplete or damaged."""
    try:
        return json.loads((directory / METADATA).read_text()).get("sharded_backend")
    except (OSError, ValueError, AttributeError):
        return None


def require_backend(backend: str, kind: str, path: str | os.PathLike[str] | None, step: int | None) -> None:
    """Refuse a checkpoint that the trainer of `--train-backend` cannot load.

    Args:
        kind, path, step: those of a source of weights.

    Raises:
        UserError: another backend has written it, or its pointer is damaged; the message names the way out.
    """
    if kind != "megatron":
        return
    directory = iteration_directory(path, latest_iteration(path) if step is None else step)
    is_of_fsdp = sharded_backend(directory) == FSDP2
    if is_of_fsdp and backend != "fsdp":
        raise UserError(
            f"{directory} was saved with --train-backend fsdp, and goes on with that alone; to start from its weights, give it "
            "itself: it is a Hugging Face directory too"
        )
    if backend == "fsdp" and not is_of_fsdp:
        raise UserError(
            f"{directory} was not saved with --train-backend fsdp, which starts from a Hugging Face directory and goes on from "
            "its own checkpoints; tools/convert_torch_dist_to_hf.py makes such a directory of Megatron's"
        )
