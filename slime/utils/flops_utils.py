"""Public import path of the FLOPs count; only re-exports."""

from slime.arguments.model_shape import calculate_fwd_flops

__all__ = ["calculate_fwd_flops"]
