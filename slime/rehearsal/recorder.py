"""What a rank does to its device, taken down while it does it on fake tensors.

A mode of torch sees every operation before the fake tensors do. It answers those that ask for a value with a placeholder, and
collectives at once, and notes of each phase

- operations launched: those that make a tensor or write into one, on the device;
- waits of the host for the device, by file and line: values read, and copies between host and device that block;
- collectives by group, with their bytes;
- places whose shapes depend on values, as in an index of booleans: there the host waits too, and all elements are taken;
- storages as they come and go, from which the peak of live bytes follows by kind, when kinds are known at the end;
- host memory that comes in the phase "save".
"""

from __future__ import annotations

import collections
import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
# How many elements come out is in the values.
_OF_DATA_DEPENDENT_SHAPE = (_aten.nonzero.default, _aten.masked_select.default)
_FOREIGN = ("/torch/", "/slime/rehearsal/")


class Recorder(TorchDispatchMode):
    """Takes down what happens on `device_type` while it is entered; enter it inside a FakeTensorMode.

    Attributes:
        operations: per phase, how many were launched.
        waits: per phase, how often the host waited for the device, by "what at file:line".
        collectives: per phase and (group, collective), [how many, bytes].
        data_dependent: places whose shapes depend on values.
        host_peak: most bytes of host memory at once in the phase "save", beside what was there; 0 where it is the device's.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self.phase = "start"
        self.operations: collections.Counter[str] = collections.Counter()
        self.waits: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.collectives: dict[str, dict[tuple[str, str], list[int]]] = collections.defaultdict(dict)
        self.data_dependent: collections.Counter[str] = collections.Counter()
        self._chosen: int | None = None
        self.host_peak = self._host_bytes = self._host_before = 0
        # Addresses of storages.
        self._on_host: set[int] = set()
        self._live: dict[int, int] = {}
        # (phase, number of the storage, bytes that come or go)
        self._events: list[tuple[str, int, int]] = []
        self._columns: dict[int, tuple[int, ...]] = {}
        self._numbers: dict[int, int] = {}

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What happens in the block belongs to `phase`."""
        before, self.phase = self.phase, phase
        self._host_before = self._host_bytes
        try:
            yield
        finally:
            self.phase = before

    @contextlib.contextmanager
    def selecting(self, chosen: int) -> Iterator[None]:
        """Masks choose `chosen` elements in the block, where they are asked by `masked_select`."""
        self._chosen = chosen
        try:
            yield
        finally:
            self._chosen = None

    def wait(self, what: str) -> None:
        """The host waits for the device, for `what`; for the CPU it never does."""
        if self._device_type == "cpu":
            return
        self.waits[self.phase][f"{what} at {_place()}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if func is _aten._local_scalar_dense.default:
            return self._value(args[0])
        if func in _OF_DATA_DEPENDENT_SHAPE or func is _aten.index.Tensor and _is_mask(args[1]):
            return self._data_dependent(func, args, kwargs)
        self._note_copies(func, args, kwargs)
        result = func(*args, **kwargs)
        self._note_results(func, result)
        return result

    def note_storage(self, tensor: torch.Tensor) -> int | None:
        """The number of the tensor's storage, which is live from now on; None where it is not on the device."""
        storage = tensor.untyped_storage()
        if tensor.device.type != self._device_type:
            if tensor.device.type == "cpu" and storage._cdata not in self._on_host:
                self._on_host.add(storage._cdata)
                self._host_bytes += storage.nbytes()
                if self.phase == "save":
                    self.host_peak = max(self.host_peak, self._host_bytes - self._host_before)
                weakref.finalize(storage, self._gone_from_host, storage._cdata, storage.nbytes())
            return None
        address = storage._cdata
        number = self._live.get(address)
        if number is None:
            number = self._live[address] = len(self._numbers)
            size = storage.nbytes()
            self._numbers[number] = size
            self._columns[number] = tuple(tensor.shape[-1:])
            self._events.append((self.phase, number, size))
            weakref.finalize(storage, self._gone, address, number, size)
        return number

    def peaks(self, kinds: dict[int, str], columns: int) -> dict[str, dict[str, int]]:
        """Per phase, the live bytes by kind at its peak.

        Args:
            kinds: of storages, by number. Of the others, those that are as wide as `columns`, the rank's part of the
                vocabulary, are "logits", what is made in the phases "push" and "save" goes by their names, and what is left is
                "activations".
        """
        live: collections.Counter[str] = collections.Counter()
        best: dict[str, tuple[int, dict[str, int]]] = {}
        total = 0
        made_in: dict[int, str] = {}
        for phase, number, size in list(self._events):
            made_in.setdefault(number, phase)
            kind = kinds.get(number) or self._kind(number, made_in[number], columns)
            live[kind] += size
            total += size
            if phase not in best or total > best[phase][0]:
                best[phase] = total, dict(live)
        return {phase: {kind: size for kind, size in at.items() if size} for phase, (_, at) in best.items()}

    def _kind(self, number: int, phase: str, columns: int) -> str:
        if phase in ("push", "data", "save"):
            return phase
        return "logits" if self._columns[number] == (columns,) else "activations"

    def _gone(self, address: int, number: int, size: int) -> None:
        if self._live.get(address) == number:
            del self._live[address]
        self._events.append((self.phase, number, -size))

    def _gone_from_host(self, address: int, size: int) -> None:
        self._on_host.discard(address)
        self._host_bytes -= size

    def _value(self, tensor: torch.Tensor) -> Any:
        constant = getattr(tensor, "constant", None)
        if constant is not None:
            return constant.item()
        if tensor.device.type == self._device_type != "cpu":
            self.wait("a value")
        return placeholder(tensor.dtype)

    def _collective(self, func: Any, args: tuple, kwargs: dict) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        group = next(
            arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, torch.ScriptObject) and _is_group(arg)
        )
        name = ProcessGroup.unbox(group).group_desc
        # What goes over the links of a rank is near the larger side: all of a gather, what is scattered.
        sides = [sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, torch.Tensor)) for arg in args[:2]]
        entry = self.collectives[self.phase].setdefault((name, func._opname.strip("_")), [0, 0])
        entry[0] += 1
        entry[1] += max(sides) if func is not torch.ops.c10d.barrier.default else 0
        for tensor in tensors:
            self.note_storage(tensor)
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _data_dependent(self, func: Any, args: tuple, kwargs: dict) -> Any:
        tensor = args[0]
        if tensor.device.type == self._device_type != "cpu":
            self.wait("how many elements")
        self.data_dependent[_place()] += 1
        if func is _aten.nonzero.default:
            return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)
        if func is _aten.masked_select.default:
            return tensor.new_empty((tensor.numel() if self._chosen is None else self._chosen,))
        kept = next(index for index in args[1] if index is not None)
        return tensor.new_empty((kept.numel(), *tensor.shape[kept.dim() :]))

    def _note_copies(self, func: Any, args: tuple, kwargs: dict) -> None:
        """A copy between host and device is waited for unless it is told not to be."""
        if func is _aten._to_copy.default:
            source, target = args[0].device, kwargs.get("device")
            blocks = not kwargs.get("non_blocking", False)
        elif func is _aten.copy_.default:
            source, target = args[1].device, args[0].device
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        elif func is _aten.index_put_.default and _is_mask(args[1]) and self._device_type != "cpu":
            # One number of the host under a mask is filled in, and nobody counts.
            if args[2].device.type != "cpu" or args[2].numel() != 1:
                self.wait("how many elements")
            return
        else:
            return
        if target is None or not blocks or self._device_type == "cpu":
            return
        ends = torch.device(source).type, torch.device(target).type
        if ends == (self._device_type, "cpu"):
            self.wait("a copy to the host")
        elif ends == ("cpu", self._device_type):
            self.wait("a copy to the device")

    def _note_results(self, func: Any, result: Any) -> None:
        on_device = False
        known = len(self._numbers)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                on_device |= self.note_storage(leaf) is not None
        if on_device and (len(self._numbers) > known or func._schema.is_mutable):
            self.operations[self.phase] += 1


