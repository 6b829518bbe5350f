"""Rows of `.jsonl` and `.parquet` files, whole or as a slice `path@[a:b]`.

A slice has Python's semantics over the rows of the file (blank lines are no rows; broken rows count, so that a slice
means the same rows whether they can be read or not). Every row comes with its place, `file:line`, for messages.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slime.utils.errors import UserError

BadRowHandler = Callable[[str, str], None]
# Called after every row of a file, those that are only counted or passed too; raises to end the reading.
RowWatch = Callable[[], None]


@dataclass(frozen=True)
class DataFile:
    """A data file and the rows to take from it; `text` is what the user wrote."""

    text: str
    path: str
    start: int | None
    stop: int | None

    @property
    def slice_text(self) -> str:
        """`[a:b]`, or the empty string for the whole file."""
        if self.start is None and self.stop is None:
            return ""
        return f"[{'' if self.start is None else self.start}:{'' if self.stop is None else self.stop}]"


def path_without_slice(text: str) -> str:
    """`text` up to a slice `@[...]` at its end, well formed or not."""
    return text[: text.rindex("@[")] if text.endswith("]") and "@[" in text else text


def parse_data_path(text: str, flag: str = "--prompt-data") -> DataFile:
    """Split `path@[a:b]`.

    Raises:
        UserError: malformed slice, unknown ending, or no such file; the message names `flag`.
    """
    path, start, stop = text, None, None
    if path_without_slice(text) != text:
        match = re.fullmatch(r"(.+)@\[(-?\d+)?:(-?\d+)?\]", text)
        if match is None:
            raise UserError(f"{flag} {text}: malformed slice; write path@[start:stop], each bound may be left out")
        path = match[1]
        start, stop = (None if bound is None else int(bound) for bound in match.group(2, 3))
    if not path.endswith((".jsonl", ".parquet")):
        raise UserError(f"{flag} {text}: unknown kind of data file; use .jsonl or .parquet")
    if not os.path.isfile(path):
        raise UserError(f"{flag} {text}: there is no file {path}")
    return DataFile(text, path, start, stop)


def read_file(path: str, flag: str = "--prompt-data", on_bad_row: BadRowHandler | None = None) -> Iterator[dict]:
    """The rows of `path` (see `parse_data_path`), each a dict. Arguments as for `iterate_rows`."""
    for _, row in iterate_rows(path, flag, on_bad_row):
        yield row


def iterate_rows(
    path: str,
    flag: str = "--prompt-data",
    on_bad_row: BadRowHandler | None = None,
    watch: RowWatch = lambda: None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs of place (`file:line`) and row.

    `on_bad_row(place, cause)` is called for a row that cannot be read, which is then skipped; without it, such a row is
    an error. `watch` is called after every row of the file, the selected ones or not: what it raises ends the reading.

    Raises:
        UserError: as `parse_data_path`; an unreadable file; a broken row.
    """
    file = parse_data_path(path, flag)
    read = _iterate_jsonl if file.path.endswith(".jsonl") else _iterate_parquet
    return read(file, on_bad_row or raise_bad_row, watch)


def raise_bad_row(place: str, cause: str) -> None:
    """The default handler of bad rows."""
    raise UserError(bad_row(place, cause))


def bad_row(place: str, cause: str) -> str:
    """The message about a row that cannot be used."""
    return f"{place}: {cause}; mend the row, or skip and count such rows with --allow-bad-rows"


def estimated_rows(path: str) -> int:
    """About how many rows `path` has, whole or slice: from the length of its first lines, or from the parquet footer."""
    file = parse_data_path(path)
    if file.path.endswith(".parquet"):
        from pyarrow import parquet

        total = parquet.read_metadata(file.path).num_rows
    else:
        with open(file.path, "rb") as content:
            start = content.read(2**16)
        total = os.path.getsize(file.path) * max(1, start.count(b"\n")) // max(1, len(start))
    return len(range(total)[file.start : file.stop])


def fingerprint(path: str, flag: str = "--prompt-data") -> dict[str, Any]:
    """What a data file was: `path`, `slice`, `size` in bytes and `sha256` of the whole file."""
    file = parse_data_path(path, flag)
    with open(file.path, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {"path": file.path, "slice": file.slice_text, "size": os.path.getsize(file.path), "sha256": digest}


def _selected_rows(file: DataFile, count_rows: Callable[[], int]) -> range:
    """Row numbers to take. Rows are counted only if a bound is relative to the end."""
    start, stop = file.start or 0, file.stop
    if start < 0 or (stop is not None and stop < 0):
        return range(count_rows())[file.start : file.stop]
    return range(start, 2**62 if stop is None else max(start, stop))


def _iterate_jsonl(file: DataFile, on_bad_row: BadRowHandler, watch: RowWatch) -> Iterator[tuple[str, dict[str, Any]]]:
    selected = _selected_rows(file, lambda: sum(1 for _ in _non_blank_lines(file.path, watch)))
    for number, line in itertools.islice(_non_blank_lines(file.path, watch), selected.start, selected.stop):
        place = f"{file.path}:{number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
            on_bad_row(place, f"no valid JSON ({error})")
            continue
        if not isinstance(row, dict):
            on_bad_row(place, f"expected a JSON object, found {type(row).__name__}")
            continue
        yield place, row


def _non_blank_lines(path: str, watch: RowWatch) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line
            watch()


def _iterate_parquet(
    file: DataFile, on_bad_row: BadRowHandler, watch: RowWatch
) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(file.path) as table:
            selected = _selected_rows(file, lambda: table.metadata.num_rows)
            rows = itertools.islice(_watched_rows(table, watch), selected.start, selected.stop)
            for number, row in rows:
                yield f"{file.path}:{number + 1}", row
    except (ArrowException, OSError) as error:
        raise UserError(f"{file.path}: no readable parquet file ({error})") from error


def _watched_rows(table: Any, watch: RowWatch) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    for batch in table.iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            yield number, row
            number += 1
            watch()
