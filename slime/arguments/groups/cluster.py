"""Flags of placement: which nodes and GPUs train, which serve, and who moves out of whose way."""

import argparse

TITLE = "cluster and placement"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    _add_sizes(group)
    _add_time_limits(group)
    _add_offload(group)
    _add_plan(group)


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--actor-num-nodes", type=int, default=1, help="nodes that run training ranks")
    group.add_argument(
        "--actor-num-gpus-per-node",
        type=int,
        default=8,
        help="training ranks on each of those nodes, one GPU each; the world size is this times --actor-num-nodes",
    )
    group.add_argument(
        "--rollout-num-gpus",
        type=int,
        default=None,
        help="GPUs given to inference, a multiple of --rollout-num-gpus-per-engine; unset: all actor GPUs with "
        "--colocate, none with --debug-train-only, else it must be given; 0 starts routers without engines",
    )
    group.add_argument(
        "--rollout-num-gpus-per-engine",
        type=int,
        default=1,
        help="GPUs of one engine; its tensor-parallel size is this divided by its pipeline size",
    )
    group.add_argument(
        "--num-gpus-per-node",
        type=int,
        default=8,
        help="GPUs of one node, for the placement of engines; untyped with --colocate: --actor-num-gpus-per-node",
    )
    group.add_argument(
        "--distributed-backend",
        choices=["nccl", "gloo"],
        default="nccl",
        help="process-group backend of the training ranks; without GPUs it is always Gloo",
    )
    group.add_argument(
        "--distributed-timeout-minutes", type=int, default=10, help="time limit of one collective, in minutes"
    )
    group.add_argument(
        "--train-backend",
        choices=["megatron", "fsdp"],
        default="megatron",
        help="training engine: Megatron-Core, or PyTorch FSDP2 over the Hugging Face model",
    )
    group.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        help="how often training restarts from the last checkpoint (--save) after a training rank failed",
    )


def _add_time_limits(group: argparse._ArgumentGroup) -> None:
    """Of what takes the longer the larger the model is; `slime.arguments.time_limits` has the defaults."""
    limits = {
        "--engine-start-timeout": "an engine from its start until it is healthy",
        "--engine-load-timeout": "an engine that loads, puts in place or hashes all weights",
        "--train-start-timeout": "the training ranks from their start until they hold the model",
        "--checkpoint-publish-timeout": "publishing a checkpoint that is written, and deleting those that --keep-last lets go",
    }
    for flag, what in limits.items():
        group.add_argument(
            flag,
            type=float,
            default=None,
            help=f"time limit of {what}, in seconds; unset: from the size of the weights of --hf-checkpoint",
        )


def _add_offload(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--colocate",
        action="store_true",
        help="training and engines share the same GPUs and take turns; implies --offload-train and --offload-rollout "
        "unless those are typed",
    )
    group.add_argument("--offload", action="store_true", help="shorthand for --offload-train --offload-rollout")
    group.add_argument(
        "--offload-train",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="move the trainer's memory to the host while engines work; unset: on with --colocate",
    )
    group.add_argument(
        "--offload-rollout",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="free engine memory while the trainer works; unset: on with --colocate",
    )


def _add_plan(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan (placement, batch arithmetic, memory, weight sync, effective values), then exit; needs "
        "neither GPUs nor weights",
    )
    group.add_argument(
        "--check",
        action="store_true",
        help="do all that a run does before it starts Ray (flags, files, rows, plug-ins, this machine, what is left to "
        "do), say which resources it needs of Ray, then exit",
    )
    group.add_argument(
        "--dry-run-json", metavar="FILE", default=None, help="write the plan to this JSON file; implies --dry-run"
    )
    group.add_argument(
        "--dry-run-gpu-memory-gib",
        type=float,
        default=None,
        help="memory of one GPU in the plan, in GiB; unset: that of this machine's GPU, else 80",
    )
    group.add_argument(
        "--dry-run-link-gbps",
        type=float,
        default=400.0,
        help="link speed that the plan uses for the cost of a weight sync, in Gbit/s",
    )
