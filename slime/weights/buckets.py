"""Named tensors in buckets: grouped up to a size, and flattened into one contiguous byte buffer per bucket.

A flat bucket lists its tensors by falling element size. Every element size is a multiple of the smaller ones, so each
tensor starts at a multiple of its own element size and the receiver can view the bytes in place, whatever dtypes meet
in one bucket.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from slime.utils.errors import RunError

if TYPE_CHECKING:
    import torch

    NamedTensors = list[tuple[str, torch.Tensor]]


def split_into_buckets(named_tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[NamedTensors]:
    """Group consecutive tensors into buckets of at most `max_bytes`; a larger tensor forms a bucket of its own.

    Lazy: a bucket is yielded as soon as it is full, so at most one bucket (and one tensor) is held.
    """
    bucket, size = [], 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


@dataclasses.dataclass(frozen=True)
class FlatBucket:
    """Tensors of one bucket back to back in `buffer` (uint8, one dimension), in the order of `names`.

    `dtypes` are names without the `torch.` prefix.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    buffer: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.buffer.numel()


class BucketFlattener:
    """Flattens buckets into `count` buffers taken in turn, so that a steady push allocates nothing.

    A returned bucket stays valid until `flatten` was called `count` more times: with 2, the bucket in flight survives
    the preparation of the next one.
    """

    def __init__(self, count: int = 2):
        self._buffers: list[torch.Tensor | None] = [None] * count
        self._turn = 0

    def flatten(self, named_tensors: NamedTensors) -> FlatBucket:
        """Copy the tensors into the next buffer, on the device of the first one."""
        import torch

        ordered = sorted(named_tensors, key=lambda item: -item[1].element_size())
        buffer = self._next_buffer(sum(tensor.nbytes for _, tensor in ordered), ordered[0][1].device)
        start = 0
        for _, tensor in ordered:
            target = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            with torch.no_grad():
                target.copy_(tensor)
            start += tensor.nbytes
        return FlatBucket(
            names=[name for name, _ in ordered],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
            shapes=[list(tensor.shape) for _, tensor in ordered],
            buffer=buffer,
        )

    def _next_buffer(self, size: int, device: torch.device) -> torch.Tensor:
        import torch

        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < size or buffer.device != device:
            buffer = self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8, device=device)
        return buffer[:size]


class PushedNames:
    """Compares the names of one push with the names that the engines' checkpoint has (engines accept any in silence).

    `check_bucket` refuses a bucket before it is sent; `check_complete` is called when all buckets were sent.
    """

    def __init__(self, expected: set[str] | None):
        self._expected = expected
        self._pushed: set[str] = set()

    def check_bucket(self, names: Iterable[str]) -> None:
        """Raises RunError for a name that is unknown or was pushed before."""
        names = list(names)
        repeated = sorted({name for name in names if name in self._pushed or names.count(name) > 1})
        if repeated:
            raise RunError(f"weight push: sent twice: {_shorten(repeated)}")
        self._pushed.update(names)
        surplus = sorted(self._pushed - self._expected) if self._expected is not None else []
        if surplus:
            raise RunError(
                f"weight push: {len(surplus)} tensors that the checkpoint of the engines does not have: "
                f"{_shorten(surplus)}. The conversion of the model and --hf-checkpoint do not fit together"
            )

    def check_complete(self) -> None:
        """Raises RunError if an expected tensor was not pushed."""
        missing = sorted(self._expected - self._pushed) if self._expected is not None else []
        if missing:
            raise RunError(
                f"weight push: {len(missing)} tensors of the checkpoint of the engines were not sent: "
                f"{_shorten(missing)}. The conversion of the model and --hf-checkpoint do not fit together"
            )


def _shorten(names: list[str], limit: int = 10) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
