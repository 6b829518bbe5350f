"""HF checkpoint directories: safetensors shards, index, and the files that are not weights.

The directory appears whole or not at all. Shards are written as the tensors come, so at most one shard is held in
memory. The source checkpoint is never written to.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from slime.utils.errors import RunError, UserError
from slime.utils.filesystem import publishing_directory, write_json_atomically
from slime.weights.buckets import split_into_buckets

if TYPE_CHECKING:
    import torch

    from slime.weights.buckets import NamedTensors

_DEFAULT_SHARD_BYTES = 5 * 1024**3
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")


def write_hf_checkpoint(
    directory: str | Path,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    source_hf_dir: str | Path,
    max_shard_bytes: int = _DEFAULT_SHARD_BYTES,
) -> None:
    """Write `named_tensors` as the HF checkpoint `directory`. Of a directory that is there, weight files are replaced.

    Args:
        named_tensors: (HF name, tensor) on any device; read once, in order.
        source_hf_dir: where configuration, tokenizer and generation settings are copied from.
        max_shard_bytes: upper size of a shard; a larger tensor gets a shard of its own.

    Raises:
        UserError: `directory` is the source, lies inside it or holds it.
        RunError: a name occurs twice, or there is no tensor.
        OSError: the disk is full or not writable; `directory` is then as it was.
    """
    directory, source = Path(directory), Path(source_hf_dir)
    _refuse_source(directory, source)
    with publishing_directory(directory) as temporary:
        if directory.is_dir():
            shutil.copytree(directory, temporary, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_WEIGHT_FILES))
        copy_auxiliary_files(source, temporary)
        _write_shards(temporary, named_tensors, max_shard_bytes)


def copy_auxiliary_files(source_hf_dir: str | Path, target: str | Path) -> None:
    """Copy every top-level file that is not a weight file or its index: configuration, tokenizer, templates."""
    for path in sorted(Path(source_hf_dir).iterdir()):
        is_weight_file = any(path.match(pattern) for pattern in _WEIGHT_FILES)
        if path.is_file() and not path.name.startswith(".") and not is_weight_file:
            shutil.copyfile(path, Path(target) / path.name)


def _refuse_source(directory: Path, source: Path) -> None:
    target, origin = directory.resolve(), source.resolve()
    if target == origin or origin in target.parents or target in origin.parents:
        raise UserError(
            f"refusing to write a checkpoint to {directory}: it would overwrite the source checkpoint {source}; "
            "choose another directory"
        )


def _write_shards(directory: Path, named_tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int) -> None:
    seen: set[str] = set()
    for index, bucket in enumerate(split_into_buckets(named_tensors, max_shard_bytes)):
        for name, _ in bucket:
            if name in seen:
                raise RunError(f"checkpoint {directory}: tensor {name} occurs twice")
            seen.add(name)
        write_shard(directory / f"shard-{index:05d}", bucket)()
    if not seen:
        raise RunError(f"checkpoint {directory}: there are no tensors to write")
    number_shards(directory)


def write_shard(path: Path, bucket: NamedTensors) -> Callable[[], None]:
    """A function that writes the tensors to `path`; what it writes lies on the CPU when it is returned.

    `number_shards` takes files whose names begin with `shard-`, in the order of their names.
    """
    from safetensors.torch import save_file

    shard = {name: _own_storage(tensor) for name, tensor in bucket}
    return lambda: save_file(shard, path, metadata={"format": "pt"})


def number_shards(directory: Path) -> None:
    """Give the shards in `directory` the names that a checkpoint has, and write their index."""
    shards = sorted(directory.glob("shard-*"))
    weight_map: dict[str, str] = {}
    total_size = 0
    for index, shard in enumerate(shards):
        file_name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        ends = _ends_of_tensors(shard)
        weight_map.update(dict.fromkeys(ends, file_name))
        total_size += max(ends.values())
        shard.rename(directory / file_name)
    index_file = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json_atomically(directory / "model.safetensors.index.json", index_file)


def _ends_of_tensors(shard: Path) -> dict[str, int]:
    """Where each tensor of a safetensors file ends, in bytes from the first one; they lie back to back."""
    with open(shard, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the CPU, contiguous and alone in its storage: safetensors refuses tensors that share one."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
