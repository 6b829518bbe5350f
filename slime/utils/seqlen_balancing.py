"""Public import path of packing and partitioning; only re-exports."""

from slime.scheduling.packing import (
    best_fit_pack,
    expand_bins_by_splitting,
    first_fit_pack,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    greedy_partition,
    karmarkar_karp,
)

__all__ = [
    "best_fit_pack",
    "expand_bins_by_splitting",
    "first_fit_pack",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
    "greedy_partition",
    "karmarkar_karp",
]
