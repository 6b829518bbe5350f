"""Reads quantised checkpoints as plain numbers: FP8 by blocks or by tensors, INT4 in groups.

A reader gets the numbers with which engines compute, under the names of the weights. Only the indexed part is read from the
file, with the scales of its blocks or groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.utils.errors import UserError
from slime.weights.hf_reader import SafetensorsDirectory, StoredTensor
from slime.weights.quantisers import (
    INTEGERS_OF_WHOLE_WORDS,
    PACKED,
    STRIP_NUMBERS,
    PackedForm,
    packed_form,
    quantisation_settings,
    quantiser_of,
    unpack_integers,
)

if TYPE_CHECKING:
    import torch


def open_checkpoint(directory: str | Path, dtype: torch.dtype | None = None) -> SafetensorsDirectory:
    """The tensors of a Hugging Face checkpoint by name; quantised weights become plain numbers.

    Args:
        dtype: that to which numbers of FP8 weights are rounded; None: they are float32.

    Raises:
        UserError: it has no weights, or they are quantised in a way that is not known here.
    """
    directory = Path(directory)
    settings = quantisation_settings(directory)
    if settings is None:
        return SafetensorsDirectory(directory)
    # Refuse to read a format that this package cannot write.
    quantiser_of(directory)
    if settings["quant_method"] == "fp8":
        block = tuple(settings.get("weight_block_size") or ())
        return _Dequantised(
            directory, "weight_scale_inv" if block else "weight_scale", lambda parts: _Fp8(parts, block, dtype)
        )
    form = packed_form(directory, settings)
    return _Dequantised(directory, PACKED, lambda parts: _Packed(parts, form))


class _Dequantised(SafetensorsDirectory):
    """`suffix` as in `Quantiser`; `read` makes a weight from the stored parts of its module."""

    _PARTS = ("weight", PACKED, "weight_scale", "weight_scale_inv", "weight_shape", "weight_zero_point")

    def __init__(
        self, directory: Path, suffix: str, read: Callable[[Mapping[str, StoredTensor]], StoredTensor]
    ) -> None:
        super().__init__(directory)
        self._read, stored = read, super().names()
        modules = {name.removesuffix(suffix) for name in stored if name.endswith(suffix)}
        self._parts = {
            module: {part: module + part for part in self._PARTS if module + part in stored} for module in modules
        }
        hidden = {name for parts in self._parts.values() for name in parts.values()}
        self._names = (stored - hidden) | {f"{module}weight" for module in modules}

    def tensor(self, name: str) -> StoredTensor:
        parts = self._parts.get(name.removesuffix("weight"))
        if parts is None or not name.endswith("weight"):
            return super().tensor(name)
        found = {part: super(_Dequantised, self).tensor(stored) for part, stored in parts.items()}
        try:
            return self._read(found)
        except KeyError as error:
            raise UserError(f"{self._directory}: {name} is quantised, and its {error.args[0]} is missing") from error
        except ValueError as error:
            raise UserError(f"{self._directory}: {name} is quantised, and {error}") from error

    def part_names(self, name: str) -> Sequence[str]:
        module = self._parts.get(name.removesuffix("weight")) if name.endswith("weight") else None
        return (name,) if module is None else tuple(module.values())

    def parts(self, name: str) -> dict[str, StoredTensor]:
        return {part: super(_Dequantised, self).tensor(part) for part in self.part_names(name)}


class _Fp8:
    """A matrix in FP8, read as float32 or another type: each number is multiplied by the scale of its block, or of the tensor,
    in float32."""

    def __init__(
        self, parts: Mapping[str, StoredTensor], block: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> None:
        self._numbers, self._block, self._dtype = parts["weight"], block, dtype
        self._scale = parts["weight_scale_inv" if block else "weight_scale"]
        self.shape = self._numbers.shape
        found, blocks = (
            tuple(self._scale.shape),
            tuple(-(-own // size) for own, size in zip(self.shape, block, strict=False)),
        )
        # With fewer of them rows would be left as the memory was, and those of a square matrix could be taken for its columns'.
        if block and found != blocks:
            raise ValueError(f"has scales {list(found)}, where blocks of {list(block)} need {list(blocks)}")
        if not block and math.prod(found) != 1:
            raise ValueError(f"has scales {list(found)}, where a tensor has one")

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return self._dtype or torch.float32

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        import torch

        rows, columns = _ranges(index, self.shape)
        codes = self._numbers[rows, columns].view(torch.uint8)
        numbers = torch.empty(codes.shape, dtype=self.dtype)
        if self._block:
            height, scales = self._block[0], _scales_of_rows(self._scale, rows, columns, self._block)
        else:
            height, scales = max(STRIP_NUMBERS // max(codes.shape[1], 1), 1), itertools.repeat(self._scale[...].float())
        # Converted in strips of rows that share their scales and fit into a cache.
        ends = [*range((rows.start // height + 1) * height, rows.stop, height), rows.stop]
        for first, last, scale in zip([rows.start, *ends], ends, scales, strict=False):
            own = slice(first - rows.start, last - rows.start)
            _put_fp8_numbers(codes[own], scale, numbers[own])
        return numbers


def _put_fp8_numbers(codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` with the values of codes (uint8) of `float8_e4m3fn`, times `scale` in float32. It is faster than torch, which
    converts number by number.

    The bits of a code are those of a float16 that is 256 times smaller, even for subnormal numbers. Only codes for NaN differ.
    """
    import torch

    signed = codes.view(torch.int8)
    products = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32)
    # NaN has the largest code of either sign.
    if not codes.numel() or signed.amax() == 0x7F or codes.amax() == 0xFF:
        products.copy_(codes.view(torch.float8_e4m3fn)).mul_(scale)
    else:
        # The sign bit appears twice after the shift; the second time it is at the place of an exponent bit, and is cleared. It
        # is shifted by a product, which takes torch a third of the time.
        halves = signed.to(torch.int16).mul_(1 << 7).bitwise_and_(-0x4001)
        # There are fewer scales than numbers, so the factor goes to them.
        products.copy_(halves.view(torch.float16)).mul_(256.0 * scale)
    if products is not out:
        out.copy_(products)


