"""What is looked at when the arguments are right and before Ray starts: rows of data files, the chat template, what is left.

A run would find each of these by itself, after the 10 to 20 seconds that its processes take to start. The rows are read for
a few seconds at most; whoever loads them reads the rest.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator

from slime.arguments.checkpoints import latest_iteration
from slime.arguments.rules.data import SFT_FUNCTION, OwnFile, names_reward, own_files
from slime.utils.data_files import estimated_rows
from slime.utils.dataset import scan_rows
from slime.utils.errors import UserError
from slime.utils.processing_utils import lacks_chat_template, no_chat_template
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

SCAN_SECONDS = 5.0


def check_before_start(args: argparse.Namespace, scan_seconds: float = SCAN_SECONDS) -> None:
    """Look at the data and the tokenizer.

    Raises:
        UserError: one message with everything that would end the run later.
    """
    problems = [*_template_problems(args), *_row_problems(args, time.monotonic() + scan_seconds)]
    if problems:
        raise UserError("\n".join(problems))


def nothing_left(args: argparse.Namespace) -> str | None:
    """Why a run with these checked arguments would do nothing; None when it would, or when only its data can tell."""
    total = args.num_rollout
    if not total:
        return None  # epochs: the data set knows. And 0 asks for an evaluation alone
    start, source = args.start_rollout_id, args.initial_weights
    if start is not None:
        return (
            None
            if start < total
            else f"nothing left to do: --start-rollout-id {start} is not below --num-rollout {total}"
        )
    if source is None or not source.resume:
        return None
    start = 1 + (latest_iteration(source.path) if source.step is None else source.step)
    if start < total:
        return None
    return (
        f"nothing left to do: {start} rollouts are done in --load {source.path}, --num-rollout is {total}; a larger "
        "--num-rollout goes on from there"
    )


def _template_problems(args: argparse.Namespace) -> Iterator[str]:
    if args.hf_checkpoint is None or not lacks_chat_template(args.hf_checkpoint):
        return
    files = list(_files_of_the_run(args))
    if args.prompt_data and args.rollout_function_path == SFT_FUNCTION and args.load_debug_rollout_data is None:
        yield no_chat_template("supervised fine-tuning renders chats", args.hf_checkpoint)
    elif any(file.in_template for file in files):
        yield no_chat_template("--apply-chat-template is given", args.hf_checkpoint)


def _files_of_the_run(args: argparse.Namespace) -> Iterator[OwnFile]:
    """The files that are read when the run starts."""
    for file in own_files(args):
        trains = file.flag == "--prompt-data"
        if args.load_debug_rollout_data is None if trains else args.has_engines and args.eval_interval is not None:
            yield file


def _row_problems(args: argparse.Namespace, deadline: float) -> Iterator[str]:
    if args.allow_bad_rows:
        return  # they are skipped, and counted where they are read
    from tqdm import tqdm

    no_template = args.hf_checkpoint is not None and lacks_chat_template(args.hf_checkpoint)
    for file in _files_of_the_run(args):

        def objection(sample: Sample, file: OwnFile = file) -> str | None:
            return _objection(sample, file, args.hf_checkpoint if no_template else None)

        total = estimated_rows(file.path) if sys.stderr.isatty() else None
        name = os.path.basename(file.path)
        # Nothing is drawn where nobody looks, nor for a file that is read at once.
        with tqdm(desc=f"checking {name}", total=total, unit="row", leave=False, disable=None, delay=0.5) as bar:
            scan = scan_rows(
                file.path,
                file.keys,
                flag=file.flag,
                objection=objection,
                deadline=deadline,
                advance=bar.update,
            )
        yield from scan.problems
        if not scan.finished and not scan.problems and not scan.rows:
            logger.info("%s: its rows are read while the run starts", file.path)
        elif not scan.finished and not scan.problems:
            logger.info(
                "%s: the first %d rows can be used; the others are read while the run starts", file.path, scan.rows
            )


def _objection(sample: Sample, file: OwnFile, without_template: str | None) -> str | None:
    """Why a row that can be read ends the run later. `without_template`: the tokenizer, if it has no chat template."""
    chat = not isinstance(sample.prompt, str)
    if file.prompts == "messages" and not chat:
        return (
            "the prompt is text, and supervised fine-tuning needs a list of messages; name that field with --input-key"
        )
    if file.prompts == "renderable" and chat and not file.in_template and without_template is not None:
        return no_chat_template("the prompt is a list of messages", without_template)
    if file.graded_by_row and not names_reward(sample.metadata):
        return f"nothing says how responses are graded: no `rm_type` in {file.keys.metadata!r}; give --rm-type"
    return None
