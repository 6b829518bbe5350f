"""Records what a rank does to its device, while it runs on fake tensors.

A mode of torch sees every operation before the fake tensors do. It answers operations that ask for a value with a placeholder,
and collectives at once, and records for each phase

- operations launched: those that make a tensor or write into one, on the device;
- waits of the host for the device, by file and line: values read, and copies between host and device that block;
- collectives by group, with their bytes;
- places whose shapes depend on values, as in an index of booleans: there the host waits too, and all elements are taken;
- storages as they come and go, from which the peak of live bytes follows by kind, when kinds are known at the end;
- host memory that comes in the phase "save".

The result of an operation with arguments like those of an earlier one is made from the earlier result, because a step repeats
the same few thousand operations many times, and torch takes ten times as long to compute a result.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
# Operations whose number of results depends on values.
_OF_DATA_DEPENDENT_SHAPE = (_aten.nonzero.default, _aten.masked_select.default)
_FOREIGN = ("/torch/", "/slime/rehearsal/")
# Operations whose results depend on values, on sizes of storages, or on tensors that are not fake yet.
_NOT_BY_SHAPE = (_aten.as_strided.default, _aten.lift_fresh.default, _aten.lift_fresh_copy.default)
_TAGS_NOT_BY_SHAPE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
# Arguments of these types are part of a key by their value and their type, because 1, 1.0 and True are equal.
_VALUES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


class Results:
    """Calls operations on fake tensors, and caches their results by the shapes of the arguments.

    Torch has such a cache, too, but its key costs more than all the rest here. An entry describes a fake tensor: shape,
    strides, dtype, device, and storage, which is new or that of an argument. A new entry is kept only if a tensor that is made
    from it equals the result. The offset of an argument in its storage is no part of the key, since that of a view shifts with
    it. So all experts of a rank, whose weights are in one storage, share the entries of the first one.
    """

    def __init__(self) -> None:
        self._is_by_shape: dict[Any, bool] = {}
        # None: to be asked for each time.
        self._known: dict[tuple, _Result | None] = {}

    def __call__(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What `func` gives.

        Args:
            func: an operation that torch calls a mode with, as are its arguments.
        """
        by_shape = self._is_by_shape.get(func)
        if by_shape is None:
            by_shape = self._is_by_shape[func] = _is_by_shape(func)
        if not by_shape or torch.is_inference_mode_enabled():
            return func(*args, **kwargs)
        tensors: list[FakeTensor] = []
        key = _key(func, args, kwargs, tensors)
        if key is None:
            return func(*args, **kwargs)
        known = self._known.get(key, self)
        if known is self:
            result = func(*args, **kwargs)
            # An `out` argument may have been resized by the call.
            is_unchanged = key == _key(func, args, kwargs, [])
            self._known[key] = _learned(result, tensors) if is_unchanged else None
            return result
        return func(*args, **kwargs) if known is None else known.made_of(tensors)


