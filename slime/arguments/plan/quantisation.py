"""Bytes of one weight of a served checkpoint, as its `quantization_config` describes it.

A quantised weight takes its bits and its part of a scale. Modules that a checkpoint leaves as they are count layer by layer,
told by the name of one projection of each part. A format that is not known counts as not quantised, and is named.
"""

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime.scheduling.model_shape import ModelShape
from slime.scheduling.serving_memory import WeightBytes

Config = dict[str, Any]


@dataclass(frozen=True)
class Quantisation:
    """`group` weights share a scale of `scale_bytes`; None: a whole row, or more, so that scales do not count."""

    bits: int
    group: int | None = None
    scale_bytes: int = 2

    @property
    def bytes_per_weight(self) -> float:
        return self.bits / 8 + (self.scale_bytes / self.group if self.group else 0.0)


_ROWS_OF_8 = Quantisation(8)
_NVFP4 = Quantisation(4, 16, 1)
# Formats whose name says all.
_FIXED = {
    "nvfp4": _NVFP4, "modelopt_fp4": _NVFP4, "petit_nvfp4": _NVFP4, "nvfp4_online": _NVFP4, "mxfp4": Quantisation(4, 32, 1),
    "mxfp8": Quantisation(8, 32, 1), "modelopt_fp8": _ROWS_OF_8, "w8a8_fp8": _ROWS_OF_8, "w8a8_int8": _ROWS_OF_8,
}  # fmt: skip
# Formats with a number of bits (4 where none is given) and a group beside the name.
_INTEGERS = ("gptq", "gptq_marlin", "awq", "awq_marlin", "auto-round", "moe_wna16")
# Formats of 8 bits, whose scales may be those of blocks.
_BLOCKS = ("fp8", "blockwise_int8")
# Bits that the `format` of a compressed checkpoint means where no group of it names them.
_COMPRESSED_BITS = {"pack-quantized": 4, "int-quantized": 8, "float-quantized": 8, "naive-quantized": 8}
_NVFP4_COMPRESSED = "nvfp4-pack-quantized"
_NOT_QUANTISED = ("", "none", "dense", "unquant")
_LEFT_OUT = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude")
# A projection of each part, in all its spellings.
_PROJECTIONS = {
    "attention": ("self_attn.o_proj",),
    "linear_attention": ("linear_attn.out_proj",),
    "dense_mlp": ("mlp.down_proj",),
    "shared_experts": ("mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj"),
    "routed_experts": ("mlp.experts.0.down_proj",),
}


def weight_bytes(shape: ModelShape, plain: float, config: Config | None, method: str | None) -> WeightBytes:
    """Bytes of one weight by part, scales included.

    Args:
        plain: of one that is not quantised.
        config: the checkpoint's `quantization_config`; None: it has none.
        method: `--sglang-quantization`, which counts where the checkpoint names no method.
    """
    found = quantisation_of(config, method)
    if found is None:
        return WeightBytes.everywhere(plain)
    left_out = tuple(_left_out(config or {}))
    sizes = {}
    for part, layers in _layers_by_part(shape).items():
        kept = sum(_is_left_out(left_out, layer, _PROJECTIONS[part]) for layer in layers)
        share = kept / max(len(layers), 1)
        sizes[part] = share * plain + (1 - share) * found.bytes_per_weight
    return WeightBytes(**sizes, rest=plain)


def quantisation_of(config: Config | None, method: str | None) -> Quantisation | None:
    """How matrices are stored; None: they are not quantised, or in a format that is not known."""
    config = config or {}
    name = _method(config, method)
    if name in _FIXED:
        return _FIXED[name]
    if name in _INTEGERS:
        return Quantisation(_number(config, "bits", "w_bit") or 4, _group(config, "group_size", "q_group_size"))
    if name in _BLOCKS:
        return _blocks(config.get("weight_block_size"))
    if name == "compressed-tensors":
        return max(_compressed(config), key=lambda group: group.bytes_per_weight, default=None)
    if name == "modelopt":
        return {"FP8": _ROWS_OF_8, "NVFP4": _NVFP4}.get(str(config.get("quant_algo", "FP8")).upper())
    if name == "bitsandbytes":
        return Quantisation(4, 64, 4) if config.get("load_in_4bit") else _ROWS_OF_8
    return None


def unknown_format(config: Config | None, method: str | None) -> str | None:
    """A format whose bytes are not known, as its config calls it."""
    config = config or {}
    name, form = _method(config, method), config.get("format") or config.get("quant_algo")
    if name in _NOT_QUANTISED or form in _NOT_QUANTISED or quantisation_of(config, method) is not None:
        return None
    return f"{name} ({form})" if form else name


def _method(config: Config, method: str | None) -> str:
    name = str(config.get("quant_method") or method or "").lower().removeprefix("intel/")
    return {"compressed_tensors": "compressed-tensors", "autoround": "auto-round"}.get(name, name)


def _compressed(config: Config) -> Iterator[Quantisation]:
    """What the groups of a compressed checkpoint say; without groups, what its format and its own entries say."""
    if config.get("format") == _NVFP4_COMPRESSED:
        yield _NVFP4
        return
    groups = config.get("config_groups")
    described = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else [config]
    for weights in described:
        bits = _number(weights or {}, "num_bits") or _COMPRESSED_BITS.get(str(config.get("format")))
        if weights and bits:
            blocks = weights.get("block_structure")
            yield _blocks(blocks) if blocks else Quantisation(bits, _group(weights, "group_size"))


def _blocks(size: Any) -> Quantisation:
    """8 bits, with a float32 for each block of rows and columns, if there are blocks."""
    if not isinstance(size, list | tuple) or len(size) != 2:
        return _ROWS_OF_8
    return Quantisation(8, size[0] * size[1], 4)


def _group(config: Config, *names: str) -> int | None:
    """Weights that share a scale; -1 and 0 mean a whole row."""
    size = _number(config, *names)
    return size if size is not None and size > 0 else None


def _number(config: Config, *names: str) -> int | None:
    found = (config[name] for name in names if isinstance(config.get(name), int))
    return next(found, None)


def _layers_by_part(shape: ModelShape) -> dict[str, list[int]]:
    layers = range(shape.num_layers)
    experts = [layer for layer in layers if shape.has_experts(layer)]
    linear = [layer for layer in layers if shape.has_linear_attention(layer)]
    return {
        "attention": [layer for layer in layers if layer not in linear],
        "linear_attention": linear,
        "dense_mlp": [layer for layer in layers if layer not in experts],
        "shared_experts": experts,
        "routed_experts": experts,
    }


def _left_out(config: Config) -> Iterator[str]:
    for key in _LEFT_OUT:
        entries = config.get(key)
        if isinstance(entries, list):
            yield from (entry.replace("language_model.", "") for entry in entries if isinstance(entry, str))


def _is_left_out(entries: tuple[str, ...], layer: int, projections: tuple[str, ...]) -> bool:
    return any(_names(entry, f"model.layers.{layer}.{name}") for entry in entries for name in projections)


def _names(entry: str, module: str) -> bool:
    """Whether an entry means a module: `re:` with a regular expression, a name with `*`, or whole components of the name."""
    if entry.startswith("re:"):
        try:
            return re.match(entry.removeprefix("re:"), module) is not None
        except re.error:
            return False
    if "*" in entry:
        return fnmatch.fnmatchcase(module, entry) or fnmatch.fnmatchcase(module, f"{entry}.*")
    return f".{entry}." in f".{module}."
