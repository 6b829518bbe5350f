"""Writes HF checkpoint directories: safetensors shards, their index, and the files that are not weights.

Several ranks write one directory, each its own shards; rank 0 makes the index of all, and publishes the directory. It appears
whole or not at all: until then it has a hidden name, and the next attempt removes what a killed one has left there. Shards are
written as the tensors come, so a rank holds at most one shard in memory; if several ranks write, shards are smaller. The source
checkpoint is never written to.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.models.config_entries import NUM_EXPERTS, first_of
from slime.utils.checkpoint_directory import METADATA, WEIGHT_VERSION
from slime.utils.errors import RunError, UserError
from slime.utils.filesystem import fsync_tree, overlapping, replace_directory, write_json_atomically
from slime.utils.hf_files import INDEX_FILE
from slime.weights.buckets import split_into_buckets
from slime.weights.hf_reader import (
    FUSED_EXPERTS,
    config_of_stacks,
    fused_ending,
    is_exchanged,
    places_of_checkpoint,
    places_of_tensors,
)

if TYPE_CHECKING:
    import torch

    from slime.weights.buckets import NamedTensors

logger = logging.getLogger(__name__)

_DEFAULT_SHARD_BYTES = 5 * 1024**3
_LEAST_SHARD_BYTES = 512 * 1024**2
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")
# The note that `tools/inspect_checkpoint.py` makes of a directory's files.
CHECKSUMS = "checksums.json"
# Files about the weights of their own directory, which would be wrong beside others.
_OF_THESE_WEIGHTS = (CHECKSUMS, METADATA, WEIGHT_VERSION)
_OF_EXPERT = re.compile(r"^(?P<layer>.+)\.experts\.(?P<expert>\d+)\.(?P<part>(?:gate|up|down)_proj\.weight)$")
_ON_ONE_DISK = "the directory has to be on a disk that all nodes share"


@dataclasses.dataclass(frozen=True)
class Stacks:
    """How a checkpoint stacks all experts of a layer in one tensor.

    Attributes:
        count: how many experts there are.
        is_exchanged: whether their columns stand before their rows.
    """

    count: int
    is_exchanged: bool


def stacks_of(directory: Path) -> Stacks | None:
    """How exports with a checkpoint's config stack experts: as the checkpoint does or, if it has no weights, as published
    checkpoints of its family do. None: they do not stack them.

    Raises:
        UserError: a weight file is broken; rows cannot be told from columns.
    """
    config = config_of_stacks(directory)
    if config is None:
        return None
    places = places_of_checkpoint(directory)
    if not places:
        return Stacks(first_of(config, NUM_EXPERTS), True)
    stored = next(((name, place.shape) for name, place in places.items() if fused_ending(name) is not None), None)
    if stored is None:
        return None
    name, shape = stored
    return Stacks(shape[0], is_exchanged(name, shape, config.get("hidden_size")))


def stacked(
    named_tensors: Iterable[tuple[str, torch.Tensor]], stacks: Stacks | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint, with those of experts stacked; a stack waits on the host for its last expert.

    Raises:
        RunError: an expert is missing; raised after all other tensors were given.
    """
    import torch

    whole: dict[str, torch.Tensor] = {}
    missing: dict[str, set[tuple[int, str]]] = {}
    for name, tensor in named_tensors:
        found = stacks and _OF_EXPERT.match(name)
        if not found:
            yield name, tensor
            continue
        ending, parts = next(item for item in FUSED_EXPERTS.items() if found["part"] in item[1])
        stack, (rows, columns) = found["layer"] + ending, tensor.shape
        if stack not in whole:
            sides = (columns, len(parts) * rows) if stacks.is_exchanged else (len(parts) * rows, columns)
            whole[stack] = torch.empty(stacks.count, *sides, dtype=tensor.dtype)
            missing[stack] = {(expert, part) for expert in range(stacks.count) for part in parts}
        expert, first = int(found["expert"]), parts.index(found["part"]) * rows
        of_expert = whole[stack][expert].T if stacks.is_exchanged else whole[stack][expert]
        of_expert[first : first + rows].copy_(tensor)
        missing[stack].discard((expert, found["part"]))
        if not missing[stack]:
            yield stack, whole.pop(stack)
    for stack in whole:
        raise RunError(f"{stack} lacks expert {min(missing[stack])[0]}")


