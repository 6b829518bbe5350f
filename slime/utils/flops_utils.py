"""Public import path of the FLOPs count; only re-exports."""

from slime.arguments.model_shape import calculate_fwd_flops as calculate_fwd_flops
