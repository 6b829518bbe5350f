"""The accelerator of a process, and everything that depends on which one it is.

All other code of the package asks `get_accelerator()` and never uses `torch.cuda`, except for the adapters that lift the
assumptions of wheels. A new device is a subclass of `Accelerator` that is passed to `register_accelerator`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from slime.utils import env
from slime.utils.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity


logger = logging.getLogger(__name__)

# Options of glibc's malloc.h, and the size in bytes up to which freed memory is kept.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 2**30

# How many of the newest allocations on a GPU a recording keeps; each takes some kilobytes in a snapshot.
_RECORDED_EVENTS = 100_000


class Accelerator:
    """What the trainer and the weight transports need to know about a device. This base class is the CPU."""

    name = "cpu"
    process_group_backend = "gloo"
    # Whether the device has no memory of its own and uses the host's.
    shares_host_memory = True
    # The backend of groups whose collectives are on tensors of the host and on objects.
    host_group_backend = "gloo"

    def device(self, index: int = 0) -> torch.device:
        """The device that the process with local index `index` computes on."""
        import torch

        return torch.device("cpu")

    def current_device(self) -> torch.device:
        """This process's default device."""
        return self.device()

    def group_device(self, group: dist.ProcessGroup | None) -> torch.device:
        """Where tensors have to be for the collectives of `group` (None: the default group)."""
        return self.device()

    def set_device(self, index: int) -> None:
        """Make `index` this process's default device."""

    def keep_freed_memory(self) -> None:
        """Make this process reuse freed memory instead of giving it back, until `release_cached_memory`.

        glibc gives back pieces of 32 MiB and more at once, for example logits, whose pages the kernel then has to clear anew in
        every micro-batch. Settings of the environment have precedence.
        """
        tune = getattr(ctypes.CDLL(None), "mallopt", None)
        if tune is not None and not env.tunes_allocator():
            tune(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
            tune(_M_TRIM_THRESHOLD, 2**31 - 1)

    def compute_in_this_thread(self) -> None:
        """Let the calling thread compute on all cores of this process, and threads that begin to compute later on one each.

        OpenMP's threads spin while they wait for the next operator only if a process has no more of them than cores. Gloo
        computes sums in threads of its own. If each of these had a team, every operator would wait for the kernel to wake
        threads.
        """
        set_threads_of_later_threads(1)

    def synchronize(self) -> None:
        """Wait until all work queued on the device is done."""

    def host_buffer(self, size: int) -> torch.Tensor:
        """`size` bytes of host memory, uint8; the host need not wait for copies between it and the device.

        The memory is freed with this tensor: keep it for as long as its views.
        """
        import torch

        return torch.empty(size, dtype=torch.uint8)

    def aside(self) -> contextlib.AbstractContextManager:
        """In the block, work is queued beside the other work of the device: it begins after work that was queued before, and
        later work does not wait for it before `join_aside`."""
        return contextlib.nullcontext()

    def join_aside(self) -> None:
        """Make work that is queued from now on wait for all work that was queued in `aside`."""

    def mark(self) -> Callable[[], None]:
        """Mark this point in the queue. The function that is returned makes the host wait until the device has reached it."""
        return lambda: None

    def generator_state(self) -> torch.Tensor | None:
        """The state of the device's random generator, uint8 on the host; None if the device uses the host's generator."""
        return None

    def set_generator_state(self, state: torch.Tensor) -> None:
        """Restore the device's generator; does nothing if the device uses the host's generator."""

    def fused(self, function: Callable[..., Any]) -> CompiledFunction | None:
        """`function`, compiled to few kernels. None if this device does not fuse: on a CPU a cache holds what is computed in
        chunks."""
        return None

    def release_cached_memory(self) -> None:
        """Give freed memory that is kept for later allocations back to the system."""
        # This is a function of glibc; other allocators give large pieces back at once.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def memory_allocated(self) -> int:
        """Bytes in use by this process: resident memory on CPU."""
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def peak_memory_allocated(self) -> int | None:
        """The most bytes of tensors since `reset_peak_memory`; None if the device does not count them."""
        return None

    def memory_of_device(self) -> tuple[int, int]:
        """(free, all) bytes of the device, counting all processes; on CPU those of the host, where memory that it can reclaim
        at once counts as free."""
        with open("/proc/meminfo") as meminfo:
            kilobytes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in meminfo)}
        return kilobytes["MemAvailable"] * 1024, kilobytes["MemTotal"] * 1024

    def reset_peak_memory(self) -> None:
        """Let the peak begin anew at the present allocation; does nothing if the device does not count it."""

    def profiled_activities(self) -> list[ProfilerActivity]:
        """What torch's profiler can look at here."""
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU]

    def record_memory(self, out_of_memory: Callable[[], None]) -> None:
        """Begin to record allocations on the device, with their places in the source. `out_of_memory` is called if an
        allocation fails, before that raises; it stays registered even after the recording ends.

        Raises:
            UserError: this device has no such recording.
        """
        raise UserError(
            "--memory-recorder torch records the memory of GPUs, and this rank computes on a CPU; give --memory-recorder "
            "memray, which records that of the host, or drop --record-memory-history"
        )

    def write_recorded_memory(self, path: Path) -> None:
        """Write the recording and all present allocations to a file for https://pytorch.org/memory_viz.

        Raises:
            OSError: the disk refuses.
        """

    def stop_recording_memory(self) -> None:
        """End the recording and discard it."""

    def device_name(self) -> str:
        """The maker's name of the device."""
        return "cpu"

    def device_uuid(self, index: int) -> str | int:
        """A name for device `index` of this process that is the same in all processes."""
        return index

    def collect_shared_memory(self) -> None:
        """Free memory that this process has shared and dropped, if no other process has it mapped any more."""


