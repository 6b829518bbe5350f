"""Named tensors in buckets: grouped up to a size, and flattened into one contiguous byte buffer per bucket.

A flat bucket lists its tensors by falling element size. Every element size is a multiple of the smaller ones, so each
tensor starts at a multiple of its own element size and the receiver can view the bytes in place, whatever dtypes meet
in one bucket.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from slime.utils.device import get_accelerator

if TYPE_CHECKING:
    import torch

    NamedTensors = list[tuple[str, torch.Tensor]]


# (Names, dtypes without the `torch.` prefix, shapes) of the tensors of a flat bucket, in its order.
Contents = tuple[list[str], list[str], list[list[int]]]

# Tensors that engines only load together, out of one bucket: of the first two they make one layer, and the third they combine
# with its scale. One that comes without the other is lost, and nobody says so.
_LOADED_TOGETHER = re.compile(r"\.self_attn\.(?:(q_a_proj|kv_a_proj_with_mqa)|indexer\.wk)\.")


class RankBucket(list[tuple[str, "torch.Tensor"]]):
    """A bucket of which each rank has other tensors, or none. `names` and `num_bytes` are those of all ranks together."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], names: list[str], num_bytes: int) -> None:
        super().__init__(tensors)
        self.names, self.num_bytes = names, num_bytes

    def __bool__(self) -> bool:
        # A rank without tensors of it takes part all the same.
        return True


def names_of(bucket: NamedTensors) -> list[str]:
    """The names of the tensors that engines get with a bucket."""
    return bucket.names if isinstance(bucket, RankBucket) else [name for name, _ in bucket]


def bytes_of(bucket: NamedTensors) -> int:
    """The size of the tensors of `names_of`, in bytes."""
    return bucket.num_bytes if isinstance(bucket, RankBucket) else sum(tensor.nbytes for _, tensor in bucket)


