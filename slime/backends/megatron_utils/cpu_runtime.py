"""Lets the unmodified megatron-core wheel run on a machine without CUDA.

megatron-core 0.16.1 assumes a CUDA device. `install()` lifts that assumption from the outside, as each module of
`megatron.core` is imported. It does not change `torch` as other code sees it:

* `CONSTANT_LIFTS`: text constants inside megatron.core's code objects ("cuda" as a device, CUDA tensor type names);
* `TORCH_CUDA_LIFTS`: what `torch.cuda` offers to megatron.core modules, whose global name `torch` is a view of torch;
* `MODULE_LIFTS`: functions of single modules that are replaced as a whole;
* `KERNEL_PACKAGES`: packages that this process cannot import;
* `TENSOR_METHOD_LIFTS` and `OPTIMIZER_METHOD_LIFTS`: the exceptions, methods of `torch.Tensor` itself, and only methods that
  can do nothing but raise where there is no CUDA; and methods of optimizers, which do what they did.

Every lift names the assumption it removes. A test takes each one away (but for packages, which need not be there) and sees
the wheel fail without it, so a lift that a newer wheel no longer needs shows itself. Where the accelerator is not the CPU,
`install()` does nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

from slime.utils.device import get_accelerator

_PACKAGE = "megatron.core"

# Assumption: a tensor that is created or moved inside megatron.core belongs on a CUDA device, and the type of a
# parameter is one of the CUDA tensor types (optimizer/optimizer.py, optimizer/distrib_optimizer.py,
# optimizer/clip_grads.py).
CONSTANT_LIFTS: dict[str, str] = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


class _OneStream:
    """Stands in for a CUDA stream: on a CPU all work is done at once, so there is nothing to wait for."""

    def __init__(self, device: Any = None) -> None:
        return

    def wait_stream(self, stream: Any) -> None:
        return


class _OneEvent:
    """Stands in for a CUDA event, which is recorded on one stream and waited for on another."""

    def record(self, stream: Any = None) -> None:
        return

    def wait(self, stream: Any = None) -> None:
        return


def _torch_cuda_lifts() -> dict[str, Any]:
    import torch

    return {
        # Assumption: the default device of a process is a CUDA device (used as `device=` nearly everywhere).
        "current_device": lambda: torch.device("cpu"),
        # Assumption: work is queued on the device and has to be waited for (process groups, checkpoint writers).
        "synchronize": lambda device=None: None,
        # Assumption: the generator that initialises weights and drops activations is the CUDA one
        # (tensor_parallel/random.py). On CPU it is torch's default generator.
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": lambda device="cpu": torch.get_rng_state(),
        # Assumption: work that may overlap is queued on a stream of its own (transformer/moe/shared_experts.py,
        # distributed/param_and_grad_buffer.py).
        "Stream": _OneStream,
        "current_stream": _OneStream,
        "default_stream": _OneStream,
        # Assumption: events say when the work on a stream is done, and its parts are named for a profiler
        # (models/common/model_chunk_schedule_plan.py, pipeline_parallel/utils.py).
        "Event": _OneEvent,
        "nvtx": types.SimpleNamespace(range_push=lambda name: None, range_pop=lambda: None),
    }


TORCH_CUDA_LIFTS: tuple[str, ...] = (
    "current_device", "synchronize", "manual_seed", "get_rng_state", "Stream", "current_stream", "default_stream", "Event",
    "nvtx",
)  # fmt: skip


def _disable_jit_fuser(jit: types.ModuleType) -> None:
    """Assumption: elementwise functions are worth a torch.compile. On CPU that costs every rank a second of imports and,
    for a function that is called, a run of the C++ compiler."""
    jit.disable_jit_fuser()


def _use_cpu_generator(random: types.ModuleType) -> None:
    """Assumption: generator states are read and set through torch.cuda's internals, once CUDA is initialised."""
    import torch

    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _leave_counts_on_host(token_dispatcher: types.ModuleType) -> None:
    """Assumption: how many tokens go where is known on the device, and is copied to the host on a stream of its own."""

    def as_numpy(self, point: str, tokens_per_expert: Any) -> Any:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            splits = getattr(self, name)
            if hasattr(splits, "numpy"):
                setattr(self, name, splits.numpy())
        return tokens_per_expert

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = "none on CPU"
    dispatcher._maybe_dtoh_and_synchronize = as_numpy


