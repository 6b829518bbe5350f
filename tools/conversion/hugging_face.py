"""Converts Hugging Face checkpoints into others: quantised ones for engines, or plain ones of quantised ones.

Numbers, names and `quantization_config` are as engines read them. `slime.weights.quantisers` makes them here as it does for
pushes, so the weights that a run sends to engines have the form of a checkpoint that is converted here.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.utils.errors import UserError
from slime.utils.filesystem import write_json_atomically
from slime.utils.hf_files import INDEX_FILE
from slime.weights.hf_reader import (
    Place,
    SafetensorsDirectory,
    StoredTensor,
    places_of_checkpoint,
    places_of_matrices,
)
from slime.weights.hf_writer import copy_auxiliary_files, number_shards
from slime.weights.quantised_checkpoint import open_checkpoint
from slime.weights.quantisers import (
    LINEAR_WEIGHTS,
    STRIP_NUMBERS,
    modules_by_name,
    quantisation_settings,
    quantise_fp8_blocks,
    quantise_fp8_tensor,
    quantise_integers,
)
from tools.conversion.units import ALIGNMENT, Conversion, Unit, split_into_units, write_streamed_shard

if TYPE_CHECKING:
    import torch

_EMBEDDING = re.compile(r"embed")
# Types of numbers that are not quantised.
_PLAIN_TYPES = ("BF16", "F16", "F32")
DEFAULT_SHARD_BYTES = 5 * 1024**3
# The rows of nearly all blocks of FP8; strips that end where blocks end need each scale once.
_ROWS_OF_BLOCKS = 128


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How matrices are quantised.

    Attributes:
        settings: the `quantization_config`, without the modules that are left alone.
        ignored: the entry of `quantization_config` that names those modules.
        parts: gives the tensors of a weight, by the name that each has in the place of `weight`.
    """

    settings: dict[str, Any]
    ignored: str
    parts: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]


def quantised_matrices(
    places: Mapping[str, Place], rules: Sequence[str], columns: int = 1
) -> tuple[list[str], list[str]]:
    """(weights to be quantised, modules that are left alone) among a checkpoint's tensors.

    Args:
        rules: modules to leave alone: a name, its end after a dot, or a pattern after `re:`.
        columns: the number of columns has to be a multiple of this.

    Raises:
        UserError: a pattern is not a regular expression; no weight is left; several experts are one of the tensors.
    """
    is_ignored = modules_by_name(rules, "--ignore-rules")
    chosen, left = [], []
    for name, place in places.items():
        if len(place.shape) == 3 and ".experts." in name:
            raise UserError(
                f"{name} has all experts of a layer in one tensor, in a form that is not known, so it would stay as it is; "
                "give a checkpoint with a tensor for each expert"
            )
        if not name.endswith(".weight") or len(place.shape) != 2 or _EMBEDDING.search(name):
            continue
        module = name.removesuffix(".weight")
        fits = LINEAR_WEIGHTS.search(name) and not is_ignored(module) and place.shape[1] % columns == 0
        (chosen if fits and place.dtype in _PLAIN_TYPES else left).append(name if fits else module)
    if not chosen:
        multiple = f", or have columns that are no multiple of {columns}" if columns > 1 else ""
        raise UserError(
            "no weight is left that could be quantised: the checkpoint has none of the known names, or all are ignored"
            f"{multiple}"
        )
    return chosen, left


def fp8_recipe(strategy: str, block: Sequence[int], scale_format: str) -> Recipe:
    """The recipe for FP8. `strategy`: block, channel or tensor."""
    if strategy == "channel":
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
        inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
        settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
        return Recipe(settings, "ignore", _fp8_channels)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if strategy == "tensor":
        return Recipe(settings, "modules_to_not_convert", _fp8_tensor)
    settings["weight_block_size"] = list(block)
    if scale_format != "float":
        settings["scale_fmt"] = scale_format
    parts = functools.partial(_fp8_blocks, block=tuple(block), scale_format=scale_format)
    return Recipe(settings, "modules_to_not_convert", parts)


def _fp8_blocks(weight: torch.Tensor, block: tuple[int, int], scale_format: Any) -> Mapping[str, torch.Tensor]:
    return dict(zip(("weight", "weight_scale_inv"), quantise_fp8_blocks(weight, block, scale_format), strict=True))


