"""Tensors in the files of a torch_dist checkpoint: they are mapped when read, and need not be in one piece when written.

Each tensor is saved by `torch.save` into a part of a file. That format has a place for the numbers, as they are in memory, and
torch can skip it in reading and writing. So a tensor that is read stays in the file, and one that is written comes from
wherever its rows lie.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import mmap
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from slime.models.tensor_layouts import Layout, TensorSizes
from slime.utils.checkpoint_directory import read_torch_metadata
from slime.utils.errors import UserError

_OPTIMIZER = "optimizer."
COMMON = "common.pt"
FORMAT = "metadata.json"


class TorchDistDirectory:
    """The tensors of a torch_dist checkpoint by key, without optimizer state. Stacked tensors can be read entry by entry.

    Raises:
        UserError: it is no such directory, or its metadata cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._metadata = read_torch_metadata(directory)
        self._directory, self._storage = directory, self._metadata.places
        self._files: dict[Path, mmap.mmap] = {}
        # By (tensor, number of first axes): see `_by_prefix`.
        self._chunks: dict[tuple[str, int], dict[tuple[int, ...], list[Any]]] = {}
        self.tensors = {key: entry for key, entry in self._metadata.tensors.items() if not key.startswith(_OPTIMIZER)}

    def require_files(self) -> None:
        """Raise UserError if a file is missing, or shorter than the metadata say."""
        for message in self._metadata.damage():
            raise UserError(message)

    def read(self, key: str, prefix: tuple[int, ...]) -> list[torch.Tensor]:
        """The entry at `prefix` of the first axes of the tensor `key`, as parts with consecutive rows. Whole rows in a file are
        mapped, not copied.

        Raises:
            UserError: a file is missing or too short, or the pieces do not make the whole.
        """
        entry, depth = self.tensors[key], len(prefix)
        if (key, depth) not in self._chunks:
            self._chunks[key, depth] = _by_prefix(entry.chunks, depth)
        shape, found = entry.size[depth:], self._chunks[key, depth].get(prefix, ())
        pieces = [
            (chunk.offsets[depth:], self._load(key, tuple(chunk.offsets)).view(chunk.sizes)[_inside(prefix, chunk)])
            for chunk in found
        ]
        rows, row = [], 0
        for offset, piece in sorted(pieces, key=lambda at: at[0]):
            if piece.shape[1:] == shape[1:] and (not shape or offset[0] == row):
                rows.append(piece)
                row += len(piece) if shape else 1
        if rows and row == (shape[0] if shape else 1):
            return rows
        whole, filled = torch.empty(shape, dtype=dtype_of(entry)), 0
        for offset, piece in pieces:
            whole[tuple(slice(first, first + size) for first, size in zip(offset, piece.shape, strict=True))] = piece
            filled += piece.numel()
        if filled != whole.numel():
            raise UserError(f"{self._directory}: {key} is incomplete: {filled} of {whole.numel()} entries are there")
        return [whole]

    def _load(self, key: str, offset: tuple[int, ...]) -> torch.Tensor:
        """The piece that is saved for `offset` of a tensor."""
        place = self._storage[key, offset]
        path = self._directory / place.relative_path
        try:
            if path not in self._files:
                with open(path, "rb") as file:
                    self._files[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            window = _Window(self._files[path], place.offset, place.length)
            described = torch.load(window, map_location="meta", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise UserError(f"{path} cannot be read: {str(error) or 'it is cut off'}") from error
        # If a tensor is loaded without its numbers torch notes where these start; they are never compressed.
        stored = described.untyped_storage()
        start = place.offset + stored._checkpoint_offset
        if not stored.nbytes():
            return torch.empty(described.shape, dtype=described.dtype)
        numbers = torch.frombuffer(self._files[path], dtype=torch.uint8, count=stored.nbytes(), offset=start)
        if start % described.itemsize:
            numbers = numbers.clone()
        return numbers.view(described.dtype).as_strided(described.shape, described.stride(), described.storage_offset())


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor of the rows of `parts`; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def split_parts(layout: Layout, parts: Sequence[torch.Tensor], sizes: TensorSizes) -> list[list[torch.Tensor]]:
    """`layout.split` for a parameter in `parts` with consecutive rows. Its results are in parts too; rows are not copied."""
    if layout.moves_columns or not parts[0].ndim:
        return [[part] for part in layout.split(joined(parts), sizes)]
    found, starts = [], [0, *itertools.accumulate(map(len, parts))]
    for runs in _runs_of_rows(layout, starts[-1], sizes):
        cuts = [
            part[max(first - start, 0) : max(last - start, 0)]
            for first, last in runs
            for part, start in zip(parts, starts, strict=False)
        ]
        # A tensor without rows keeps its other sizes.
        found.append([cut for cut in cuts if len(cut)] or [parts[0][:0]])
    return found


@functools.cache
def _runs_of_rows(layout: Layout, rows: int, sizes: TensorSizes) -> list[list[tuple[int, int]]]:
    """For each Hugging Face tensor, the runs of a parameter's rows of which the layout makes it, as (first, last + 1)."""
    found = []
    # Numbers in the place of rows tell where each row comes from.
    for numbers in layout.split(torch.arange(rows), sizes):
        ends = [0, *((numbers[1:] - numbers[:-1]) != 1).nonzero().add(1).flatten().tolist(), len(numbers)]
        found.append(
            [(int(numbers[at]), int(numbers[at]) + end - at) for at, end in itertools.pairwise(ends) if end > at]
        )
    return found


def dtype_of(entry: Any) -> torch.dtype:
    """The dtype of a tensor in the metadata."""
    # It is the first of the properties, which are saved as a tuple; a class of its name stands for it.
    return getattr(torch, entry.properties.saved[0].__name__)


def _by_prefix(chunks: Sequence[Any], depth: int) -> dict[tuple[int, ...], list[Any]]:
    """By each index of the first `depth` axes, the chunks of a tensor that have a part of that entry."""
    found: dict[tuple[int, ...], list[Any]] = {}
    for chunk in chunks:
        ranges = (
            range(first, first + size) for first, size in zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True)
        )
        for prefix in itertools.product(*ranges):
            found.setdefault(prefix, []).append(chunk)
    return found


def _inside(prefix: tuple[int, ...], chunk: Any) -> tuple[int, ...]:
    return tuple(at - first for at, first in zip(prefix, chunk.offsets, strict=False))


class _Window(io.RawIOBase):
    """`length` bytes of a mapped file from `start` on, as a file of their own."""

    def __init__(self, mapped: mmap.mmap, start: int, length: int) -> None:
        self._bytes = memoryview(mapped)[start : start + length]
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self._bytes))[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        read = self._bytes[self._at : self._at + len(buffer)]
        buffer[: len(read)] = read
        self._at += len(read)
        return len(read)


def read_common(directory: Path) -> dict[str, Any]:
    """The common part of a torch_dist checkpoint, which is everything but its tensors.

    Raises:
        UserError: its `common.pt` is missing or broken.
    """
    path = directory / COMMON
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} cannot be read: {str(error) or 'it is cut off'}") from error


