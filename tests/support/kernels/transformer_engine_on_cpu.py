"""Lets the unmodified wheel `transformer-engine` run on a machine without CUDA, over kernels in plain PyTorch.

The wheel has all of Transformer Engine's Python: modules, autograd functions, choice of attention, FP8 recipes, optimizers. Its
C++ and Triton kernels are not there, and `plain_kernels` and `plain_permutation` stand in for them. What runs like this are
its layers and how Megatron and the trainer use them, and not its kernels.

`install()` belongs into child processes that end with their test, before anything of Megatron is imported there, or into the
server that forks these. In `site-packages` of an environment without CUDA the wheel would break Megatron, which imports it
where it finds it, so `scripts/install.sh` puts it into a directory of its own.

It lifts the assumption of a CUDA device as `cpu_runtime` does for Megatron:

* `CONSTANT_LIFTS` and `ATTRIBUTE_LIFTS`: device names, and attributes of tensors, inside the package's code objects;
* `TORCH_CUDA_LIFTS`: what `torch.cuda` offers to the package's modules, whose global name `torch` is a view of torch;
* `MODULE_LIFTS`: functions of single modules that are replaced as a whole;
* `ABSENT_MODULES`: modules that cannot be imported for want of other packages, and that no layer calls.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from slime.backends.megatron_utils import cpu_runtime
from tests.support.kernels import plain_kernels

# Where `scripts/install.sh` puts the wheel.
WHEEL = Path(sys.prefix) / "transformer-engine"
_PACKAGE = "transformer_engine"

# Assumption: a tensor that is created or moved belongs on a CUDA device.
CONSTANT_LIFTS: dict[str, str] = {"cuda": "cpu"}
# Assumption: a tensor that a kernel takes is on a CUDA device (assertions of linear layers, attention, permutation).
ATTRIBUTE_LIFTS: dict[str, str] = {"is_cuda": "is_cpu"}

_HOPPER = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
TORCH_CUDA_LIFTS: dict[str, Any] = {
    # Assumption: the default device of a process is a CUDA device (used as `device=`).
    "current_device": lambda: torch.device("cpu"),
    # Assumption: there is a GPU, whose generation says which kernels there are. Here all layers that exist are to run.
    "is_available": lambda: True,
    "get_device_properties": lambda device=None: _HOPPER,
    "get_device_capability": lambda device=None: (_HOPPER.major, _HOPPER.minor),
    # Assumption: work may be recorded into a CUDA graph.
    "is_current_stream_capturing": lambda: False,
}


def _without_shared_objects(common: types.ModuleType) -> None:
    """Assumption: kernels are in shared objects."""
    common.load_framework_extension = lambda framework: None


def _with_absent_kernels(cpp_extensions: types.ModuleType) -> None:
    """Assumption: `import *` from the extension gives the name of every kernel."""
    cpp_extensions.__getattr__ = plain_kernels.__getattr__


def _on_default_device(utils: types.ModuleType) -> None:
    """Assumption: a device has a number."""
    utils.canonicalize_device = lambda device: torch.get_default_device() if device is None else torch.device(device)


MODULE_LIFTS: dict[str, Callable[[types.ModuleType], None]] = {
    "transformer_engine.common": _without_shared_objects,
    "transformer_engine.pytorch.cpp_extensions": _with_absent_kernels,
    "transformer_engine.pytorch.utils": _on_default_device,
}
# Assumption: torch was built for a version of CUDA, which says which recipes of FP8 there are.
_TORCH = cpu_runtime._View(
    torch, cuda=cpu_runtime._View(torch.cuda, **TORCH_CUDA_LIFTS), version=cpu_runtime._View(torch.version, cuda="13.0")
)

# What stands in for modules of kernels: names of files beside this one.
STAND_INS: dict[str, str] = {
    "transformer_engine_torch": "plain_kernels.py",
    "transformer_engine.pytorch.triton.permutation": "plain_permutation.py",
}

# The first two need Triton, the last one needs onnxscript.
ABSENT_MODULES: tuple[str, ...] = (
    "transformer_engine.pytorch.triton.cross_entropy",
    "transformer_engine.pytorch.triton.pad",
    "transformer_engine.pytorch.onnx_extensions",
)


def _on_cpu(code: types.CodeType) -> types.CodeType:
    """The code with the names of attributes lifted, and those in the functions in it."""
    inner = tuple(
        _on_cpu(constant) if isinstance(constant, types.CodeType) else constant for constant in code.co_consts
    )
    return code.replace(co_names=tuple(ATTRIBUTE_LIFTS.get(name, name) for name in code.co_names), co_consts=inner)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one module of the package with the lifts applied."""

    def get_code(self, fullname: str) -> types.CodeType | None:
        return _on_cpu(cpu_runtime._lift_constant(super().get_code(fullname), CONSTANT_LIFTS))

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        # Only functions that are called later see the view.
        if "torch" in vars(module):
            module.torch = _TORCH
        if module.__name__ in MODULE_LIFTS:
            MODULE_LIFTS[module.__name__](module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds stand-ins, and modules of the package the usual way, which get the lifting loader."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname in STAND_INS:
            return importlib.util.spec_from_file_location(fullname, Path(__file__).with_name(STAND_INS[fullname]))
        if fullname.partition(".")[0] != _PACKAGE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Make `import transformer_engine` work in this process, and have Megatron's models built of its layers.

    A forked process calls it again: it has the modules of its server, and not its paths and environment.

    Raises:
        FileNotFoundError: the wheel is not where `scripts/install.sh` puts it.
        RuntimeError: Megatron was imported before, without Transformer Engine.
    """
    if not (WHEEL / _PACKAGE).is_dir():
        raise FileNotFoundError(f"{WHEEL} has no {_PACKAGE}: bash scripts/install.sh puts it there")
    cpu_runtime.install(without=frozenset({_PACKAGE, "transformer_engine_torch"}))
    # The package's own switch for a build that has no shared objects yet.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    if str(WHEEL) not in sys.path:
        sys.path.append(str(WHEEL))
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name in ABSENT_MODULES:
        sys.modules[name] = plain_kernels.Absent(name)
    _build_its_layers()


def call_with_transformer_engine(worker: Callable[..., Any], *args: Any) -> Any:
    """A worker for `run_distributed`, with `start_method="transformer engine"`: calls another one after `install`."""
    # This file is loaded once more for a worker, and that module knows nothing of what the server has done.
    from tests.support.kernels import transformer_engine_on_cpu

    transformer_engine_on_cpu.install()
    return worker(*args)


def _build_its_layers() -> None:
    """Have the trainer take Transformer Engine's layers for its models as on a GPU, and nothing else."""
    from slime.backends.megatron_utils import transformer_config

    fields = transformer_config._layer_implementation_fields
    on_a_gpu = SimpleNamespace(name="cuda")

    def fields_on_a_gpu(args: Any) -> dict[str, Any]:
        with mock.patch.object(transformer_config, "get_accelerator", lambda: on_a_gpu):
            found = fields(args)
        if found["transformer_impl"] != args.transformer_impl:
            raise RuntimeError(f"--transformer-impl {args.transformer_impl} gives {found['transformer_impl']} layers")
        return found

    transformer_config._layer_implementation_fields = fields_on_a_gpu
