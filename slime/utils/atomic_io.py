"""Files and directories that exist whole or not at all: temporary name, fsync, rename."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
    _fsync_directory(path.parent)


def write_json_atomically(path: str | Path, value: Any) -> None:
    """`write_text_atomically` of `value` as indented JSON."""
    write_text_atomically(path, json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def publishing_directory(final_path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling directory that becomes `final_path` when the block ends without an error.

    An existing `final_path` is replaced. On an error the temporary directory is removed and `final_path` stays as it was.
    """
    final_path = Path(final_path)
    final_path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=final_path.parent, prefix=f".{final_path.name}."))
    try:
        yield temporary
        fsync_tree(temporary)
        os.chmod(temporary, 0o755)
        replace_directory(temporary, final_path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def replace_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`, moving an existing `target` aside first and deleting it last."""
    retired = None
    if target.exists():
        retired = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.retired."))
        os.rename(target, retired / target.name)
    os.rename(source, target)
    _fsync_directory(target.parent)
    if retired is not None:
        shutil.rmtree(retired)


def fsync_tree(directory: str | Path) -> None:
    """Force every file and directory below `directory` to disk."""
    for root, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(root, name), "rb") as file:
                os.fsync(file.fileno())
        _fsync_directory(Path(root))


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
