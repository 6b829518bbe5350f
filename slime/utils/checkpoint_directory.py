"""What a directory of Megatron checkpoints looks like: one directory for each iteration, and a pointer file, written last."""

import os
from pathlib import Path

from slime.utils.errors import UserError

POINTER = "latest_checkpointed_iteration.txt"


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
