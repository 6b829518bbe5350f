"""The one door to the device: which accelerator a process uses and what differs because of it.

Everything else in the package asks `get_accelerator()`: nobody else names `torch.cuda`, but for the adapters that lift what
wheels assume about it. A new device is a subclass of `Accelerator` given to `register_accelerator`.
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

# Of glibc's malloc.h, and the bytes up to which a piece of memory is kept.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 2**30

# Of a recording of allocations on a GPU so many are kept, the newest; each takes some kilobytes in a snapshot.
_RECORDED_EVENTS = 100_000


class Accelerator:
    """What the trainer and the weight transports need to know about a device. This base class is the CPU."""

    name = "cpu"
    process_group_backend = "gloo"
    # Whether its memory is that of the host.
    shares_host_memory = True
    # Of groups whose collectives are on tensors of the host and on objects.
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
        """Have this process use freed memory again instead of giving it back, until `release_cached_memory`.

        glibc gives back pieces of 32 MiB and more at once, and logits are such: the kernel then clears their pages anew in
        every micro-batch. Where the environment says how that is to be, it stays so.
        """
        tune = getattr(ctypes.CDLL(None), "mallopt", None)
        if tune is not None and not env.tunes_allocator():
            tune(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
            tune(_M_TRIM_THRESHOLD, 2**31 - 1)

    def compute_in_this_thread(self) -> None:
        """Have the thread that calls compute on all cores of this process, and those that begin to compute later on one.

        OpenMP's threads wait awake for the next operator only where a process has no more of them than cores. Gloo adds up in
        threads of its own: with a team for each of these, every operator would wait for the kernel to wake its other threads.
        """
        set_threads_of_later_threads(1)

    def synchronize(self) -> None:
        """Wait until all work queued on the device is done."""

    def host_buffer(self, size: int) -> torch.Tensor:
        """`size` bytes of host memory, uint8, that the device copies to and from while the host goes on.

        They are given back when this tensor is gone: keep it for as long as its views.
        """
        import torch

        return torch.empty(size, dtype=torch.uint8)

    def aside(self) -> contextlib.AbstractContextManager:
        """What is queued on the device within begins after what was queued before, and what is queued afterwards does not wait
        for it, unless `join_aside` says so."""
        return contextlib.nullcontext()

    def join_aside(self) -> None:
        """Have what is queued from now on wait for all that was queued in `aside`."""

    def mark(self) -> Callable[[], None]:
        """A point among what is queued: called, the host waits until the device is there."""
        return lambda: None

    def generator_state(self) -> torch.Tensor | None:
        """The state of the device's random generator, uint8 on the host; None where it is the one of the host."""
        return None

    def set_generator_state(self, state: torch.Tensor) -> None:
        """Put the device's generator where it was; does nothing where it is the one of the host."""

    def fused(self, function: Callable[..., Any]) -> CompiledFunction | None:
        """`function` of tensors on this device as few kernels. None: this device fuses nothing, as here, where a cache holds
        what is computed in chunks."""
        return None

    def release_cached_memory(self) -> None:
        """Give back to the system what was freed and is kept for the next allocation."""
        # Of glibc; others give large pieces back at once.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def memory_allocated(self) -> int:
        """Bytes in use by this process: resident memory on CPU."""
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def peak_memory_allocated(self) -> int | None:
        """The most bytes of tensors since `reset_peak_memory`; None where the device does not count them."""
        return None

    def memory_of_device(self) -> tuple[int, int]:
        """(free, all) bytes of the device, whoever uses them; of the host on CPU, with what it would give up at once."""
        with open("/proc/meminfo") as meminfo:
            kilobytes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in meminfo)}
        return kilobytes["MemAvailable"] * 1024, kilobytes["MemTotal"] * 1024

    def reset_peak_memory(self) -> None:
        """Let the peak begin at what is allocated now; does nothing where the device counts none."""

    def profiled_activities(self) -> list[ProfilerActivity]:
        """What torch's profiler can look at here."""
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU]

    def record_memory(self, out_of_memory: Callable[[], None]) -> None:
        """Begin to record allocations on the device, and where in the source they are made. `out_of_memory` is called where one
        fails, before that raises; once begun it stays, whatever is recorded.

        Raises:
            UserError: this device has no such recording.
        """
        raise UserError(
            "--memory-recorder torch records the memory of GPUs, and this rank computes on a CPU; give --memory-recorder "
            "memray, which records that of the host, or drop --record-memory-history"
        )

    def write_recorded_memory(self, path: Path) -> None:
        """Write what was recorded and what is allocated, for https://pytorch.org/memory_viz.

        Raises:
            OSError: the disk refuses.
        """

    def stop_recording_memory(self) -> None:
        """Record no more, and forget what was recorded."""

    def device_name(self) -> str:
        """What the maker calls the device."""
        return "cpu"

    def device_uuid(self, index: int) -> str | int:
        """What all processes call the device that this one numbers `index`."""
        return index

    def collect_shared_memory(self) -> None:
        """Free memory that this process shared, has dropped, and that nobody else has mapped any more."""


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

        # Every other backend carries what is on the GPU, whatever its name.
        on_host = dist.get_backend(group) == self.host_group_backend
        return torch.device("cpu") if on_host else self.current_device()

    def set_device(self, index: int) -> None:
        import torch

        torch.cuda.set_device(index)

    def keep_freed_memory(self) -> None:
        """PyTorch's allocator does that."""

    def compute_in_this_thread(self) -> None:
        """The device computes."""

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def fused(self, function: Callable[..., Any]) -> CompiledFunction:
        return CompiledFunction(function)

    def host_buffer(self, size: int) -> torch.Tensor:
        import torch

        if size == 0:
            return super().host_buffer(size)
        # torch's own pinned memory comes in powers of two: nearly twice the size, at worst. A fork, as the writer of
        # checkpoints makes one, would copy pages that are pinned.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        # Registering fills every page: by pages of 4 KiB a gigabyte takes a third of a second. Some kernels have no others.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        driver, address = torch.cuda.cudart(), buffer.data_ptr()
        torch.cuda.check_error(driver.cudaHostRegister(address, size, 0))

        def give_back() -> None:
            # The device may still be reading.
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

        # Frames of C++ would be looked up one by one when a snapshot is written, for minutes.
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


