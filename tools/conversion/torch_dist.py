"""Converts Hugging Face directories to Megatron checkpoints (torch_dist), and back.

Towards Megatron the model is built on the meta device, where it takes no memory, and asked how it describes its parameters to
torch_dist. Each parameter is then made of its Hugging Face tensors and written, one after the other. Towards Hugging Face no
model is built: the names and places in the checkpoint's metadata say where each layer's parameters lie. Either way the rules of
the family (`slime.models`) and the layouts are those of training.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slime.models.config_entries import text_config_of
from slime.models.families import FAMILIES, FAMILIES_BY_NAME, family_name, model_args_from_hf
from slime.models.family import Family, next_expert
from slime.models.tensor_layouts import TensorSizes
from slime.utils.checkpoint_directory import POINTER, is_megatron_checkpoint, iteration_directory, latest_iteration
from slime.utils.errors import UserError
from slime.utils.filesystem import write_text_atomically
from slime.utils.misc import no_garbage_collection
from slime.weights.hf_reader import StoredTensor
from slime.weights.hf_writer import Stacks, stacked, stacks_of
from slime.weights.quantised_checkpoint import open_checkpoint
from slime.weights.quantisers import quantiser_of
from tools.command_line import model_alone
from tools.conversion.hugging_face import finish_hf_checkpoint, read_config, reopen_hf_checkpoint, shard_name
from tools.conversion.origin import require_same_model, require_same_tensors
from tools.conversion.torch_dist_files import (
    COMMON,
    TorchDistDirectory,
    dtype_of,
    joined,
    read_common,
    save_in_parts,
    split_parts,
)
from tools.conversion.units import Conversion, Unit, split_into_units, write_streamed_shard

# The flags of a run that only builds a model; --load-debug-rollout-data will name a file that it never reads.
_RUN = (
    "--model-args-from-hf", "--debug-train-only", "--rollout-batch-size", "1",
    "--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1", "--disable-rewards-normalization",
)  # fmt: skip
_LAYERS = re.compile(r"(?<=\blayers)\.(?!\d)")
_EXPERTS = ".experts.experts."
_EXPERT_NUMBER = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")
# The prefix, in units, of the names of tensors that are copied from the origin.
_ORIGIN = "origin:"
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a parameter in torch_dist's form: it lies at `offset` of the tensor `key`, which has `shape`.

    `stride` and `start` say which entries of the parameter it has. `sizes` are its own sizes, with a one for each of the `axes`
    axes (of layers, of experts) that torch_dist puts in front.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    axes: int


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of the model with its pieces in torch_dist."""

    name: str
    pieces: tuple[Piece, ...]
    numel: int


@dataclasses.dataclass(frozen=True)
class StoredParameter:
    """A parameter of a Megatron checkpoint: the entry at `prefix` of the first axes of the tensor `key`."""

    key: str
    prefix: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int


# The flags with which runs divide the model over their ranks.
_LAYOUT = (
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size", "--expert-model-parallel-size",
    "--expert-tensor-parallel-size", "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--num-layers-in-first-pipeline-stage", "--num-layers-in-last-pipeline-stage", "--pipeline-model-parallel-layout",
    "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
    "--virtual-pipeline-model-parallel-size", "--microbatch-group-size-per-virtual-pipeline-stage",
    "--microbatch-group-size-per-vp-stage",
)  # fmt: skip
_LAYOUT_SWITCHES = (
    "--sequence-parallel", "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
)  # fmt: skip


