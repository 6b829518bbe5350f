"""The imports that the server of `run_distributed` does once for all processes that it forks: the trainer's modules, Megatron
with its CPU lifts, models of transformers, and modules that test files with workers import. It also parses the default
arguments once."""

import gc
import importlib
import warnings

from slime.backends.megatron_utils import cpu_runtime
from tests.support.models.args import default_args
from tests.support.processes.trainer_imports import import_trainer

# Modules that ranks train with beside Megatron, and modules that test files import.
OTHERS = (
    "slime.backends.fsdp_utils.backend", "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3",
    "pytest", "safetensors.torch", "tests.support.models.tiny_families", "tests.support.processes.layout_steps",
    "tests.support.processes.megatron_worker",
)  # fmt: skip

# Imports make a million objects that stay. Collections that look through them would take a tenth of the time.
gc.disable()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        cpu_runtime.install()
        import_trainer()
        for name in OTHERS:
            importlib.import_module(name)
        # Nearly every rank asks for the default arguments, and they need all flags, which are read from files.
        default_args()
    except ImportError as error:
        # The server ignores an ImportError silently, and every rank would then import everything by itself.
        raise RuntimeError(f"the processes of ranks cannot be prepared: {error}") from error

# Without freezing, a collection would write to every page that the children share.
gc.freeze()
gc.enable()
