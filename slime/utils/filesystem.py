"""Atomic files and directories, scratch directories of processes, file names with placeholders, and checks for writability.

Atomic files and directories exist whole or not at all: they are written under a temporary name, synced to disk, and renamed.

A process that is killed leaves its scratch directory behind. Each has a file `owner` that its process keeps locked; the kernel
releases the lock when that process ends, in whatever way. So an `owner` that can be locked proves that the directory is one of
ours and not in use, even in containers and with reused process ids, and nothing else is deleted. Files in shared memory whose
names contain the directory's name belong to it.

A directory that a user named is claimed in the same way, by a file `.lock`, and never deleted. A scratch directory may lie in
it, for other machines to read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Constants of renameat2 (Linux).
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write `text` so that a reader (or a crash) sees the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_json_atomically(path: str | Path, value: Any) -> None:
    """`write_text_atomically` of `value` as indented JSON."""
    write_text_atomically(path, json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def publishing_directory(final_path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling directory that becomes `final_path` when the block ends without an error.

    An existing `final_path` is replaced. On an error the temporary directory is removed and `final_path` stays as it was. One
    process at a time may publish a path: the temporary directory of one that was killed is removed.
    """
    final_path = Path(final_path)
    temporary = final_path.with_name(f".{final_path.name}.writing")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(mode=0o700, parents=True)
    try:
        yield temporary
        fsync_tree(temporary)
        os.chmod(temporary, 0o755)
        replace_directory(temporary, final_path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def replace_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`; an existing `target` is deleted.

    The two change places in one step, so that a whole `target` exists at every moment. On a file system that cannot do that
    there is none between two renames. Remains of an old `target`, which a process that was killed meanwhile has left, are
    deleted, too.
    """
    retired = f".{target.name}.retired."
    if not target.exists():
        os.rename(source, target)
    else:
        # If this process is killed the next call finds the remains of both by this name.
        aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=retired))
        new, old = aside / "new", aside / "old"
        os.rename(source, new)
        try:
            if not _exchange(new, target):
                os.rename(target, old)
                try:
                    os.rename(new, target)
                except OSError:
                    os.rename(old, target)
                    raise
        except OSError:
            os.rename(new, source)
            raise
    fsync_directory(target.parent)
    for left in target.parent.glob(f"{glob.escape(retired)}*"):
        shutil.rmtree(left, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths change places in one step; False if the system or the file system cannot do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def overlapping(template: str | Path, directory: str | Path | None) -> bool:
    """Whether a directory that `template` names, with numbers in the place of its {fields}, may be `directory` (None: there is
    none), lie in it or hold it. Links are followed."""
    return directory is not None and (
        Path(template).resolve().is_relative_to(Path(directory).resolve()) or holding(template, directory)
    )


def holding(template: str | Path | None, directory: str | Path | None) -> bool:
    """Whether a directory that `template` names, with numbers in the place of its {fields}, may be `directory` or hold it; not
    if either is None. Links are followed."""
    if template is None or directory is None:
        return False
    numbered = re.sub(r"\\{.*?\\}", r"\\d+", re.escape(str(Path(template).resolve())))
    return re.match(rf"{numbered}(/|$)", str(Path(directory).resolve())) is not None


def fsync_tree(directory: str | Path) -> None:
    """Force every file and directory below `directory` to disk."""
    for root, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(root, name), "rb") as file:
                os.fsync(file.fileno())
        fsync_directory(Path(root))


def fsync_directory(directory: Path) -> None:
    """Force the entries of `directory` to disk, not what they name."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_PREFIX = "slime-"
_OWNER = "owner"
_LOCK = ".lock"
_SHARED_MEMORY = Path("/dev/shm")
_CLOCKS_DIFFER_SECONDS = 3600.0

# Descriptors that hold locks, by the scratch directory of this process or the lock file in a claimed directory.
_locks: dict[Path, int] = {}


def make_scratch_directory(kind: str) -> Path:
    """A new directory, for this user only, below the directory for temporary files. Sweeps what others left first.

    Args:
        kind: what it is for, as part of its name. The path stays short: Unix sockets may lie in it.
    """
    sweep_scratch_directories()
    return _own(Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-")))


def make_shared_scratch_directory(parent: Path, kind: str, seconds: float) -> Path:
    """A new directory `.{kind}-…` below `parent`, which several machines may share. It is used for `seconds` at most.

    First those directories are deleted that processes which were killed have left there. A lock tells only on the machine of
    the process whether that lives, since some network file systems keep the locks of each machine apart. Directories of other
    machines are deleted an hour after their time.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for path in parent.glob(f".{kind}-*"):
        _delete_if_left(path)
    note = {"machine": _machine(), "until": time.time() + seconds}
    return _own(Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=parent)), json.dumps(note))


def _own(path: Path, note: str = "") -> Path:
    """Have this process own the directory until it ends, and say in it what `note` says."""
    draft = path / f".{_OWNER}"
    try:
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # A file system that has no locks grants this, as any claim.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, note.encode())
        # Renamed after it is locked, so that no process ever sees the file without its lock.
        draft.rename(path / _OWNER)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    _locks[path] = descriptor
    return path


def _delete_if_left(path: Path) -> None:
    """Delete a directory of `make_shared_scratch_directory` whose process has ended. Harmless if it is none."""
    try:
        descriptor = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        # It is being made or deleted, or belongs to another user.
        return
    with os.fdopen(descriptor) as owner:
        is_free = True
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            # The file system has no locks.
            is_free = False
        with contextlib.suppress(ValueError, KeyError, TypeError):
            note = json.load(owner)
            if (is_free and note["machine"] == _machine()) or time.time() > note["until"] + _CLOCKS_DIFFER_SECONDS:
                _delete(path)


def _machine() -> str:
    """The same for all processes, also those in containers, that one kernel has run since it started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def remove_scratch_directory(path: Path) -> None:
    """Delete a directory of this process and its files in shared memory. Harmless when it is gone."""
    _delete(path)
    descriptor = _locks.pop(path, None)
    if descriptor is not None:
        os.close(descriptor)


def claim_directory(path: Path, lock: str = _LOCK) -> bool:
    """Claim a directory, which is created if it is missing, for this process until it ends or releases it. Returns False if
    another process has it.

    On a file system without locks every claim is granted.

    Args:
        lock: name of a file in the directory. Claims by different names are independent.
    """
    path = path.resolve() / lock
    if path in _locks:
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        # The file is that of another user, whose directory this user may write to.
        descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError:
        # The file system has no locks.
        pass
    _locks[path] = descriptor
    return True


def release_directory(path: Path, lock: str = _LOCK) -> None:
    """Undo `claim_directory`."""
    descriptor = _locks.pop(path.resolve() / lock, None)
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
    """Yields whether the directory has no owner any more; if so, this process owns it in the block."""
    try:
        descriptor = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        # It was not made by slime, belongs to another user, or is being deleted.
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        abandoned = os.fstat(descriptor).st_uid == os.getuid()
    except OSError:
        # Its owner lives, or the file system has no locks.
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


def existing_files(template: str) -> list[str]:
    """The files that `template` names for any rollout id, in the order of the ids."""
    try:
        pattern = glob.escape(template).format(rollout_id="*")
    except (KeyError, IndexError, ValueError):
        return []  # such as {rollout_id:04d}, which takes numbers only
    return sorted((path for path in glob.glob(pattern) if os.path.isfile(path)), key=lambda path: (len(path), path))


def existing_parent(path: str) -> Path:
    """The nearest directory or file above or at `path` that exists; the part behind the first placeholder is open."""
    place = Path(path.partition("{")[0])
    while not os.path.lexists(place):
        place = place.parent
    return place


def free_room(directory: Path) -> str:
    """How much is free on the disk of `directory`, in a sentence for an error."""
    try:
        return f"{shutil.disk_usage(directory).free / 1e6:.0f} MB are free there"
    except OSError as error:
        # Above all: there is no such directory.
        return str(error)


def unwritable(directory: Path) -> str | None:
    """Why nothing can be created in `directory`; None when it can. A file without a name is created to find out."""
    if not directory.is_dir():
        return "is a file, not a directory"
    try:
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return f"cannot be written ({error.strerror})"
