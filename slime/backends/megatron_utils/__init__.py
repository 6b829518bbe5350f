"""Training with megatron-core."""

import importlib.abc
import sys
from collections.abc import Sequence
from typing import Any

_TRACKERS = ("wandb", "torch.utils.tensorboard")


class _NoTrackerForMegatron(importlib.abc.MetaPathFinder):
    """Keeps megatron-core from importing trackers; any other code can import them.

    megatron-core 0.16 imports those that are installed, for timers whose values go nowhere else than to the log here. Every
    rank and every converter would wait for it. An import of wandb also makes two temporary directories, which a killed rank
    would leave behind.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname in _TRACKERS and _importing_module().startswith("megatron."):
            raise ModuleNotFoundError(f"No module named {fullname!r} for megatron-core", name=fullname)


def _importing_module() -> str:
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame is not None else ""


sys.meta_path.insert(0, _NoTrackerForMegatron())
