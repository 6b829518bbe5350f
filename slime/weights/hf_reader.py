"""Reads a Hugging Face model directory tensor by tensor, and of each tensor only the rows and columns that are asked for."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.models.config_entries import text_config_of
from slime.models.families import FAMILIES
from slime.models.family import Family
from slime.utils.errors import UserError
from slime.utils.hf_files import INDEX_FILE

if TYPE_CHECKING:
    import numpy as np
    import torch


# One of several files, as transformers names them.
_NUMBERED = re.compile(r"(?P<stem>.*-)(?P<number>\d+)(?P<end>-of-(?P<count>\d+)\.safetensors)")
# With these bytes begins what Git has in the place of a file that Git LFS keeps elsewhere.
_GIT_LFS = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the bytes of a tensor lie in a safetensors file. `dtype` is the file's name for it, such as BF16."""

    path: Path
    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]


def places_of_tensors(path: Path) -> tuple[dict[str, Place], dict[str, str]]:
    """The place of every tensor of a safetensors file, by name, and the file's metadata.

    Raises:
        UserError: it is not a safetensors file, or shorter than its header says.
        FileNotFoundError: there is none.
    """
    start_of_file = b""
    try:
        with open(path, "rb") as file:
            start_of_file = file.read(len(_GIT_LFS))
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        places = {}
        for name, entry in header.items():
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            places[name] = Place(path, start, stop, entry["dtype"], tuple(entry["shape"]))
    except (ValueError, OverflowError, MemoryError, LookupError, TypeError, AttributeError, IsADirectoryError) as error:
        what = "it is no safetensors file"
        if start_of_file == _GIT_LFS:
            what = "it is a pointer of Git LFS in the place of the file: get the file (git lfs pull)"
        raise UserError(f"{path} cannot be read: {what}") from error
    if path.stat().st_size < max((place.stop for place in places.values()), default=0):
        raise UserError(f"{path} cannot be read: it is shorter than its header says")
    return places, metadata


def read_bytes(place: Place) -> np.ndarray:
    """A copy of the bytes of a tensor (uint8).

    Raises:
        UserError: the file ends too early.
    """
    import numpy as np

    data = np.fromfile(place.path, dtype=np.uint8, count=place.stop - place.start, offset=place.start)
    if len(data) != place.stop - place.start:
        raise UserError(f"{place.path} cannot be read: it is shorter than its header says")
    return data


def safetensors_dtype(dtype: torch.dtype) -> str:
    """The name of a dtype in safetensors files, such as BF16."""
    from safetensors.torch import _TYPES

    return next(name for name, known in _TYPES.items() if known is dtype)


def places_of_checkpoint(directory: Path) -> dict[str, Place]:
    """`places_of_tensors` for a checkpoint directory: for the files in its index, or for all if there is no index.

    Raises:
        UserError: the index is broken, or names a file or a tensor that is not there; without one, files are missing whose
            numbers are known from the others.
    """
    index = directory / INDEX_FILE
    weight_map = _read_index(index) if index.is_file() else None
    names = (file.name for file in _files_without_index(directory)) if weight_map is None else weight_map.values()
    try:
        files = {name: places_of_tensors(directory / name)[0] for name in sorted(set(names))}
    except FileNotFoundError as error:
        named = "" if weight_map is None else f", and the index of the weights in {directory} names it"
        if Path(error.filename).is_symlink():
            named += f": it is a link to {Path(error.filename).readlink()}"
        raise UserError(f"{error.filename} is not there{named}; get what is missing") from error
    if weight_map is None:
        return {name: place for places in files.values() for name, place in places.items()}
    absent = next((f"{file}: it has no {name}" for name, file in weight_map.items() if name not in files[file]), None)
    if absent is not None:
        raise UserError(f"{index} does not fit {absent}")
    return {name: files[file][name] for name, file in weight_map.items()}


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        if not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError("it names no files")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read: it is no index of safetensors files") from error
    return weight_map


