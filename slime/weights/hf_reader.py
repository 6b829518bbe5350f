"""Reading a Hugging Face model directory tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.utils.errors import UserError

if TYPE_CHECKING:
    import torch

_INDEX = "model.safetensors.index.json"


class SafetensorsDirectory:
    """The tensors of all safetensors files of a directory, by name. Files are mapped, a tensor is read when asked for.

    Raises:
        UserError: the directory has no safetensors file, or the index names a file or tensor that is not there.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._files: dict[str, Any] = {}
        self._file_of = self._read_index()

    def names(self) -> set[str]:
        return set(self._file_of)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name`, on the CPU, in the dtype it is stored in."""
        from safetensors import SafetensorError

        file_name = self._file_of[name]
        try:
            return self._open(file_name).get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{self._directory / file_name}: tensor {name} cannot be read: {error}") from error

    def _read_index(self) -> dict[str, str]:
        index = self._directory / _INDEX
        if index.is_file():
            return json.loads(index.read_text())["weight_map"]
        files = sorted(self._directory.glob("*.safetensors"))
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
