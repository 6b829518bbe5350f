"""How a trained model is quantised in the form of a checkpoint: FP8 by blocks or by tensors, or INT4 in groups.

The checkpoint decides: the `quantization_config` in its `config.json` tells how weights are quantised, and its tensors tell
which. A weight is quantised if the checkpoint has a scale for it, so norms, embeddings, routers and whatever else its maker
left alone stay plain. The result must have the checkpoint's names, dtypes and shapes. If there are settings but no checkpoint,
names decide which weights are quantised.

A scale of FP8 is the largest magnitude over 448, the largest number of `float8_e4m3fn`; if the checkpoint's scales are powers
of two (`scale_fmt` ue8m0) it is the next power of two. Scales of blocks have the checkpoint's dtype. For INT4 the scales, the
rounding and the packing are those of the `compressed-tensors` package, with which engines read it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime.utils.errors import RunError, UserError
from slime.weights.hf_reader import Place, places_of_checkpoint, safetensors_dtype

if TYPE_CHECKING:
    import torch

    from slime.weights.buckets import NamedTensors

_FP8_LARGEST = 448.0
# The least largest magnitude, so that a tensor of zeros does not get the scale zero.
_LEAST_AMAX = 1e-12
# The same for scales that are powers of two; engines that compute with these take no smaller one.
_LEAST_AMAX_OF_POWERS = 1e-4
PACKED = "weight_packed"
SCALE_OF_BLOCKS = "weight_scale_inv"
# How many numbers are converted at a time: enough that calls cost little, and few enough for a cache in float32.
STRIP_NUMBERS = 2**19
# So many integers of any number of bits fill whole words.
INTEGERS_OF_WHOLE_WORDS = 32

# The names of the matrices of attention (also latent, linear, and that of an indexer) and of dense and expert layers.
LINEAR_WEIGHTS = re.compile(
    r"(?:\.(?:[qkvo]_proj|qkv_proj|gate_proj|up_proj|down_proj|gate_up_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|wq_b|wk"
    r"|in_proj_qkv|in_proj_qkvz|in_proj_z|out_proj)|\.experts\.\d+\.w[123])\.weight$"
)

# Matrices of latent attention, by the ends of their names, that SGLang 0.5.21 cannot serve packed: it takes the first apart,
# and joins each of the others with one beside it.
NEVER_PACKED = ("kv_b_proj", "q_a_proj", "kv_a_proj_with_mqa", "indexer.wk")

ScaleFormat = Literal["float", "ue8m0"]


def quantise_fp8_blocks(
    weight: torch.Tensor,
    block: tuple[int, int],
    scale_format: ScaleFormat = "float",
    scale_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as `float8_e4m3fn`, and the scale of every block, [rows / block, columns / block], rounded up.

    A block of zeros has the scale 1. With `scale_format` ue8m0 a scale is the least power of two that is not smaller.

    Args:
        scale_dtype: that of the scales, to which they are rounded before numbers are divided by them; None: float32.
    """
    import torch

    quantised = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    strips = zip(_strips(weight, block[0]), _strips(quantised, block[0]), strict=True)
    dtype = scale_dtype or torch.float32
    return quantised, torch.cat([_fp8_strip(strip, into, block, scale_format, dtype) for strip, into in strips])


