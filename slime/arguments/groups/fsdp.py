"""Flags of the FSDP backend (`--train-backend fsdp`); `--gradient-checkpointing` works with Megatron too."""

import argparse

TITLE = "FSDP"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="recompute every block in the backward pass instead of keeping its activations; with Megatron: "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 unless those are typed",
    )
    group.add_argument(
        "--context-parallel-size", type=int, default=1, help="ranks that split one sequence, with either backend"
    )
    group.add_argument(
        "--attn-implementation",
        choices=["auto", "flash_attention_2", "flash_attention_3", "sdpa", "eager"],
        default="auto",
        help="attention kernel of --train-backend fsdp; auto takes the fastest that is installed",
    )
    group.add_argument(
        "--fsdp-cpu-offload",
        action="store_true",
        help="with --train-backend fsdp, keep parameters and optimizer state in host memory",
    )
    group.add_argument(
        "--optimizer-cpu-offload",
        "--offload-optimizer-states",
        action="store_true",
        help="keep the optimizer state in host memory, with either backend",
    )
