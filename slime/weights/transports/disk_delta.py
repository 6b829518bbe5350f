"""Weights as files with the changes since the last push, for engines in another place, behind a slow connection.

A source keeps the bytes that engines have (a second copy of the model in the memory of the trainers' hosts) and compares every
tensor with them. At first they are those of `--hf-checkpoint`, so the first push of a resumed run takes engines from there to
the run's weights. Publications stay until a whole checkpoint takes their place, since an engine that starts anew has to apply
all of them. After a failed push it is not known what engines have, so the next push writes all tensors as they are.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.weights import delta_encoding
from slime.weights.hf_reader import SafetensorsDirectory, safetensors_dtype
from slime.weights.hf_writer import own_storage, write_shard
from slime.weights.publication import CHECKPOINT, Patch, index_metadata, patches_to_metadata
from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.transport import Delta

if TYPE_CHECKING:
    import numpy as np
    import torch

    from slime.weights.buckets import NamedTensors

_THREADS = 8


@dataclasses.dataclass
class _Base:
    """The bytes (uint8) of a tensor as engines have it, with its dtype (safetensors' name) and shape."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Base:
        """The bytes of a tensor on the host, in its own memory."""
        import torch

        data = tensor.contiguous().flatten().view(torch.uint8).numpy()
        return cls(safetensors_dtype(tensor.dtype), tuple(tensor.shape), data)

    def copy(self) -> _Base:
        return dataclasses.replace(self, data=self.data.copy())


@dataclasses.dataclass(frozen=True)
class _Change:
    """The published form of a tensor: the stream that `patch` describes, or without a patch the tensor itself."""

    name: str
    tensor: torch.Tensor
    patch: Patch | None
    changed_bytes: int


class DiskDeltaTransport(DiskTransport):
    """Writes a shard per bucket, with its changed tensors. Several tensors are compared and compressed at the same time."""

    def __init__(self, args: Any, source: int, num_sources: int) -> None:
        super().__init__(args, source, num_sources)
        self._pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), thread_name_prefix="weight delta")
        # The tensors that engines have, by name, and their version; None: it is not known.
        self._base: dict[str, _Base] = {}
        self._base_version: int | None = CHECKPOINT
        self._checkpoint: SafetensorsDirectory | None = None
        self._checkpoint_names: set[str] = set()
        self._whole = self._published = False

    def begin(self, version: int) -> None:
        # A repeat for engines that missed the last push; the files for them are there.
        self._published = version == self._base_version and not self._whole
        self._delta = Delta(0, 0)
        if self._published:
            self._version, self._final, self._draft = version, self.directory(self._args, version), None
            return
        super().begin(version)
        self._whole = self._whole or self._base_version is None
        self._changes_version = None if self._whole else self._base_version
        # Not known until engines have the new tensors. A push that fails leaves it so.
        self._base_version = None
        # It may be a configuration alone.
        if self._changes_version == CHECKPOINT and any(Path(self._args.hf_checkpoint).glob("*.safetensors")):
            self._checkpoint = SafetensorsDirectory(self._args.hf_checkpoint)
            self._checkpoint_names = self._checkpoint.names()

    def carry_all(self) -> None:
        self._whole = True

    def send(self, bucket: NamedTensors) -> None:
        if not self._published:
            super().send(bucket)

    def finish(self) -> None:
        if not self._published:
            super().finish()

    def delta(self) -> Delta:
        return self._delta

    def settle(self) -> None:
        if self._published:
            return
        self._base_version, self._whole = self._version, False
        # A whole publication, and the first delta on `--hf-checkpoint`, need no earlier publication.
        if self._is_last and not self._changes_version and not self._args.update_weight_disk_keep_files:
            self._remove_others()

    def close(self) -> None:
        super().close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _writer(self, path: Path, bucket: NamedTensors) -> Callable[[], Path | None]:
        on_host = [(name, own_storage(tensor)) for name, tensor in bucket]

        def write() -> Path | None:
            changes = [change for change in self._pool.map(lambda named: self._change(*named), on_host) if change]
            if changes:
                patches = {change.name: change.patch for change in changes if change.patch is not None}
                tensors = [(change.name, change.tensor) for change in changes]
                write_shard(path, tensors, patches_to_metadata(patches))()
            self._delta = Delta(
                self._delta.changed_bytes + sum(change.changed_bytes for change in changes),
                self._delta.wire_bytes + sum(change.tensor.nbytes for change in changes),
                is_whole=self._whole,
            )
            return path if changes else None

        return write

    def _change(self, name: str, tensor: torch.Tensor) -> _Change | None:
        """The change to publish of a tensor; None if it is unchanged. From now on engines are assumed to have the new
        tensor."""
        import torch

        new = _Base.of(tensor)
        base = None if self._whole else self._base_of(name)
        if base is None or (base.dtype, base.shape) != (new.dtype, new.shape):
            self._base[name] = new.copy()
            return _Change(name, tensor, None, tensor.nbytes)
        encoding = delta_encoding.usable_encoding(self._args.update_weight_delta_encoding, tensor.nbytes)
        found = delta_encoding.encode(encoding, base.data, new.data, self._args.update_weight_delta_checksum)
        if not found.changed:
            return None
        stream = torch.frombuffer(bytearray(found.payload), dtype=torch.uint8)
        return _Change(name, stream, Patch(encoding, found.digest), found.changed)

    def _base_of(self, name: str) -> _Base | None:
        is_stored = self._changes_version == CHECKPOINT and name in self._checkpoint_names
        if is_stored and name not in self._base:
            self._base[name] = _Base.of(self._checkpoint.tensor(name)[...]).copy()
        return self._base.get(name)

    def _index_metadata(self) -> Mapping[str, Any]:
        args = self._args
        delta = (args.update_weight_delta_encoding, args.update_weight_delta_checksum)
        return index_metadata(self._chain, self._version, self._changes_version, delta)