def _fill_uneven_parts(mappings: types.ModuleType) -> None:
    """Assumption: ranks may bring parts of different lengths to a collective, as NCCL takes them and Gloo does not. Here all
    are as long as the longest one, and what was filled up is dropped."""
    import torch

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def filled(part: Any, length: int) -> Any:
        return torch.cat([part, part.new_zeros(length - len(part), *part.shape[1:])])

    def gather_parts(input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, None, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        parts = gather(filled(input_, max(sizes)), group).chunk(len(sizes)) if max(sizes) else [input_]
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=False)])

    def scatter_parts(input_: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, None, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        if not max(sizes):
            return input_
        parts = [filled(part, max(sizes)) for part in input_.split(sizes)]
        return reduce_scatter(torch.cat(parts), group)[: sizes[group.rank()]]

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_parts, scatter_parts


def _leave_a_lone_rank_alone(param_and_grad_buffer: types.ModuleType) -> None:
    """Assumption: collectives of a group of one rank cost nothing, since gradients and parameters are where they should be.
    Gloo copies them into other memory and back."""

    def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(output: Any, input_: Any, *, group: Any, **options: Any) -> Any:
            if group.size() == 1 and output.data_ptr() == input_.data_ptr():
                return None
            return collective(output, input_, group=group, **options)

        return call

    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(param_and_grad_buffer, name, unless_alone(getattr(param_and_grad_buffer, name)))


MODULE_LIFTS: dict[str, Callable[[types.ModuleType], None]] = {
    "megatron.core.distributed.param_and_grad_buffer": _leave_a_lone_rank_alone,
    "megatron.core.jit": _disable_jit_fuser,
    "megatron.core.tensor_parallel.mappings": _fill_uneven_parts,
    "megatron.core.tensor_parallel.random": _use_cpu_generator,
    "megatron.core.transformer.moe.token_dispatcher": _leave_counts_on_host,
}


# Assumption: kernels of packages that are installed run on the device of this process, so they are taken wherever they are
# found (optimizer/clip_grads.py, optimizer/__init__.py). With SLIME_ACCELERATOR=cpu the host of a GPU has them, too. Without
# them Megatron-Core uses torch's operations.
KERNEL_PACKAGES: tuple[str, ...] = (
    "transformer_engine", "transformer_engine_torch", "apex", "amp_C", "fused_weight_gradient_mlp_cuda", "flash_attn",
    "flash_attn_3", "grouped_gemm", "deep_ep",
)  # fmt: skip

TENSOR_METHOD_LIFTS: dict[str, Callable[..., Any]] = {
    # Assumption: host tensors are moved to the device by `.cuda()` (checkpoint exchange between ranks, optimizer state).
    "cuda": lambda self, *args, **kwargs: self,
    # Assumption: memory must not be given away while work on another stream still uses it (pipeline_parallel/utils.py).
    "record_stream": lambda self, stream: None,
}

# Assumption: torch's compiler is loaded anyway, so that a method that is excluded from compilation may import it. A rank on CPU
# does not load it otherwise, and the import takes more than a second.
OPTIMIZER_METHOD_LIFTS: tuple[str, ...] = ("state_dict", "load_state_dict", "add_param_group")


class _View(types.ModuleType):
    """A module with a few attributes of its own; everything else it takes from the module behind it."""

    def __init__(self, behind: types.ModuleType, **own: Any) -> None:
        super().__init__(behind.__name__)
        self.__dict__.update(own, _behind=behind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_behind"], name)


def _lift_constant(constant: Any, constants: dict[str, str]) -> Any:
    if isinstance(constant, str):
        return constants.get(constant, constant)
    if isinstance(constant, types.CodeType):
        return constant.replace(co_consts=tuple(_lift_constant(inner, constants) for inner in constant.co_consts))
    if isinstance(constant, tuple):
        return tuple(_lift_constant(inner, constants) for inner in constant)
    if isinstance(constant, frozenset):
        return frozenset(_lift_constant(inner, constants) for inner in constant)
    return constant


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one megatron.core module with the lifts applied."""

    def __init__(self, name: str, path: str, runtime: _Finder) -> None:
        super().__init__(name, path)
        self._runtime = runtime

    def get_code(self, fullname: str) -> types.CodeType | None:
        return _lift_constant(super().get_code(fullname), self._runtime.constants)

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        # Only functions called later see the view: no megatron.core module touches the device while it is imported.
        if "torch" in vars(module):
            module.torch = self._runtime.torch_view
        if module.__name__ in self._runtime.modules:
            self._runtime.modules[module.__name__](module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds megatron.core modules the usual way and gives them the lifting loader."""

    def __init__(self, without: frozenset[str]) -> None:
        import torch

        cuda = {name: lift for name, lift in _torch_cuda_lifts().items() if f"torch.cuda.{name}" not in without}
        self.torch_view = _View(torch, cuda=_View(torch.cuda, **cuda))
        self.constants = {old: new for old, new in CONSTANT_LIFTS.items() if old not in without}
        self.modules = {name: lift for name, lift in MODULE_LIFTS.items() if name not in without}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != _PACKAGE and not fullname.startswith(_PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self)
        return spec


def lift_names() -> list[str]:
    """The names of all lifts, as `install(without=...)` takes them."""
    methods = [f"torch.Tensor.{name}" for name in TENSOR_METHOD_LIFTS]
    methods += [f"torch.optim.Optimizer.{name}" for name in OPTIMIZER_METHOD_LIFTS]
    return [*CONSTANT_LIFTS, *(f"torch.cuda.{name}" for name in TORCH_CUDA_LIFTS), *MODULE_LIFTS, *methods]


def install(without: frozenset[str] = frozenset()) -> None:
    """Make later imports of `megatron.core` work without CUDA; call it before the first one. Idempotent.

    Args:
        without: names of lifts (of `lift_names()`, or a package) to leave out; for the tests that prove that each lift is
            needed, or that have a package on a CPU.

    Raises:
        RuntimeError: megatron.core was imported before; its modules can no longer be adapted.
    """
    import torch

    if get_accelerator().name != "cpu" or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _PACKAGE in sys.modules:
        raise RuntimeError(
            "slime.backends.megatron_utils.cpu_runtime.install() must run before megatron.core is imported"
        )
    for name, method in TENSOR_METHOD_LIFTS.items():
        if f"torch.Tensor.{name}" not in without:
            setattr(torch.Tensor, name, method)
    for name in OPTIMIZER_METHOD_LIFTS:
        if f"torch.optim.Optimizer.{name}" not in without:
            setattr(torch.optim.Optimizer, name, getattr(torch.optim.Optimizer, name).__wrapped__)
    # A module that is None here cannot be imported.
    sys.modules.update({name: None for name in KERNEL_PACKAGES if name not in without})
    sys.meta_path.insert(0, _Finder(without))
