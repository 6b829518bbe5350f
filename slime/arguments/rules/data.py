"""Rules about prompts, evaluation sets, the number of rollouts and their batches; what must exist on disk stands in `files`."""

import argparse
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from slime.arguments.config_files.eval_file import places_in
from slime.arguments.flag import flag_of
from slime.arguments.rules import Rule
from slime.arguments.sizes import longest_sample, positions_of_model
from slime.utils.data_files import path_without_slice
from slime.utils.dataset import RowKeys, check_first_row
from slime.utils.errors import UserError

# Where the data sources and evaluation functions live whose way of reading files is known.
_OWN = "slime.rollout."
# Those of them that ask for rewards, and that train on chats as they stand.
_GRADING_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"
SFT_FUNCTION = "slime.rollout.sft_rollout.generate_rollout"


def prompts(args: argparse.Namespace) -> Iterator[str]:
    if args.rollout_global_dataset and not args.prompt_data and args.load_debug_rollout_data is None:
        yield "--prompt-data is needed (or --disable-rollout-global-dataset with an own data source)"


def evaluation(args: argparse.Namespace) -> Iterator[str]:
    # A set that was given and could not be read has a message of its own.
    if args.eval_interval is not None and not args.eval_prompt_data and args.eval_config is None:
        yield f"--eval-interval {args.eval_interval} needs data sets: give --eval-prompt-data name path, or --eval-config"


def chats_as_they_are(args: argparse.Namespace) -> Iterator[str]:
    if args.apply_chat_template and args.rollout_function_path == SFT_FUNCTION and args.prompt_data:
        yield (
            "--apply-chat-template: supervised fine-tuning takes lists of messages and renders them itself, to know which "
            "tokens the assistant said; drop it"
        )


def first_rows(args: argparse.Namespace) -> Iterator[str]:
    """The first row of every file that exists must have the fields that are asked for, and say how it is graded."""
    for file in own_files(args):
        if os.path.isfile(path_without_slice(file.path)):
            yield from _row_problems(file)


@dataclass(frozen=True)
class OwnFile:
    """A data file that our own code reads.

    Attributes:
        flag: where the path comes from, a flag or `file:line: key`.
        graded_by_row: the type of reward can only stand in the metadata of the rows.
        in_template: prompts are rendered in the chat template when the file is read.
        prompts: what must be known of a prompt: that it is a list of messages, that a list of messages can be rendered
            (its generation does that), or nothing.
    """

    path: str
    flag: str
    keys: RowKeys
    graded_by_row: bool = False
    in_template: bool = False
    prompts: Literal["messages", "renderable", "any"] = "any"


def own_files(args: argparse.Namespace) -> Iterator[OwnFile]:
    """All data files that our own code reads: plug-ins read theirs in their way."""
    if args.prompt_data and args.data_source_path.startswith(_OWN):
        kinds = {SFT_FUNCTION: "messages", _GRADING_FUNCTION: "renderable"}
        own_way = args.custom_generate_function_path is not None
        for path in [args.prompt_data] if isinstance(args.prompt_data, str) else args.prompt_data:
            yield OwnFile(
                path,
                "--prompt-data",
                RowKeys(args.input_key, args.label_key, args.tool_key, args.metadata_key),
                graded_by_row=_rows_name_rewards(args, args.rollout_function_path),
                in_template=args.apply_chat_template,
                prompts="any" if own_way else kinds.get(args.rollout_function_path, "any"),
            )
    if args.eval_function_path.startswith(_OWN):
        place = places_in(args.eval_config if args.eval_datasets else None)
        for dataset in args.eval_datasets:
            in_file = place(dataset.name, "path")
            graded = dataset.rm_type or dataset.custom_rm_path or dataset.metadata_overrides.get("rm_type")
            generate = dataset.custom_generate_function_path or args.custom_generate_function_path
            flags = tuple(_key_of_set(args, place(dataset.name, key), key) for key in ("input_key", "label_key"))
            by_row = not (dataset.custom_generate_function_path or graded)
            yield OwnFile(
                dataset.path,
                "--eval-prompt-data" if in_file is None else f"{in_file}: path",
                RowKeys(dataset.input_key, dataset.label_key, dataset.tool_key, dataset.metadata_key, flags),
                graded_by_row=by_row and _rows_name_rewards(args, args.eval_function_path),
                in_template=bool(dataset.apply_chat_template),
                prompts="any" if generate or args.eval_function_path != _GRADING_FUNCTION else "renderable",
            )


