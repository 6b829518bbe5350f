"""Training of a model that engines serve in fewer bits: its layers compute with the same rounded numbers as the engines.

**INT4.** With `OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1` every weight that is packed in `--hf-checkpoint`, of dense layers and of
experts, is rounded before it is used, to the value that the next push sends. The gradient passes the rounding unchanged (a
straight-through estimator: Bengio et al. 2013, arXiv 1308.3432). The parameter itself, which optimizer and checkpoints have,
is not rounded.

Only while a layer computes does the rounded weight take the place of the parameter: names, gradient buffers and pushes see the
parameter alone. A group is a run of columns in one row. So fused rows, and rows of tensor-parallel ranks, are rounded
independently of each other, and a rank that has a part of the columns needs whole groups of them.

**FP8.** The layers of `--megatron-deepgemm-forward-layers` and `--megatron-deepgemm-moe-forward-layers` multiply as an engine
does with an FP8 checkpoint of blocks: weights with a scale for each block of 128 × 128, as the next push sends them, inputs
with a scale for each 128 numbers of a row, products summed in float32. Backward passes multiply unrounded numbers, in the dtype
of the parameters. A rank has to hold whole blocks of each tensor of the checkpoint.

With `--fp8-format` the layers of Transformer Engine multiply in FP8 by themselves, forwards and backwards.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.fp8_utils import get_fp8_align_size
from torch.autograd.function import once_differentiable

from slime.arguments.config_files.role_config import CRITIC
from slime.backends.megatron_utils.hf_conversion import family_of_run, tensor_place, tensor_sizes
from slime.backends.megatron_utils.parameter_names import global_named_parameters, unwrap_model
from slime.models.tensor_layouts import Layout, TensorSizes
from slime.utils import env
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError
from slime.weights.hf_reader import SafetensorsDirectory, places_of_checkpoint
from slime.weights.quantisers import (
    dtype_of_block_scales,
    int4_scheme,
    quantisation_settings,
    quantise_fp8_blocks,
    rounded_as_int4,
    settings_for_int4,
)

logger = logging.getLogger(__name__)


def round_weights_to_int4(args: Any, chunks: Sequence[torch.nn.Module]) -> None:
    """Make the layers of `chunks` compute with rounded weights, if the environment asks for it; not those of a critic, which no
    engine serves.

    Raises:
        UserError: `--hf-checkpoint` is no INT4 checkpoint with groups of that size; a weight's columns on this rank are not
            whole groups; a kernel would add gradients into the parameter itself, or round it once more.
    """
    group_size = env.int4_training_group_size()
    if group_size is None or args.role == CRITIC:
        return
    if args.fp8:
        raise UserError(
            f"OPEN_TRAINING_INT4_FAKE_QAT_FLAG with --fp8-format {args.fp8}: engines would not multiply such weights in FP8; "
            "leave one of them out"
        )
    directory = Path(args.hf_checkpoint)
    scheme = int4_scheme(directory, settings_for_int4(directory, group_size))
    family, stored, count = family_of_run(args), SafetensorsDirectory(directory).names(), 0
    for chunk in chunks:
        places = {
            id(parameter): (module, name)
            for module in chunk.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }
        for name, parameter in global_named_parameters(chunk):
            if family.leaves_out(name) or parameter.ndim != 2:
                continue
            _, hf_names = family.find(name)
            if all(hf_name.removesuffix("weight") + "weight_packed" in stored for hf_name in hf_names):
                _round_in_forward(name, *places[id(parameter)], scheme)
                count += 1
        if count and chunk.config.gradient_accumulation_fusion:
            raise UserError("--gradient-accumulation-fusion with INT4 training: give --no-gradient-accumulation-fusion")
    logger.info("%d weights of this rank are rounded to INT4 in groups of %d while layers compute", count, group_size)


def _round_in_forward(name: str, module: torch.nn.Module, attribute: str, scheme: Any) -> None:
    columns = module._parameters[attribute].shape[1]
    if columns % scheme.weights.group_size:
        raise UserError(
            f"INT4 training: {name} has {columns} columns on this rank, which are no whole groups of "
            f"{scheme.weights.group_size}; give a smaller --tensor-model-parallel-size or --expert-tensor-parallel-size"
        )

    def put(module: torch.nn.Module, _: Any) -> None:
        # Python looks for an attribute in the module's own dictionary before it asks for its parameters.
        module.__dict__[attribute] = _Rounded.apply(module._parameters[attribute], scheme)

    def take_away(module: torch.nn.Module, *_: Any) -> None:
        module.__dict__.pop(attribute, None)

    module.register_forward_pre_hook(put)
    module.register_forward_hook(take_away, always_call=True)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, weight: torch.Tensor, scheme: Any) -> torch.Tensor:
        return rounded_as_int4(weight, scheme)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def require_fp8_shapes(chunks: Sequence[torch.nn.Module]) -> None:
    """Refuse, with `--fp8-format`, a weight of Transformer Engine's layers that its kernels do not multiply in FP8.

    It checks one side of a weight in forward passes; the other one is that of a product in the backward pass, which a kernel
    would refuse without a name.
    """
    config = chunks[0].config
    multiple = get_fp8_align_size(config.fp8_recipe) if config.fp8 else 1
    for chunk in chunks:
        names = {id(parameter): name for name, parameter in global_named_parameters(chunk)}
        # Megatron itself recognises layers of Transformer Engine by this attribute.
        for module in (module for module in chunk.modules() if hasattr(module, "is_first_microbatch")):
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 2 and any(size % multiple for size in parameter.shape):
                    raise UserError(
                        f"--fp8-format {config.fp8}: {names[id(parameter)]} is {list(parameter.shape)} on this rank, and FP8 "
                        f"products need multiples of {multiple}; give a smaller --tensor-model-parallel-size, or leave the "
                        "flag out"
                    )


# Rows and columns of a block of weights, and columns of a group of inputs.
_BLOCK = 128
# Either of the two flags, for messages.
_FLAGS = "--megatron-deepgemm-[moe-]forward-layers"
_FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max
# The least magnitude from which a scale is computed, so that a group of zeros has a scale, too.
_LEAST_AMAX = 1e-10
# Weight -> its numbers (float8_e4m3fn), the scales of its blocks.
Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# Rows, weight (float8_e4m3fn), the sizes of its blocks, their scales -> rows.
EngineLinear = Callable[[torch.Tensor, torch.Tensor, list[int], torch.Tensor], torch.Tensor]


def multiply_in_fp8(args: Any, chunks: Sequence[torch.nn.Module]) -> None:
    """Make the modules that the flags name multiply in FP8 in forward passes; not those of a critic, which no engine serves.

    Raises:
        UserError: `--hf-checkpoint` has no FP8 weights in blocks of 128 × 128, or the weight of a module is not among them; a
            layer has no such module; this rank holds parts of blocks; the layers are Transformer Engine's; the engine's kernels
            are not there, or are others on this device.
    """
    chosen = {
        flag: (set(layers), endings)
        for flag, layers, endings in (
            ("forward", args.megatron_deepgemm_forward_layers, args.megatron_deepgemm_forward_modules),
            ("moe-forward", args.megatron_deepgemm_moe_forward_layers, args.megatron_deepgemm_moe_forward_modules),
        )
        if layers
    }
    if not chosen or args.role == CRITIC:
        return
    if unwrap_model(chunks[0]).config.transformer_impl != "local":
        raise UserError(f"{_FLAGS} with the layers of Transformer Engine: give --transformer-impl local")
    stored = _StoredBlocks.of_run(args)
    multiply = _multiply_on_host if get_accelerator().name == "cpu" else engine_linear()
    count = 0
    for chunk in chunks:
        names = {id(parameter): name for name, parameter in global_named_parameters(chunk)}
        for layer in unwrap_model(chunk).decoder.layers:
            for flag, (layers, endings) in chosen.items():
                if layer.layer_number - 1 in layers:
                    for module in _modules_of_layer(layer, endings, f"--megatron-deepgemm-{flag}-modules"):
                        stored.require_whole_blocks(names[id(module.weight)], module.weight)
                        module._forward_impl = functools.partial(_linear_in_fp8, stored.quantise, multiply)
                        count += 1
    logger.info("%d modules of this rank multiply in FP8 when they compute forwards", count)


def _modules_of_layer(layer: torch.nn.Module, endings: Sequence[str], flag: str) -> Iterator[torch.nn.Module]:
    """The linear layers whose names, or the names of modules that contain them, have these endings."""
    kinds = (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)
    linear = {f".{name}.": module for name, module in layer.named_modules() if isinstance(module, kinds)}
    for ending in endings:
        found = [module for name, module in linear.items() if f".{ending}." in name]
        if not found:
            named = ", ".join(name.strip(".") for name in linear)
            raise UserError(
                f"{flag} {ending}: decoder layer {layer.layer_number - 1} has no such module; it has {named}"
            )
        yield from found


@dataclasses.dataclass(frozen=True)
class _StoredBlocks:
    """The FP8 weights of `--hf-checkpoint`. `quantise`: (numbers, scales) of a weight, as the next push has them; `rows`: how
    many rows each tensor that has scales of blocks has."""

    args: Any
    directory: Path
    quantise: Quantise
    rows: dict[str, int]

    @classmethod
    def of_run(cls, args: Any) -> _StoredBlocks:
        directory = Path(args.hf_checkpoint)
        settings = quantisation_settings(directory) or {}
        block = settings.get("weight_block_size")
        if settings.get("quant_method") != "fp8" or block != [_BLOCK, _BLOCK]:
            found = f"quant_method {settings.get('quant_method')}, weight_block_size {block}"
            raise UserError(
                f"{_FLAGS} needs an --hf-checkpoint that engines serve in FP8, with blocks of "
                f"{_BLOCK} x {_BLOCK}; {directory} has {found}: name another, or drop the flag"
            )
        places = places_of_checkpoint(directory)
        rows = {name: place.shape[0] for name, place in places.items() if f"{name}_scale_inv" in places}
        scales = {"scale_format": settings.get("scale_fmt") or "float", "scale_dtype": dtype_of_block_scales(places)}
        return cls(args, directory, functools.partial(quantise_fp8_blocks, block=(_BLOCK, _BLOCK), **scales), rows)

    def require_whole_blocks(self, name: str, weight: torch.Tensor) -> None:
        """Refuse a weight (global name) that this rank would quantise in other blocks than the checkpoint, or that the
        checkpoint does not quantise."""
        rule, hf_names = family_of_run(self.args).find(name)
        if missing := [hf_name for hf_name in hf_names if hf_name not in self.rows]:
            raise UserError(
                f"{self.directory} has no FP8 blocks of {missing[0]}, so engines multiply it in more bits: leave {name} out of "
                f"the modules of {_FLAGS}"
            )
        rows = tuple(self.rows[hf_name] for hf_name in hf_names)
        cuts_columns = getattr(rule.layout, "dim", 0) == 1
        if weight.shape[1] % _BLOCK or not (
            cuts_columns or has_whole_blocks(rule.layout, rows, tensor_sizes(self.args), *tensor_place(rule))
        ):
            raise UserError(
                f"{_FLAGS}: of {name}, {list(weight.shape)} on this rank, the blocks of {_BLOCK} x "
                f"{_BLOCK} are not those of {', '.join(hf_names)}: give a smaller --tensor-model-parallel-size or "
                "--expert-tensor-parallel-size, or leave the module out"
            )


@functools.cache
def has_whole_blocks(layout: Layout, rows: tuple[int, ...], sizes: TensorSizes, rank: int, size: int) -> bool:
    """Whether every 128 rows of a rank's part are a block of one of the checkpoint's tensors.

    Args:
        rows: the number of rows of each tensor; the layout moves rows, and does not cut columns.
        rank, size: this rank's place among those that share the parameter.
    """
    # Each row is identified by the number of its tensor and its own number.
    numbered = [
        torch.stack([torch.full((count,), tensor), torch.arange(count)], dim=1) for tensor, count in enumerate(rows)
    ]
    for block in layout.part(numbered, sizes, rank, size).split(_BLOCK):
        tensor, first = block[0].tolist()
        is_last = first + len(block) == rows[tensor]
        if first % _BLOCK or not (len(block) == _BLOCK or is_last):
            return False
        if not torch.equal(block, numbered[tensor][first : first + len(block)]):
            return False
    return True


def _linear_in_fp8(
    quantise: Quantise,
    multiply: EngineLinear,
    *,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None,
    **_: object,
) -> torch.Tensor:
    """The function that Megatron's linear layers call to multiply, with their keywords."""
    kind = "gathered" if sequence_parallel else "shared" if allreduce_dgrad else "own"
    output = _LinearInFp8.apply(input, weight, kind, tp_group, quantise, multiply)
    return output if bias is None else output + bias


