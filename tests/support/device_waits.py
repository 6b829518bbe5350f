"""Counts the places at which a GPU would be waited for, on tensors of any device.

    with counted_waits() as waits:
        ...
    assert waits["item"] == 1

Every one of these methods copies from the device, after all that was asked of it before.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import torch

WAITING = ("__bool__", "__float__", "__int__", "cpu", "item", "numpy", "tolist")


@contextlib.contextmanager
def counted_waits() -> Iterator[Counter]:
    """The calls of each of the `WAITING` methods in the block, by name."""
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
