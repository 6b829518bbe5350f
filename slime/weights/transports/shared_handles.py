"""Weights from training ranks to engines on the same devices, by handles of memory that both map: CUDA IPC, or shared memory.

A bucket is copied once, into memory that engines can map, and each engine gets an order with a handle for each of its ranks; it
copies from there into its weights. Meanwhile the next bucket is made and ordered too. Memory is written again only when all
engines have answered: then none reads it.

On the host of one node, memory of the source serves all ranks of all engines. Otherwise an engine rank needs memory of the
training rank on its device: then every training rank walks through the tensors and flattens them, and the source collects their
handles. Ranks of other pipeline stages do not have the tensors. They hear what a bucket holds, make room for it where their
engine ranks find it, and get its bytes by a broadcast from the rank in their place on the stage that has them.

Engines need nothing of each other here, so whoever breaks a transfer did it alone.

On a GPU a handle is one of CUDA IPC. On the host it names a file in shared memory (by torch's sharing strategy `file_system`;
by the other one an engine dies). A process of torch's own, `torch_shm_manager`, is connected to all that have them mapped. When
these are gone, even by SIGKILL, it deletes what they left, and ends.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from slime.arguments.sizes import layout_of
from slime.utils.device import get_accelerator
from slime.utils.errors import RunError
from slime.weights.buckets import BucketFlattener, Contents, FlatBucket, Memory, contents_of
from slime.weights.transports.transport import EnginesFailed, Receiver, Transport, naming_engines

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from slime.weights.buckets import NamedTensors

# On the host an order takes as long as the copy of some megabytes. Engines would wait for many orders of smaller buckets, and
# for the first of larger ones.
HOST_BUCKET_BYTES = 64 * 2**20
# Between the end of an engine's own time limit and its answer.
_ANSWER_SECONDS = 30.0
_NAME = "sending weights by shared handles"
_DIRECTORY = Path("/dev/shm")

# Number of a device of the run → the handle for the engine rank on it.
Handles = dict[int, str]


def reads_own_device(args: Any, shares_host_memory: bool) -> bool:
    """Whether an engine rank needs memory of the training rank on its device, and that of the source does not serve it too.

    `shares_host_memory`: of the devices, as an accelerator says.
    """
    several_nodes = max(args.actor_num_nodes, -(-layout_of(args).actor_gpus // args.num_gpus_per_node)) > 1
    return several_nodes or not shares_host_memory


class _Step(NamedTuple):
    """What a rank tells the others of a bucket before it is filled. `contents`: from ranks that have it, for those of other
    stages. `sends`: this rank will tell engines about it."""

    contents: Contents | None = None
    sends: bool = False


class SharedHandlesTransport(Transport):
    """Training rank r is on device r of the run, where engines that share devices with the trainer are too."""

    host_bucket_bytes = HOST_BUCKET_BYTES
    giving_up_seconds = 2 * _ANSWER_SECONDS

    def __init__(self, args: Any, source: int, num_sources: int) -> None:
        self._every_rank = self.takes_every_rank(args)
        self._source = source
        # See `relay_over`; None where every rank that takes part has the tensors.
        self._places: dist.ProcessGroup | None = None
        self._timeout = 60.0 * args.distributed_timeout_minutes
        self._version: str | None = None  # until a push begins
        self._first_device = layout_of(args).first_rollout_gpu
        self._engines: list[Receiver] = []
        # The engines' answers, by engine id, for each bucket that is on its way.
        self._in_flight: list[dict[int, Any]] = []
        on_host = get_accelerator().shares_host_memory
        self._bucket_bytes = self.bucket_bytes(args)
        # Size of a buffer that is kept between pushes: on the host it is small, and slow to allocate; on a GPU training needs
        # it.
        self._kept_bytes = self._bucket_bytes if on_host else 0
        # On a GPU a tensor larger than a bucket needs no buffer, since an engine on the same GPU can map its memory.
        self._flattener = BucketFlattener(2, math.inf if on_host else self._bucket_bytes, SharedMemory())
        # The last bucket, which may be the only reference to the tensor whose bytes it has.
        self._last: FlatBucket | None = None

    @classmethod
    def takes_every_rank(cls, args: Any) -> bool:
        return reads_own_device(args, get_accelerator().shares_host_memory)

    def connect(self, engines: Sequence[Receiver]) -> None:
        if list(engines) == self._engines:
            return
        # Wait first, since engines that have not opened a buffer yet would not find it after its release.
        self._failed_of(keep=0)
        # Engines that remain have the buffers mapped, and new ones would need memory beside the old ones; so buffers are kept.
        # An engine that hangs and was given up may read what is written next, which does not matter, since it is not used any
        # more.
        self._flattener.release(above=self._kept_bytes if engines else 0)
        self._engines = list(engines)

    def assist(self, engines: Sequence[Receiver]) -> None:
        self.connect(engines)

    def begin(self, version: int) -> None:
        self._version = str(version)
        # A push that the trainer has stopped may have left buckets on their way.
        self._settle(keep=0)

    def send(self, bucket: NamedTensors) -> None:
        failed = self._failed_of(keep=1)
        # Even after a failure, because `_share` is collective.
        handles = self._share(bucket, sends=not failed)
        if failed:
            raise EnginesFailed(failed, certain=True)
        answers = {}
        for engine in self._engines:
            of_ranks = [handles[device] for device in self._devices_of(engine)]
            answers[engine.id] = engine.handle.update_weights_from_tensor.remote(
                of_ranks, "flattened_bucket", self._timeout, self._version
            )
        self._in_flight.append(answers)
        if not self._last.is_copy:
            # A tensor larger than a bucket must be taken before the next tensors are gathered, to save memory.
            self._settle(keep=0)
            self._last = None

    def help(self, bucket: NamedTensors) -> None:
        if self._every_rank:
            # The source raises the error, if it still sends.
            with contextlib.suppress(RunError):
                self._share(bucket, sends=False)

    def relay_over(self, group: dist.ProcessGroup) -> None:
        self._places = group

    def follow(self, source: int) -> None:
        import torch.distributed as dist

        giver = dist.get_global_rank(self._places, source)
        while (contents := (steps := self._exchange(_Step()))[giver].contents) is not None:
            with contextlib.suppress(RunError):
                self._put(steps, functools.partial(self._flattener.make_room, contents), source)

    def end_walk(self) -> None:
        if self._places is not None:
            self._exchange(_Step())

    def finish(self) -> None:
        self._settle(keep=0)

    def discard(self) -> None:
        self._failed_of(keep=0)

    def settle(self) -> None:
        self._last = None
        self._flattener.release(above=self._kept_bytes)
        get_accelerator().collect_shared_memory()

    def close(self) -> None:
        self._in_flight, self._engines, self._last = [], [], None
        self._flattener.release()

    def _devices_of(self, engine: Receiver) -> Iterable[int]:
        first = self._first_device + engine.gpu_offset
        return range(first, first + engine.num_gpus)

    def _share(self, bucket: NamedTensors, sends: bool) -> Handles:
        """Put a bucket where engines can map it, together with all ranks that take part. Returns all handles, if one of these
        ranks `sends` the bucket.

        Raises:
            RunError: one of them had no memory for it.
        """
        # The source comes here only when the engines have released the next buffer, on every rank.
        steps = self._exchange(_Step(None if self._places is None else contents_of(bucket), sends))
        return self._put(steps, functools.partial(self._flattener.flatten, bucket), self._source)

    def _put(self, steps: Sequence[_Step], fill: Callable[[], FlatBucket], source: int) -> Handles:
        """The part of `_share` after the next buffer is free. `fill` returns the bucket of `source`, or room to receive it."""
        import torch.distributed as dist

        # Frees a tensor that was larger than a bucket.
        self._last = None
        # Memory of a GPU is freed only when engines have opened and closed every handle of it. So a bucket that they are not
        # told about gets none.
        if not any(step.sends for step in steps):
            return {}
        self._last, error = _attempt(fill)
        if self._places is not None:
            # A broadcast begins only if all ranks have memory for it.
            _raise_first(self._exchange(error))
            _, error = _attempt(lambda: dist.broadcast(self._last.buffer, group=self._places, group_src=source))
        handles, error = _attempt(self._own_handles) if error is None else (None, error)
        found = self._exchange((handles, error))
        _raise_first([error for _, error in found])
        return {device: handle for of_rank, _ in found for device, handle in of_rank.items()}

    def _own_handles(self) -> Handles:
        """Handles of the last bucket, for the engine ranks with which this rank shares its memory."""
        devices = [device for engine in self._engines for device in self._devices_of(engine)]
        if self._every_rank:
            devices = [device for device in devices if device == self._rank()]
        return {device: handle_of(self._last) for device in devices}

    def _rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank()

    def _exchange(self, value: Any) -> list[Any]:
        """`value` of all ranks that take part; small picklable values only."""
        if not self._every_rank:
            return [value]
        import torch.distributed as dist

        from slime.utils.process_groups import get_gloo_group

        group = get_gloo_group()
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, value, group=group)
        return found

    def _settle(self, keep: int) -> None:
        """Return when at most `keep` buckets are on their way.

        Raises:
            EnginesFailed: engines did not take one.
        """
        failed = self._failed_of(keep)
        if failed:
            raise EnginesFailed(failed, certain=True)

    def _failed_of(self, keep: int) -> dict[int, str]:
        """Wait until at most `keep` buckets are on their way, or none if an engine failed to take one. Returns the failures: by
        engine, the reason."""
        from slime.observability.waiting import wait_for_each

        failed: dict[int, str] = {}
        while len(self._in_flight) > (0 if failed else keep):
            answers = self._in_flight.pop(0)
            limit, pending = self._timeout + _ANSWER_SECONDS, naming_engines(answers)
            outcomes = wait_for_each(list(answers.values()), _NAME, limit, pending=pending)
            for id, outcome in zip(answers, outcomes, strict=True):
                if isinstance(outcome, RunError):
                    failed.setdefault(id, str(outcome))
        return failed


def _attempt(function: Callable[[], Any]) -> tuple[Any, str | None]:
    """(the result of `function`, None), or (None, why it failed): the reason is for the other ranks."""
    try:
        return function(), None
    except (RunError, RuntimeError) as error:
        return None, str(error)


def _raise_first(errors: Iterable[str | None]) -> None:
    """Raise RunError with the first of the errors of all ranks, on each of them."""
    for error in errors:
        if error is not None:
            raise RunError(error)


class SharedMemory(Memory):
    """Buffers that other processes can map."""

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        """`size` bytes, uint8, on `device`.

        Raises:
            RunError: the host has no shared memory left.
        """
        import torch

        if device.type != "cpu":
            return super().allocate(size, device)
        try:
            with _through_files():
                storage = torch.UntypedStorage._new_shared(size)
            # A process that releases the last reference deletes the file, and fails if it is gone. This reference is never
            # released, so none does.
            storage._shared_incref()
        except RuntimeError as error:
            raise RunError(
                f"weight push: {size / 1e6:.1f} MB of shared memory for a bucket of weights are not to be had ({error}). Let "
                f"{_DIRECTORY} be larger (docker run --shm-size), or give a smaller --update-weight-buffer-size"
            ) from None
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def release(self, buffer: torch.Tensor) -> None:
        """Free a buffer when no process has it mapped any more, even if an engine died without releasing its reference."""
        if buffer.device.type == "cpu":
            _, name, _ = buffer.untyped_storage()._share_filename_cpu_()
            (_DIRECTORY / name.decode().lstrip("/")).unlink(missing_ok=True)

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, in memory of at most twice its size.

        An engine that dies with a handle of a GPU's memory keeps it from being freed for ever. A parameter lies in that of all
        parameters; a tensor that was gathered may have rows of padding beside it, which are not worth a copy.
        """
        return tensor.clone() if tensor.untyped_storage().nbytes() > 2 * tensor.nbytes else tensor


