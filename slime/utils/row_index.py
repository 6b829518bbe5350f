"""Where the rows of a data file lie, so that each can be read when it is asked for, in any order.

The index of a `.jsonl` file takes eight bytes per line. That of a `.parquet` file holds its row groups, and keeps the few
decoded ones that were read last. Rows are numbered as `slime.utils.data_files` counts them: blank lines do not count, broken
ones do, and a slice has Python's semantics. The file must not change after it was indexed.
"""

from __future__ import annotations

import codecs
import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from slime.utils.data_files import DataFile, parquet_errors, parse_data_path, parse_row, plain_rows
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 16 * 2**20
_BEGINS_BLANK = np.frombuffer(b" \t\n\r\x0b\x0c" + codecs.BOM_UTF8[:1], np.uint8)
# How much of decoded row groups is kept; several are useful because shuffled rows come from all over a file. A larger group is
# warned of.
_KEPT_GROUP_BYTES = 256 * 2**20


class RowIndex(Protocol):
    """The rows of one file, or of a slice of it."""

    def __len__(self) -> int:
        """Number of rows, unreadable ones included."""
        ...

    def place(self, position: int) -> str:
        """`file:line` of a row, for messages."""
        ...

    def read(self, position: int) -> dict[str, Any]:
        """A row. Thread-safe.

        Raises:
            BadRow: it cannot be read.
            UserError: the file is not what it was.
        """
        ...


def index_rows(path: str, flag: str = "--prompt-data") -> RowIndex:
    """The index of a file, with an optional slice `@[a:b]`.

    Raises:
        UserError: the slice is malformed, the ending is unknown, or the file is missing or cannot be read.
    """
    file = parse_data_path(path, flag)
    return _Lines(file) if file.path.endswith(".jsonl") else _RowGroups(file)


class _OpenFile:
    """A file that is read at any offset, and must not change meanwhile."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._was = self._now()

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def check(self) -> None:
        """Raise UserError if the file was changed since it was opened. Another file that took its name does no harm."""
        if self._now() != self._was:
            raise UserError(
                f"{self.path} was changed while the run reads it (--streaming-data); write another file instead, and start "
                "the run again with it"
            )

    def bytes_at(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on, or as many as there are."""
        pieces = []
        while count and (piece := os.pread(self._descriptor, count, offset)):
            pieces.append(piece)
            offset, count = offset + len(piece), count - len(piece)
        return b"".join(pieces)

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """The whole file as pairs of offset and bytes, uint8."""
        offset = 0
        while chunk := os.pread(self._descriptor, _CHUNK_BYTES, offset):
            yield offset, np.frombuffer(chunk, np.uint8)
            offset += len(chunk)


class _Lines:
    """The rows of a `.jsonl` file: row i lies between its offset and the next one, possibly with blank lines behind it."""

    def __init__(self, file: DataFile) -> None:
        self._file = _OpenFile(file.path)
        starts, begins_blank, size = _line_starts(self._file)
        ends = np.append(starts[1:], size)
        blank = [i for i in np.flatnonzero(begins_blank) if not self._line(starts[i], ends[i]).strip()]
        selected = range(len(starts) - len(blank))[file.start : file.stop]
        stop = max(selected.start, selected.stop)
        # Most files have no blank lines, so their rows are numbered like their lines and need no array of numbers.
        self._lines = np.delete(np.arange(len(starts)), blank)[selected.start : stop] if blank else None
        self._first = selected.start
        rows = np.delete(starts, blank) if blank else starts
        # A copy, so that a small slice does not keep the offsets of a large file in memory.
        self._offsets = np.append(rows, size)[selected.start : stop + 1].copy()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def place(self, position: int) -> str:
        line = self._first + position if self._lines is None else int(self._lines[position])
        return f"{self._file.path}:{line + 1}"

    def read(self, position: int) -> dict[str, Any]:
        self._file.check()
        line, _, _ = self._line(*self._offsets[position : position + 2]).partition(b"\n")
        return parse_row(line)

    def _line(self, start: int, end: int) -> bytes:
        line = self._file.bytes_at(int(start), int(end - start))
        return line.removeprefix(codecs.BOM_UTF8) if start == 0 else line


def _line_starts(file: _OpenFile) -> tuple[np.ndarray, np.ndarray, int]:
    """(offset of every line, int64; whether it begins with whitespace or a byte order mark; size of the file)."""
    starts, blank, size = [np.empty(0, np.int64)], [np.empty(0, bool)], 0
    next_start = [0]
    for size, chunk in file.chunks():
        begins = np.concatenate([np.array(next_start, np.int64), np.flatnonzero(chunk == ord("\n")) + size + 1])
        size += len(chunk)
        next_start = [size] if len(begins) and begins[-1] == size else []
        begins = begins[: len(begins) - len(next_start)]
        starts.append(begins)
        blank.append(np.isin(chunk[begins - (size - len(chunk))], _BEGINS_BLANK))
    return np.concatenate(starts), np.concatenate(blank), size


class _RowGroups:
    """The rows of a `.parquet` file, of which whole row groups are decoded."""

    def __init__(self, file: DataFile) -> None:
        from pyarrow import parquet

        self._file = _OpenFile(file.path)
        with parquet_errors(file.path):
            self._table = parquet.ParquetFile(file.path)
        weakref.finalize(self, self._table.close)
        metadata = self._table.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        largest = max((group.total_byte_size for group in groups), default=0)
        if largest > _KEPT_GROUP_BYTES:
            logger.warning(
                "%s: a row group has %d MiB, and for a row that is not at hand a whole one is decoded (--streaming-data); "
                "write the file with smaller groups (row_group_size of pyarrow, a few thousand rows), or as JSONL",
                file.path, largest // 2**20,
            )  # fmt: skip
        sizes = [group.num_rows for group in groups]
        self._group_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
        self._selected = range(metadata.num_rows)[file.start : file.stop]
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self._reading = threading.Lock()

    def __len__(self) -> int:
        return len(self._selected)

    def place(self, position: int) -> str:
        return f"{self._file.path}:{self._selected[position] + 1}"

    def read(self, position: int) -> dict[str, Any]:
        number = self._selected[position]
        group = int(np.searchsorted(self._group_starts, number, side="right")) - 1
        row = self._group(group).slice(number - int(self._group_starts[group]), 1)
        with parquet_errors(self._file.path):
            return plain_rows(row)[0]

    def _group(self, number: int) -> Any:
        with self._reading, parquet_errors(self._file.path):
            if number not in self._groups:
                self._file.check()
                self._groups[number] = self._table.read_row_group(number)
                while len(self._groups) > 1 and sum(g.nbytes for g in self._groups.values()) > _KEPT_GROUP_BYTES:
                    self._groups.popitem(last=False)
            self._groups.move_to_end(number)
            return self._groups[number]
