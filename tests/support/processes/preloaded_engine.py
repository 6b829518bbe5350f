"""The imports of `preloaded`, and Transformer Engine before them, for processes whose layers are its own."""

import importlib

from tests.support.kernels import transformer_engine_on_cpu

transformer_engine_on_cpu.install()
for name in ("transformer_engine.pytorch", "tests.support.processes.preloaded"):
    importlib.import_module(name)