def _fp8_strip(
    weight: torch.Tensor,
    into: torch.Tensor,
    block: tuple[int, int],
    scale_format: ScaleFormat,
    scale_dtype: torch.dtype,
) -> torch.Tensor:
    """The scales of a strip; its quantised numbers are written to `into`."""
    import torch

    (rows, columns), (height, width) = weight.shape, block
    numbers = weight.to(torch.float32, copy=True)
    if rows % height or columns % width:
        numbers = torch.nn.functional.pad(numbers, (0, -columns % width, 0, -rows % height))
    blocks = numbers.view(numbers.shape[0] // height, height, numbers.shape[1] // width, width)
    # Columns first, because the extremes of rows that lie side by side are found for many columns at a time.
    largest = torch.maximum(blocks.amax(dim=1, keepdim=True), -blocks.amin(dim=1, keepdim=True))
    amax = largest.amax(dim=3, keepdim=True)
    scale = _of_largest(amax)
    if scale_format == "ue8m0":
        mantissa, exponent = torch.frexp(_of_largest(amax.clamp(min=_LEAST_AMAX_OF_POWERS)))
        # A power of two has the mantissa 1/2 and is not rounded up.
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    scale = torch.where(amax == 0, 1.0, scale.to(scale_dtype).float())
    blocks.div_(scale).clamp_(-_FP8_LARGEST, _FP8_LARGEST)
    into.copy_(numbers[:rows, :columns])
    return scale[:, 0, :, 0].to(scale_dtype).contiguous()


def _of_largest(amax: torch.Tensor) -> torch.Tensor:
    """The scale for the largest magnitude `amax`, with the same bits on every device. The divisor is a tensor because CUDA
    divides by a number with two roundings, as a product with its inverse."""
    import torch

    return amax / torch.full_like(amax, _FP8_LARGEST)


def quantise_fp8_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor as `float8_e4m3fn`, and its scale, a float32 scalar."""
    import torch

    flat = weight.reshape(-1, 1)
    amax = torch.stack([torch.stack(torch.aminmax(strip.float())).abs().amax() for strip in _strips(flat)]).amax()
    scale = _of_largest(amax.clamp(min=_LEAST_AMAX))
    quantised = torch.empty_like(flat, dtype=torch.float8_e4m3fn)
    for strip, into in zip(_strips(flat), _strips(quantised), strict=True):
        numbers = strip.to(torch.float32, copy=True)
        into.copy_(numbers.div_(scale).clamp_(-_FP8_LARGEST, _FP8_LARGEST))
    return quantised.view(weight.shape), scale


def _strips(weight: torch.Tensor, height: int = 1) -> Sequence[torch.Tensor]:
    """Strips of a multiple of `height` rows, each as large as a cache holds in float32. On other devices than a CPU there is
    one strip."""
    if weight.device.type != "cpu":
        return [weight]
    return weight.split(height * max(STRIP_NUMBERS // (height * max(weight.shape[1], 1)), 1))


def quantise_int4(weight: torch.Tensor, form: PackedForm) -> dict[str, torch.Tensor]:
    """A matrix as the tensors of a `pack-quantized` module: weight_packed, weight_scale, weight_shape, weight_zero_point."""
    if form.scheme is None:
        return quantise_integers(weight, form.bits, form.group_size, form.symmetric)
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor

    scale, zero_point = _scale_and_zero(weight, form.scheme)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    # The package makes the shape on the host.
    return {**PackedQuantizationCompressor.compress(state, form.scheme), "weight_shape": _shape_of(weight)}


def quantise_integers(
    weight: torch.Tensor, bits: int, group_size: int | None, symmetric: bool
) -> dict[str, torch.Tensor]:
    """`quantise_int4` with scales of the weight's dtype, with the numbers of the compressed-tensors package bit for bit.

    Args:
        group_size: how many columns share a scale; None: all.
    """
    import torch

    parts = [_integers_of_strip(strip, bits, group_size, symmetric) for strip in _strips(weight)]
    packed, scales, zeros = zip(*parts, strict=True)
    found = {"weight_packed": torch.cat(packed), "weight_scale": torch.cat(scales)}
    if not symmetric:
        found["weight_zero_point"] = pack_integers(torch.cat(zeros).T, bits).T.contiguous()
    return {**found, "weight_shape": _shape_of(weight)}


def _shape_of(weight: torch.Tensor) -> torch.Tensor:
    """The shape of `weight`, int64, on its device: a bucket has one. It is filled, because a copy from the host would wait for
    work that is queued."""
    import torch

    shape = torch.empty(weight.dim(), dtype=torch.int64, device=weight.device)
    for number, size in zip(shape, weight.shape, strict=True):
        number.fill_(size)
    return shape


def _integers_of_strip(
    weight: torch.Tensor, bits: int, group_size: int | None, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed integers, scales, zero points) of some rows."""
    import torch

    rows, columns = weight.shape
    groups = weight.view(rows, -1, group_size or columns)
    # The extremes of many small groups are found faster in float32. A symmetric group needs only the largest magnitude.
    wide = (groups.abs() if symmetric else groups).float()
    largest = wide.amax(-1).to(weight.dtype)
    least = torch.zeros_like(largest) if symmetric else wide.amin(-1).to(weight.dtype)
    scale, zero = scale_and_zero(least, largest, bits, symmetric)
    scaled = groups / scale[..., None]
    if not symmetric:
        scaled += zero[..., None].to(weight.dtype)
    least = -(1 << (bits - 1))
    # 16-bit numbers are rounded and clamped faster in float32, with the same result.
    integers = scaled.float().clamp_(least, -least - 1).round_().to(torch.int8)
    return pack_integers(integers.view(rows, columns), bits), scale, zero


def scale_and_zero(
    least: torch.Tensor, largest: torch.Tensor, bits: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, zero point as int8) of groups with these extremes, in their dtype, as compressed-tensors computes them."""
    import torch

    steps, lowest = float((1 << bits) - 1), -(1 << (bits - 1))
    least, largest = least.clamp(max=0), largest.clamp(min=0)
    if symmetric:
        scale = torch.maximum(least.abs(), largest.abs()) / (steps / 2)
        zero = torch.zeros_like(scale, dtype=torch.int8)
    else:
        scale = (largest - least) / steps
        zero = (lowest - least / scale).clamp(lowest, -lowest - 1).round().to(torch.int8)
    return scale.masked_fill(scale == 0, torch.finfo(scale.dtype).eps), zero


def pack_integers(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed integers (int8) [rows, columns], packed into int32 [rows, columns * bits / 32, rounded up]; the first integer of a
    word is in its lowest bits."""
    import torch

    if bits not in (4, 8):
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        return pack_to_int32(integers, bits).contiguous()
    stored = integers.view(torch.uint8) + (1 << (bits - 1))
    # Flat, because a single row or column counts as contiguous with strides with which a view of wider numbers is refused.
    missing = -integers.shape[1] % (32 // bits)
    stored = (torch.nn.functional.pad(stored, (0, missing)) if missing else stored).reshape(-1)
    if bits == 4:
        pairs = stored.view(torch.int16)
        stored = (pairs | (pairs >> 4)).to(torch.uint8)
    return stored.view(torch.int32).view(integers.shape[0], -(-integers.shape[1] * bits // 32))


def unpack_integers(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The integers (int8) [rows, `columns`] that `pack_integers` has packed."""
    import torch

    if bits not in (4, 8):
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        return unpack_from_int32(words, bits, torch.Size((words.shape[0], columns)))
    stored = words.reshape(-1).view(torch.uint8)
    if bits == 4:
        stored = torch.stack((stored & 0xF, stored >> 4), dim=-1)
    return (stored - (1 << (bits - 1))).view(torch.int8).view(words.shape[0], words.shape[1] * 32 // bits)[:, :columns]


def rounded_as_int4(weight: torch.Tensor, scheme: Any) -> torch.Tensor:
    """The numbers that engines compute with after `quantise_int4`, in the dtype of `weight`. `scheme`: of `int4_scheme`."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    return fake_quantize(weight, *_scale_and_zero(weight, scheme), scheme.weights)


def _scale_and_zero(weight: torch.Tensor, scheme: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from compressed_tensors.quantization.utils import calculate_qparams

    rows, columns = weight.shape
    groups = weight.view(rows, -1, scheme.weights.group_size or columns)
    return calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)


@dataclasses.dataclass(frozen=True)
class Quantiser:
    """Quantises the weights that the checkpoint at `directory` has quantised.

    Attributes:
        suffix: the name, in the place of `weight`, of the tensor by which a quantised weight is known, such as its scale.
        quantise: gives the tensors for a weight, by the name that each has in the place of `weight`.
        places: the checkpoint's tensors.
    """

    directory: Path
    suffix: str
    quantise: Callable[..., Mapping[str, torch.Tensor]]
    places: Mapping[str, Place]

    def __call__(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors in the checkpoint's form; those that come from one weight follow each other.

        Raises:
            RunError: a tensor would have another dtype or shape than the checkpoint's.
        """
        for name, tensor in named_tensors:
            module = name.removesuffix("weight")
            if not name.endswith("weight") or module + self.suffix not in self.places:
                yield name, tensor
                continue
            yield from self._of_module(module, self.quantise(tensor))

    def _of_module(self, module: str, parts: Mapping[str, torch.Tensor]) -> NamedTensors:
        found = []
        for part, tensor in parts.items():
            place = self.places.get(module + part)
            if place is not None and place.shape != tensor.shape and place.shape in ((1,), ()) and tensor.numel() == 1:
                tensor = tensor.reshape(place.shape)
            if part == "weight_shape" and place is not None:
                tensor = tensor.int() if place.dtype == "I32" else tensor.long()
            form = (safetensors_dtype(tensor.dtype), tuple(tensor.shape))
            if place is not None and form != (place.dtype, place.shape):
                raise RunError(
                    f"weight push: {module}{part} would be {form[0]} {list(form[1])}, and is {place.dtype} "
                    f"{list(place.shape)} in {self.directory}: its quantization_config does not fit its tensors"
                )
            found.append((module + part, tensor))
        return found


def quantisation_settings(directory: Path) -> Mapping[str, Any] | None:
    """The `quantization_config` of a checkpoint; None if it has none.

    Raises:
        UserError: its config.json is broken.
    """
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    return config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")


def quantiser_of(directory: str | Path) -> Quantiser | None:
    """The quantiser for a checkpoint; None if it is not quantised.

    Raises:
        UserError: it is quantised in an unknown way.
    """
    directory = Path(directory)
    settings = quantisation_settings(directory)
    if settings is None:
        return None
    places = places_of_checkpoint(directory)
    if not places:
        # There is only a configuration, with which a run is rehearsed.
        return None
    suffix, quantise = _method(directory, settings)
    if suffix == SCALE_OF_BLOCKS:
        quantise = functools.partial(quantise, scale_dtype=dtype_of_block_scales(places))
    return Quantiser(directory, suffix, quantise, places)


def dtype_of_block_scales(places: Mapping[str, Place]) -> torch.dtype:
    """That of a checkpoint's scales of FP8 blocks: bfloat16 if all of them are, else float32. `places`: its tensors."""
    import torch

    stored = {place.dtype for name, place in places.items() if name.endswith(f".{SCALE_OF_BLOCKS}")}
    return torch.bfloat16 if stored == {"BF16"} else torch.float32


def quantise_by_names(
    named_tensors: Iterable[tuple[str, torch.Tensor]], settings: Mapping[str, Any], where: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint with the `quantization_config` `settings`, if there is no checkpoint that tells which.

    The matrices whose names `LINEAR_WEIGHTS` knows are quantised, except those of modules that `settings` leave alone, those
    whose columns do not divide into groups, and for packed ones `NEVER_PACKED`. Scales of INT4 have the dtype of their weight.

    Args:
        where: the source of the settings, for errors.

    Raises:
        UserError: the weights are to be quantised in an unknown way.
    """
    _, quantise = _method(where, settings)
    groups = list(settings.get("config_groups", {}).values())
    targets = [target for group in groups for target in group.get("targets", ()) if target != "Linear"]
    if targets:
        raise _refusal(where, f"targets {targets[0]}, where names decide")
    columns = groups[0]["weights"].get("group_size") or 1 if groups else 1
    is_left = _left_alone(settings, where)
    for name, tensor in named_tensors:
        module = name.removesuffix(".weight")
        if not LINEAR_WEIGHTS.search(name) or tensor.ndim != 2 or tensor.shape[1] % columns or is_left(module):
            yield name, tensor
        else:
            yield from ((f"{module}.{part}", made) for part, made in quantise(tensor).items())


def modules_by_name(rules: Sequence[str], where: str) -> Callable[[str], bool]:
    """A function that tells whether `rules` name a module: by its name, its end after a dot, or a pattern after `re:`.

    Args:
        where: the source of the rules, for the error.

    Raises:
        UserError: a pattern is not a regular expression.
    """
    try:
        patterns = [re.compile(rule.removeprefix("re:")) for rule in rules if rule.startswith("re:")]
    except re.error as error:
        raise UserError(f"{where}: {error} in {error.pattern!r}") from error
    names = [rule for rule in rules if not rule.startswith("re:")]

    def is_named(module: str) -> bool:
        by_name = any(module == name or module.endswith("." + name) for name in names)
        return by_name or any(pattern.match(module) for pattern in patterns)

    return is_named


def _left_alone(settings: Mapping[str, Any], where: str) -> Callable[[str], bool]:
    """A function that tells whether settings leave a module alone. Settings of packed weights name modules as `modules_by_name`
    does, beside those that no engine takes packed. In those of FP8 a name stands for everything inside the module too, and a
    leading `model.` may be missing."""
    if "config_groups" in settings:
        return modules_by_name((*NEVER_PACKED, *(settings.get("ignore") or ())), where)
    names = settings.get("modules_to_not_convert") or settings.get("ignored_layers") or ()
    within = [f".{name.removeprefix('model.').strip('.')}." for name in names]
    return lambda module: any(name in f".{module}." for name in within)


def _method(where: str | Path, settings: Mapping[str, Any]) -> tuple[str, Callable[[Any], Mapping[str, Any]]]:
    """(`suffix`, `quantise`) of a `Quantiser`. `where`: the source of the settings, for errors."""
    method = settings.get("quant_method")
    if method == "fp8":
        return _fp8(where, settings)
    if method == "compressed-tensors" and settings.get("format") == "pack-quantized":
        return PACKED, functools.partial(quantise_int4, form=packed_form(where, settings))
    raise _refusal(where, f"quant_method {method}, format {settings.get('format')}")


def _fp8(where: str | Path, settings: Mapping[str, Any]) -> tuple[str, Callable[..., Mapping[str, Any]]]:
    formats = ("e4m3", "float8_e4m3fn")
    if settings.get("activation_scheme", "dynamic") != "dynamic" or settings.get("fmt", formats[0]) not in formats:
        raise _refusal(where, f"activation_scheme {settings.get('activation_scheme')}, fmt {settings.get('fmt')}")
    scale_format, block = settings.get("scale_fmt") or "float", settings.get("weight_block_size")
    if scale_format not in ("float", "ue8m0") or (scale_format == "ue8m0" and block is None):
        raise _refusal(where, f"scale_fmt {scale_format}, weight_block_size {block}")
    if block is None:
        names, quantise = ("weight", "weight_scale"), quantise_fp8_tensor
    else:
        names = ("weight", SCALE_OF_BLOCKS)
        quantise = functools.partial(quantise_fp8_blocks, block=tuple(block), scale_format=scale_format)
    return names[1], lambda weight, **how: dict(zip(names, quantise(weight, **how), strict=True))


@dataclasses.dataclass(frozen=True)
class PackedForm:
    """How a `pack-quantized` checkpoint packs its weights.

    Attributes:
        group_size: how many columns share a scale; None: all.
        scheme: the `QuantizationScheme` of compressed-tensors if scales have another dtype than weights, else None.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    scheme: Any = None


def packed_form(where: str | Path, settings: Mapping[str, Any]) -> PackedForm:
    """The form that is said by settings of a checkpoint.

    Raises:
        UserError: as `int4_scheme`.
    """
    weights = _packing_scheme(where, settings)["weights"]
    size, bits, symmetric = weights.get("group_size"), weights.get("num_bits"), weights.get("symmetric", True)
    has_groups = type(size) is int and size > 0 if weights["strategy"] == "group" else size is None
    plain = {**weights, "type": weights.get("type", "int"), "dynamic": weights.get("dynamic", False)}
    usual = all(plain.get(name) in values for name, values in _USUAL_VALUES.items())
    if has_groups and usual and type(bits) is int and isinstance(symmetric, bool):
        return PackedForm(bits, size, symmetric)
    scheme = int4_scheme(where, settings)
    found = scheme.weights
    return PackedForm(found.num_bits, found.group_size, found.symmetric, scheme if found.scale_dtype else None)


# Of settings with these values every other entry is without consequence for reading and packing. Of others compressed-tensors
# knows the meaning, whose import takes seconds, since it brings the models of transformers along.
_USUAL_VALUES = {
    "num_bits": (4, 8), "type": ("int",), "dynamic": (False,), "actorder": (None,), "block_structure": (None,),
    "scale_dtype": (None,),
}  # fmt: skip


def settings_for_int4(directory: str | Path, group_size: int) -> Mapping[str, Any]:
    """The `quantization_config` of a checkpoint for whose engines weights are trained as they are rounded to INT4.

    Raises:
        UserError: it is no INT4 checkpoint with groups of `group_size`, or has several kinds of groups.
    """
    settings = quantisation_settings(Path(directory)) or {}
    weights = _packing_scheme(directory, settings)["weights"] if settings.get("format") == "pack-quantized" else {}
    found = (weights.get("num_bits"), weights.get("group_size"))
    if found != (4, group_size):
        what = f"has {found[0]} bits and groups of {found[1]}, and is not" if weights else "is not"
        raise UserError(
            f"OPEN_TRAINING_INT4_GROUP_SIZE={group_size}: --hf-checkpoint {directory} {what} an INT4 checkpoint with groups of "
            f"{group_size}; name the one that engines serve, or leave OPEN_TRAINING_INT4_FAKE_QAT_FLAG out"
        )
    return settings


def int4_scheme(where: str | Path, settings: Mapping[str, Any]) -> Any:
    """The `QuantizationScheme` of a `pack-quantized` checkpoint.

    Raises:
        UserError: it has several, or an unknown one.
    """
    from compressed_tensors.quantization import QuantizationScheme

    return QuantizationScheme.model_validate({"targets": ["Linear"], **_packing_scheme(where, settings)})


def _packing_scheme(where: str | Path, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The only one of the settings' schemes."""
    schemes = list(settings.get("config_groups", {}).values())
    weights = schemes[0].get("weights") or {} if len(schemes) == 1 else {}
    if weights.get("strategy") not in ("group", "channel") or weights.get("actorder"):
        raise _refusal(where, "pack-quantized with more than one group, another strategy, or an order of activations")
    return schemes[0]


def moves_when_read(directory: str | Path) -> bool:
    """Whether weights change when they are read from this checkpoint and quantised again, as packed integers do.

    The scale of a group follows from its extremes, and these have been rounded: a symmetric group with the scale 1 and the
    extreme 7 gets the scale 7 / 7.5. FP8 keeps the largest number of a block exactly, so nothing changes.
    """
    return (quantisation_settings(Path(directory)) or {}).get("format") == "pack-quantized"


def loaded_once_on_gpus(directory: str | Path) -> str | None:
    """The first weight of a checkpoint that engines with GPUs cannot load a second time, and so take no push of; None: all can.

    SGLang 0.5.21 gives weights another form for their kernels, and before a push takes that back for packed experts and for FP8
    with scales of blocks; not for other packed layers, and not for FP8 with a scale per tensor.
    """
    settings = quantisation_settings(Path(directory)) or {}
    ending = ".weight_scale" if settings.get("quant_method") == "fp8" else f".{PACKED}"
    names = places_of_checkpoint(Path(directory)) if settings else ()
    found = (
        name
        for name in names
        if name.endswith(ending) and (settings["quant_method"] == "fp8" or ".experts." not in name)
    )
    return next(found, None)


def _refusal(where: str | Path, what: str) -> UserError:
    return UserError(
        f"{where}: weights are neither quantised nor read as its quantization_config asks for ({what}); FP8 (e4m3, dynamic "
        "activations) and INT4 (compressed-tensors, pack-quantized) are"
    )
