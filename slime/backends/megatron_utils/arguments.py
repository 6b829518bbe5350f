"""Public import path of what follows from Megatron's flags; only re-exports."""

from slime.arguments.megatron.values import derive_megatron_values as set_default_megatron_args  # noqa: F401
