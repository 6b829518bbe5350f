"""Our own flags about Megatron: hooks into the trainer, and layers that use the engine's FP8 kernels."""

import argparse

TITLE = "Megatron hooks"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    hooks = {
        "--custom-megatron-init-path": "called after Megatron is initialised",
        "--custom-megatron-before-log-prob-hook-path": "called before each forward-only pass",
        "--custom-megatron-before-train-step-hook-path": "called before the forward pass of each optimizer step",
    }
    for flag, help_text in hooks.items():
        group.add_argument(flag, default=None, help=f"plug-in path: {help_text}")
    for kind, default in (("", None), ("moe-", ["mlp.experts"])):
        group.add_argument(
            f"--megatron-deepgemm-{kind}forward-layers",
            nargs="+",
            type=int,
            default=None,
            help="decoder layers, counted from 0 over all pipeline stages, whose forward uses the engine's block-FP8 GEMM",
        )
        group.add_argument(
            f"--megatron-deepgemm-{kind}forward-modules",
            nargs="+",
            default=default,
            help="endings of the names of the modules to replace in those layers",
        )