class Recorder(TorchDispatchMode):
    """Records what happens on `device_type` while it is entered; enter it inside a FakeTensorMode.

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

    def __enter__(self) -> Recorder:
        # Fake tensors belong to the mode that they were made under, which may be another one each time.
        self._results = Results()
        return super().__enter__()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record the block under `phase`."""
        before, self.phase = self.phase, phase
        self._host_before = self._host_bytes
        try:
            yield
        finally:
            self.phase = before

    @contextlib.contextmanager
    def selecting(self, chosen: int) -> Iterator[None]:
        """In the block `masked_select` returns `chosen` elements."""
        self._chosen = chosen
        try:
            yield
        finally:
            self._chosen = None

    def wait(self, what: str) -> None:
        """Record that the host waits for the device, for `what`. On the CPU it never does."""
        if self._device_type == "cpu":
            return
        self.waits[self.phase][f"{what} at {_place()}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            # Torch's engine asks for it about as often as for operations.
            return args[0].device
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if func is _aten._local_scalar_dense.default:
            return self._value(args[0])
        if func in _OF_DATA_DEPENDENT_SHAPE or func is _aten.index.Tensor and _is_mask(args[1]):
            return self._data_dependent(func, args, kwargs)
        self._note_copies(func, args, kwargs)
        result = self._results(func, args, kwargs)
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
        # The traffic of a rank is about the larger side: the result of a gather, the input of a scatter.
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
        for leaf in (result,) if type(result) is FakeTensor else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                on_device |= self.note_storage(leaf) is not None
        if on_device and (len(self._numbers) > known or func._schema.is_mutable):
            self.operations[self.phase] += 1


def _is_by_shape(func: Any) -> bool:
    """Whether what comes out of an operation follows from the shapes of what goes in."""
    if func.namespace != "aten" or func in _NOT_BY_SHAPE:
        return False
    # An index of booleans does not come here.
    return func is _aten.index.Tensor or _TAGS_NOT_BY_SHAPE.isdisjoint(func.tags)


def _key(func: Any, args: tuple, kwargs: dict, tensors: list[FakeTensor]) -> tuple | None:
    """What decides about results; fake tensors are added to `tensors`. None: something else may decide."""
    signature = [func, torch.get_default_dtype(), *kwargs]
    is_all = _describe(args, signature, tensors) and _describe(kwargs.values(), signature, tensors)
    return tuple(signature) if is_all else None


def _describe(arguments: Iterable[Any], signature: list[Any], tensors: list[FakeTensor]) -> bool:
    """Add what decides about results to `signature`, and fake tensors to `tensors`; False: something else may decide."""
    for argument in arguments:
        kind = type(argument)
        signature.append(kind)
        if kind is FakeTensor:
            if argument.constant is not None or argument.layout is not torch.strided:
                return False
            tensors.append(argument)
            signature += (
                argument.shape, argument.stride(), argument.dtype, argument.fake_device, argument.requires_grad,
                torch._C._dispatch_keys(argument).raw_repr(),
            )  # fmt: skip
        elif kind in _VALUES:
            signature.append(argument)
        elif kind is list or kind is tuple:
            signature.append(len(argument))
            if not _describe(argument, signature, tensors):
                return False
        else:
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A fake tensor that an operation gave.

    Attributes:
        of: the place of the argument that has its storage; None: it is a new one.
        offset: from where that argument begins, in elements.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    of: int | None
    attributes: dict[str, Any]

    def made_of(self, tensors: list[FakeTensor]) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            if self.of is None:
                bare = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
            else:
                base = tensors[self.of]
                bare = torch.empty(0, dtype=self.dtype, device="meta")
                bare.set_(base.untyped_storage(), base.storage_offset() + self.offset, self.shape, self.strides)
        tensor = torch.Tensor._make_subclass(
            FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        tensor.__dict__.update(self.attributes)
        return tensor


@dataclass(frozen=True, slots=True)
class _Result:
    """What an operation gave. `parts`: of each tensor what it is, or the place of the argument that it is; None is None.
    `container`: the type that holds them; None: there is one, alone."""

    parts: tuple[_Tensor | int | None, ...]
    container: type | None

    def made_of(self, tensors: list[FakeTensor]) -> Any:
        made = [
            part.made_of(tensors) if type(part) is _Tensor else part if part is None else tensors[part]
            for part in self.parts
        ]
        return made[0] if self.container is None else self.container(made)


def _learned(result: Any, tensors: list[FakeTensor]) -> _Result | None:
    """How to make what an operation gave for `tensors`; None: it cannot be told, or not be made."""
    container = type(result) if type(result) in (list, tuple) else None
    given = (result,) if container is None else result
    held: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        held.setdefault(tensor.untyped_storage()._cdata, []).append(place)
    parts: list[_Tensor | int | None] = []
    for tensor in given:
        if tensor is None:
            parts.append(None)
            continue
        if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.requires_grad:
            return None
        places = held.get(tensor.untyped_storage()._cdata, [None])
        if len(places) > 1:
            # Which of them it is cannot be told.
            return None
        (place,) = places
        base = None if place is None else tensors[place]
        if base is tensor:
            parts.append(place)
            continue
        if base is not None and base.dtype != tensor.dtype:
            # Their offsets count in other units.
            return None
        offset = tensor.storage_offset() - (0 if base is None else base.storage_offset())
        shape, strides, attributes = tensor.shape, tensor.stride(), dict(vars(tensor))
        parts.append(_Tensor(shape, strides, offset, tensor.dtype, tensor.fake_device, place, attributes))
    learned = _Result(tuple(parts), container)
    made = learned.made_of(tensors)
    is_same = _laid_out((made,) if container is None else made, tensors) == _laid_out(given, tensors)
    return learned if is_same else None


def _laid_out(given: Iterable[FakeTensor | None], tensors: list[FakeTensor]) -> list[tuple | None]:
    """All that is to be seen of what an operation gave for `tensors`."""
    first: dict[int, int] = {}
    for place, tensor in enumerate((*tensors, *given)):
        if tensor is not None:
            first.setdefault(tensor.untyped_storage()._cdata, place)
    return [
        None
        if tensor is None
        else (
            tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device, tensor.requires_grad,
            torch._C._dispatch_keys(tensor).raw_repr(), tensor.untyped_storage().nbytes(),
            first[tensor.untyped_storage()._cdata],
        )
        for tensor in given
    ]  # fmt: skip


def placeholder(dtype: torch.dtype) -> Any:
    """The placeholder for an unknown value."""
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
