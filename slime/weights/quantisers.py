"""Tensors of a trained model as a quantised checkpoint has them: FP8 by blocks or by tensors, INT4 in groups.

The checkpoint decides: `quantization_config` in its `config.json` how, and its tensors which. A weight is quantised where the
checkpoint has its scale, so norms, embeddings, routers and whatever else its maker left alone stay as they are. What comes out
must have the names, dtypes and shapes that the checkpoint has.

Scales of FP8 are the largest magnitude over 448, the largest number of `float8_e4m3fn`. Those of INT4, the rounding and the
packing are those of the `compressed-tensors` package, with which engines read it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.utils.errors import RunError, UserError
from slime.weights.hf_reader import Place, places_of_checkpoint, safetensors_dtype

if TYPE_CHECKING:
    import torch

    from slime.weights.buckets import NamedTensors

_FP8_LARGEST = 448.0
# Of a tensor of zeros: the scale is not zero.
_LEAST_AMAX = 1e-12


def quantise_fp8_blocks(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as `float8_e4m3fn`, and the scale of every block, float32 [rows / block, columns / block], rounded up.

    A block of zeros has the scale 1.
    """
    import torch

    (rows, columns), (height, width) = weight.shape, block
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.where(amax == 0, 1.0, amax / _FP8_LARGEST)
    quantised = (blocks / scale).clamp(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn)
    return quantised.view(padded.shape)[:rows, :columns].contiguous(), scale[:, 0, :, 0].contiguous()


def quantise_fp8_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor as `float8_e4m3fn`, and its scale, a float32 scalar."""
    import torch

    scale = weight.float().abs().amax().clamp(min=_LEAST_AMAX) / _FP8_LARGEST
    return (weight.float() / scale).clamp(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn), scale


def quantise_int4(weight: torch.Tensor, scheme: Any) -> dict[str, torch.Tensor]:
    """A matrix as the tensors of a `pack-quantized` module: weight_packed, weight_scale, weight_shape, weight_zero_point.

    Args:
        scheme: a `QuantizationScheme` of compressed-tensors whose weights are quantised by group or by channel.
    """
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    rows, columns = weight.shape
    groups = weight.view(rows, -1, scheme.weights.group_size or columns)
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    return PackedQuantizationCompressor.compress(state, scheme)


@dataclasses.dataclass(frozen=True)
class Quantiser:
    """Quantises what the checkpoint at `directory` has quantised.

    `suffix` is what the name of a quantised weight has added, or in the place of `weight`, for its scale; `quantise` gives the
    tensors of a module, by what stands in the place of `weight`.
    """

    directory: Path
    suffix: str
    quantise: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
    places: Mapping[str, Place]

    def __call__(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the checkpoint; those that were one follow each other.

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
                tensor = tensor.to(_integer_type(place.dtype))
            form = (safetensors_dtype(tensor.dtype), tuple(tensor.shape))
            if place is not None and form != (place.dtype, place.shape):
                raise RunError(
                    f"weight push: {module}{part} would be {form[0]} {list(form[1])}, and is {place.dtype} "
                    f"{list(place.shape)} in {self.directory}: its quantization_config does not fit its tensors"
                )
            found.append((module + part, tensor))
        return found


def quantisation_settings(directory: Path) -> Mapping[str, Any] | None:
    """`quantization_config` of a checkpoint; None where it has none."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    return config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")


def refuse_quantised(directory: str | Path) -> None:
    """Raise UserError where training would start from quantised weights: their scales would be left out."""
    if quantisation_settings(Path(directory)) is not None:
        raise UserError(
            f"{directory} holds quantised weights, which training cannot start from; name the checkpoint that they were made "
            "of with --ref-load (or --load), and keep this one as --hf-checkpoint for the engines"
        )


def quantiser_of(directory: str | Path) -> Quantiser | None:
    """The quantiser for a checkpoint; None where it is not quantised.

    Raises:
        UserError: it is quantised in a way that is not known here.
    """
    directory = Path(directory)
    settings = quantisation_settings(directory)
    if settings is None:
        return None
    places = places_of_checkpoint(directory)
    if not places:
        # A configuration alone, with which a run is rehearsed.
        return None
    method = settings.get("quant_method")
    if method == "fp8":
        return _fp8(directory, settings, places)
    if method == "compressed-tensors" and settings.get("format") == "pack-quantized":
        return Quantiser(directory, "weight_packed", _int4(directory, settings), places)
    raise _refusal(directory, f"quant_method {method}, format {settings.get('format')}")


def _fp8(directory: Path, settings: Mapping[str, Any], places: Mapping[str, Place]) -> Quantiser:
    if settings.get("activation_scheme", "dynamic") != "dynamic" or settings.get("fmt", "e4m3") != "e4m3":
        raise _refusal(directory, f"activation_scheme {settings.get('activation_scheme')}, fmt {settings.get('fmt')}")
    if settings.get("scale_fmt") not in (None, "float"):
        raise _refusal(directory, f"scale_fmt {settings['scale_fmt']}")
    block = settings.get("weight_block_size")
    if block is None:
        names = ("weight", "weight_scale")
        quantise: Callable[[Any], Any] = quantise_fp8_tensor
    else:
        names = ("weight", "weight_scale_inv")

        def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return quantise_fp8_blocks(weight, tuple(block))

    return Quantiser(directory, names[1], lambda weight: dict(zip(names, quantise(weight), strict=True)), places)


def _int4(directory: Path, settings: Mapping[str, Any]) -> Callable[[torch.Tensor], Mapping[str, torch.Tensor]]:
    from compressed_tensors.quantization import QuantizationScheme

    schemes = list(settings.get("config_groups", {}).values())
    weights = schemes[0].get("weights") or {} if len(schemes) == 1 else {}
    if weights.get("strategy") not in ("group", "channel") or weights.get("actorder"):
        raise _refusal(
            directory, "pack-quantized with more than one group, another strategy, or an order of activations"
        )
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], **schemes[0]})
    return lambda weight: quantise_int4(weight, scheme)


def _integer_type(name: str) -> torch.dtype:
    import torch

    return torch.int32 if name == "I32" else torch.int64


def _refusal(directory: Path, what: str) -> UserError:
    return UserError(
        f"--hf-checkpoint {directory}: weights are not quantised as its quantization_config asks for ({what}); FP8 (e4m3, "
        "dynamic activations) and INT4 (compressed-tensors, pack-quantized) are"
    )
