"""Flags of placement, weights and the training process."""

import argparse

from slime.arguments.types import json_object

TITLE = "cluster, placement and weights"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    _add_placement(group)
    _add_weights(group)


def _add_placement(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--actor-num-nodes", type=int, default=1, help="nodes that run training ranks")
    group.add_argument("--actor-num-gpus-per-node", type=int, default=8, help="training ranks on each of those nodes")
    group.add_argument(
        "--rollout-num-gpus", type=int, default=None, help="GPUs given to inference; not needed with --debug-train-only"
    )
    group.add_argument("--rollout-num-gpus-per-engine", type=int, default=1, help="GPUs of one engine")
    group.add_argument("--num-gpus-per-node", type=int, default=8, help="node size for engine placement")
    group.add_argument(
        "--distributed-timeout-minutes", type=int, default=10, help="time limit of one collective, in minutes"
    )


def _add_weights(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--random-init",
        action="store_true",
        help="start from random weights instead of those of --hf-checkpoint",
    )
    group.add_argument(
        "--train-env-vars", type=json_object, default={}, help="extra environment of the train actors, as JSON object"
    )
    group.add_argument(
        "--update-weight-buffer-size",
        type=int,
        default=536870912,
        help="upper size of one weight transfer bucket, in bytes",
    )
    group.add_argument(
        "--log-probs-chunk-size",
        type=int,
        default=-1,
        help="rows per float32 chunk when computing log-probs; 0 or less: chosen so that a chunk stays under 256 MiB",
    )
    group.add_argument(
        "--padded-vocab-size", type=int, default=None, help="force the padded vocabulary size; else computed"
    )
    group.add_argument(
        "--trust-remote-code", action="store_true", help="allow code shipped inside checkpoints (tokenizer, engine)"
    )
    group.add_argument(
        "--model-args-from-hf",
        action="store_true",
        help="derive all model-shape flags from the config of --hf-checkpoint; typed flags must agree with it",
    )