def _files_without_index(directory: Path) -> list[Path]:
    """The weight files of a directory that has no index.

    Raises:
        UserError: their names tell that there are more. A download that broke off may not have come to the index.
    """
    files = sorted(directory.glob("*.safetensors"))
    numbers: dict[tuple[str, str], set[int]] = collections.defaultdict(set)
    numbered = [found for file in files if (found := _NUMBERED.fullmatch(file.name))]
    for found in numbered:
        numbers[found["stem"], found["end"]].add(int(found["number"]))
    for found in numbered:
        there = numbers[found["stem"], found["end"]]
        # Some count from 0, so it is their number that tells.
        if len(there) < int(found["count"]):
            missing = min({*range(1, int(found["count"]) + 1)} - there)
            name = f"{found['stem']}{missing:0{len(found['number'])}d}{found['end']}"
            raise UserError(f"{directory / name} is not there, and {found[0]} beside it says so; get what is missing")
    return files


class StoredTensor:
    """A tensor of a safetensors file, of which only the indexed part is read; `shape` is known before.

    Indexed with slices, `[:]` for all of it, it gives a tensor on the CPU, in the dtype of the file.
    """

    def __init__(self, file: Any, path: Path, name: str) -> None:
        self._stored, self._path, self._name = file.get_slice(name), path, name
        self.shape: tuple[int, ...] = tuple(self._stored.get_shape())

    @property
    def dtype(self) -> torch.dtype:
        from safetensors.torch import _TYPES

        return _TYPES[self._stored.get_dtype()]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        from safetensors import SafetensorError

        try:
            return self._stored[index]
        except SafetensorError as error:
            raise UserError(f"{self._path}: tensor {self._name} cannot be read: {error}") from error


@dataclasses.dataclass(frozen=True)
class PlaceInStack:
    """Where a matrix of one expert lies in the tensor `stack` of all experts, which is [experts, rows, columns] or, exchanged,
    [experts, columns, rows]. `rows`: those of the matrix among the expert's."""

    stack: str
    expert: int
    rows: range
    columns: int
    is_exchanged: bool

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.columns


class _OfExpert(StoredTensor):
    """A matrix of one expert, at `place` of the tensor of all experts `fused`."""

    def __init__(self, fused: StoredTensor, place: PlaceInStack) -> None:
        self._fused, self._place, self.shape = fused, place, place.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._fused.dtype

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        rows, *columns = index if isinstance(index, tuple) else (slice(None) if index is ... else index,)
        own, of_expert = self._place.rows[rows], slice(self._place.expert, self._place.expert + 1)
        place = (slice(own.start, own.stop), *(columns or [slice(None)]))
        if self._place.is_exchanged:
            return self._fused[(of_expert, *reversed(place))][0].T.contiguous()
        return self._fused[(of_expert, *place)][0]


# The ending of a tensor of all experts → the matrices of each expert in it, whose rows follow each other.
FUSED_EXPERTS = {
    ".experts.gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
    ".experts.down_proj": ("down_proj.weight",),
}


def is_exchanged(name: str, shape: Sequence[int], hidden_size: int | None) -> bool:
    """Whether a tensor of all experts of a layer has their columns before their rows.

    Raises:
        UserError: both of an expert's sides, or neither, have the model's hidden size.
    """
    # Matrices with two parts lead up from the hidden size, the one with a single part down to it.
    rows, columns = (size == hidden_size for size in shape[1:])
    if rows == columns:
        raise UserError(
            f"{name} is {list(shape)}, and hidden_size {hidden_size} does not tell its rows from its columns; give a "
            "checkpoint with tensors for each expert"
        )
    return rows == (len(FUSED_EXPERTS[fused_ending(name)]) == 2)


def fused_ending(name: str) -> str | None:
    """The key of `FUSED_EXPERTS` with which the name of a tensor ends; None: it is not a tensor of all experts of a layer."""
    return next((ending for ending in FUSED_EXPERTS if name.endswith(ending)), None)


def _config_and_family(directory: Path) -> tuple[dict[str, Any], Family | None]:
    try:
        config = text_config_of(json.loads((directory / "config.json").read_text()))
    except (OSError, ValueError, AttributeError):
        return {}, None
    return config, FAMILIES.get(str(config.get("model_type")))


def config_of_stacks(directory: Path) -> dict[str, Any] | None:
    """The config of a checkpoint's language model if its family stacks experts; None if not, or if the family is unknown."""
    config, family = _config_and_family(directory)
    return config if family is not None and family.stacks_experts else None