class CudaAccelerator(Accelerator):
    """NVIDIA (and ROCm) GPUs through torch.cuda."""

    name = "cuda"
    process_group_backend = "nccl"
    shares_host_memory = False

    def device(self, index: int = 0) -> torch.device:
        import torch

        return torch.device("cuda", index)

    def current_device(self) -> torch.device:
        import torch

        return self.device(torch.cuda.current_device())

    def group_device(self, group: dist.ProcessGroup | None) -> torch.device:
        import torch
        import torch.distributed as dist

        # Any other backend handles tensors on the GPU, whatever its name is.
        on_host = dist.get_backend(group) == self.host_group_backend
        return torch.device("cpu") if on_host else self.current_device()

    def set_device(self, index: int) -> None:
        import torch

        torch.cuda.set_device(index)

    def keep_freed_memory(self) -> None:
        """Does nothing: PyTorch's allocator keeps freed memory anyway."""

    def compute_in_this_thread(self) -> None:
        """Does nothing: the device computes, not the host's threads."""

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def fused(self, function: Callable[..., Any]) -> CompiledFunction:
        return CompiledFunction(function)

    def host_buffer(self, size: int) -> torch.Tensor:
        import torch

        if size == 0:
            return super().host_buffer(size)
        # torch's own pinned memory has sizes of powers of two: nearly twice the size, at worst. And a fork, which the writer of
        # checkpoints uses, would copy its pages.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        # Registering touches every page: with pages of 4 KiB that takes a third of a second for a gigabyte. Not all kernels
        # have larger ones.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        driver, address = torch.cuda.cudart(), buffer.data_ptr()
        torch.cuda.check_error(driver.cudaHostRegister(address, size, 0))

        def give_back() -> None:
            # Wait, because the device may still read from the buffer.
            self.synchronize()
            torch.cuda.check_error(driver.cudaHostUnregister(address))

        weakref.finalize(buffer, give_back).atexit = False
        return buffer

    @functools.cached_property
    def _side_stream(self) -> torch.cuda.Stream:
        import torch

        return torch.cuda.Stream()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        import torch

        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            yield

    def join_aside(self) -> None:
        import torch

        torch.cuda.current_stream().wait_stream(self._side_stream)

    def mark(self) -> Callable[[], None]:
        import torch

        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def generator_state(self) -> torch.Tensor:
        import torch

        return torch.cuda.get_rng_state()

    def set_generator_state(self, state: torch.Tensor) -> None:
        import torch

        torch.cuda.set_rng_state(state)

    def release_cached_memory(self) -> None:
        import torch

        torch.cuda.empty_cache()

    def memory_allocated(self) -> int:
        import torch

        return torch.cuda.memory_allocated()

    def peak_memory_allocated(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated()

    def memory_of_device(self) -> tuple[int, int]:
        import torch

        return torch.cuda.mem_get_info()

    def reset_peak_memory(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def profiled_activities(self) -> list[ProfilerActivity]:
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]

    def record_memory(self, out_of_memory: Callable[[], None]) -> None:
        import torch

        # Without C++ frames, which would be looked up one by one when a snapshot is written, and take minutes.
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=_RECORDED_EVENTS)
        torch._C._cuda_attach_out_of_memory_observer(lambda device, size, total, free: out_of_memory())

    def write_recorded_memory(self, path: Path) -> None:
        import torch

        torch.cuda.memory._dump_snapshot(str(path))

    def stop_recording_memory(self) -> None:
        import torch

        torch.cuda.memory._record_memory_history(enabled=None)

    def device_name(self) -> str:
        import torch

        return torch.cuda.get_device_name()

    def device_uuid(self, index: int) -> str:
        import torch

        return str(torch.cuda.get_device_properties(index).uuid)

    def collect_shared_memory(self) -> None:
        import torch

        torch.cuda.ipc_collect()