def _alone(value: Any) -> list[Any]:
    return [value]


def write_hf_checkpoint(
    directory: str | Path,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    source_hf_dir: str | Path,
    max_shard_bytes: int = _DEFAULT_SHARD_BYTES,
    *,
    rank: int = 0,
    writes: bool = True,
    exchange: Callable[[Any], list[Any]] = _alone,
) -> None:
    """Write the tensors of all ranks as the HF checkpoint `directory`. If it exists, its weight files are replaced.

    Collective over the ranks of `exchange`, which see `directory` on one disk; it succeeds or fails on all of them. On a node,
    shards that wait take at most `max_shard_bytes` of memory, or 512 MiB for each of its ranks that write, if that is more.

    Args:
        named_tensors: (HF name, tensor) on any device; read once, in order, and to the end, because other ranks may help to
            make them.
        source_hf_dir: the source of configuration, tokenizer and generation settings, and of the form of stacked experts.
        max_shard_bytes: upper size of a shard; a larger tensor gets a shard of its own. The ranks that write share this size,
            down to 512 MiB each.
        writes: whether this rank writes its tensors; other ranks only help to make them.
        exchange: collective; gives the values of all ranks, in their order.

    Raises:
        UserError: `directory` is the source, lies inside it or contains it; see `stacks_of`.
        RunError: a rank could not write (the disk is full), or was lost; a name occurs twice, or there is no tensor.
            `directory` is unchanged, unless the message says that the new one is in place, or may be because a rank was lost
            during the publication.
    """
    directory, source = Path(directory), Path(source_hf_dir)
    _refuse_source(directory, source)
    stacks = stacks_of(source)
    draft = directory.with_name(f".{directory.name}.writing")

    def agree(outcome: tuple[dict[str, list[str]], str | None]) -> dict[str, list[str]]:
        """The shards that all ranks have written, with the names of their tensors; raises the first error of any rank."""
        outcomes = exchange(outcome)
        for index, (_, error) in enumerate(outcomes):
            if error is not None:
                raise RunError(f"rank {index}: {error}")
        return {shard: names for written, _ in outcomes for shard, names in written.items()}

    what_is_there = "What was there is untouched"
    try:
        agree(({}, _error_of(lambda: _make_draft(draft, directory, source)) if rank == 0 else None))
        shard_bytes = max(max_shard_bytes // max(sum(exchange(writes)), 1), min(max_shard_bytes, _LEAST_SHARD_BYTES))
        own = stacked(named_tensors, stacks) if writes else _only_made(named_tensors)
        shards = agree(_write_shards(draft, rank, own, shard_bytes))
        agree(({}, _error_of(lambda: _complete(draft, shards)) if rank == 0 else None))
        what_is_there = "The new one may be in place already"
        error = _error_of(lambda: replace_directory(draft, directory)) if rank == 0 else None
        if rank == 0 and not draft.exists():
            what_is_there = "But the new one is in place, whole"
        agree(({}, error))
    except Exception as error:
        # This includes the error of an exchange that broke because a rank was killed.
        if rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise RunError(f"checkpoint {directory} could not be written: {error}. {what_is_there}") from error


def _error_of(action: Callable[[], None]) -> str | None:
    """Run `action`; the text of its error, or None. The text is for the other ranks."""
    try:
        action()
    except Exception as error:
        logger.debug("%s", error, exc_info=True)
        return str(error)
    return None


def _make_draft(draft: Path, directory: Path, source: Path) -> None:
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    if directory.is_dir():
        old_weights = shutil.ignore_patterns(*_WEIGHT_FILES)
        # What lies deeper is not of this checkpoint: somebody else's files, of other checkpoints perhaps.
        shutil.copytree(
            directory, draft, dirs_exist_ok=True,
            ignore=lambda place, names: old_weights(place, names) if Path(place) == directory else set(),
        )  # fmt: skip
    copy_auxiliary_files(source, draft)


def _complete(draft: Path, shards: dict[str, list[str]]) -> None:
    """Make a synced checkpoint of the shards of all ranks. Raises RunError if a tensor is in them twice, or there is none."""
    names = collections.Counter(name for names in shards.values() for name in names)
    if not names:
        raise RunError("there are no tensors to write")
    repeated = sorted(name for name, count in names.items() if count > 1)
    if repeated:
        raise RunError(f"tensor {repeated[0]} occurs twice")
    try:
        number_shards(draft, sorted(shards))
    except FileNotFoundError as error:
        raise RunError(f"{error.filename}, which another rank has written, is not there: {_ON_ONE_DISK}") from error
    fsync_tree(draft)


def copy_auxiliary_files(source_hf_dir: str | Path, target: str | Path) -> None:
    """Copy all top-level files, such as configuration and tokenizer, except weight files, their index, and notes about them."""
    for path in sorted(Path(source_hf_dir).iterdir()):
        is_weight_file = any(path.match(pattern) for pattern in _WEIGHT_FILES)
        is_wanted = not path.name.startswith(".") and path.name not in _OF_THESE_WEIGHTS
        if path.is_file() and is_wanted and not is_weight_file:
            shutil.copyfile(path, Path(target) / path.name)


def _refuse_source(directory: Path, source: Path) -> None:
    if overlapping(directory, source):
        raise UserError(
            f"refusing to write a checkpoint to {directory}: it would overwrite the source checkpoint {source}; "
            "choose another directory"
        )


def _only_made(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Go through all tensors, so that they are made, and give none."""
    collections.deque(named_tensors, maxlen=0)
    yield from ()


def _write_shards(
    draft: Path, rank: int, named_tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> tuple[dict[str, list[str]], str | None]:
    """Write the tensors to the disk. Returns (the names in each shard, the text of the error or None)."""
    shards: dict[str, list[str]] = {}
    error = None
    # A tensor waits for the rest of its shard in the host's memory.
    on_host = ((name, own_storage(tensor)) for name, tensor in named_tensors)
    try:
        for index, bucket in enumerate(split_into_buckets(on_host, max_shard_bytes)):
            # After an error the walk goes on, because other ranks are in the gather of the next tensor.
            if error is None:
                shard = draft / f"shard-{rank:05d}-{index:05d}"
                error = _error_of(functools.partial(_write_to_disk, shard, bucket))
                shards[shard.name] = [name for name, _ in bucket]
            del bucket
    except Exception as cause:
        logger.debug("the tensors of %s could not be made", draft, exc_info=True)
        error = str(cause)
    return shards, error


def _write_to_disk(path: Path, bucket: NamedTensors) -> None:
    if not path.parent.is_dir():
        raise RunError(f"{path.parent}, which rank 0 has made, is not there: {_ON_ONE_DISK}")
    write_shard(path, bucket)()
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def write_shard(path: Path, bucket: NamedTensors, metadata: Mapping[str, str] | None = None) -> Callable[[], Path]:
    """A function that writes the tensors to `path`, with `metadata`, and returns `path`. The tensors are copied to the CPU now,
    not when it is called."""
    from safetensors.torch import save_file

    shard = {name: own_storage(tensor) for name, tensor in bucket}

    def write() -> Path:
        save_file(shard, path, metadata={"format": "pt", **(metadata or {})})
        return path

    return write


def number_shards(directory: Path, shards: Sequence[str], metadata: Mapping[str, Any] | None = None) -> None:
    """Give the files `shards` of `directory` the names of a checkpoint's files, in their order, and write their index.

    The files are opened by name, because the listing of a network disk may lack what another node has just written.

    Args:
        metadata: further entries of the index's metadata, beside the size.
    """
    weight_map: dict[str, str] = {}
    total_size = 0
    for index, shard in enumerate(shards):
        file_name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        places, _ = places_of_tensors(directory / shard)
        weight_map.update(dict.fromkeys(places, file_name))
        total_size += sum(place.stop - place.start for place in places.values())
        (directory / shard).rename(directory / file_name)
    index_file = {
        "metadata": {"total_size": total_size, **(metadata or {})},
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_json_atomically(directory / INDEX_FILE, index_file)


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the CPU, contiguous and alone in its storage, since safetensors refuses tensors that share one."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
