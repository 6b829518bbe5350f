"""Kernels of Transformer Engine in plain PyTorch: what the module `transformer_engine_torch` of its C++ extension gives.

Sums and products are taken in float32 whatever the dtypes of inputs, as the kernels do, and results have the dtype that the
caller asks for. Names, order of arguments and results are those of the extension. What is not here raises its name when it is
called.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from tests.support.kernels import plain_fp8


class Absent(types.ModuleType):
    """A name of the extension, or a module, that has no stand-in. Names in it are absent too."""

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} has no stand-in in plain PyTorch")


def __getattr__(name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"transformer_engine_torch.{name}")


DType = enum.IntEnum(
    "DType",
    "kByte kInt16 kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat8E8M0 kFloat4E2M1",
    start=0,
)
# The tensors of up to three products, by which FP8 keeps scales.
FP8FwdTensors = enum.IntEnum(
    "FP8FwdTensors",
    [f"GEMM{product}_{part}" for product in (1, 2, 3) for part in ("INPUT", "WEIGHT", "OUTPUT")],
    start=0,
)
FP8BwdTensors = enum.IntEnum(
    "FP8BwdTensors", [f"GRAD_{part}{product}" for product in (1, 2, 3) for part in ("OUTPUT", "INPUT")], start=0
)
NVTE_Fused_Attn_Backend = enum.IntEnum(
    "NVTE_Fused_Attn_Backend", "NVTE_No_Backend NVTE_F16_max512_seqlen NVTE_F16_arbitrary_seqlen NVTE_FP8", start=-1
)
Float8BlockScaleTensorFormat = enum.IntEnum("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT", start=0)
_TORCH_DTYPES = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


def get_fused_attn_backend(*args: Any, **options: Any) -> NVTE_Fused_Attn_Backend:
    """cuDNN's attention for these inputs: there is none."""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend


def get_cublasLt_version() -> int:
    return 130000


def get_cudnn_version() -> int:
    return 91300


def get_num_cublas_streams() -> int:
    return 4


def rmsnorm_fwd(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None, quantizer: Any, dtype: DType,
    sm_margin: int, zero_centered: bool,
) -> tuple[torch.Tensor, None, torch.Tensor]:  # fmt: skip
    """y = x·r·w with r = 1 / sqrt(mean(x²) + ε), for x [rows, width]; w is one more than `weight` if that is zero-centered.

    Returns:
        y of `dtype`, or in FP8 as a quantizer says; None for a mean; and r [rows] in float32.
    """
    r = (x.float().square().mean(-1) + eps).rsqrt()
    y = x.float() * r[:, None] * (weight.float() + zero_centered)
    if quantizer is not None:
        return plain_fp8.quantize(_written(y, None, dtype), quantizer, out), None, r
    return _written(y, out, dtype), None, r


def rmsnorm_bwd(
    gradient: torch.Tensor, x: torch.Tensor, r: torch.Tensor, weight: torch.Tensor, sm_margin: int, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """∂L/∂x = r·(g·w − x̂·mean(g·w·x̂)) and ∂L/∂w = Σ g·x̂ over rows, with the gradient g of y and x̂ = x·r."""
    normed, g = x.float() * r[:, None], gradient.float()
    of_normed = g * (weight.float() + zero_centered)
    of_x = r[:, None] * (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True))
    return of_x.to(x.dtype), (g * normed).sum(0).to(weight.dtype)


