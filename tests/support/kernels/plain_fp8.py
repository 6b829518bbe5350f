"""Tensors in FP8 of Transformer Engine in plain PyTorch: how they are made of other tensors, and which numbers they stand for.

Two kinds of them are here, by what makes them: one scale for the whole tensor (recipes `delayed` and `tensorwise`), and one for
every 128 numbers of a row or 128 × 128 numbers (`blockwise`). A tensor may hold its numbers row by row, as its transposed
matrix, or both, each with scales of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

# Numbers of the extension's DType → the torch dtype.
_FLOAT8 = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}
BLOCK = 128


def largest(dtype: int) -> float:
    """The largest number of an FP8 dtype of the extension."""
    return float(torch.finfo(_FLOAT8[dtype]).max)


def quantize(tensor: torch.Tensor, quantizer: Any, out: Any = None, noop: torch.Tensor | None = None) -> Any:
    """`tensor` in FP8 as `quantizer` says, in `out` where that is given. With a `noop` that is not zero `out` stays."""
    if noop is not None and float(noop):
        return out
    matrix = tensor.detach().float().reshape(-1, tensor.shape[-1])
    if hasattr(quantizer, "block_scaling_dim"):
        out = quantizer.make_empty(tensor.shape, dtype=tensor.dtype) if out is None else out
        for data, scales, rows in (
            (out._rowwise_data, out._rowwise_scale_inv, matrix),
            (out._columnwise_data, out._columnwise_scale_inv, matrix.T),
        ):
            if data is not None:
                _write_blocks(rows, quantizer, data, scales)
        return out
    most = matrix.abs().max() if matrix.numel() else matrix.new_zeros(())
    if hasattr(quantizer, "use_existing_amax"):
        # The recipe `tensorwise` scales by the numbers at hand.
        scale = torch.where(most > 0, largest(quantizer.dtype) / most, 1.0)
    else:
        scale = quantizer.scale.view(()).clone()
        quantizer.amax.copy_(torch.maximum(quantizer.amax, most))
    out = quantizer.make_empty(tensor.shape, dtype=tensor.dtype) if out is None else out
    numbers = _bytes(matrix * scale, quantizer.dtype)
    if out._data is not None:
        out._data.copy_(numbers.view(out._data.shape))
    if out._transpose is not None:
        out._transpose.copy_(numbers.T.reshape(out._transpose.shape))
        out._transpose_invalid = False
    out._scale_inv.copy_(1 / scale.view(1))
    return out


def is_fp8(tensor: Any) -> bool:
    return hasattr(tensor, "_rowwise_data") or hasattr(tensor, "_scale_inv")


def values_of(tensor: Any) -> torch.Tensor:
    """The numbers of a tensor in FP8, in float32; of another one itself."""
    if hasattr(tensor, "_rowwise_data"):
        data, scales = tensor._rowwise_data, tensor._rowwise_scale_inv
        is_transposed = data is None
        if is_transposed:
            data, scales = tensor._columnwise_data, tensor._columnwise_scale_inv
        matrix = data.view(data.shape[0], -1) if is_transposed else data.view(-1, data.shape[-1])
        numbers = matrix.view(_FLOAT8[tensor._fp8_dtype]).float() * _spread(scales, matrix.shape, tensor._is_2D_scaled)
    elif hasattr(tensor, "_scale_inv"):
        data, is_transposed = tensor._data, tensor._data is None
        if is_transposed:
            data = tensor._transpose
        numbers = data.view(_FLOAT8[tensor._fp8_dtype]).float() * tensor._scale_inv
    else:
        return tensor
    if not is_transposed:
        return numbers.view(data.shape)
    return numbers.reshape(data.shape[0], -1).T.reshape(*data.shape[1:], data.shape[0])


def update_scales(
    most: torch.Tensor,
    histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    algorithm: str,
    dtype: int,
    margin: float,
) -> None:
    """The recipe `delayed`: put the largest numbers of a step into each history [steps, tensors], and scale by these.

    Args:
        most: the largest numbers of all tensors, those of the first history first.
        algorithm: `max` of the history, or its `most_recent` number.
    """
    for newest, history, scale in zip(most.split([len(one) for one in scales]), histories, scales, strict=True):
        history.copy_(history.roll(-1, 0))
        history[-1] = newest
        found = history.amax(0) if algorithm == "max" else newest
        # Where the next step counts.
        history[0] = 0
        usable = (found > 0) & found.isfinite()
        scale.copy_(torch.where(usable, largest(dtype) / found / 2**margin, scale))


def _write_blocks(rows: torch.Tensor, quantizer: Any, data: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the numbers of `rows` into `data`, and what they are multiplied with into `scales`, which has padding."""
    is_square, dtype = quantizer.block_scaling_dim == 2, quantizer.dtype
    height = BLOCK if is_square else 1
    padded = F.pad(rows, (0, -rows.shape[1] % BLOCK, 0, -rows.shape[0] % height))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, height))
    most = blocks.abs().amax((1, 3)).clamp_min(quantizer.amax_epsilon)
    scale = torch.where(most > 0, largest(dtype) / most, 1.0)
    if quantizer.force_pow_2_scales:
        scale = scale.log2().floor().exp2()
    own = 1 / scale if is_square else 1 / scale.T
    scales.zero_()[: own.shape[0], : own.shape[1]] = own
    numbers = rows / _spread(scales, rows.shape, is_square)
    data.copy_(_bytes(numbers, dtype).reshape(data.shape))


def _spread(scales: torch.Tensor, shape: torch.Size, is_square: bool) -> torch.Tensor:
    """What each number of a matrix of this shape is multiplied with. Scales of blocks in a row are stored column by column."""
    by_row = scales.repeat_interleave(BLOCK, 0) if is_square else scales.T
    return by_row.repeat_interleave(BLOCK, 1)[: shape[0], : shape[1]]


def _bytes(numbers: torch.Tensor, dtype: int) -> torch.Tensor:
    most = largest(dtype)
    return numbers.clamp(-most, most).to(_FLOAT8[dtype]).view(torch.uint8)