# Dtypes and sizes for which one function is compiled.
_KINDS = 64


class CompiledFunction:
    """A function of tensors that torch compiles when it is first called, for any size of the first dimension of each. Results
    have no gradient.

    Compiled kernels are chosen by their speed, so they add in another order in another run: with deterministic algorithms
    nothing is compiled.

    Where the compiler or what it needs is missing (Triton, a C compiler), or is switched off, it says so once and returns None
    from then on: the caller has another way. While a TorchDispatchMode looks at operations torch compiles nothing: then it
    returns None too.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = None
        self._is_broken = False
        # Of arguments that came before: dtypes, layouts, and all sizes but the first.
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
            # Whole or not at all: half of it would make what the other half was to read at once.
            self._compiled = torch.compile(self._function, fullgraph=True)
        # With TORCHDYNAMO_DISABLE=1 `torch.compile` gives back what it was given; its result would be computed in many steps.
        if self._compiled is self._function or torch._dynamo.config.disable:
            return self._give_up("torch's compiler is switched off (TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE)")
        if torch._dynamo.config.recompile_limit < _KINDS:
            # Of norms, say, a model has some of each width, in training and without gradients; torch thinks of 8 as too many.
            # Every thread has a limit of its own, and the one of the backward pass comes later.
            torch._dynamo.config.recompile_limit = _KINDS
        # What requires a gradient would be compiled once more.
        arguments = [argument.detach() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor) and argument.dim()]
        kind = tuple((tensor.dtype, tensor.shape[1:], tensor.stride(), min(len(tensor), 2)) for tensor in tensors)
        if kind not in self._known:
            self._known.add(kind)
            for tensor in tensors:
                # Rows come in any number. A kernel that does not know their width takes up to twice as long.
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
    """Have threads that compute for the first time from now on do so on `count` cores each. The caller's number stays.

    PyTorch keeps a number per thread, which it takes when the thread first asks, and one for threads to come: setting it sets
    both, so a thread of its own does that.
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
        # A rank that is alone needs no Ray; torch heeds those variables by itself.
        import torch

        return torch.cuda.device_count()
    makers = (NvidiaGPUAcceleratorManager, AMDGPUAcceleratorManager)
    present = next(filter(None, (maker.get_current_node_num_accelerators() for maker in makers)), 0)
    visible = env.visible_devices()
    return present if visible is None else min(present, len(visible))


def _torch_is_a_cpu_build() -> bool:
    return importlib.metadata.version("torch").endswith("+cpu")


def clear_memory() -> None:
    """Collect garbage, and give back to the system what was freed."""
    accelerator = get_accelerator()
    accelerator.synchronize()
    gc.collect()
    accelerator.release_cached_memory()


def available_memory() -> dict[str, Any]:
    """`device`, its name, and in GiB, with two digits: `total_GB`, `free_GB`, `used_GB` by anybody, `allocated_GB` by us."""
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