def handle_of(bucket: FlatBucket) -> str:
    """A handle of `bucket` and its list of tensors, which exactly one rank of an engine opens, for
    `/update_weights_from_tensor` with the format `flattened_bucket`.

    Every call adds one reader to the reference count of the bucket's memory.
    """
    import torch

    entries, start = [], 0
    for name, dtype_name, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        # A plain namespace with the attributes that SGLang reads, because it does not unpickle classes of ours.
        entries.append(
            SimpleNamespace(name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=start + size, numel=size)
        )
        start += size
    stream = io.BytesIO()
    with _through_files():
        _Pickler(stream).dump({"flattened_tensor": bucket.buffer, "metadata": entries})
    return base64.b64encode(stream.getvalue()).decode()


class _Pickler(ForkingPickler):
    """Names a GPU by its UUID, because engines number devices in their own way. SGLang accepts both."""

    def reducer_override(self, value: Any) -> Any:
        import torch
        from torch.multiprocessing import reductions

        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        device = _DEVICE_ARGUMENT
        return rebuild, (
            *arguments[:device],
            get_accelerator().device_uuid(arguments[device]),
            *arguments[device + 1 :],
        )


# Position of the device among the arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`.
_DEVICE_ARGUMENT = 6


@contextlib.contextmanager
def _through_files() -> Iterator[None]:
    """In the block torch shares host memory as files. The setting is restored, for memory that users' code shares."""
    import torch.multiprocessing

    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
