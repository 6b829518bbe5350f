"""Rules about prompts and evaluation sets; what must exist on disk stands in `files`."""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass

from slime.arguments.config_files.eval_file import places_in
from slime.arguments.plug_ins import flag_of
from slime.arguments.rules import Rule
from slime.utils.data_files import path_without_slice
from slime.utils.dataset import check_first_row
from slime.utils.errors import UserError

# Where the data sources and evaluation functions live whose way of reading files is known.
_OWN = "slime.rollout."
# The one of them that asks for rewards.
_GRADING_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"


def prompts(args: argparse.Namespace) -> Iterator[str]:
    if args.rollout_global_dataset and not args.prompt_data and args.load_debug_rollout_data is None:
        yield "--prompt-data is needed (or --disable-rollout-global-dataset with an own data source)"


def evaluation(args: argparse.Namespace) -> Iterator[str]:
    # A set that was given and could not be read has a message of its own.
    if args.eval_interval is not None and not args.eval_prompt_data and args.eval_config is None:
        yield f"--eval-interval {args.eval_interval} needs data sets: give --eval-prompt-data name path, or --eval-config"


def first_rows(args: argparse.Namespace) -> Iterator[str]:
    """The first row of every file that exists must have the fields that are asked for, and say how it is graded."""
    for file in own_files(args):
        if os.path.isfile(path_without_slice(file.path)):
            yield from _row_problems(file)


@dataclass(frozen=True)
class OwnFile:
    """A data file that our own code reads.

    Attributes:
        flag: where the path comes from, a flag or `file:line: key`; `key_flags`: the same of prompt and label key.
        metadata_key: field of the row's metadata; None where nothing has to be found there, because the run says how
            responses are graded.
    """

    path: str
    flag: str
    prompt_key: str | None
    label_key: str | None
    key_flags: tuple[str, str]
    metadata_key: str | None


def own_files(args: argparse.Namespace) -> Iterator[OwnFile]:
    """All data files that our own code reads: plug-ins read theirs in their way."""
    if args.prompt_data and args.data_source_path.startswith(_OWN):
        metadata = args.metadata_key if _rows_name_rewards(args, args.rollout_function_path) else None
        keys = (args.input_key, args.label_key, ("--input-key", "--label-key"))
        for path in [args.prompt_data] if isinstance(args.prompt_data, str) else args.prompt_data:
            yield OwnFile(path, "--prompt-data", *keys, metadata)
    if args.eval_function_path.startswith(_OWN):
        place = places_in(args.eval_config if args.eval_datasets else None)
        for dataset in args.eval_datasets:
            in_file = place(dataset.name, "path")
            graded = dataset.rm_type or dataset.custom_rm_path or dataset.metadata_overrides.get("rm_type")
            own_way = dataset.custom_generate_function_path or graded
            by_row = not own_way and _rows_name_rewards(args, args.eval_function_path)
            yield OwnFile(
                dataset.path,
                "--eval-prompt-data" if in_file is None else f"{in_file}: path",
                dataset.input_key,
                dataset.label_key,
                tuple(_key_of_set(args, place(dataset.name, key), key) for key in ("input_key", "label_key")),
                dataset.metadata_key if by_row else None,
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
        row = check_first_row(
            file.path, prompt_key=file.prompt_key, label_key=file.label_key, flag=file.flag, key_flags=file.key_flags
        )
    except UserError as error:
        yield str(error)
        return
    if row is None or file.metadata_key is None:
        return
    metadata = row.get(file.metadata_key)
    if not isinstance(metadata, dict) or not metadata.get("rm_type"):
        yield (
            f"{file.flag} {file.path}: nothing says how responses are graded: the first row has no `rm_type` in its "
            f"{file.metadata_key!r}; give --rm-type (math, for example) or --custom-rm-path"
        )


DATA_RULES: tuple[Rule, ...] = (prompts, evaluation, first_rows)
