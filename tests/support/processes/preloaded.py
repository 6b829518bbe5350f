"""What the server of `run_distributed` imports once, for all processes that it forks: what a rank trains with, Megatron behind
its lifts and the models of transformers; what the test files import that ranks are asked by; and the arguments of a run in
which nothing is typed."""

import gc
import importlib
import warnings

from slime.backends.megatron_utils import cpu_runtime
from tests.support.models.args import default_args
from tests.support.processes.trainer_imports import import_trainer

# What ranks train with beside Megatron, and what the test files import.
OTHERS = (
    "slime.backends.fsdp_utils.backend", "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3",
    "pytest", "safetensors.torch", "tests.support.models.tiny_families", "tests.support.processes.layout_steps",
    "tests.support.processes.megatron_worker",
)  # fmt: skip

# Imports make a million objects that stay: looking through them again and again is a tenth of their time.
gc.disable()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        cpu_runtime.install()
        import_trainer()
        for name in OTHERS:
            importlib.import_module(name)
        # Nearly every rank asks for them, and the flags are read from files and parsed for them.
        default_args()
    except ImportError as error:
        # The server passes over an ImportError without a word, and every rank would import all of it by itself.
        raise RuntimeError(f"the processes of ranks cannot be prepared: {error}") from error

# A collection would write to every page that the children share.
gc.freeze()
gc.enable()
