"""Directories for what a process needs while it runs: gone with it, or swept by the next one of ours.

A process that is killed leaves its directory behind. Each holds a file `owner` that its process keeps locked; the kernel
takes the lock away when that process ends, however it ends. So an `owner` that can be locked says for certain that the
directory is one of ours and that nobody uses it, in containers and for reused process numbers too, and nothing else is
touched. Files in shared memory whose names hold the directory's name belong to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "slime-"
_OWNER = "owner"
_SHARED_MEMORY = Path("/dev/shm")

# Of the directories of this process: the descriptor that holds the lock.
_locks: dict[Path, int] = {}


def make_scratch_directory(kind: str) -> Path:
    """A new directory, for this user only, below the directory for temporary files. Sweeps what others left first.

    Args:
        kind: what it is for, as part of its name. The path stays short: Unix sockets may lie in it.
    """
    sweep_scratch_directories()
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
    draft = path / f".{_OWNER}"
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    # Renamed when it is locked: nobody ever sees the file without its lock.
    draft.rename(path / _OWNER)
    _locks[path] = descriptor
    return path


def remove_scratch_directory(path: Path) -> None:
    """Delete a directory of this process and its files in shared memory. Harmless when it is gone."""
    _delete(path)
    descriptor = _locks.pop(path, None)
    if descriptor is not None:
        os.close(descriptor)


def shared_memory_of(path: Path) -> list[Path]:
    """Files in shared memory that belong to the directory."""
    with contextlib.suppress(OSError):
        return [file for file in _SHARED_MEMORY.iterdir() if path.name in file.name]
    return []


def sweep_scratch_directories() -> list[Path]:
    """Delete the directories of this user's processes that were killed; those are returned."""
    swept = []
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with _owning(path) as abandoned:
            if abandoned:
                _delete(path)
                swept.append(path)
    return swept


@contextlib.contextmanager
def _owning(path: Path) -> Iterator[bool]:
    """Whether the directory has no owner any more; if so we are it for the length of the block."""
    try:
        descriptor = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        # Not made by us, somebody else's, or deleted at this moment.
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        abandoned = os.fstat(descriptor).st_uid == os.getuid()
    except OSError:
        # Its owner lives, or the disk cannot tell.
        abandoned = False
    try:
        yield abandoned
    finally:
        os.close(descriptor)


def _delete(path: Path) -> None:
    for file in shared_memory_of(path):
        with contextlib.suppress(OSError):
            file.unlink()
    shutil.rmtree(path, ignore_errors=True)
