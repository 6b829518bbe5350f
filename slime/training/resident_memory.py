"""The memory that a model has on its device, given back while others use the device, and taken again with the same bytes.

What moves are storages, the memory behind tensors, which several tensors may share. While a storage is given back it has no
bytes; the tensors over it stay what they are, and have their bytes again when it has. Process groups, random generators and
everything else of a rank are not touched.

Gradients are not kept. They are made anew as zeros, with which every step begins anyway.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from slime.scheduling.device_turns import Holds
from slime.training.model_states import HostCopy
from slime.utils.device import get_accelerator
from slime.utils.errors import RunError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Residents:
    """The tensors that a rank has on its device between two steps.

    Attributes:
        weights: those of the model, and other sets of weights that lie there too.
        optimizer: its state, without what shares memory with the weights.
        gradients: these, and whatever else need not come back as it was.
        caches: functions that free what a pass makes again when it needs it.
    """

    weights: Iterable[torch.Tensor]
    optimizer: Iterable[torch.Tensor]
    gradients: Iterable[torch.Tensor]
    caches: Iterable[Callable[[], None]] = ()


class ResidentMemory:
    """What a rank holds on its device.

    On CPU, bytes that are given back go into a file without a name, in the directory for temporary files (`TMPDIR`), so that
    they leave the process. On a GPU they go into pinned host memory.

    Args:
        residents: asked whenever a rank that holds everything is to give something back.
        ends: the process ends after it has held its weights only, so nothing keeps the optimizer's state for it.
    """

    def __init__(self, residents: Callable[[], Residents], *, ends: bool = False) -> None:
        self._residents = residents
        self._ends = ends
        place = _FileCopy if get_accelerator().shares_host_memory else _PinnedCopy
        self._weights, self._optimizer = _PutAway(place()), _PutAway(place())
        self._gradients: list[tuple[torch.UntypedStorage, int]] = []
        self._to_put_away: list[torch.UntypedStorage] = []
        self.holds = Holds.ALL

    @torch.no_grad()
    def hold(self, holds: Holds) -> None:
        """Have exactly that on the device.

        Raises:
            RunError: there is no room for the bytes where they go; none of that part has moved then. Or a process that ends is
                to have its optimizer back.
        """
        if self._ends and self.holds < holds:
            raise RunError(
                "a training rank has given its optimizer up for a push (--release-train): only a new one can train"
            )
        if self.holds is Holds.ALL and holds < Holds.ALL:
            self._give_back_all_but_weights()
            self.holds = Holds.WEIGHTS
        if self.holds is Holds.WEIGHTS and holds is Holds.NOTHING:
            self._weights.put_away(self._to_put_away)
            self.holds = Holds.NOTHING
        elif self.holds is Holds.NOTHING and holds > Holds.NOTHING:
            self._weights.bring_back()
            self.holds = Holds.WEIGHTS
        if self.holds is Holds.WEIGHTS and holds is Holds.ALL:
            self._take_all_but_weights()
            self.holds = Holds.ALL
        get_accelerator().release_cached_memory()

    def _give_back_all_but_weights(self) -> None:
        # The weights are looked up now too, though they may be given back later: by then tensors may have no bytes.
        residents = self._residents()
        for free in residents.caches:
            free()
        weights = _storages(residents.weights)
        optimizer = _storages(residents.optimizer, without=weights)
        gradients = _storages(residents.gradients, without=[*weights, *optimizer])
        self._to_put_away = weights
        dropped = gradients
        if self._ends:
            dropped = [*gradients, *optimizer]
        else:
            self._optimizer.put_away(optimizer)
        self._gradients = [(storage, storage.nbytes()) for storage in gradients]
        for storage in dropped:
            storage.resize_(0)

    def _take_all_but_weights(self) -> None:
        self._optimizer.bring_back()
        for storage, size in self._gradients:
            storage.resize_(size)
            _bytes_of(storage).zero_()
        self._gradients = []


class _PutAway:
    """Storages without bytes, whose bytes lie in `place` meanwhile."""

    def __init__(self, place: _PinnedCopy | _FileCopy) -> None:
        self._place = place
        self._storages: list[tuple[torch.UntypedStorage, int]] = []

    def put_away(self, storages: list[torch.UntypedStorage]) -> None:
        self._place.fill([_bytes_of(storage) for storage in storages])
        self._storages = [(storage, storage.nbytes()) for storage in storages]
        # The copy may still be under way, and nobody who gets this memory next would wait for it.
        get_accelerator().synchronize()
        for storage in storages:
            storage.resize_(0)

    def bring_back(self) -> None:
        for storage, size in self._storages:
            storage.resize_(size)
        self._place.put_into([_bytes_of(storage) for storage, _ in self._storages])
        self._storages = []


class _PinnedCopy:
    """Bytes in one piece of host memory, which is kept: pinned memory is slow to allocate."""

    def __init__(self) -> None:
        self._copy: HostCopy | None = None
        self._sizes: list[int] = []

    def fill(self, pieces: list[torch.Tensor]) -> None:
        sizes = [piece.nbytes for piece in pieces]
        if self._copy is None or sizes != self._sizes:
            # Freed first: there may not be room for the old one and the new one.
            self._copy = None
            self._copy, self._sizes = HostCopy(_named(pieces)), sizes
        self._copy.fill(_named(pieces))

    def put_into(self, pieces: list[torch.Tensor]) -> None:
        self._copy.put_into(_named(pieces))


class _FileCopy:
    """Bytes in a file without a name, which the system deletes with the process, however that ends."""

    def __init__(self) -> None:
        self._file: int | None = None

    def fill(self, pieces: list[torch.Tensor]) -> None:
        size, directory = sum(piece.nbytes for piece in pieces), tempfile.gettempdir()
        try:
            self._file, path = tempfile.mkstemp(prefix="slime-asleep-", dir=directory)
            os.unlink(path)
            if size:
                # A full disk shows here, before anything has moved.
                os.posix_fallocate(self._file, 0, size)
            self._go_through(pieces, os.pwrite)
        except OSError as error:
            self._close()
            raise RunError(
                f"a training rank cannot put {size / 2**20:.0f} MiB aside while engines work: {directory}: {error.strerror}; "
                "free space there, name another directory by TMPDIR, or, in a run without a critic, give --no-offload-train"
            ) from error

    def put_into(self, pieces: list[torch.Tensor]) -> None:
        try:
            self._go_through(pieces, lambda file, view, offset: os.preadv(file, [view], offset))
        except OSError as error:
            raise RunError(f"what a training rank put aside cannot be read: {error.strerror}") from error
        self._close()

    def _go_through(self, pieces: list[torch.Tensor], move: Callable[[int, memoryview, int], int]) -> None:
        offset = 0
        for piece in pieces:
            # `piece.numpy()` would do too, but then torch never gives this memory back.
            view = memoryview((ctypes.c_ubyte * piece.nbytes).from_address(piece.data_ptr())).cast("B")
            # The system moves 2 GiB at most at a time.
            while view:
                moved = move(self._file, view, offset)
                if moved == 0:
                    raise OSError(errno.EIO, "the file ends early")
                view, offset = view[moved:], offset + moved

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _storages(
    tensors: Iterable[torch.Tensor], without: Iterable[torch.UntypedStorage] = ()
) -> list[torch.UntypedStorage]:
    """The memory behind the tensors that lie on the device, each piece once."""
    device, known = get_accelerator().current_device().type, {storage.data_ptr() for storage in without}
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.device.type == device and storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    storages = [storage for address, storage in found.items() if address not in known]
    kept = sum(storage.nbytes() for storage in storages if not storage.resizable())
    if kept:
        logger.warning(
            "%.1f MiB of a training rank stay on the device while engines work: somebody shares that memory by another "
            "handle (a NumPy array, say), and torch cannot give it back", kept / 2**20,
        )  # fmt: skip
    return [storage for storage in storages if storage.resizable()]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _named(pieces: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(str(position), piece) for position, piece in enumerate(pieces)]