def placeholder(dtype: torch.dtype) -> Any:
    """What stands for a value that nobody knows."""
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def placeholders(recorder: Recorder) -> dict[tuple[type, str], Callable[..., Any]]:
    """Methods of tensors that read many values at once, as one wait each; zeros stand for what nobody knows."""

    def tolist(tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return _tolist(tensor)
        if tensor.constant is not None:
            return _tolist(tensor.constant)
        if tensor.device.type == recorder._device_type != "cpu":
            recorder.wait("values")
        return _tolist(_zeros(tensor))

    def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, FakeTensor):
            return _numpy(tensor, *args, **kwargs)
        return _numpy(_zeros(tensor) if tensor.constant is None else tensor.constant)

    return {(torch.Tensor, "tolist"): tolist, (FakeTensor, "tolist"): tolist, (torch.Tensor, "numpy"): numpy}


_tolist, _numpy = torch.Tensor.tolist, torch.Tensor.numpy


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _is_mask(indices: Iterable[Any]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _is_group(script_object: torch.ScriptObject) -> bool:
    return script_object._type().qualified_name().endswith("ProcessGroup")


def place_of(filename: str, line: int) -> str | None:
    """ "file:line" of a line of ours or of Megatron; None of any other, and of the rehearsal itself."""
    if any(part in filename for part in _FOREIGN) or not ("/slime" in filename or "/megatron/" in filename):
        return None
    return f"{filename.partition('site-packages/')[2] or filename[filename.rindex('/slime') + 1 :]}:{line}"


def _place() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        place = place_of(frame.f_code.co_filename, frame.f_lineno)
        if place is not None:
            return place
        frame = frame.f_back
    return "the backward pass"
