"""Flags of the training process: where weights start, how they reach the engines, and what the model is made of."""

import argparse

from slime.arguments.types import environment_variables

TITLE = "weights and training process"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    _add_process(group)
    _add_sync(group)
    _add_disk_sync(group)
    _add_trained_parameters(group)
    _add_model(group)


def _add_process(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--random-init", action="store_true", help="start from random weights instead of those of --hf-checkpoint"
    )
    group.add_argument(
        "--initial-megatron-checkpoint",
        default=None,
        help="where the weights come from when --load holds no checkpoint: as --ref-load, but no reference model; "
        "takes precedence over --ref-load there",
    )
    group.add_argument(
        "--train-env-vars",
        type=environment_variables,
        default={},
        help="extra environment of the train actors, as JSON object; applied last. The actors set it themselves before they "
        "import anything, so that it stands in no log; only what the dynamic loader, the interpreter, the thread libraries "
        "and Ray read (LD_*, PYTHON*, OMP_*, RAY_* and the like) is handed to Ray, but none of its tokens and passwords",
    )
    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="allow code shipped inside checkpoints, for tokenizer, config and engine alike",
    )
    group.add_argument(
        "--model-args-from-hf",
        action="store_true",
        help="derive all model-shape flags from the config of --hf-checkpoint; typed flags must agree with it",
    )
    group.add_argument(
        "--release-train",
        action="store_true",
        help="end the train actors during generation and recreate them from a checkpoint for each step; needs --save "
        "and --update-weight-transport disk, and saves every rollout",
    )
    group.add_argument(
        "--log-probs-chunk-size",
        type=int,
        default=-1,
        help="rows per float32 chunk when computing log-probs; 0 or less: chosen so that a chunk stays under 256 MiB",
    )
    group.add_argument(
        "--recompute-loss-function",
        action="store_true",
        help="compute log-probs and loss once more in the backward pass instead of keeping their activations: less "
        "memory, more time",
    )


def _add_sync(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--update-weight-mode",
        choices=["full", "delta"],
        default="full",
        help="send all parameters, or only the bytes that changed since the last sync; delta needs "
        "--update-weight-transport disk",
    )
    group.add_argument(
        "--update-weight-transport",
        choices=["nccl", "disk"],
        default="nccl",
        help="direct transfer (process group, or shared handles with --colocate), or files in --update-weight-disk-dir",
    )
    group.add_argument(
        "--update-weight-buffer-size",
        type=int,
        default=536870912,
        help="upper size of one weight transfer bucket, in bytes",
    )
    group.add_argument(
        "--update-weights-interval",
        type=int,
        default=1,
        help="push weights every N rollouts, in the asynchronous loop; see also --max-weight-staleness",
    )
    group.add_argument(
        "--update-weights-in-flight",
        action="store_true",
        help="pause running requests, swap the weights and go on; the version of each token is recorded",
    )


def _add_disk_sync(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--update-weight-disk-dir",
        default=None,
        help="directory that trainer and engines share; every sync writes one sub-directory (transport disk)",
    )
    group.add_argument(
        "--update-weight-disk-keep-files",
        action="store_true",
        help="keep published full checkpoints after the engines loaded them (transport disk)",
    )
    group.add_argument(
        "--update-weight-delta-encoding",
        choices=["xor", "overwrite"],
        default="xor",
        help="payload of --update-weight-mode delta: bit difference, to be applied exactly once, or positions with "
        "their new bytes, repeatable",
    )
    group.add_argument(
        "--update-weight-delta-checksum",
        choices=["xxh3-128", "blake3", "adler32"],
        default="xxh3-128",
        help="digest of every tensor, checked after a delta was applied",
    )
    group.add_argument(
        "--update-weight-local-checkpoint-dir",
        default=None,
        help="host-local Hugging Face checkpoint that is kept current and reloaded; delta cannot do without",
    )
    group.add_argument(
        "--custom-update-weight-post-write-path",
        default=None,
        help="plug-in path: called on each rank after it wrote its sync files (transport disk)",
    )


def _add_trained_parameters(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--only-train-params-name-list",
        nargs="+",
        default=None,
        help="regular expressions (re.search); parameters that match none of them are frozen",
    )
    group.add_argument(
        "--freeze-params-name-list",
        nargs="+",
        default=None,
        help="regular expressions (re.search); parameters that match one are frozen; not with "
        "--only-train-params-name-list",
    )
    group.add_argument(
        "--freeze-indexer",
        action="store_true",
        help="freeze the weights that choose keys in sparse attention; an error when the model has none",
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--custom-model-provider-path", default=None, help="plug-in path: function that builds the Megatron model"
    )
    group.add_argument(
        "--qwen-gdn-backend",
        choices=["fla", "flashqla"],
        default="fla",
        help="kernel family of gated-delta-net layers (Qwen3-Next and its kin)",
    )
    group.add_argument("--use-gated-attention", action="store_true", help="another name of --attention-output-gate")
    group.add_argument("--post-self-attn-layernorm", action="store_true", help="one more norm after attention")
    group.add_argument("--post-mlp-layernorm", action="store_true", help="one more norm after the MLP")
    group.add_argument(
        "--allgather-cp",
        action="store_true",
        help="context parallelism with contiguous shards and gathered keys and values; sparse-attention (DSA) models only",
    )
    group.add_argument(
        "--padded-vocab-size",
        type=int,
        default=None,
        help="force the padded vocabulary size; unset: --vocab-size up to a multiple of "
        "--make-vocab-size-divisible-by x tensor-parallel size",
    )
