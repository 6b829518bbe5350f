"""Describes a checkpoint directory in lines to read, and makes and compares checksums of its files."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.utils.checkpoint_directory import (
    FSDP2,
    FSDP_OPTIMIZER,
    METADATA,
    POINTER,
    is_megatron_checkpoint,
    iteration_directory,
    latest_iteration,
    sharded_backend,
)
from slime.utils.errors import UserError
from slime.utils.filesystem import write_json_atomically
from slime.weights.hf_reader import places_of_checkpoint, places_of_tensors
from slime.weights.hf_writer import CHECKSUMS
from slime.weights.quantisers import quantisation_settings
from tools.conversion.hugging_face import read_config
from tools.conversion.torch_dist import describe_model, missing_and_surplus, parse_model_flags
from tools.conversion.torch_dist_files import TorchDistDirectory, dtype_of, read_common, require_format

_READ_BYTES = 16 * 1024**2


def describe(directory: Path) -> Iterator[str]:
    """Lines about a Hugging Face directory, a checkpoint of Megatron or FSDP, or one of its iterations.

    Raises:
        UserError: it is none of these, or a file of it is missing or cut off.
    """
    root = _newest(directory)
    backend, is_torch_dist = sharded_backend(root), (root / ".metadata").is_file()
    if root != directory:
        others = sorted(int(path.name[5:]) for path in directory.glob("iter_*") if path.name[5:].isdigit())
        if backend is None and not is_torch_dist:
            raise UserError(f"{root / METADATA} is missing, or cannot be read, so the checkpoint is not whole")
        kind = "FSDP" if backend == FSDP2 else "Megatron"
        newest = latest_iteration(directory)
        yield f"{kind} checkpoint, iterations {', '.join(map(str, others))}; the newest is {newest} ({POINTER})"
        directory = root
    if backend == FSDP2:
        yield from _describe_fsdp(directory)
    elif is_torch_dist:
        yield from _describe_torch_dist(directory)
    elif (directory / "config.json").is_file():
        yield from _describe_hf(directory)
    else:
        raise UserError(f"{directory} is no checkpoint: it has neither {POINTER} nor .metadata nor config.json")


def _newest(directory: Path) -> Path:
    """The directory of the newest iteration, if `directory` has several; else itself."""
    return (
        iteration_directory(directory, latest_iteration(directory)) if is_megatron_checkpoint(directory) else directory
    )


def _describe_fsdp(directory: Path) -> Iterator[str]:
    noted = json.loads((directory / METADATA).read_text())
    yield f"iteration {noted.get('iteration', '?')}, saved by {noted.get('world_size', '?')} ranks with --train-backend fsdp"
    yield f"optimizer state: {'yes' if noted.get('has_optimizer') else 'no'}"
    states = sorted((directory / "states").glob("*"))
    for part in (*states, *([directory / FSDP_OPTIMIZER] if noted.get("has_optimizer") else ())):
        TorchDistDirectory(part).require_files()
    _require_generators(directory)
    yield from _states_line(states)
    yield from _describe_hf(directory)


def _states_line(states: Sequence[Path]) -> Iterator[str]:
    if states:
        yield f"further sets of weights: {', '.join(state.name for state in states)}"


def _describe_torch_dist(directory: Path) -> Iterator[str]:
    stored, common = _whole(directory)
    layout = ", ".join(f"{name} {size}" for name, size in common.get("layout", {}).items())
    yield f"iteration {common.get('iteration', '?')}, saved by {layout or 'a converter'}"
    yield f"optimizer state: {'yes' if common.get('has_optimizer') else 'no'}"
    states = sorted((directory / "states").glob("*"))
    for state in states:
        _whole(state)
    yield from _states_line(states)
    numel: collections.Counter[str] = collections.Counter()
    for entry in stored.tensors.values():
        numel[str(dtype_of(entry)).removeprefix("torch.")] += math.prod(entry.size)
    yield _sizes_line(len(stored.tensors), numel)


def _whole(directory: Path) -> tuple[TorchDistDirectory, dict[str, Any]]:
    """(a torch_dist directory, its common part). Raises UserError if a file is missing or cut off."""
    stored = TorchDistDirectory(directory)
    stored.require_files()
    require_format(directory)
    _require_generators(directory)
    return stored, read_common(directory)


def _require_generators(directory: Path) -> None:
    """Raise UserError if a file with the states of a rank's generators is cut off."""
    for path in directory.glob("rng_*.safetensors"):
        places_of_tensors(path)


