"""Public import path of the device backends; their home is `slime.utils.device`."""

from slime.utils.device import Accelerator, get_accelerator, register_accelerator  # noqa: F401