def _fp8_tensor(weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return dict(zip(("weight", "weight_scale"), quantise_fp8_tensor(weight), strict=True))


def _fp8_channels(weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
    # A channel is a block of one row.
    return dict(zip(("weight", "weight_scale"), quantise_fp8_blocks(weight, (1, weight.shape[1])), strict=True))


def integer_recipe(bits: int, group_size: int, is_symmetric: bool) -> Recipe:
    """The recipe that rounds to nearest, in groups of columns."""
    weights = {
        "num_bits": bits, "type": "int", "symmetric": is_symmetric, "strategy": "group", "group_size": group_size,
        "dynamic": False,
    }  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": groups,
    }  # fmt: skip
    parts = functools.partial(quantise_integers, bits=bits, group_size=group_size, symmetric=is_symmetric)
    return Recipe(settings, "ignore", parts)


def quantise_checkpoint(
    source: Path, target: Path, recipe: Recipe, rules: Sequence[str], columns: int, options: argparse.Namespace
) -> None:
    """Write `source` with its matrices quantised by `recipe` as `target`; see `Conversion` for errors. Experts that are in one
    tensor get tensors of their own, as engines take them.

    Args:
        rules, columns: see `quantised_matrices`.
        options: those of `add_options`.

    Raises:
        UserError: `source` is quantised already.
    """
    if quantisation_settings(source) is not None:
        raise UserError(f"{source} is quantised already: make a plain one of it first (tools/fp8_cast_bf16.py)")
    places = places_of(source, places_of_matrices)
    chosen, left = quantised_matrices(places, rules, columns)
    settings = {**recipe.settings, recipe.ignored: left}
    config = {**read_config(source), "quantization_config": settings}
    _convert(
        source, target, config, functools.partial(_quantised, source, frozenset(chosen), recipe.parts), places, options
    )


def dequantise_checkpoint(
    source: Path,
    target: Path,
    options: argparse.Namespace,
    files: Sequence[str] = (),
    config_file: Path | None = None,
) -> None:
    """Write the quantised checkpoint `source` with plain numbers, in the 16-bit type of its config, as `target`.

    Args:
        files: names of weight files, if only the weights of these are wanted.
        config_file: the config of the new checkpoint, in place of that of `source`.

    Raises:
        UserError: `source` is not quantised, or has no such file; or several experts are quantised in one tensor.
    """
    if quantisation_settings(source) is None:
        raise UserError(f"{source} is not quantised: its config.json has no quantization_config")
    places = places_of(source)
    absent = sorted(set(files) - {place.path.name for place in places.values()})
    if absent:
        raise UserError(f"--files {absent[0]}: {source} has no such weight file")
    config = _json_object(config_file) if config_file is not None else read_config(source)
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    stored = _places_of_weights(source, places)
    wanted = {name: place for name, place in stored.items() if not files or place.path.name in files}
    _convert(source, target, config, functools.partial(_plain, source, dtype), wanted, options)


def _places_of_weights(source: Path, places: Mapping[str, Place]) -> dict[str, Place]:
    """Where the weights of a quantised checkpoint lie, by name; for a packed weight it is the place of its integers."""
    opened = open_checkpoint(source)
    names = opened.names()
    found = {name: place for name in names if (place := places.get(name) or places.get(f"{name}_packed"))}
    # Nothing is stored under the names of experts in one tensor, and that tensor is no part of a weight, so it is copied.
    for name in places.keys() - {part for weight in names for part in opened.part_names(weight)}:
        if places[name].dtype not in _PLAIN_TYPES:
            raise UserError(
                f"{name} has all experts of a layer in one tensor of {places[name].dtype}, which is not taken apart here; give "
                "a checkpoint with a tensor for each expert"
            )
        found[name] = places[name]
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that all converters to Hugging Face checkpoints have."""
    parser.add_argument("--max-workers", type=int, default=2, help="processes that convert (default: %(default)s)")
    parser.add_argument(
        "--chunk-size", type=int, default=DEFAULT_SHARD_BYTES, metavar="BYTES",
        help="largest size of a weight file before quantisation (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("-f", "--force", action="store_true", help="replace the target if it exists")


def write_hf_shard(
    named: Callable[[Sequence[str]], Iterator[tuple[str, torch.Tensor | Iterable[torch.Tensor]]]],
    draft: Path,
    unit: Unit,
) -> tuple[Path, None]:
    """Write the tensors that `named` gives for the unit's names as one weight file."""
    file = draft / shard_name(unit.index)
    # A weight becomes four tensors at most.
    write_streamed_shard(file, named(unit.names), 4 * len(unit.names))
    return file, None


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def finish_hf_checkpoint(source: Path, config: Mapping[str, Any], draft: Path, count: int) -> None:
    """Make a checkpoint of `count` shards in `draft`, with the tokenizer of `source`."""
    number_shards(draft, [shard_name(index) for index in range(count)])
    copy_auxiliary_files(source, draft)
    write_json_atomically(draft / "config.json", dict(config))


def reopen_hf_checkpoint(draft: Path) -> None:
    """Undo what `finish_hf_checkpoint` has done to the shards in `draft`."""
    for left in (*draft.glob("model-*-of-*.safetensors"), draft / INDEX_FILE):
        number = re.match(r"model-(\d+)-of-", left.name)
        if number:
            left.rename(draft / shard_name(int(number[1]) - 1))
        else:
            left.unlink(missing_ok=True)


def _convert(
    source: Path,
    target: Path,
    config: Mapping[str, Any],
    named: Callable[[Sequence[str]], Iterator[tuple[str, torch.Tensor | Iterable[torch.Tensor]]]],
    places: Mapping[str, Place],
    options: argparse.Namespace,
) -> None:
    # In the order of the files, so that neighbours stay together.
    ordered = sorted(places.items(), key=lambda item: (item[1].path.name, item[1].start))
    sizes = [(name, place.stop - place.start) for name, place in ordered]
    conversion = Conversion(
        source, target, {"config": config, "chunk_size": options.chunk_size}, options.max_workers, options.force
    )
    conversion.run(
        split_into_units(sizes, options.max_workers, options.chunk_size),
        functools.partial(write_hf_shard, named),
        lambda draft, results: finish_hf_checkpoint(source, config, draft, len(results)),
        reopen_hf_checkpoint,
    )


def _quantised(
    source: Path,
    chosen: frozenset[str],
    parts: Callable[[torch.Tensor], Mapping[str, torch.Tensor]],
    names: Sequence[str],
) -> Iterator[tuple[str, torch.Tensor]]:
    stored = SafetensorsDirectory(source)
    for name in names:
        tensor = stored.tensor(name)[...]
        if name not in chosen:
            yield name, tensor
            continue
        module = name.removesuffix("weight")
        yield from ((module + part, made) for part, made in parts(tensor).items())


def _plain(
    source: Path, dtype: str, names: Sequence[str]
) -> Iterator[tuple[str, torch.Tensor | Iterable[torch.Tensor]]]:
    import torch

    plain = getattr(torch, dtype)
    opened = open_checkpoint(source, plain)
    for name in names:
        stored = opened.tensor(name)
        # A tensor that was never quantised is copied.
        if isinstance(stored, StoredTensor):
            yield name, stored[...]
            continue
        rows = max(STRIP_NUMBERS // stored.shape[1] // _ROWS_OF_BLOCKS, 1) * _ROWS_OF_BLOCKS
        strips = (stored[first : first + rows].to(plain) for first in range(0, stored.shape[0] or 1, rows))
        yield name, strips if math.prod(stored.shape) * plain.itemsize % ALIGNMENT == 0 else list(strips)


def places_of(source: Path, read: Callable[[Path], dict[str, Place]] = places_of_checkpoint) -> dict[str, Place]:
    """Where the tensors of a Hugging Face checkpoint lie, by name; those that `read` finds.

    Raises:
        UserError: `source` is no directory, has no weights, or lacks one of their files.
    """
    if not source.is_dir():
        raise UserError(f"{source} is no directory; give a Hugging Face checkpoint")
    places = read(source)
    if not places:
        raise UserError(f"{source} holds no *.safetensors file")
    return places


def read_config(hf_dir: Path) -> dict[str, Any]:
    """The unchanged `config.json` of a Hugging Face directory.

    Raises:
        UserError: there is none, or it is broken.
    """
    file = hf_dir / "config.json"
    if not file.is_file():
        raise UserError(f"{hf_dir} has no config.json: it is no Hugging Face checkpoint")
    return _json_object(file)


def _json_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no JSON object")
    return found


def differences(checkpoint: Path, other: Path, ignored: Callable[[str], bool] = lambda name: False) -> Iterator[str]:
    """The differences of two Hugging Face checkpoints, in words. Stored tensors are compared bit by bit.

    Args:
        ignored: whether a tensor may be missing in `checkpoint`.
    """
    one, two = SafetensorsDirectory(checkpoint), SafetensorsDirectory(other)
    yield from (f"{name} is in {checkpoint} alone" for name in sorted(one.names() - two.names()))
    for name in sorted(two.names()):
        if name not in one.names():
            if not ignored(name):
                yield f"{name} is in {other} alone"
            continue
        found, expected = one.tensor(name), two.tensor(name)
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            yield f"{name} is {found.dtype} {list(found.shape)}, and {expected.dtype} {list(expected.shape)} in {other}"
        elif not _bits(found).equal(_bits(expected)):
            yield f"{name} has other numbers"


def _bits(stored: StoredTensor) -> torch.Tensor:
    import torch

    return stored[...].contiguous().flatten().view(torch.uint8)