def _describe_hf(directory: Path) -> Iterator[str]:
    config = read_config(directory)
    places = places_of_checkpoint(directory)
    numel: collections.Counter[str] = collections.Counter()
    for place in places.values():
        numel[place.dtype] += math.prod(place.shape)
    settings = quantisation_settings(directory)
    method = "no" if settings is None else f"{settings.get('quant_method')} {settings.get('format', '')}".rstrip()
    files = {place.path.name for place in places.values()}
    yield f"Hugging Face checkpoint of {config.get('model_type')}, {len(files)} weight files, quantised: {method}"
    yield _sizes_line(len(places), numel)


def _sizes_line(count: int, numel: Mapping[str, int]) -> str:
    parts = ", ".join(f"{number:,} {dtype}" for dtype, number in sorted(numel.items()))
    return f"{count} tensors, numbers in them: {parts or 'none'}"


def misfits(directory: Path, hf_checkpoint: Path, words: Sequence[str]) -> list[str]:
    """The differences between a checkpoint and the model of `hf_checkpoint` with the model flags `words`, in words."""
    root = _newest(directory)
    if sharded_backend(root) == FSDP2 or (root == directory and not (root / ".metadata").is_file()):
        args = parse_model_flags(hf_checkpoint, words)
        missing, surplus = missing_and_surplus(root, describe_model(args)[0], args.model_name)
        return [*(f"lacks {name}" for name in missing), *(f"has {name}, which the model has not" for name in surplus)]
    from slime.backends.megatron_utils import initialize

    initialize.prepare()
    from slime.backends.megatron_utils.checkpoint.stored import VOCABULARY, Stored, other_sizes

    found = {key: tuple(entry.size) for key, entry in TorchDistDirectory(root).tensors.items()}
    args = parse_model_flags(hf_checkpoint, words)
    parameters, _ = describe_model(args, found)
    wanted = {piece.key: piece.shape for parameter in parameters for piece in parameter.pieces}
    lines = other_sizes(args, read_common(root), Stored(found))
    lines += [f"lacks {key}" for key in sorted(wanted.keys() - found.keys())]
    lines += [f"has {key}, which the model has not" for key in sorted(found.keys() - wanted.keys())]
    for key in sorted(wanted.keys() & found.keys()):
        # The vocabulary's padding depends on the layout, so its rows are not compared.
        is_vocabulary = key in VOCABULARY
        if wanted[key][is_vocabulary:] != found[key][is_vocabulary:]:
            lines.append(f"{key} is {list(found[key])}, and {list(wanted[key])} in the model")
    return lines


def write_checksums(directory: Path) -> int:
    """Write the digest of every file below `directory` to `checksums.json` there; returns how many files there are."""
    digests = {str(path.relative_to(directory)): _digest(path) for path in _files(directory)}
    write_json_atomically(directory / CHECKSUMS, digests)
    return len(digests)


def check_checksums(directory: Path) -> list[str]:
    """The differences from `checksums.json`, in words.

    Raises:
        UserError: there is no such file, or it is broken.
    """
    try:
        digests = dict(json.loads((directory / CHECKSUMS).read_text()))
    except FileNotFoundError as error:
        raise UserError(f"{directory} has no {CHECKSUMS}: --write-checksums makes it") from error
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{directory / CHECKSUMS} cannot be read ({error}): nothing is known of the files' content"
        ) from error
    present = {str(path.relative_to(directory)): path for path in _files(directory)}
    lines = [f"{name} is missing" for name in sorted(digests.keys() - present.keys())]
    lines += [f"{name} is new" for name in sorted(present.keys() - digests.keys())]
    return lines + [
        f"{name} has changed"
        for name in sorted(digests.keys() & present.keys())
        if _digest(present[name]) != digests[name]
    ]


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory")
    return sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / CHECKSUMS)


def _digest(path: Path) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return f"xxh3_128:{digest.hexdigest()}"
