"""Training with megatron-core."""

import importlib.abc
import sys
from collections.abc import Sequence
from typing import Any


class _NoTrackerForMegatron(importlib.abc.MetaPathFinder):
    """Keeps megatron-core from importing wandb; any other code can import it.

    megatron-core 0.16 imports wandb if it is installed, for timers that are not used here. An import of wandb makes two
    temporary directories, which a killed rank would leave behind.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname == "wandb" and _importing_module().startswith("megatron."):
            raise ModuleNotFoundError("No module named 'wandb' for megatron-core", name="wandb")


def _importing_module() -> str:
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame is not None else ""


sys.meta_path.insert(0, _NoTrackerForMegatron())
