"""Flags of prompts, batches and their schedule."""

import argparse

from slime.arguments.types import json_object

TITLE = "data and batches"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    _add_prompts(group)
    _add_batches(group)
    _add_micro_batches(group)


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompt-data",
        nargs="+",
        default=None,
        help=".jsonl or .parquet files, each with an optional slice such as data.jsonl@[0:100]; read in order",
    )
    group.add_argument(
        "--data-source-path",
        default="slime.rollout.data_source.RolloutDataSourceWithBuffer",
        help="plug-in path: data source class",
    )
    group.add_argument(
        "--disable-rollout-global-dataset",
        dest="rollout_global_dataset",
        action="store_false",
        help="no built-in data set: the data source or the rollout function brings prompts",
    )
    group.add_argument(
        "--streaming-data",
        action="store_true",
        help="read rows on demand through an index of offsets instead of loading the files; same order",
    )
    group.add_argument(
        "--num-data-workers",
        type=int,
        default=0,
        help="processes that render templates and tokenise prompts; 0: none beside the rollout manager",
    )
    group.add_argument(
        "--allow-bad-rows", action="store_true", help="skip and count unreadable rows instead of stopping at file:line"
    )
    group.add_argument(
        "--apply-chat-template",
        action="store_true",
        help="render prompts through the tokenizer's chat template, with generation prompt",
    )
    group.add_argument(
        "--apply-chat-template-kwargs", type=json_object, default={}, help="extra template arguments, as JSON object"
    )
    group.add_argument("--input-key", default=None, help="prompt field; unset: `prompt`, else `input`")
    group.add_argument("--label-key", default=None, help="label field; unset: `label` if the rows have it")
    group.add_argument(
        "--multimodal-keys",
        type=json_object,
        default=None,
        help='fields with media, as JSON object from media type to field: {"image": "image_file"}',
    )
    group.add_argument("--metadata-key", default="metadata", help="field with the metadata object")
    group.add_argument("--tool-key", default="tools", help="field with tool schemas for the chat template")
    group.add_argument(
        "--fresh-data-state",
        action="store_true",
        help="start the data source from zero although the checkpoint has no state for it",
    )
    group.add_argument(
        "--loss-mask-type",
        choices=["qwen", "qwen3", "qwen3_5", "distill_qwen"],
        default="qwen",
        help="how supervised fine-tuning finds assistant tokens",
    )


def _add_batches(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-rollout", type=int, default=None, help="number of rollout steps")
    group.add_argument("--num-epoch", type=int, default=None, help="passes over the data, when --num-rollout is unset")
    group.add_argument(
        "--start-rollout-id", type=int, default=None, help="first rollout id; unset: from the checkpoint, else 0"
    )
    group.add_argument("--rollout-batch-size", type=int, default=None, help="prompts per rollout step; must be given")
    group.add_argument("--n-samples-per-prompt", type=int, default=1, help="rollouts per prompt")
    group.add_argument(
        "--global-batch-size",
        type=int,
        default=None,
        help="rollouts (not samples) per optimizer step; --rollout-batch-size x --n-samples-per-prompt must be a "
        "multiple; unset: from --num-steps-per-rollout",
    )
    group.add_argument(
        "--num-steps-per-rollout",
        type=int,
        default=None,
        help="optimizer steps per rollout step; sets --global-batch-size; neither given: one step",
    )


def _add_micro_batches(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--micro-batch-size", type=int, default=1, help="samples per micro-batch when batching is static"
    )
    group.add_argument(
        "--use-dynamic-batch-size", action="store_true", help="pack samples into micro-batches up to a token budget"
    )
    group.add_argument(
        "--max-tokens-per-gpu",
        type=int,
        default=None,
        help="that budget, in tokens per GPU; a micro-batch holds this times --context-parallel-size",
    )
    group.add_argument(
        "--packing",
        choices=["best-fit", "first-fit"],
        default="best-fit",
        help="how dynamic batching fills micro-batches",
    )
    group.add_argument("--balance-data", action="store_true", help="equalise estimated FLOPs over data-parallel ranks")
    group.add_argument(
        "--balance-by-flops",
        action="store_true",
        help="pack micro-batches by estimated FLOPs instead of tokens; implies --balance-data",
    )
    group.add_argument(
        "--data-pad-size-multiplier",
        type=int,
        default=128,
        help="packed streams are padded to a multiple of tensor-parallel size times this",
    )