def _key_of_set(args: argparse.Namespace, in_file: str | None, key: str) -> str:
    if in_file is not None:
        return f"{key}, {in_file}"
    return flag_of(f"eval_{key}" if getattr(args, f"eval_{key}") is not None else key)


def _rows_name_rewards(args: argparse.Namespace, function: str) -> bool:
    """Whether the type of reward can only stand in the metadata of the rows."""
    elsewhere = (args.rm_type, args.custom_rm_path, args.custom_generate_function_path)
    return args.has_engines and function == _GRADING_FUNCTION and not any(elsewhere)


def _row_problems(file: OwnFile) -> Iterator[str]:
    try:
        row = check_first_row(file.path, file.keys, file.flag)
    except UserError as error:
        yield str(error)
        return
    if row is not None and file.graded_by_row and not names_reward(row.get(file.keys.metadata)):
        yield (
            f"{file.flag} {file.path}: nothing says how responses are graded: the first row has no `rm_type` in its "
            f"{file.keys.metadata!r}; give --rm-type (math, for example) or --custom-rm-path"
        )


def names_reward(metadata: object) -> bool:
    """Whether the metadata of a row says how its responses are graded."""
    return isinstance(metadata, dict) and bool(metadata.get("rm_type"))


logger = logging.getLogger(__name__)


def rollout_count(args: argparse.Namespace) -> Iterator[str]:
    if args.num_rollout is None and args.num_epoch is None:
        yield "give --num-rollout (rollout steps) or --num-epoch (passes over the data)"
    if args.num_rollout is not None and args.num_epoch is not None:
        logger.warning("--num-epoch %d is ignored: --num-rollout %d is given", args.num_epoch, args.num_rollout)
    if args.num_rollout is None and args.load_debug_rollout_data is not None:
        yield "--load-debug-rollout-data needs --num-rollout: a dump does not tell how many there are"
    if args.num_rollout is None and args.num_epoch is not None and not args.rollout_global_dataset:
        yield (
            f"--num-epoch {args.num_epoch} needs the built-in data set; give --num-rollout with "
            "--disable-rollout-global-dataset"
        )
    if args.over_sampling_batch_size < args.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {args.over_sampling_batch_size} must be at least --rollout-batch-size "
            f"{args.rollout_batch_size}"
        )


def static_batches(args: argparse.Namespace) -> Iterator[str]:
    unit = args.micro_batch_size * args.data_parallel_size
    if args.has_trainer and not args.use_dynamic_batch_size and args.global_batch_size % unit:
        yield (
            f"--global-batch-size {args.global_batch_size} is no multiple of --micro-batch-size {args.micro_batch_size} x "
            f"{args.data_parallel_size} data-parallel ranks; change one, or give --use-dynamic-batch-size"
        )


def dynamic_batches(args: argparse.Namespace) -> Iterator[str]:
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu, the token budget of a micro-batch (8192 is usual)"
    if args.balance_by_flops and not args.use_dynamic_batch_size:
        yield "--balance-by-flops needs --use-dynamic-batch-size"
    # Where no flag limits a sample, the model and the engines do.
    longest = longest_sample(args) or getattr(args, "sglang_context_length", None) or positions_of_model(args)
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is not None and longest is not None:
        budget = args.max_tokens_per_gpu * args.context_parallel_size
        # A plan says it among its own warnings.
        if longest > budget and not args.dry_run:
            logger.warning(
                "the longest allowed sample has %d tokens, more than --max-tokens-per-gpu %d x --context-parallel-size %d = "
                "%d: it makes a micro-batch of its own that needs more memory than the others",
                longest, args.max_tokens_per_gpu, args.context_parallel_size, budget,
            )  # fmt: skip


DATA_RULES: tuple[Rule, ...] = (prompts, evaluation, chats_as_they_are, first_rows)
BATCH_RULES: tuple[Rule, ...] = (rollout_count, static_batches, dynamic_batches)
