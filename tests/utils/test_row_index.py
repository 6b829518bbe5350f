"""Rows by their place in a file, compared with the reader that goes through it from the start."""

import json
import os
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest

from slime.utils import row_index
from slime.utils.data_files import BadRow, iterate_rows
from slime.utils.errors import UserError
from slime.utils.row_index import index_rows

AWKWARD = (
    b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt": "\xc3\xa9\xe2\x80\xa8"}\n'
    b' \t\x0b\n  {"prompt": "indented"}\n\n{"prompt": "b"}\n'
    b'\n{"prompt": "no newline at the end"}'
)
SLICES = ["", "@[-3:]", "@[:-1]", "@[2:5]", "@[:]", "@[4:]", "@[-100:2]", "@[5:100]", "@[-4:-2]", "@[3:1]"]


def all_of(path):
    index = index_rows(path)
    return [(index.place(position), index.read(position)) for position in range(len(index))]


@pytest.mark.parametrize("chunk", [1, 3, 7, 2**20])
@pytest.mark.parametrize("slice_text", SLICES)
def test_lines_are_those_of_the_reader(tmp_path, monkeypatch, chunk, slice_text):
    monkeypatch.setattr(row_index, "_CHUNK_BYTES", chunk)
    path = tmp_path / "data.jsonl"
    path.write_bytes(AWKWARD)
    assert all_of(f"{path}{slice_text}") == list(iterate_rows(f"{path}{slice_text}"))


@pytest.mark.parametrize(
    "content", [b"", b"\n", b" \n\n", b'{"prompt": "a"}', b'{"prompt": "a"}\n\n\n', b'\xef\xbb\xbf\n{"a": 1}\n']
)
def test_small_files(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    assert all_of(str(path)) == list(iterate_rows(str(path)))


@pytest.mark.parametrize("slice_text", SLICES)
def test_rows_of_parquet_are_those_of_the_reader(tmp_path, slice_text):
    from pyarrow import Table, parquet

    path = str(tmp_path / "data.parquet")
    parquet.write_table(Table.from_pylist([{"prompt": str(i), "n": i} for i in range(8)]), path, row_group_size=3)
    assert all_of(path + slice_text) == list(iterate_rows(path + slice_text))


def test_values_of_parquet_that_json_has_not_are_numbers_and_text(tmp_path):
    import pyarrow
    from pyarrow import parquet

    def written(**columns):
        parquet.write_table(pyarrow.table(columns), path)
        read = [row for _, row in iterate_rows(path)]
        assert [row for _, row in all_of(path)] == read
        return read

    path = str(tmp_path / "data.parquet")
    prices = ["85.00", "2.50", "0.1", "12345678901234567890.12", None]
    moment = datetime(2024, 5, 1, 2, 3, 4, 5, UTC)
    inner = {"day": date(2024, 5, 1), "at": moment, "in": [moment.time()], "after": timedelta(1, 2), "bytes": b"\xff"}
    decimals = pyarrow.array([price and Decimal(price) for price in prices], pyarrow.decimal128(22, 2))
    count = pyarrow.array([[("left", Decimal(7))]] * 5, pyarrow.map_(pyarrow.string(), pyarrow.decimal128(38, 0)))
    found = written(label=decimals, metadata=[inner] * 5, count=count)
    assert [repr(row["label"]) for row in found] == ["85", "2.5", "0.1", "'12345678901234567890.12'", "None"]
    assert found[0]["metadata"] == {
        "day": "2024-05-01", "at": "2024-05-01T02:03:04.000005+00:00", "in": ["02:03:04.000005"],
        "after": "1 day, 0:00:02", "bytes": b"\xff",
    }  # fmt: skip
    assert found[0]["count"] == [["left", 7]]
    # Of nanoseconds only pandas has objects.
    moments = pyarrow.array([1], pyarrow.timestamp("ns"))
    parquet.write_table(pyarrow.table({"at": moments}), path)
    for read in (all_of, lambda path: list(iterate_rows(path))):
        with pytest.raises(UserError, match="data.parquet: no readable parquet file .*Nanosecond.*Install pandas"):
            read(path)


def test_only_some_row_groups_are_held(tmp_path, monkeypatch):
    from pyarrow import Table, parquet

    monkeypatch.setattr(row_index, "_KEPT_GROUP_BYTES", 100)
    path = str(tmp_path / "data.parquet")
    parquet.write_table(Table.from_pylist([{"n": i} for i in range(60)]), path, row_group_size=6)
    index = index_rows(path)
    order = [(i * 37) % 60 for i in range(60)]
    assert [index.read(i)["n"] for i in order] == order
    assert len(index._groups) == 2, "a group of six numbers takes 48 bytes"


def test_an_unreadable_row_is_named_when_it_is_read(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n{broken\n[1]\n{"prompt": "b"}\n')
    index = index_rows(str(path))
    assert (len(index), index.place(1), index.read(3)) == (4, f"{path}:2", {"prompt": "b"})
    for position, cause in ((1, "no valid JSON"), (2, "expected a JSON object, found list")):
        with pytest.raises(BadRow, match=cause):
            index.read(position)


def test_large_row_groups_are_warned_of(tmp_path, caplog, monkeypatch):
    from pyarrow import Table, parquet

    path = str(tmp_path / "data.parquet")
    parquet.write_table(Table.from_pylist([{"prompt": f"{i}" * 100_000} for i in range(50)]), path)
    index_rows(path)
    assert caplog.text == ""
    monkeypatch.setattr(row_index, "_KEPT_GROUP_BYTES", 2**20)
    index_rows(path)
    (record,) = caplog.records
    assert (
        f"{path}: a row group has" in record.getMessage()
        and "write the file with smaller groups" in record.getMessage()
    )


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_file_that_changes_under_the_run_is_named_and_one_that_takes_its_name_is_not_read(tmp_path, ending):
    path = tmp_path / f"data.{ending}"
    _write(path, range(3))
    index = index_rows(str(path))
    _write(tmp_path / f"other.{ending}", range(7, 10))
    os.replace(tmp_path / f"other.{ending}", path)
    assert [index.read(position) for position in range(3)] == [{"n": 0}, {"n": 1}, {"n": 2}]
    index = index_rows(str(path))
    with path.open("ab") as content:
        content.write(b"more")
    with pytest.raises(UserError, match="was changed while the run reads it"):
        index.read(0)


def _write(path, numbers):
    from pyarrow import Table, parquet

    rows = [{"n": number} for number in numbers]
    if path.suffix == ".parquet":
        parquet.write_table(Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_broken_parquet_file_is_named(tmp_path):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(UserError, match="data.parquet: no readable parquet file"):
        index_rows(str(path))
