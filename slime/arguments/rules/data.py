"""Rules about prompts and evaluation sets; what must exist on disk stands in `files`."""

import argparse
import os
from collections.abc import Iterator

from slime.arguments.config_files.eval_file import lines_of_sets
from slime.arguments.rules import Rule
from slime.utils.data import check_first_row
from slime.utils.data_files import path_without_slice
from slime.utils.errors import UserError

# Where the data sources and evaluation functions live whose way of reading files is known.
_OWN = "slime.rollout."


def prompts(args: argparse.Namespace) -> Iterator[str]:
    if args.rollout_global_dataset and not args.prompt_data and args.load_debug_rollout_data is None:
        yield "--prompt-data is needed (or --disable-rollout-global-dataset with an own data source)"


def evaluation(args: argparse.Namespace) -> Iterator[str]:
    # A set that was given and could not be read has a message of its own.
    if args.eval_interval is not None and not args.eval_prompt_data and args.eval_config is None:
        yield f"--eval-interval {args.eval_interval} needs data sets: give --eval-prompt-data name path, or --eval-config"


def first_rows(args: argparse.Namespace) -> Iterator[str]:
    """The first row of every file that exists must have the fields that are asked for."""
    for path, prompt_key, label_key, flag in own_files(args):
        if os.path.isfile(path_without_slice(path)):
            yield from _row_problem(path, prompt_key, label_key, flag)


def own_files(args: argparse.Namespace) -> Iterator[tuple[str, str | None, str | None, str]]:
    """(path, prompt key, label key, flag) of all data files that our own code reads: plug-ins read theirs in their way."""
    if args.prompt_data and args.data_source_path.startswith(_OWN):
        for path in [args.prompt_data] if isinstance(args.prompt_data, str) else args.prompt_data:
            yield path, args.input_key, args.label_key, "--prompt-data"
    if args.eval_function_path.startswith(_OWN):
        in_file = args.eval_config is not None and args.eval_datasets
        lines = lines_of_sets(args.eval_config) if in_file else {}
        for dataset in args.eval_datasets:
            where = f"{lines[dataset.name]}: path" if dataset.name in lines else "--eval-prompt-data"
            yield dataset.path, dataset.input_key, dataset.label_key, where


def _row_problem(path: str, prompt_key: str | None, label_key: str | None, flag: str) -> Iterator[str]:
    try:
        check_first_row(path, prompt_key=prompt_key, label_key=label_key, flag=flag)
    except UserError as error:
        yield str(error)


DATA_RULES: tuple[Rule, ...] = (prompts, evaluation, first_rows)
