"""Files of plain values and tensors that are read without running any code: dumps, and the values of a data source's state.

A dump whose name ends in `.pt` is a file of torch, and loads with `weights_only=True`. Any other dump is JSON, with its tensors
in `{path}.safetensors` beside it. In JSON, an object with a key that starts with `__` stands for a tuple, for bytes, for a dict
with keys that are not strings, or for a value that is not plain.
"""

from __future__ import annotations

import base64
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slime.utils.run_values import Kept

TORCH_SUFFIX = ".pt"
_SCALARS = frozenset({bool, int, float, str, type(None)})
_TENSOR = "__tensor__"


def encode_plain(value: Any, where: str, encode_other: Callable[[Any, str], Any]) -> Any:
    """`value` as JSON can hold it. For a value that is not plain `encode_other(value, where)` returns an object with a key
    `__…`, or raises."""
    if isinstance(value, np.generic):
        value = value.item()
    # Exact types: an enum or another subclass would come back as something else.
    if type(value) in _SCALARS:
        return value
    if type(value) is list:
        if set(map(type, value)).issubset(_SCALARS):
            return value
        return [encode_plain(entry, f"{where}[{index}]", encode_other) for index, entry in enumerate(value)]
    if type(value) is bytes:
        return {"__bytes__": base64.b64encode(value).decode()}
    if type(value) is tuple:
        return {"__tuple__": encode_plain(list(value), where, encode_other)}
    if type(value) is dict:
        if all(type(key) is str and not key.startswith("__") for key in value):
            return {key: encode_plain(entry, f"{where}[{key!r}]", encode_other) for key, entry in value.items()}
        return {"__items__": encode_plain([[key, entry] for key, entry in value.items()], where, encode_other)}
    if isinstance(value, Kept):
        # A list or dict of a flag that a user's function has put beside a sample; the file holds a plain copy.
        return encode_plain(value.copy(), where, encode_other)
    return encode_other(value, where)


def decode_plain(value: Any, decode_other: Callable[[dict[str, Any]], Any]) -> Any:
    """The inverse of `encode_plain`; `decode_other` gets the objects that `encode_other` made."""
    if isinstance(value, list):
        if set(map(type, value)).issubset(_SCALARS):
            return value
        return [decode_plain(entry, decode_other) for entry in value]
    if not isinstance(value, dict):
        return value
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    if "__tuple__" in value:
        return tuple(decode_plain(value["__tuple__"], decode_other))
    if "__items__" in value:
        return dict(decode_plain(value["__items__"], decode_other))
    if any(key.startswith("__") for key in value):
        return decode_other(value)
    return {key: decode_plain(entry, decode_other) for key, entry in value.items()}


def is_plain_array(value: Any) -> bool:
    """Whether `value` is an array of numbers or of truth values, the only arrays that files of tensors can hold."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"


def type_name(value: Any) -> str:
    """The name that messages give the type of a value that is not plain."""
    return f"{type(value).__name__}{f' of {value.dtype}' if isinstance(value, np.ndarray) else ''}"


def write_dump(path: Path, dump: dict[str, Any]) -> None:
    """Write plain values, arrays and tensors to `path`, which is replaced if it exists; its directory is made.

    Raises:
        TypeError: the dump holds another value, and the file is not one of torch.
        OSError: the file cannot be written.
    """
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == TORCH_SUFFIX:
        # torch gets an open file: of one that it opens itself it does not tell that the disk is full.
        os.replace(_written(path, lambda file: torch.save(dump, file)), path)
        return
    from safetensors.torch import save

    tensors: dict[str, Any] = {}

    def put(value: Any, where: str) -> dict[str, str]:
        tensor = torch.from_numpy(value) if is_plain_array(value) else value
        if not torch.is_tensor(tensor):
            raise TypeError(
                f"{path}: {where} is a {type_name(value)}; only plain values, arrays and tensors are written"
            )
        name = f"tensor_{len(tensors)}"
        # A clone: a view would share the storage of its whole column.
        tensors[name] = tensor.detach().cpu().contiguous().clone()
        return {_TENSOR: name}

    text = json.dumps(encode_plain(dump, "dump", put))
    written = {
        _beside(path): _written(_beside(path), lambda file: file.write(save(tensors))),
        path: _written(path, lambda file: file.write(text.encode())),
    }
    # The file that is read first is removed first and comes back last, so that an end in between never leaves the values of
    # one dump beside the tensors of another.
    path.unlink(missing_ok=True)
    for place, temporary in written.items():
        os.replace(temporary, place)


def read_dump(path: Path) -> Any:
    """The values that `write_dump` wrote. A file of torch is also recognised by its content.

    Raises:
        Exception: whatever torch, safetensors or JSON raise for a broken file.
    """
    import torch

    if path.suffix == TORCH_SUFFIX or zipfile.is_zipfile(path):
        return torch.load(path, weights_only=True)
    from safetensors.torch import load_file

    value = json.loads(path.read_text())
    tensors = load_file(_beside(path))
    return decode_plain(value, lambda entry: tensors[entry[_TENSOR]])


def may_be_dump(path: Path) -> bool:
    """Whether `read_dump` may be able to read the file `path`. Its content, which may be long, is not read through."""
    if zipfile.is_zipfile(path):
        return True
    if path.suffix != TORCH_SUFFIX:
        return _beside(path).is_file()
    try:
        with open(path, "rb") as file:
            # The first byte of a pickle, the format that torch used to write.
            return file.read(1) == b"\x80"
    except OSError:
        return False


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.safetensors")


def _written(path: Path, write: Callable[[Any], Any]) -> Path:
    """The hidden file that is to become `path`."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with open(temporary, "wb") as file:
            write(file)
    except (OSError, RuntimeError) as error:
        # A part of a file would keep a full disk full.
        temporary.unlink(missing_ok=True)
        # Torch ends its file all the same, and the RuntimeError of that hides the error of the write, which names no file.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error
    return temporary
