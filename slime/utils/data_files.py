"""Rows of `.jsonl` and `.parquet` files, whole or as a slice `path@[a:b]`; with `*2.5` behind it, as a part of a mixture.

A slice has Python's semantics over the rows of the file (blank lines are no rows; broken rows count, so that a slice
means the same rows whether they can be read or not). Every row comes with its place, `file:line`, for messages.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from slime.utils.errors import UserError
from slime.utils.misc import without_repetition

BadRowHandler = Callable[[str, str], None]
# Called after every row of a file, even of rows that are only counted or skipped; it may raise to end the reading.
RowWatch = Callable[[], None]


class BadRow(Exception):
    """A row breaks a rule; the message is the cause, the caller knows the place."""


@dataclass(frozen=True)
class DataFile:
    """A data file, the rows to take from it and how often beside those of other files; `text` is what the user wrote."""

    text: str
    path: str
    start: int | None
    stop: int | None
    weight: float = 1.0

    @property
    def slice_text(self) -> str:
        """`[a:b]`, or the empty string for the whole file."""
        if self.start is None and self.stop is None:
            return ""
        return f"[{'' if self.start is None else self.start}:{'' if self.stop is None else self.stop}]"


_WEIGHTED = re.compile(r"(.+(?:\.jsonl|\.parquet|\]))\*(.*)")


def path_without_slice(text: str) -> str:
    """`text` up to a slice `@[...]` and a weight `*...` at its end, well formed or not."""
    weighted = _WEIGHTED.fullmatch(text)
    text = weighted[1] if weighted else text
    return text[: text.rindex("@[")] if text.endswith("]") and "@[" in text else text


def parse_data_path(text: str, flag: str = "--prompt-data") -> DataFile:
    """Split `path@[a:b]*weight`.

    Raises:
        UserError: malformed slice or weight, a directory, unknown ending, or no such file; the message names `flag`.
    """
    path, start, stop, weight = text, None, None, 1.0
    if (weighted := _WEIGHTED.fullmatch(text)) is not None:
        path, weight = weighted[1], _weight(text, weighted[2], flag)
    if path_without_slice(path) != path:
        match = re.fullmatch(r"(.+)@\[(-?\d+)?:(-?\d+)?\]", path)
        if match is None:
            raise UserError(f"{flag} {text}: malformed slice; write path@[start:stop], each bound may be left out")
        path = match[1]
        start, stop = (None if bound is None else int(bound) for bound in match.group(2, 3))
    if os.path.isdir(path):
        raise UserError(f"{flag} {text}: is a directory; name the .jsonl or .parquet files in it")
    if not os.path.splitext(path)[1] and not os.path.exists(path):
        raise UserError(
            f"{flag} {text}: there is no such file; name a .jsonl or .parquet file (data sets of the Hugging Face hub are not "
            "downloaded here: `hf download --repo-type dataset` does that)"
        )
    if not path.endswith((".jsonl", ".parquet")):
        raise UserError(f"{flag} {text}: unknown kind of data file; use .jsonl or .parquet")
    if not os.path.isfile(path):
        raise UserError(f"{flag} {text}: there is no file {path}")
    return DataFile(text, path, start, stop, weight)


def _weight(text: str, number: str, flag: str) -> float:
    if flag != "--prompt-data":
        raise UserError(f"{flag} {text}: all of the file is taken, so a weight says nothing; leave *{number} out")
    if re.fullmatch(r"\d+(\.\d*)?|\.\d+", number) is None or not float(number):
        raise UserError(
            f"{flag} {text}: the weight {number!r} is no number above 0; write path*2.5, or leave the file out"
        )
    return float(number)


def read_file(path: str, flag: str = "--prompt-data") -> Iterator[dict[str, Any]]:
    """The rows of `path` (see `parse_data_path`), each a dict. Errors, which name `flag`, as of `iterate_rows`."""
    for _, row in iterate_rows(path, flag):
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
    """What a data file was: `path`, `slice`, `size` in bytes and `sha256` of the whole file; its `weight` if it has one."""
    file = parse_data_path(path, flag)
    with open(file.path, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    weight = {} if file.weight == 1 else {"weight": file.weight}
    return {"path": file.path, "slice": file.slice_text, "size": os.path.getsize(file.path), "sha256": digest, **weight}


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
            row = parse_row(line)
        except BadRow as error:
            on_bad_row(place, str(error))
            continue
        yield place, row


# One decoder for all rows: `json.loads` with a hook would make one for each.
_ROWS = json.JSONDecoder(object_pairs_hook=without_repetition)


def parse_row(line: bytes) -> dict[str, Any]:
    """The JSON object on a line. Raises BadRow if there is none, or if a name stands twice in it."""
    try:
        text = line.decode("utf-8").rstrip(" \t\r\n")
        row = _ROWS.decode(text)
    except json.JSONDecodeError as error:
        # An array in place of lines, or an object that goes on in the next one.
        cut = "; each line has to hold one whole object" if error.pos >= len(text) else ""
        raise BadRow(f"no valid JSON ({error.msg}, at character {error.pos + 1}){cut}") from error
    except ValueError as error:
        raise BadRow(f"no valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise BadRow(f"expected a JSON object, found {type(row).__name__}")
    return row


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
    from pyarrow import parquet

    with parquet_errors(file.path), parquet.ParquetFile(file.path) as table:
        selected = _selected_rows(file, lambda: table.metadata.num_rows)
        rows = itertools.islice(_watched_rows(table, watch), selected.start, selected.stop)
        for number, row in rows:
            yield f"{file.path}:{number + 1}", row


@contextlib.contextmanager
def parquet_errors(path: str) -> Iterator[None]:
    """Turns errors of Arrow into a UserError with the name of the file."""
    from pyarrow import ArrowException

    try:
        yield
    except UserError:
        raise
    except (ArrowException, OSError, ValueError) as error:  # a ValueError: Python has no such time
        raise UserError(f"{path}: no readable parquet file ({error})") from error


def _watched_rows(table: Any, watch: RowWatch) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    for batch in table.iter_batches(batch_size=1024):
        for row in plain_rows(batch):
            yield number, row
            number += 1
            watch()


# Arrow's types whose values become other objects than those of JSON. A field may have such a name, which only costs time.
_NOT_IN_JSON = re.compile(r"decimal|date|time|duration|uuid|map<")


def plain_rows(table: Any) -> list[dict[str, Any]]:
    """The rows of an Arrow table or batch, in the types of JSON and bytes.

    A decimal is a number where one holds it exactly, else text, as dates and times are (ISO 8601).
    """
    rows = table.to_pylist()
    return _in_json(rows) if _NOT_IN_JSON.search(str(table.schema.types)) else rows


def _in_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(inner) for inner in value]
    if isinstance(value, Decimal):
        number = int(value) if value == int(value) else float(value)
        return number if Decimal(str(number)) == value else str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value) if isinstance(value, timedelta | UUID) else value
