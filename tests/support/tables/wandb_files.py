"""Reads the file of an offline W&B run: a log of records in blocks of 32 KiB; records have checksum, length and kind."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE_HEADER = 7
_BLOCK = 32768
_RECORD_HEADER = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4


class OfflineRun:
    """The only run below `directory`/wandb, with its settings (`run`), `config`, `axes` and `history`."""

    def __init__(self, directory: Path) -> None:
        from wandb.proto.wandb_internal_pb2 import Record

        (self.path,) = (directory / "wandb").glob("offline-run-*/run-*.wandb")
        self.config: dict[str, Any] = {}
        self.axes: dict[str, str] = {}
        self.history: list[dict[str, Any]] = []
        self.exit_code: int | None = None
        for data in _records(self.path.read_bytes()):
            record = Record.FromString(data)
            self._take(record.WhichOneof("record_type"), record)

    def _take(self, kind: str, record: Any) -> None:
        if kind == "run":
            self.run = record.run
            self.config.update({item.key: json.loads(item.value_json) for item in record.run.config.update})
        elif kind == "metric" and record.metric.step_metric:
            self.axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
        elif kind == "history":
            items = record.history.item
            values = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items}
            self.history.append({name: value for name, value in values.items() if not name.startswith("_")})
        elif kind == "exit":
            self.exit_code = record.exit.exit_code


def _records(data: bytes) -> Iterator[bytes]:
    position, record = _FILE_HEADER, b""
    while position + _RECORD_HEADER.size <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _RECORD_HEADER.size:
            position += left
            continue
        _, length, kind = _RECORD_HEADER.unpack_from(data, position)
        position += _RECORD_HEADER.size
        record += data[position : position + length]
        position += length
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""