class _LinearInFp8(torch.autograd.Function):
    """rows · weightᵀ. `kind` says which rows the ranks of the group have: each a part of them ("gathered"), all the same ones
    ("shared"), or each its own columns or rows ("own")."""

    @staticmethod
    def forward(
        context: Any, rows: torch.Tensor, weight: torch.Tensor, kind: str, group: Any, *how: Any
    ) -> torch.Tensor:
        quantise, multiply = how
        # The rows are needed only for the gradient of the weight, which a frozen weight does not have.
        context.save_for_backward(rows if context.needs_input_grad[1] else None, weight)
        context.kind, context.group = kind, group
        whole = _whole_rows(rows, kind, group)
        # Kernels ignore strides, and cannot take zero rows, which experts without tokens have.
        flat = whole.flatten(0, -2).contiguous()
        if len(flat):
            numbers, scales = quantise(weight)
            # Engines keep scales in float32, whatever the dtype is in which they are stored.
            output = multiply(flat, numbers, [_BLOCK, _BLOCK], scales.float())
        else:
            output = flat.new_empty(0, len(weight))
        return output.unflatten(0, whole.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = context.saved_tensors
        kind, group = context.kind, context.group
        of_rows = of_weight = None
        if context.needs_input_grad[0]:
            of_rows = gradient @ weight
            if kind == "gathered":
                of_rows = tensor_parallel.reduce_scatter_to_sequence_parallel_region(of_rows, group=group)
            elif kind == "shared":
                of_rows = tensor_parallel.reduce_from_tensor_model_parallel_region(of_rows, group=group)
        if context.needs_input_grad[1]:
            of_weight = gradient.flatten(0, -2).T @ _whole_rows(rows, kind, group).flatten(0, -2)
        return of_rows, of_weight, None, None, None, None


def _whole_rows(rows: torch.Tensor, kind: str, group: Any) -> torch.Tensor:
    if kind != "gathered":
        return rows
    return tensor_parallel.gather_from_sequence_parallel_region(rows, group=group)


def _multiply_on_host(rows: torch.Tensor, weight: torch.Tensor, block: list[int], scales: torch.Tensor) -> torch.Tensor:
    """The engine's product in plain PyTorch: [T, K] · [N, K]ᵀ, in the dtype of `rows`."""
    groups = rows.float().unflatten(-1, (-1, block[1]))
    scale = groups.abs().amax(-1, keepdim=True).clamp_(min=_LEAST_AMAX) / _FP8_LARGEST
    rounded = (groups / scale).clamp_(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn).float() * scale
    of_rows = scales.repeat_interleave(block[0], dim=0)[: len(weight)]
    numbers = weight.float() * of_rows.repeat_interleave(block[1], dim=1)
    return (rounded.flatten(1) @ numbers.T).to(rows.dtype)


def engine_linear() -> EngineLinear:
    """The function by which an engine on this GPU multiplies in FP8 by default.

    Raises:
        UserError: the package is not there; on this device the engine rounds in another way.
    """
    # Engines do the same. Otherwise DeepGEMM compiles and runs 16,384 other products before the first product of every shape.
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "false")
    try:
        from sglang.srt.layers import deep_gemm_wrapper
        from sglang.srt.layers.quantization import fp8_utils
    except ImportError as error:
        raise UserError(
            f"{_FLAGS} multiplies by the kernels of the package sglang, which does not import here "
            f"({error}); install it beside the trainer, or drop the flag"
        ) from error
    linear = fp8_utils._dispatch_auto_backend()
    known = (fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback, fp8_utils.triton_w8a8_block_fp8_linear)
    if linear not in known or deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0:
        raise UserError(
            f"{_FLAGS}: on this device engines multiply by {linear.__name__}, or with scales of "
            "another format, which the trainer does not know; drop the flag"
        )
    return linear
