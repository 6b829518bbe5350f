"""Counts the places at which the host would wait for a GPU, on tensors of any device.

    with counted_waits() as waits:
        ...
    assert waits["item"] == 1

Each of these methods copies from the device, and so waits for all its earlier work.

    with Waiting() as waiting:
        ...
    assert waiting.operations == []

Tensors on the device "meta" have no entries, so code that reads an entry or counts entries fails there. Only copies to the
device that the host waits for are left to be counted.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = ("__bool__", "__float__", "__int__", "cpu", "item", "numpy", "tolist")


@contextlib.contextmanager
def counted_waits() -> Iterator[Counter]:
    """Yields a counter of the calls of each of the `WAITING` methods in the block, by name."""
    waits: Counter = Counter()

    def counting(name):
        method = getattr(torch.Tensor, name)

        def call(tensor, *arguments, **options):
            waits[name] += 1
            return method(tensor, *arguments, **options)

        return call

    with contextlib.ExitStack() as patches:
        for name in WAITING:
            patches.enter_context(mock.patch.object(torch.Tensor, name, counting(name)))
        yield waits


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_BY_ENTRIES = (
    torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default, torch.ops.aten._local_scalar_dense.default,
)  # fmt: skip
_BY_INDEX = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class Waiting(TorchDispatchMode):
    """Records the operations that the host waits for: copies between devices without `non_blocking`, and operations whose
    result has a size that depends on the entries of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        options = options or {}
        result = operation(*arguments, **options)
        if operation in _COPIES:
            source = arguments[operation is torch.ops.aten.copy_.default]
            waits = source.device != result.device and not options.get("non_blocking") and True not in arguments[2:]
        elif operation in _BY_INDEX:
            waits = any(index is not None and index.dtype == torch.bool for index in arguments[1])
        elif operation is torch.ops.aten.repeat_interleave.Tensor:
            waits = options.get("output_size") is None
        else:
            waits = operation in _BY_ENTRIES
        if waits:
            self.operations.append(str(operation))
        return result
