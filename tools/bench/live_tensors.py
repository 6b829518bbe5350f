"""Counts the bytes of the live tensors of a process, on any device, while it computes.

The counter looks at the outputs of every operation. Each storage counts once, from the operation that made it until it is
freed. The counter does not see what an operation allocates and frees inside itself: single buffers of one kernel.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveTensors(TorchDispatchMode):
    """Counts, within its block, the `current` and `peak` bytes of live tensors, including those of `known` from the start.

    Meta tensors take no memory and are left out. If `keep_shapes` is set, `peak_shapes` holds the tensors that lived at the
    peak: bytes by (operation, shape, dtype) of the tensor that first had the storage.
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), *, keep_shapes: bool = False) -> None:
        super().__init__()
        self.current = self.peak = 0
        self.peak_shapes: dict[tuple, int] = {}
        self._keep_shapes = keep_shapes
        self._sizes: dict[int, tuple[int, tuple]] = {}
        for tensor in known:
            self._count(tensor, "known")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf, str(func))
        return result

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak, self.peak_shapes = self.current, {}

    def _count(self, tensor: torch.Tensor, operation: str) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        size = storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            weakref.finalize(storage, self._forget, key).atexit = False
        elif known[0] == size:
            return
        self._sizes[key] = (size, (operation, tuple(tensor.shape), str(tensor.dtype)))
        self.current += size - (known[0] if known else 0)
        if self.current > self.peak:
            self.peak = self.current
            if self._keep_shapes:
                self.peak_shapes = self._by_shape()

    def _forget(self, key: int) -> None:
        size, _ = self._sizes.pop(key)
        self.current -= size

    def _by_shape(self) -> dict[tuple, int]:
        found: dict[tuple, int] = {}
        for size, label in self._sizes.values():
            found[label] = found.get(label, 0) + size
        return found