# The most combinations of dtypes and sizes for which a function is compiled.
_KINDS = 64


class CompiledFunction:
    """A function of tensors that torch compiles at its first call, for any size of the first dimension of each tensor. Results
    have no gradient.

    Compiled kernels are chosen by their speed, so sums may have another order in another run. With deterministic algorithms
    nothing is compiled.

    If the compiler or its requirements (Triton, a C compiler) are missing, or if it is switched off, one line is logged and all
    calls return None: the caller has another implementation. They also return None within a TorchDispatchMode, in which torch
    does not compile.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = None
        self._is_broken = False
        # Kinds of arguments that have been compiled: dtypes, layouts, and all sizes but the first.
        self._known: set[tuple] = set()

    @property
    def works(self) -> bool:
        """Whether a call would be compiled, as far as is known before it."""
        import torch
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode

        is_asked_for_bits = torch.are_deterministic_algorithms_enabled()
        return not (self._is_broken or is_asked_for_bits or is_in_torch_dispatch_mode())

    def __call__(self, *arguments: Any) -> Any:
        import torch
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        if not self.works:
            return None
        if self._compiled is None:
            # Either the whole function is one graph, or it is not compiled: parts would need intermediate results in memory.
            self._compiled = torch.compile(self._function, fullgraph=True)
        # With TORCHDYNAMO_DISABLE=1 `torch.compile` returns the function itself, which would run in many steps.
        if self._compiled is self._function or torch._dynamo.config.disable:
            return self._give_up("torch's compiler is switched off (TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE)")
        if torch._dynamo.config.recompile_limit < _KINDS:
            # A model may have norms of several widths, in training and without gradients, but torch's default limit is 8. The
            # limit is set at each call because every thread has its own, also that of the backward pass.
            torch._dynamo.config.recompile_limit = _KINDS
        # Detached, because tensors that require a gradient would be compiled separately.
        arguments = [argument.detach() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor) and argument.dim()]
        kind = tuple((tensor.dtype, tensor.shape[1:], tensor.stride(), min(len(tensor), 2)) for tensor in tensors)
        if kind not in self._known:
            self._known.add(kind)
            for tensor in tensors:
                # The number of rows varies, but the width is fixed: kernels that do not know it take up to twice as long.
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
                torch._dynamo.mark_static(tensor, list(range(1, tensor.dim())))
        try:
            return self._compiled(*arguments)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            return self._give_up(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")

    def _give_up(self, reason: str) -> None:
        self._is_broken = True
        logger.warning(
            "%s is not compiled and runs slower, with more memory in between: %s", self._function.__name__, reason
        )


@functools.cache
def fused(function: Callable[..., Any], accelerator: Accelerator) -> CompiledFunction | None:
    """`accelerator.fused(function)`, the same at every call: it is compiled once."""
    return accelerator.fused(function)


_FACTORIES: dict[str, Callable[[], Accelerator]] = {"cpu": Accelerator, "cuda": CudaAccelerator}


def set_threads_of_later_threads(count: int) -> None:
    """Let threads that compute for the first time from now on use `count` cores each. The number of the calling thread stays.

    PyTorch has a number for each thread, which is set when the thread first computes, and a number for new threads. Setting one
    sets both, so it is done in a thread of its own.
    """
    import torch

    torch.get_num_threads()
    setting = threading.Thread(target=torch.set_num_threads, args=(count,), name="number of threads")
    setting.start()
    setting.join()


def register_accelerator(name: str, factory: Callable[[], Accelerator]) -> None:
    """Make the device backend `name` selectable through `SLIME_ACCELERATOR`."""
    _FACTORIES[name] = factory
    get_accelerator.cache_clear()


@functools.cache
def get_accelerator() -> Accelerator:
    """The accelerator of this process: `SLIME_ACCELERATOR` if set, CUDA where it is available, else the CPU.

    Raises:
        UserError: `SLIME_ACCELERATOR` names no registered backend.
    """
    name = env.forced_accelerator()
    if name is None:
        import torch

        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in _FACTORIES:
        raise UserError(f"SLIME_ACCELERATOR={name} is not known; registered: {', '.join(sorted(_FACTORIES))}")
    return _FACTORIES[name]()


def gpus_on_this_machine() -> int:
    """GPUs that a process of this machine can use, without importing torch (the driver starts quickly).

    0 with `SLIME_ACCELERATOR=cpu`, with a CPU build of torch, and when `CUDA_VISIBLE_DEVICES`, or on AMD
    `HIP_VISIBLE_DEVICES`, hides them.
    """
    if env.forced_accelerator() == "cpu" or _torch_is_a_cpu_build():
        return 0
    try:
        from ray._private.accelerators import AMDGPUAcceleratorManager, NvidiaGPUAcceleratorManager
    except ModuleNotFoundError:
        # Ray is not installed, which is fine for a single rank; torch itself respects those variables.
        import torch

        return torch.cuda.device_count()
    makers = (NvidiaGPUAcceleratorManager, AMDGPUAcceleratorManager)
    present = next(filter(None, (maker.get_current_node_num_accelerators() for maker in makers)), 0)
    visible = env.visible_devices()
    return present if visible is None else min(present, len(visible))


def _torch_is_a_cpu_build() -> bool:
    return importlib.metadata.version("torch").endswith("+cpu")


def clear_memory() -> None:
    """Collect garbage, and give freed memory back to the system."""
    accelerator = get_accelerator()
    accelerator.synchronize()
    gc.collect()
    accelerator.release_cached_memory()


def available_memory() -> dict[str, Any]:
    """`device` (its name), and in GiB with two digits `total_GB`, `free_GB`, `used_GB` (by all processes) and `allocated_GB`
    (by this one)."""
    accelerator = get_accelerator()
    free, total = accelerator.memory_of_device()
    sizes = {"total": total, "free": free, "used": total - free, "allocated": accelerator.memory_allocated()}
    return {
        "device": accelerator.device_name(),
        **{f"{name}_GB": round(size / 2**30, 2) for name, size in sizes.items()},
    }


def print_memory(message: str) -> dict[str, Any]:
    """Log `available_memory` behind the message, and return it."""
    found = available_memory()
    logger.info("%s: memory %s", message, found)
    return found