def generic_gemm(
    a: torch.Tensor, transposes_a: bool, b: torch.Tensor, transposes_b: bool, out: torch.Tensor | None, quantizer: Any,
    dtype: DType | None, bias: torch.Tensor | None, bias_dtype: DType, gelu: bool, gelu_in: torch.Tensor | None, grad: bool,
    workspace: torch.Tensor, workspace_size: int, accumulate: bool, use_split_accumulator: bool, *,
    comm_overlap: Any = None, comm_type: Any = None, extra_output: torch.Tensor | None = None, bulk_overlap: bool = False,
    alpha: float = 1.0, beta: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """α·op(b)·op(a), in which op transposes or does not: cuBLAS sees row-major matrices as transposed column-major ones.

    `a` and `b` are matrices of their last dimension and all others; the result has the leading dimensions of `b` if that is
    not transposed. Both may be in FP8. Into `out` the product is added or written.

    Returns:
        The product; the gradient of a bias, which is the sum of the rows of `b`, if `grad` and a bias are given; and the last
        two as they came.
    """
    _refuse(quantizer=quantizer, gelu=gelu, comm_overlap=comm_overlap)
    if plain_fp8.is_fp8(a) != plain_fp8.is_fp8(b):
        raise TypeError("one of two matrices is in FP8: there is no kernel for that")
    a, b = plain_fp8.values_of(a), plain_fp8.values_of(b)
    left, right = b.reshape(-1, b.shape[-1]).float(), a.reshape(-1, a.shape[-1]).float()
    product = alpha * ((left.T if transposes_b else left) @ (right.T if transposes_a else right))
    of_bias = None
    if bias is not None and grad:
        of_bias = left.sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias.float()
    if not transposes_b:
        product = product.view(*b.shape[:-1], product.shape[-1])
    if accumulate:
        product = product.view(out.shape) + out.float()
    return _written(product, out, dtype, b.dtype), of_bias, gelu_in, extra_output


def te_general_grouped_gemm(
    a: Sequence[torch.Tensor], transposes_a: bool, b: Sequence[torch.Tensor], transposes_b: bool, out: Sequence[torch.Tensor],
    dtype: DType, rows: Sequence[int], bias: Sequence[torch.Tensor], bias_dtype: DType, single_output: bool, gelu_in: Any,
    grad: bool, workspaces: Any, workspace_size: int, accumulate: bool, use_split_accumulator: bool, sm_margin: int,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """`generic_gemm` of each pair of `a` and `b` into each of `out`, or into parts of these `rows` of the only one. An empty
    `bias` is none. Returns `bias`, which holds the gradients of biases if `grad`."""
    parts = torch.split(out[0].view(-1, out[0].shape[-1]), list(rows)) if single_output else out
    for one_a, one_b, part, one_bias in zip(a, b, parts, bias, strict=True):
        has_bias = one_bias.numel() > 0
        # A product with no rows in it is zero.
        _, of_bias, _, _ = generic_gemm(
            one_a, transposes_a, one_b, transposes_b, part, None, None, one_bias if has_bias else None, bias_dtype, False,
            None, grad, workspaces, workspace_size, accumulate, use_split_accumulator,
        )  # fmt: skip
        if of_bias is not None:
            one_bias.copy_(of_bias)
    return bias


quantize = plain_fp8.quantize
fused_amax_and_scale_update_after_reduction = plain_fp8.update_scales


def split_quantize(x: torch.Tensor, rows: Sequence[int], quantizers: Sequence[Any]) -> list[Any]:
    """Parts of so many rows of `x`, each in FP8."""
    return [quantize(part, one) for part, one in zip(x.split(list(rows)), quantizers, strict=True)]


def fused_multi_row_padding(x: torch.Tensor, out: torch.Tensor, rows: Sequence[int], padded: Sequence[int]) -> None:
    """Write groups of so many rows of `x` into `out`, each with rows of zeros behind it up to its number in `padded`."""
    for group, room in zip(x.split(list(rows)), out.split(list(padded)), strict=True):
        room.zero_()[: len(group)] = group


def fused_multi_row_unpadding(x: torch.Tensor, out: torch.Tensor, padded: Sequence[int], rows: Sequence[int]) -> None:
    """The way back of `fused_multi_row_padding`."""
    for group, room in zip(x.split(list(padded)), out.split(list(rows)), strict=True):
        room.copy_(group[: len(room)])


def fp8_transpose(data: torch.Tensor, dtype: DType, out: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes of a transposed matrix."""
    transposed = data.view(-1, data.shape[-1]).T.reshape(data.shape[-1], *data.shape[:-1])
    return transposed.contiguous() if out is None else out.copy_(transposed)


def fused_rope_forward(
    x: torch.Tensor, frequencies: torch.Tensor, start_positions: torch.Tensor | None, qkv_format: Any, interleaved: bool,
    boundaries: torch.Tensor | None, cp_size: int, cp_rank: int,
) -> torch.Tensor:  # fmt: skip
    """Rotate the first channels of heads, as many as `frequencies` [positions, 1, 1, channels] (angles) has.

    Args:
        x: [tokens, heads, channels] of packed samples if `boundaries` (those of the whole samples, int32) are given; each
            sample is cut into chunks, two for every context-parallel rank, of which a rank has one from either end. Otherwise
            [positions, batch, heads, channels].
        interleaved: pairs are channels next to each other, and not one of each half.
    """
    _refuse(start_positions=start_positions)
    return _rotated(x, frequencies, interleaved, boundaries, cp_size, cp_rank, 1)


def fused_rope_backward(
    gradient: torch.Tensor, frequencies: torch.Tensor, start_positions: torch.Tensor | None, qkv_format: Any,
    interleaved: bool, boundaries: torch.Tensor | None, cp_size: int, cp_rank: int,
) -> torch.Tensor:  # fmt: skip
    """The gradient of what was rotated: rotated back."""
    _refuse(start_positions=start_positions)
    return _rotated(gradient, frequencies, interleaved, boundaries, cp_size, cp_rank, -1)


def _rotated(
    x: torch.Tensor, frequencies: torch.Tensor, interleaved: bool, boundaries: torch.Tensor | None, cp_size: int,
    cp_rank: int, direction: int,
) -> torch.Tensor:  # fmt: skip
    width = frequencies.shape[-1]
    if boundaries is None:
        angles = frequencies[: x.shape[0]].view(x.shape[0], *[1] * (x.dim() - 2), width)
    else:
        lengths = [length // cp_size for length in boundaries.diff().tolist()]
        positions = torch.cat([_positions_of_rank(length, cp_size, cp_rank) for length in lengths])
        # Rows behind the last sample are padding.
        angles = frequencies[positions].view(-1, 1, width)
        angles = torch.cat([angles, angles.new_zeros(x.shape[0] - len(angles), 1, width)])
    part, rest = x[..., :width].float(), x[..., width:]
    if interleaved:
        turned = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    else:
        first, second = part.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    rotated = part * angles.cos() + direction * turned * angles.sin()
    return torch.cat((rotated.to(x.dtype), rest), -1)


def _positions_of_rank(length: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """The positions in a sample of the `length` tokens that a context-parallel rank has of it."""
    if cp_size == 1:
        return torch.arange(length)
    chunks = torch.arange(length * cp_size).chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def convert_thd_to_bshd(x: torch.Tensor, boundaries: torch.Tensor, batch: int, longest: int) -> torch.Tensor:
    """Packed samples [tokens, …] → [batch, longest, …] with zeros behind each sample."""
    out = x.new_zeros(batch, longest, *x.shape[1:])
    for row, (start, end) in zip(out, _spans(boundaries), strict=True):
        row[: end - start] = x[start:end]
    return out


def convert_bshd_to_thd(x: torch.Tensor, boundaries: torch.Tensor, tokens: int) -> torch.Tensor:
    """[batch, longest, …] → packed samples [tokens, …] with zeros behind the last."""
    out = x.new_zeros(tokens, *x.shape[2:])
    for row, (start, end) in zip(x, _spans(boundaries), strict=True):
        out[start:end] = row[: end - start]
    return out


def _spans(boundaries: torch.Tensor) -> list[tuple[int, int]]:
    """(start, end) of each sample of the boundaries [samples + 1]."""
    ends = boundaries.tolist()
    return list(zip(ends, ends[1:], strict=False))


def multi_tensor_l2norm(
    chunk_size: int, overflow: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], per_tensor: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of all tensors of the only list, float32 [1], and of each, if asked for."""
    norms = torch.stack([torch.linalg.vector_norm(tensor.float()) for tensor in lists[0]])
    return torch.linalg.vector_norm(norms).view(1), norms if per_tensor else norms.new_empty(0)


def multi_tensor_scale(
    chunk_size: int, overflow: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], scale: float
) -> None:
    """Write the scaled tensors of the first list into those of the second one."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * scale)


def multi_tensor_adam(
    chunk_size: int, overflow: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], lr: float, beta1: float, beta2: float,
    eps: float, step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """A step of Adam (Kingma & Ba 2015, arXiv 1412.6980) in place. Of each parameter `lists` have the gradient, the parameter,
    the two moments, and perhaps a float32 copy, which is then the one that is trained.

    Args:
        mode: 0: weight decay is a part of the gradient; 1: of the step (AdamW, arXiv 1711.05101).
    """
    numbers = lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
    for gradient, parameter, first, second, *copies in zip(*lists, strict=True):
        trained = copies[0] if copies else parameter
        stepped = _adam_step(trained.float(), gradient.float(), first, second, *numbers)
        trained.copy_(stepped)
        parameter.copy_(stepped)


def multi_tensor_adam_param_remainder(
    chunk_size: int, overflow: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], lr: float, beta1: float, beta2: float,
    eps: float, step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """`multi_tensor_adam` of parameters in bfloat16. The last list has, as int16, what is to be added to their bits, shifted
    left by 16, for the bits of the float32 that is trained."""
    numbers = lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
    for gradient, parameter, first, second, remainder in zip(*lists, strict=True):
        bits = (parameter.view(torch.int16).int() << 16) + remainder.int()
        stepped = _adam_step(bits.view(torch.float32), gradient.float(), first, second, *numbers).view(torch.int32)
        remainder.copy_(stepped.to(torch.int16))
        parameter.copy_(((stepped - remainder.int()) >> 16).to(torch.int16).view(torch.bfloat16))


def _adam_step(
    value: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor, lr: float, beta1: float,
    beta2: float, eps: float, step: int, mode: int, bias_correction: int, weight_decay: float,
) -> torch.Tensor:  # fmt: skip
    """What becomes of `value`, float32. The moments are changed in place."""
    if mode == 0:
        gradient = gradient + weight_decay * value
    first.copy_(beta1 * first.float() + (1 - beta1) * gradient)
    second.copy_(beta2 * second.float() + (1 - beta2) * gradient * gradient)
    correction, of_second = (1 - beta**step if bias_correction else 1.0 for beta in (beta1, beta2))
    update = first.float() / correction / ((second.float() / of_second).sqrt() + eps)
    if mode == 1:
        update = update + weight_decay * value
    return value - lr * update


def _refuse(**options: Any) -> None:
    """Raise where an argument asks for what these kernels do not do."""
    asked = [name for name, value in options.items() if value is not None and value is not False]
    if asked:
        raise NotImplementedError(f"plain kernels have no {', '.join(asked)}")


def _written(
    value: torch.Tensor, out: torch.Tensor | None, dtype: DType | None, otherwise: torch.dtype = torch.float32
) -> torch.Tensor:
    """`value` in `out` where that is given, else as a tensor of `dtype`, or of `otherwise`."""
    if out is not None:
        return out.copy_(value.view(out.shape))
    return value.to(otherwise if dtype is None else _TORCH_DTYPES[dtype])
