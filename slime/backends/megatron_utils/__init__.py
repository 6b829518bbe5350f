"""Training with megatron-core."""

import importlib.abc
import sys
from collections.abc import Sequence
from typing import Any


class _NoTrackerForMegatron(importlib.abc.MetaPathFinder):
    """megatron-core 0.16 imports wandb where it is installed, for timers that nobody asks for; and wandb makes two
    temporary directories when it is imported, which a rank that is killed leaves behind. Whoever else imports it gets it.
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