class _Packed:
    """A matrix of packed integers, read in the dtype of its scales: (integer − zero point) · scale of its group."""

    def __init__(self, parts: Mapping[str, StoredTensor], form: PackedForm) -> None:
        self._integers, self._scale, self._bits = parts[PACKED], parts["weight_scale"], form.bits
        self._zero = None if form.symmetric else parts["weight_zero_point"]
        if form.group_size:
            columns = self._scale.shape[1] * form.group_size
        else:
            columns = int(parts["weight_shape"][:][1])
        self.shape, self._group = (self._integers.shape[0], columns), form.group_size or columns

    @property
    def dtype(self) -> torch.dtype:
        return self._scale.dtype

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        import torch

        rows, columns = _ranges(index, self.shape)
        numbers = self._unpacked(self._integers, rows, columns, self.shape[1], 1).to(self.dtype)
        groups = slice(columns.start // self._group, -(-columns.stop // self._group))
        # Padded to whole groups, so that each has one scale and one zero point.
        before, after = columns.start - groups.start * self._group, groups.stop * self._group - columns.stop
        if before or after:
            numbers = torch.nn.functional.pad(numbers, (before, after))
        numbers = numbers.view(numbers.shape[0], groups.stop - groups.start, self._group)
        if self._zero is not None:
            zero = self._unpacked(self._zero, groups, rows, self.shape[0], 0)
            numbers -= zero[..., None].to(self.dtype)
        numbers *= self._scale[rows, groups][..., None]
        return numbers.flatten(1)[:, before : before + columns.stop - columns.start]

    def _unpacked(self, stored: StoredTensor, across: slice, along: slice, length: int, dim: int) -> torch.Tensor:
        """Integers [rows, columns] of a matrix that is packed along `dim`, in which it has `length` integers."""
        whole = INTEGERS_OF_WHOLE_WORDS
        first, last = along.start // whole * whole, min(-(-along.stop // whole) * whole, length)
        words = slice(first * self._bits // 32, -(-last * self._bits // 32))
        own = slice(along.start - first, along.stop - first)
        if dim == 1:
            return unpack_integers(stored[across, words], self._bits, last - first)[:, own]
        return unpack_integers(stored[words, across].T, self._bits, last - first).T[own]


def _ranges(index: slice | tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, slice]:
    """The rows and columns that an index of a matrix selects."""
    given = index if isinstance(index, tuple) else (index,)
    given = (*given, *[slice(None)] * (2 - len(given)))
    rows, columns = (slice(*part.indices(length)[:2]) for part, length in zip(given, shape, strict=True))
    return rows, columns


def _scales_of_rows(scale: StoredTensor, rows: slice, columns: slice, block: tuple[int, ...]) -> torch.Tensor:
    """The scales (float32) of `columns`, for each block of rows that `rows` touch. Nothing else of `scale` is read."""
    read = tuple(
        slice(own.start // size, -(-own.stop // size)) for own, size in zip((rows, columns), block, strict=True)
    )
    first = columns.start % block[1]
    return scale[read].float().repeat_interleave(block[1], dim=1)[:, first : first + columns.stop - columns.start]
