"""The imports of a training rank, for processes that are forked after them."""

import importlib
import pkgutil

PACKAGES = ("slime.training", "slime.backends.megatron_utils", "slime.weights")


def import_trainer() -> None:
    """Import the trainer with its Megatron backend, and torch's compiler, which the first optimizer of a process imports.

    The function searches for the modules instead of listing them, so that it finds new ones too.
    """
    for name in PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            importlib.import_module(module.name)
    importlib.import_module("torch._dynamo")
