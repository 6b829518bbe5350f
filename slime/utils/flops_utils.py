"""Public import path of the FLOPs count; only re-exports."""

from slime.models.shape_of_flags import calculate_fwd_flops as calculate_fwd_flops
