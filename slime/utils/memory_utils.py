"""Public import path of the device's memory; only re-exports."""

from slime.utils.device import available_memory, clear_memory, print_memory  # noqa: F401
