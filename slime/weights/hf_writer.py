"""HF checkpoint directories: safetensors shards, index, and the files that are not weights.

The directory appears whole or not at all. Shards are written as the tensors come, so at most one shard is held in
memory. The source checkpoint is never written to.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from slime.utils.errors import RunError, UserError
from slime.utils.filesystem import publishing_directory, write_json_atomically
from slime.weights.buckets import split_into_buckets

if TYPE_CHECKING:
    import torch

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
    from safetensors.torch import save_file

    shard_names: list[list[str]] = []
    seen: set[str] = set()
    total_size = 0
    for bucket in split_into_buckets(named_tensors, max_shard_bytes):
        shard = {}
        for name, tensor in bucket:
            if name in seen:
                raise RunError(f"checkpoint {directory}: tensor {name} occurs twice")
            seen.add(name)
            shard[name] = _own_storage(tensor)
            total_size += tensor.nbytes
        save_file(shard, directory / f"shard-{len(shard_names)}", metadata={"format": "pt"})
        shard_names.append(list(shard))
    if not shard_names:
        raise RunError(f"checkpoint {directory}: there are no tensors to write")
    weight_map = {}
    for index, names in enumerate(shard_names):
        file_name = f"model-{index + 1:05d}-of-{len(shard_names):05d}.safetensors"
        (directory / f"shard-{index}").rename(directory / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index_file = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json_atomically(directory / "model.safetensors.index.json", index_file)


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the CPU, contiguous and alone in its storage: safetensors refuses tensors that share one."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