def parse_model_flags(hf_checkpoint: Path, words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a run whose model is that of `hf_checkpoint`, with the flags `words`.

    Flags of a layout are left out, with a notice: here one process has the whole model, and any layout loads its result.
    """
    from slime.arguments import parse_args

    layout = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for flag in (*_LAYOUT, *_LAYOUT_SWITCHES):
        layout.add_argument(flag, dest=flag, action="store_true" if flag in _LAYOUT_SWITCHES else "store")
    left_out, words = layout.parse_known_args(words)
    if vars(left_out):
        print(f"no effect here, on a model that is in one piece: {', '.join(vars(left_out))}", file=sys.stderr)
    given = ["--hf-checkpoint", str(hf_checkpoint), *_RUN]
    given += ["--load-debug-rollout-data", str(hf_checkpoint / "config.json")]
    # Names on disk are the same for all layer specs, and this one needs no kernels.
    return parse_args(model_alone, argv=[*given, *words, "--transformer-impl", "local"])


def describe_model(
    args: argparse.Namespace, shapes: Mapping[str, Sequence[int]] | None = None
) -> tuple[list[Parameter], list[str]]:
    """(parameters, keys of objects) of the whole model that `args` describe, in torch_dist's form. No weights are made.

    Args:
        shapes: shapes of a checkpoint's tensors; parameters that it has get its names.
    """
    import torch.distributed as dist

    from slime.backends.megatron_utils import initialize

    # A process group of this process alone, over no network.
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        # torchrun may have set others.
        os.environ.update(RANK="0", WORLD_SIZE="1")
        initialize.init(args)
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

        from slime.backends.megatron_utils.checkpoint.stored import Stored, ask_by_stored_names, keeps_layers_apart
        from slime.backends.megatron_utils.model_provider import build_model

        with torch.device("meta"):
            model = build_model(args, pre_process=True, post_process=True, vp_stage=None)
        own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        parameters, objects, stored = [], [], Stored(shapes or {})
        described = model.sharded_state_dict(metadata={"non_homogeneous_layers": keeps_layers_apart(stored.weights)})
        if shapes is not None:
            ask_by_stored_names(described, stored.weights, ())
        for name, entry in described.items():
            if isinstance(entry, ShardedObject):
                objects.append(entry.unique_key)
                continue
            if name not in own:
                continue
            found = [entry] if isinstance(entry, ShardedTensor) else _flat(entry.build())
            pieces = tuple(_piece(sharded) for sharded in found)
            # This one rank has the whole of every parameter.
            parameters.append(Parameter(name, pieces, sum(sharded.data.numel() for sharded in found)))
        return parameters, objects
    finally:
        initialize.destroy()


def _flat(built: Any) -> list[Any]:
    values = built.values() if isinstance(built, dict) else built if isinstance(built, list | tuple) else (built,)
    return [
        found for value in values for found in (_flat(value) if isinstance(value, dict | list | tuple) else (value,))
    ]


def _piece(sharded: Any) -> Piece:
    axes = sharded.prepend_axis_num
    sizes = (1,) * axes + tuple(sharded.local_shape)
    data = sharded.data
    return Piece(
        sharded.key,
        tuple(sharded.global_shape),
        tuple(sharded.global_offset),
        sizes,
        data.stride(),
        data.storage_offset(),
        axes,
    )


def convert_hf_to_torch_dist(
    source: Path, target: Path, words: Sequence[str], *, workers: int, force: bool, largest: int
) -> None:
    """Write the Hugging Face directory `source` as the Megatron checkpoint `target`, of iteration 0. See `Conversion` for
    errors.

    Args:
        words: model flags, for what config.json does not say.

    Raises:
        UserError: tensors are missing or surplus, or the flags contradict the checkpoint.
    """
    # These calls import Megatron.
    with no_garbage_collection():
        args = parse_model_flags(source, words)
        family = _family(source, args.model_name)
        parameters, objects = describe_model(args)
    kept = [parameter for parameter in parameters if not family.leaves_out(parameter.name)]
    missing, surplus = missing_and_surplus(source, kept, args.model_name)
    for what, names in (("lacks", missing), ("has, and the model of the flags has not,", surplus)):
        if names:
            raise UserError(f"{source} {what} {len(names)} tensors: {', '.join(names[:20])}")
    sizes = [(parameter.name, 2 * parameter.numel) for parameter in kept]
    write = functools.partial(
        _write_distcp, source, family, _sizes(args), {parameter.name: parameter for parameter in kept}
    )
    conversion = Conversion(
        source, target, {"flags": list(words), "format": "torch_dist", "chunk_size": largest}, workers, force
    )
    units = split_into_units(sizes, workers, largest)
    from slime.backends.megatron_utils.checkpoint.stored import model_notes

    conversion.run(units, write, functools.partial(_finish_torch_dist, objects, model_notes(args)))


def _sizes(args: argparse.Namespace) -> TensorSizes:
    from slime.backends.megatron_utils.hf_conversion import tensor_sizes

    return tensor_sizes(args)


def _family(hf_dir: Path, model_name: str | None) -> Family:
    config = read_config(hf_dir)
    name = family_name(model_name) if model_name else None
    family = FAMILIES_BY_NAME.get(name) if model_name else FAMILIES.get(config.get("model_type"))
    if family is None or not family.is_trained:
        raise UserError(f"{hf_dir}: no conversion for {model_name or config.get('model_type')!r}")
    return family.of_model(text_config_of(config)["num_hidden_layers"])


def missing_and_surplus(
    hf_dir: Path, parameters: Sequence[Parameter], model_name: str | None
) -> tuple[list[str], list[str]]:
    """(tensors that a Hugging Face directory lacks for the model's parameters, tensors that it has for no parameter)."""
    family = _family(hf_dir, model_name)
    needed = {
        hf_name
        for parameter in parameters
        if not family.leaves_out(parameter.name)
        for hf_name in family.find(parameter.name)[1]
    }
    present = open_checkpoint(hf_dir).names()
    surplus, num_layers = _of_the_model(hf_dir, present - needed, family), _num_layers(hf_dir)
    return sorted(needed - present), sorted(name for name in surplus if not family.may_be_left_out(name, num_layers))


def _is_not_trained(family: Family, hf_name: str) -> bool:
    return family.not_trained is not None and family.not_trained.search(hf_name) is not None


def is_left_out(hf_dir: Path, hf_name: str) -> bool:
    """Whether exports leave out a tensor of a directory, because it follows from others or is another one under a second name.
    Parts that are not trained are exported, and so are layers behind the model's last one."""
    family, num_layers = _family(hf_dir, None), _num_layers(hf_dir)
    if family.is_exported_as_stored(hf_name, num_layers):
        return False
    return family.may_be_left_out(hf_name, num_layers) or not _of_the_model(hf_dir, {hf_name}, family)


def _num_layers(hf_dir: Path) -> int:
    return text_config_of(read_config(hf_dir))["num_hidden_layers"]


def _of_the_model(hf_dir: Path, names: set[str], family: Family) -> set[str]:
    """Those of `names` that have weights of their own."""
    tied = read_config(hf_dir).get("tie_word_embeddings", False)
    return {name for name in names if not family.ignored.search(name) and not (tied and name == "lm_head.weight")}


def _write_distcp(
    source: Path, family: Family, sizes: TensorSizes, parameters: dict[str, Parameter], draft: Path, unit: Unit
) -> tuple[Path, list[Any]]:
    """Write the pieces of the unit's parameters as one file; returns the file and where each piece lies in it."""
    # Without checksums: the file system has its own, and nobody reads these.
    torch.serialization.set_crc32_options(False)
    # Training turns quantised weights into numbers of 16 bits; the config says of which kind.
    config = text_config_of(read_config(source))
    dtype = torch.float16 if (config.get("dtype") or config.get("torch_dtype")) == "float16" else torch.bfloat16
    opened, written = open_checkpoint(source, dtype), []
    path = _iteration(draft) / f"__{unit.index}_0.distcp"
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        for name in unit.names:
            rule, hf_names = family.find(name)
            tensors = [opened.tensor(hf_name) for hf_name in hf_names]
            parts = rule.layout.parts(tensors, sizes)
            if not all(isinstance(tensor, StoredTensor) for tensor in tensors):
                parts = [part.to(dtype) for part in parts]
            elif len({part.dtype for part in parts}) > 1:
                parts = [joined(parts)]
            parameter, numel = parameters[name], sum(part.numel() for part in parts)
            if numel != parameter.numel:
                raise UserError(
                    f"{source}: {', '.join(hf_names)} have {numel} entries for {name}, and the model flags ask for "
                    f"{parameter.numel}; make the shape flags agree with config.json"
                )
            for piece in parameter.pieces:
                start = file.tell()
                save_in_parts(file, piece.sizes, _of_piece(parts, piece))
                place = [str(parts[0].dtype).removeprefix("torch."), start, file.tell() - start]
                written.append([dataclasses.asdict(piece), path.name, *place])
                # Numbers can be mapped if they start at a multiple of their size.
                file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
    return path, written


def _of_piece(parts: Sequence[torch.Tensor], piece: Piece) -> list[torch.Tensor]:
    """The entries of a piece in their order, as flat parts. `parts`: those of its parameter."""
    shape = torch.empty(piece.sizes[piece.axes :], device="meta")
    if shape.stride() != tuple(piece.stride):
        whole = torch.cat([part.flatten() for part in parts])
        return [whole.as_strided(shape.shape, piece.stride, piece.start).flatten()]
    found, begin = [], 0
    for part in parts:
        first, last = max(piece.start - begin, 0), min(piece.start + shape.numel() - begin, part.numel())
        if first < last:
            found.append(part.flatten()[first:last])
        begin += part.numel()
    return found


def _iteration(draft: Path) -> Path:
    return iteration_directory(draft, 0)


def _finish_torch_dist(objects: Sequence[str], sizes: dict[str, Any], draft: Path, results: list[Any]) -> None:
    """Write metadata, the common part and the pointer as Megatron-Core 0.16 and torch do."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, WriteResult, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    directory, described = _iteration(draft), {}
    places: list[WriteResult] = []
    for piece, file_name, dtype, start, length in (entry for result in results for entry in result):
        key, offset = piece["key"], torch.Size(piece["offset"])
        entry = described.setdefault(
            key,
            TensorStorageMetadata(TensorProperties(getattr(torch, dtype)), torch.Size(piece["shape"]), []),
        )
        entry.chunks.append(ChunkStorageMetadata(offset, torch.Size(piece["sizes"])))
        info = _StorageInfo(file_name, start, length)
        places.append(WriteResult(MetadataIndex(key, offset), length, info))
    # The extra states of Transformer Engine's layers, all of which are empty.
    file_name = f"__{len(results)}_0.distcp"
    with open(directory / file_name, "wb") as file:
        for key in objects:
            start = file.tell()
            torch.save([None], file)
            described[key] = BytesStorageMetadata()
            places.append(
                WriteResult(
                    MetadataIndex(key), file.tell() - start, _StorageInfo(file_name, start, file.tell() - start)
                )
            )
    FileSystemWriter(directory).finish(Metadata(state_dict_metadata=described), [places])
    torch.save({"format_version": 1, "iteration": 0, "has_optimizer": False, **sizes}, directory / COMMON)
    save_config(CheckpointingConfig("torch_dist"), str(directory))
    write_text_atomically(draft / POINTER, "0")


def megatron_names(key: str, shape: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(global name, index in the first axes) of each parameter that is stacked in the tensor `key`."""
    labels = []
    if _LAYERS.search(key):
        labels.append("layer")
        key = _LAYERS.sub(".{layer}.", key, count=1)
    if _EXPERTS in key:
        labels.append("expert")
        key = key.replace(_EXPERTS, ".experts.local_experts.{expert}.")
    for numbers in itertools.product(*(range(count) for count in shape[: len(labels)])):
        yield key.format(**dict(zip(labels, numbers, strict=True))), numbers


def convert_torch_dist_to_hf(
    source: Path,
    target: Path,
    origin: Path,
    *,
    model_name: str | None,
    vocab_size: int | None,
    adds_missing: bool,
    workers: int,
    force: bool,
    largest: int,
) -> None:
    """Write the Megatron checkpoint `source` (or one of its iterations) as the Hugging Face directory `target`.

    Args:
        origin: a Hugging Face directory of the same model, with configuration, tokenizer and quantisation for the target.
        adds_missing: copy the tensors that `origin` has and the checkpoint lacks.

    Raises:
        UserError: tensors are missing or surplus; the checkpoint is of another model than `origin`; the vocabulary has fewer
            rows than `vocab_size`; the family is not known.
    """
    directory = iteration_directory(source, latest_iteration(source)) if is_megatron_checkpoint(source) else source
    family, config, stacks = _family(origin, model_name), read_config(origin), stacks_of(origin)
    stored = _stored_parameters(directory, family)
    sizes, made = _sizes_and_names(directory, origin, stored, family, vocab_size)
    lacking = _lacking(origin, made, family)
    _refuse_to_copy(directory, origin, lacking, family, stacks, adds_missing=adds_missing)
    if vocab_size is not None:
        config = _with_vocab_size(config, vocab_size)
    conversion = Conversion(
        directory,
        target,
        {"config": config, "model_name": model_name, "format": "hf", "chunk_size": largest},
        workers,
        force,
        (origin,),
    )
    conversion.run(
        split_into_units(_shares(stored, lacking, stacks), workers, largest),
        functools.partial(_write_hf, directory, origin, family, sizes, stored, stacks),
        lambda draft, results: finish_hf_checkpoint(origin, config, draft, len(results)),
        reopen_hf_checkpoint,
    )


def _stored_parameters(directory: Path, family: Family) -> dict[str, StoredParameter]:
    """The parameters of a Megatron checkpoint by their global names, without those that Hugging Face checkpoints of the family
    do not have."""
    found: dict[str, StoredParameter] = {}
    for key, entry in TorchDistDirectory(directory).tensors.items():
        for name, prefix in megatron_names(key, entry.size):
            if family.leaves_out(name):
                continue
            try:
                family.find(name)
            except KeyError as error:
                raise UserError(
                    f"{directory}: {error.args[0]}; is it the checkpoint of another family, or of a critic?"
                ) from error
            shape = entry.size[len(prefix) :]
            found[name] = StoredParameter(key, prefix, tuple(shape), math.prod(shape) * dtype_of(entry).itemsize)
    return found


def _sizes_and_names(
    directory: Path, origin: Path, stored: Mapping[str, StoredParameter], family: Family, vocab_size: int | None
) -> tuple[TensorSizes, set[str]]:
    """(sizes for the layouts, names of the Hugging Face tensors that are made).

    Raises:
        UserError: the checkpoint is of another model than `origin`.
    """
    try:
        flags = model_args_from_hf(text_config_of(read_config(origin)))
    except UserError as error:
        raise UserError(f"--origin-hf-dir {origin}: {error}") from error
    sizes = TensorSizes.of({**flags, "vocab_size": vocab_size or flags["vocab_size"]})
    shapes = {name: parameter.shape for name, parameter in stored.items()}
    common = read_common(directory) if (directory / COMMON).is_file() else {}
    noted = {**common.get("attention_heads", {}), "vocab_size": common.get("vocab_size", flags["vocab_size"])}
    require_same_model(directory, origin, shapes, noted, family, sizes, flags)
    return sizes, require_same_tensors(directory, origin, shapes, family, sizes, ignores_rows=vocab_size is not None)


def _refuse_to_copy(
    directory: Path,
    origin: Path,
    lacking: Mapping[str, int],
    family: Family,
    stacks: Stacks | None,
    *,
    adds_missing: bool,
) -> None:
    """Raise UserError if tensors that only `origin` has must not, or cannot, be copied from there."""
    # Parts that are not trained are in no Megatron checkpoint, so they are copied in any case.
    refused = sorted(name for name in lacking if not _is_not_trained(family, name))
    if refused and not adds_missing:
        raise UserError(
            f"{directory} lacks {len(refused)} tensors that {origin} has: {', '.join(refused[:20])}; "
            "--add-missing-from-origin-hf copies them"
        )
    parts = [name for name in lacking if stacks is not None and ".experts." in name]
    if parts:
        raise UserError(f"{directory} lacks {min(parts)}, which is a part of a tensor of {origin}; convert it whole")


def _shares(
    stored: Mapping[str, StoredParameter], lacking: Mapping[str, int], stacks: Stacks | None
) -> list[tuple[str, int]]:
    """(name in units, bytes) of all that is written. Experts that become one tensor stay together, under the name of the
    first."""
    bytes_of: dict[str, int] = {}
    for name in sorted(stored, key=_by_number):
        first = name if stacks is None else _EXPERT_NUMBER.sub("0", name)
        bytes_of[first] = bytes_of.get(first, 0) + stored[name].nbytes
    return [*bytes_of.items(), *((f"{_ORIGIN}{name}", lacking[name]) for name in sorted(lacking))]


def _with_vocab_size(config: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """`config` with another `vocab_size`, for a model of text and images in both places where its config has it."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return {**config, "vocab_size": vocab_size}
    whole = {"vocab_size": vocab_size} if "vocab_size" in config else {}
    return {**config, **whole, "text_config": {**text, "vocab_size": vocab_size}}


def _lacking(origin: Path, made: set[str], family: Family) -> dict[str, int]:
    """The tensors of `origin`, if it has any, that are not in `made` → their stored bytes."""
    if not any(origin.glob("*.safetensors")):
        return {}
    opened = open_checkpoint(origin)
    return {
        name: sum(math.prod(part.shape) * part.dtype.itemsize for part in opened.parts(name).values())
        for name in _of_the_model(origin, opened.names() - made, family)
    }


def _by_number(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _write_hf(
    directory: Path,
    origin: Path,
    family: Family,
    sizes: TensorSizes,
    parameters: dict[str, StoredParameter],
    stacks: Stacks | None,
    draft: Path,
    unit: Unit,
) -> tuple[Path, None]:
    opened, quantiser = TorchDistDirectory(directory), quantiser_of(origin)
    copied = [name.removeprefix(_ORIGIN) for name in unit.names if name.startswith(_ORIGIN)]

    def named() -> Iterator[tuple[str, list[torch.Tensor]]]:
        for first in unit.names:
            is_expert = stacks is not None and _EXPERT_NUMBER.search(first)
            for name in [next_expert(first, step) for step in range(stacks.count)] if is_expert else [first]:
                if not name.startswith(_ORIGIN):
                    rows = opened.read(parameters[name].key, parameters[name].prefix)
                    rule, hf_names = family.find(name)
                    yield from zip(hf_names, split_parts(rule.layout, rows, sizes), strict=True)

    def of_origin() -> Iterator[tuple[str, torch.Tensor]]:
        files = open_checkpoint(origin) if copied else None
        for name in copied:
            # Copied unchanged, since it is quantised already.
            yield from ((part, tensor[...]) for part, tensor in files.parts(name).items())

    tensors = named()
    if quantiser is not None or stacks is not None:
        whole = ((name, joined(parts)) for name, parts in named())
        tensors = stacked(whole if quantiser is None else quantiser(whole), stacks)
    file = draft / shard_name(unit.index)
    write_streamed_shard(file, itertools.chain(tensors, of_origin()), 16 * len(unit.names))
    return file, None