def require_format(directory: Path) -> None:
    """Raise UserError if a directory does not say that its format is torch_dist, without which no run would load it."""
    path = directory / FORMAT
    try:
        settings = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict) or settings.get("sharded_backend") != "torch_dist":
        raise UserError(f"{path} says of another format than torch_dist: {str(settings)[:100]}")


def save_in_parts(file: BinaryIO, shape: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
    """`torch.save` for a contiguous tensor whose entries are those of `parts`, without putting it together in memory.

    Args:
        parts: flat tensors of one dtype, on the CPU.
    """
    with torch.serialization.skip_data():
        # The memory of this tensor is never touched, so it takes none.
        torch.save(torch.empty(tuple(shape), dtype=parts[0].dtype), _Filling(file, parts))


class _Filling:
    """The file to which `torch.save` writes; where it skips the numbers of the tensor, those of `parts` are written."""

    def __init__(self, file: BinaryIO, parts: Sequence[torch.Tensor]) -> None:
        self.write, self.flush = file.write, file.flush
        self._parts = parts

    def seek(self, offset: int, whence: int) -> None:
        # With stride 1, because a single entry counts as contiguous with any stride, but its bytes do not.
        flat = (part.as_strided((part.numel(),), (1,)).view(torch.uint8) for part in self._parts)
        written = sum(self.write(memoryview(part.numpy())) for part in flat)
        if (written, whence) != (offset, os.SEEK_CUR):
            raise RuntimeError(f"torch.save leaves {offset} bytes for a tensor of {written}")