def _places_in_stacks(directory: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, PlaceInStack]:
    """Where the matrices of each expert lie, by the names that they have in checkpoints with a tensor for each.

    Args:
        shapes: those of the checkpoint's tensors of all experts of a layer.
    """
    config, found = config_of_stacks(directory), {}
    for stack, shape in shapes.items():
        ending = fused_ending(stack)
        exchanged = config is not None and is_exchanged(stack, shape, config.get("hidden_size"))
        parts, (rows, columns) = FUSED_EXPERTS[ending], reversed(shape[1:]) if exchanged else shape[1:]
        rows //= len(parts)
        for expert in range(shape[0]):
            for number, part in enumerate(parts):
                own = range(number * rows, (number + 1) * rows)
                name = f"{stack.removesuffix(ending)}.experts.{expert}.{part}"
                found[name] = PlaceInStack(stack, expert, own, columns, exchanged)
    return found


def places_of_matrices(directory: Path) -> dict[str, Place]:
    """`places_of_checkpoint` with the matrices of each expert, named as in `SafetensorsDirectory`, in the place of a tensor of
    all of them. Where columns lie before rows, a matrix does not lie in one piece: its place is as large, and in its expert.

    In models of an unknown family rows may have another order, and there such tensors stay.

    Raises:
        UserError: as `places_of_checkpoint`; or rows cannot be told from columns.
    """
    places = places_of_checkpoint(directory)
    if _config_and_family(directory)[1] is None:
        return places
    stacks = {name: place for name, place in places.items() if fused_ending(name) is not None}
    found = {name: place for name, place in places.items() if name not in stacks}
    for name, of_expert in _places_in_stacks(directory, {name: place.shape for name, place in stacks.items()}).items():
        stack = stacks[of_expert.stack]
        nbytes = (stack.stop - stack.start) // stack.shape[0]
        row = nbytes * of_expert.columns // math.prod(stack.shape[1:])
        start = stack.start + of_expert.expert * nbytes + of_expert.rows.start * row
        found[name] = dataclasses.replace(
            stack, start=start, stop=start + len(of_expert.rows) * row, shape=of_expert.shape
        )
    return found


class SafetensorsDirectory:
    """The tensors of all safetensors files of a directory, by name. Files are mapped.

    In the place of one tensor of all experts of a layer (`mlp.experts.gate_up_proj`) there are each expert's matrices, rows
    before columns, under the names that they have in other checkpoints (`mlp.experts.7.gate_proj.weight`).

    Raises:
        UserError: the directory has no safetensors file, or lacks one that the index or the numbers of others tell of; the rows
            of stacked experts cannot be told from their columns.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._files: dict[str, Any] = {}
        self._file_of = self._read_index()
        shapes = {name: self._stored(name).shape for name in self._file_of if fused_ending(name) is not None}
        self._in_stacks = _places_in_stacks(self._directory, shapes)
        self._names = (self._file_of.keys() - shapes.keys()) | self._in_stacks.keys()

    def names(self) -> set[str]:
        return set(self._names)

    def tensor(self, name: str) -> StoredTensor:
        """The tensor `name`, of which nothing is read yet.

        Raises:
            UserError: the file cannot be read, or lacks the tensor.
        """
        place = self._in_stacks.get(name)
        return self._stored(name) if place is None else _OfExpert(self._stored(place.stack), place)

    def _stored(self, name: str) -> StoredTensor:
        from safetensors import SafetensorError

        file_name = self._file_of[name]
        path = self._directory / file_name
        try:
            return StoredTensor(self._open(file_name), path, name)
        except SafetensorError as error:
            raise UserError(f"{path}: tensor {name} cannot be read: {error}") from error

    def part_names(self, name: str) -> Sequence[str]:
        """The names of `parts`, for which no file is opened."""
        return (name,)

    def parts(self, name: str) -> dict[str, StoredTensor]:
        """The stored tensors of `name`, unchanged, by their own names; a quantised weight has several."""
        return {name: self.tensor(name)}

    def _read_index(self) -> dict[str, str]:
        index = self._directory / INDEX_FILE
        if index.is_file():
            return _read_index(index)
        files = _files_without_index(self._directory)
        if not files:
            raise UserError(f"{self._directory} holds no *.safetensors file")
        return {name: file.name for file in files for name in self._open(file.name).keys()}  # noqa: SIM118

    def _open(self, file_name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file_name not in self._files:
            path = self._directory / file_name
            try:
                self._files[file_name] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} cannot be read: {error}") from error
        return self._files[file_name]