def split_into_buckets(named_tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[NamedTensors]:
    """Group consecutive tensors into buckets of at most `max_bytes`; a larger tensor forms a bucket of its own.

    Consecutive tensors that engines load together are in one bucket, even if it is larger than that.

    Lazy: at most one bucket and one tensor are held. A full bucket is let go before the tensor after it is made.
    """
    bucket, size = [], 0
    for name, tensor in named_tensors:
        part = _part_loaded_together(name)
        if bucket and size + tensor.nbytes > max_bytes:
            # If this tensor is loaded together with some of the bucket, those begin the next bucket with it.
            whole = part is not None
            first = next((n for n, (one, _) in enumerate(bucket) if whole and _part_loaded_together(one) == part), None)
            kept = [] if first is None else bucket[first:]
            if len(kept) < len(bucket):
                yield bucket[: len(bucket) - len(kept)]
            bucket, size = kept, sum(tensor.nbytes for _, tensor in kept)
            del kept
        bucket.append((name, tensor))
        size += tensor.nbytes
        del tensor
        if size >= max_bytes and part is None:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def loading_order(name: str) -> tuple[str, str]:
    """A key by which names are sorted so that tensors which engines load together follow each other."""
    found = _LOADED_TOGETHER.search(name)
    # An indexer's keys and their scale have names that sort side by side anyway.
    return (name if found is None or found[1] is None else name[: found.start()], name)


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in a row, as integers of their size: `torch.cat` does not take every dtype."""
    import torch

    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(sizes[tensor.element_size()])


def _part_loaded_together(name: str) -> tuple[str, bool] | None:
    """(Layer, whether the tensor is a projection down or else the indexer's keys); None for a tensor that is loaded by
    itself."""
    found = _LOADED_TOGETHER.search(name)
    return None if found is None else (name[: found.start()], found[1] is not None)


@dataclasses.dataclass(frozen=True)
class FlatBucket:
    """Tensors of one bucket back to back in `buffer` (uint8, one dimension), in the order of `names`.

    `dtypes` are names without the `torch.` prefix. `is_copy`: whether `buffer` is one of the flattener's buffers, and not the
    memory of a tensor that was too large for them.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    buffer: torch.Tensor
    is_copy: bool

    @property
    def nbytes(self) -> int:
        return self.buffer.numel()

    def single(self) -> torch.Tensor:
        """The tensor of a bucket that has one, over the bytes of the buffer."""
        import torch

        return self.buffer.view(getattr(torch, self.dtypes[0])).view(self.shapes[0])


def contents_of(named_tensors: NamedTensors) -> Contents:
    """The list of contents of a flat bucket of these tensors."""
    ordered = _in_order(named_tensors)
    return (
        [name for name, _ in ordered],
        [str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
        [list(tensor.shape) for _, tensor in ordered],
    )


def _in_order(named_tensors: NamedTensors) -> NamedTensors:
    return sorted(named_tensors, key=lambda item: -item[1].element_size())


class Memory:
    """Where the memory of flat buckets comes from: this process's own."""

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        """`size` bytes, uint8, on `device`."""
        import torch

        return torch.empty(size, dtype=torch.uint8, device=device)

    def release(self, buffer: torch.Tensor) -> None:
        """`buffer` is not needed any more."""

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, which is larger than a bucket, in the memory in which it travels: by default in its own."""
        return tensor


class BucketFlattener:
    """Flattens buckets into `count` buffers taken in turn, so that within a push nothing is allocated twice.

    A returned bucket stays valid until `flatten` was called `count` more times: with 2, the bucket in flight survives
    the preparation of the next one.

    Args:
        max_bytes: a larger tensor, which is a bucket of its own, is not copied into a buffer. Its memory (`Memory.lend`) is the
            bucket then, and must not change while that travels.
        memory: where the buffers come from.
    """

    def __init__(self, count: int = 2, max_bytes: float = math.inf, memory: Memory | None = None):
        self._max_bytes, self._memory = max_bytes, memory or Memory()
        self._buffers: list[torch.Tensor | None] = [None] * count
        self._turn = 0

    def release(self, above: float = 0) -> None:
        """Give up buffers of more than `above` bytes, when nothing travels any more."""
        for position, buffer in enumerate(self._buffers):
            if buffer is not None and buffer.numel() > above:
                self._memory.release(buffer)
                self._buffers[position] = None

    def flatten(self, named_tensors: NamedTensors) -> FlatBucket:
        """Copy the tensors into the next buffer, on the device of the first one; without any, give an empty one."""
        import torch

        if not named_tensors:
            buffer = self._next_buffer(1, get_accelerator().current_device())[:0]
            return FlatBucket([], [], [], buffer, is_copy=True)
        ordered = _in_order(named_tensors)
        size, first = sum(tensor.nbytes for _, tensor in ordered), ordered[0][1]
        is_copy = self._copies(len(ordered), size)
        if not is_copy:
            buffer = self._memory.lend(first.detach().contiguous()).flatten().view(torch.uint8)
        else:
            buffer = self._next_buffer(size, first.device)
            start = 0
            for _, tensors in itertools.groupby((tensor for _, tensor in ordered), torch.Tensor.element_size):
                # On a GPU one kernel copies them all; a kernel for each tensor would take longer to launch than to copy.
                numbers = [_as_numbers(tensor.detach().to(buffer.device)) for tensor in tensors]
                stop = start + sum(tensor.nbytes for tensor in numbers)
                torch.cat(numbers, out=buffer[start:stop].view(numbers[0].dtype))
                start = stop
        return FlatBucket(*contents_of(named_tensors), buffer, is_copy)

    def make_room(self, contents: Contents) -> FlatBucket:
        """As `flatten`, on the current device, for tensors of another process, whose bytes will be received later."""
        import torch

        size = sum(math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in zip(*contents, strict=True))
        is_copy, device = self._copies(len(contents[0]), size), get_accelerator().current_device()
        # A tensor that is larger than a bucket gets memory of its own here too, which is freed with the result.
        buffer = self._next_buffer(size, device) if is_copy else self._memory.allocate(size, device)
        return FlatBucket(*contents, buffer, is_copy)

    def _copies(self, count: int, size: int) -> bool:
        """Whether `count` tensors of `size` bytes lie in one of the buffers."""
        return count > 1 or size <= self._max_bytes

    def _next_buffer(self, size: int, device: torch.device) -> torch.Tensor:
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < size or buffer.device != device:
            # Free the old buffer before the new one is allocated.
            if buffer is not None:
                self._memory.release(buffer)
            del buffer
            self._buffers[self._turn] = None
            buffer = self._buffers[self._turn] = self._memory.allocate(size, device)
        return buffer[:size]
