"""What the data files of a run, and the tokenizer beside its model, tell before it starts: rows, fields and prompts of no use.

Rows are read for a few seconds at most; the data source reads the rest when it loads them. The tokenizer takes seconds to load.
It is loaded where `--check` is given, and where every prompt has more bytes than it may have tokens.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime.arguments.config_files.eval_file import places_in
from slime.arguments.flag import flag_of
from slime.arguments.hf_config import read_hf_config
from slime.arguments.rules.data import OwnFile, names_reward, own_files
from slime.utils.data_files import BadRow, bad_row, estimated_rows, iterate_rows
from slime.utils.dataset import RowScan, scan_rows
from slime.utils.errors import UserError
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.processing_utils import (
    lacks_chat_template,
    lacks_tokenizer,
    load_processor,
    load_tokenizer,
    no_chat_template,
    no_processor,
    unheard_end_of_turn,
)
from slime.utils.prompt_rows import SFT_FUNCTION, PromptRow, RowKeys, RowReader, prompt_lengths, prompt_limit
from slime.utils.reward_types import compares_as_text, lacks_label, needs_label
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

SCAN_SECONDS = 5.0
# Prompts that are tokenised at once.
_BATCH = 64
_TRAINS_ON = "--prompt-data"


def prompt_problems(args: argparse.Namespace, seconds: float) -> list[str]:
    """Everything about data, chat template, tokenizer and processor that would end the run later.

    Args:
        seconds: for how long rows are read at most, and then tokenised at most.
    """
    problems = [*_template_problems(args), *_processor_problems(args)]
    scanned: list[_Scanned] = []
    problems += _row_problems(args, time.monotonic() + seconds, scanned)
    # What is wrong with rows or tokenizer is told first; it may be why nothing else fits.
    if problems:
        return problems
    # The files that are trained on make one set; each evaluation file is a set of its own.
    trained = [one for one in scanned if one.file.flag == _TRAINS_ON]
    groups = [*([trained] if trained else []), *([one] for one in scanned if one.file.flag != _TRAINS_ON)]
    for group in groups:
        problems += _unseen_fields(args, group)
    return problems + _token_problems(args, groups, seconds)


@dataclass
class _Scanned:
    """A file, the number of tokens that its prompts may have (None: any), and what a scan found in it.

    `fits`: the text of some prompt has no more bytes than it may have tokens, of which each has a byte at least. What a chat
    template adds is not counted.
    """

    file: OwnFile
    limit: int | None
    scan: RowScan | None = None
    fits: bool = False

    def look_at(self, sample: Sample) -> None:
        if self.limit is not None and not self.fits:
            messages = [{"content": sample.prompt}] if isinstance(sample.prompt, str) else sample.prompt
            # A beginning and an end of the text may have tokens too.
            self.fits = 2 + sum(len(str(message.get("content")).encode()) for message in messages) <= self.limit


def _unseen_fields(args: argparse.Namespace, group: list[_Scanned]) -> Iterator[str]:
    """A message for every field that the user names and no row has; one in the log where not all rows were read."""
    file, seen = group[0].file, frozenset().union(*(one.scan.fields for one in group))
    defaults = RowKeys(None, None, "tools", "metadata")
    named = (("tool_key", file.keys.tools, defaults.tools), ("metadata_key", file.keys.metadata, defaults.metadata),
             ("multimodal_keys", file.keys.images, None))  # fmt: skip
    for key, name, default in named:
        if name is None or name == default or name in seen or not seen:
            continue
        paths = " ".join(one.file.path for one in group)
        if all(one.scan.finished for one in group):
            yield (
                f"{_place_of_key(args, file, key)}: no row of {paths} has a field {name!r}, only {', '.join(sorted(seen))}; "
                "name one of these, or leave the key out"
            )
        else:
            count = sum(one.scan.rows for one in group)
            logger.warning(
                "%s: none of the first %d rows of %s has %r", _place_of_key(args, file, key), count, paths, name
            )


def _place_of_key(args: argparse.Namespace, file: OwnFile, key: str) -> str:
    if not file.flag.startswith("--"):
        return f"{file.flag.removesuffix(': path')}: {key}"
    own = f"eval_{key}"
    return flag_of(own if file.flag != _TRAINS_ON and vars(args).get(own) is not None else key)


def _token_problems(args: argparse.Namespace, groups: list[list[_Scanned]], seconds: float) -> list[str]:
    """Why the tokenizer of --hf-checkpoint makes nothing of prompts that the run can use. Prompts with images, which the
    processor counts, are left to the run."""
    # What a scan has not reached in its time is not waited for here.
    asked = [group for group in groups if not any(one.file.keys.images or not one.scan.rows for one in group)]
    if not args.check:
        asked = [group for group in asked if group[0].limit is not None and not any(one.fits for one in group)]
    asked = [group for group in asked if group[0].file.in_template or group[0].limit is not None]
    if not asked or args.hf_checkpoint is None or lacks_tokenizer(args.hf_checkpoint):
        return []
    try:
        tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        rows = read_hf_config(args.hf_checkpoint).get("vocab_size")
    except UserError as error:
        return [str(error)]
    if args.has_engines and args.apply_chat_template and (unheard := unheard_end_of_turn(args, tokenizer)):
        logger.warning(unheard)
    deadline, problems = time.monotonic() + seconds, []
    for group in asked:
        problems += _problems_of_tokens(args, group, tokenizer, rows, deadline)
    return problems


def _problems_of_tokens(
    args: argparse.Namespace, group: list[_Scanned], tokenizer: Any, vocabulary: int | None, deadline: float
) -> Iterator[str]:
    """Args: vocabulary: the number of rows of the model's embedding, if it is known."""
    limit, counted, shortest, rendered = group[0].limit, 0, None, group[0].file.in_template
    paths = " ".join(one.file.path for one in group)
    samples = _samples(args, group, tokenizer)
    for batch in iter(lambda: list(itertools.islice(samples, _BATCH)), []):
        usable = [sample for _, sample in batch if isinstance(sample, Sample)]
        measured = iter(prompt_lengths(usable, tokenizer, None, not rendered))
        found = [(place, next(measured) if isinstance(sample, Sample) else sample) for place, sample in batch]
        refused = [bad_row(place, str(length)) for place, length in found if isinstance(length, BadRow)]
        if refused and not args.allow_bad_rows:
            yield refused[0]
            return
        texts = [sample.prompt for sample in usable if isinstance(sample.prompt, str)]
        ids = tokenizer(texts, add_special_tokens=not rendered)["input_ids"] if texts else []
        largest = max((token for prompt in ids for token in prompt), default=0)
        if vocabulary is not None and largest >= vocabulary:
            yield (
                f"--hf-checkpoint {args.hf_checkpoint}: its tokenizer makes token {largest} of a prompt in {paths}, and "
                f"`vocab_size` in its config.json is {vocabulary}; put the tokenizer of this model there"
            )
            return
        lengths = [length for _, length in found if isinstance(length, int)]
        counted += len(lengths)
        shortest = min([*lengths, *([] if shortest is None else [shortest])], default=None)
        if limit is None or shortest is None or shortest <= limit:
            return
        if time.monotonic() > deadline:
            logger.warning("%s: the first %d prompts have more than %d tokens, and are left out", paths, counted, limit)
            return
    if shortest is not None:
        flag = "--rollout-max-prompt-len" if group[0].file.flag == _TRAINS_ON else "--eval-max-prompt-len"
        yield (
            f"{group[0].file.flag} {paths}: all {counted} prompts have more than {flag} {limit} tokens, and none is left; the "
            f"shortest has {shortest}: give as many, or other prompts"
        )


def _samples(args: argparse.Namespace, group: list[_Scanned], tokenizer: Any) -> Iterator[tuple[str, Sample | BadRow]]:
    """(place, sample, or why there is none) of all rows, rendered in the chat template as the data set renders them."""
    for one in group:
        file, keys = one.file, None
        own = next((each for each in args.eval_datasets if each.path == file.path and file.flag != _TRAINS_ON), args)
        reader = RowReader(tokenizer if file.in_template else None, dict(own.apply_chat_template_kwargs or {}))
        # The scan has told of rows that cannot be read, or they are to be skipped.
        for place, row in iterate_rows(file.path, file.flag, lambda place, cause: None):
            keys = keys or file.keys.resolve(row, place)
            try:
                yield place, reader.read(PromptRow(keys, place, row))
            except BadRow as refused:
                yield place, refused


def _template_problems(args: argparse.Namespace) -> Iterator[str]:
    if args.hf_checkpoint is None or not lacks_chat_template(args.hf_checkpoint):
        return
    files = list(files_of_the_run(args))
    if args.prompt_data and args.rollout_function_path == SFT_FUNCTION and args.load_debug_rollout_data is None:
        yield no_chat_template("supervised fine-tuning renders chats", args.hf_checkpoint)
    elif any(file.in_template for file in files):
        yield no_chat_template("--apply-chat-template is given", args.hf_checkpoint)


def _processor_problems(args: argparse.Namespace) -> Iterator[str]:
    """Why prompts with images cannot be encoded. Files that a user's generate function encodes are not checked."""
    seeing = [file for file in files_of_the_run(args) if file.keys.images and file.prompts != "any"]
    if not seeing or args.hf_checkpoint is None:
        return
    try:
        if load_processor(args.hf_checkpoint, trust_remote_code=args.trust_remote_code) is None:
            sets = [one for one in args.eval_datasets if one.path == seeing[0].path and one.multimodal_keys]
            in_set = seeing[0].flag != "--prompt-data"
            yield no_processor(args.hf_checkpoint, place_of_images(args, sets[0]) if in_set else "--multimodal-keys")
    except UserError as error:
        yield str(error)


def place_of_images(args: argparse.Namespace, dataset: EvalDatasetConfig) -> str:
    """The place that names the image field of an evaluation set, `file:line: multimodal_keys` or the flag, and the set."""
    in_file = places_in(args.eval_config)(dataset.name, "multimodal_keys")
    key = "--multimodal-keys" if in_file is None else f"{in_file}: multimodal_keys"
    return f"{key} (evaluation set {dataset.name})"


def files_of_the_run(args: argparse.Namespace) -> Iterator[OwnFile]:
    """The files that are read when the run starts."""
    for file in own_files(args):
        trains = file.flag == "--prompt-data"
        if args.load_debug_rollout_data is None if trains else args.has_engines and args.eval_interval is not None:
            yield file


def _row_problems(args: argparse.Namespace, deadline: float, scanned: list[_Scanned]) -> Iterator[str]:
    """Why rows cannot be used. `scanned` gets every file with what was found in it."""
    from tqdm import tqdm

    no_template = args.hf_checkpoint is not None and lacks_chat_template(args.hf_checkpoint)
    may_label = bool(args.rollout_sample_hook_path or args.buffer_filter_path)
    for file in files_of_the_run(args):
        found = _Scanned(file, prompt_limit(args) if file.flag == _TRAINS_ON else args.eval_max_prompt_len)

        def objection(sample: Sample, file: OwnFile = file, found: _Scanned = found) -> str | None:
            found.look_at(sample)
            if args.allow_bad_rows:
                return None
            tokenizer = args.hf_checkpoint if no_template else None
            return _objection(sample, file, tokenizer, may_label=may_label)

        total = estimated_rows(file.path) if sys.stderr.isatty() else None
        name = os.path.basename(file.path)
        # There is no bar if the output is no terminal, nor for a file that is read in less than half a second.
        with tqdm(desc=f"checking {name}", total=total, unit="row", leave=False, disable=None, delay=0.5) as bar:
            scan = scan_rows(
                file.path,
                file.keys,
                flag=file.flag,
                objection=objection,
                deadline=deadline,
                advance=bar.update,
                allow_bad_rows=args.allow_bad_rows,
            )
        found.scan = scan
        scanned.append(found)
        yield from scan.problems
        if not scan.finished and not scan.problems and not scan.rows:
            logger.info("%s: its rows are read while the run starts", file.path)
        elif not scan.finished and not scan.problems:
            logger.info(
                "%s: the first %d rows can be used; the others are read while the run starts", file.path, scan.rows
            )


def _objection(sample: Sample, file: OwnFile, without_template: str | None, *, may_label: bool) -> str | None:
    """Why a row would end the run later although it can be read; None if it would not.

    `without_template`: the path of the tokenizer if it has no chat template, else None. `may_label`: a function of the user's
    sees samples before they are graded, and may give them labels.
    """
    chat = not isinstance(sample.prompt, str)
    if file.prompts == "messages" and not chat:
        return (
            "the prompt is text, and supervised fine-tuning needs a list of messages; name that field with --input-key"
        )
    if file.prompts == "renderable" and chat and not file.in_template and without_template is not None:
        return no_chat_template("the prompt is a list of messages", without_template)
    if file.reward == "" and not names_reward(sample.metadata):
        return f"nothing says how responses are graded: no `rm_type` in {file.keys.metadata!r}; give --rm-type"
    # Which of the two holds where both are named is not asked here.
    rewards = [str(name) for name in (sample.metadata.get("rm_type"), file.reward) if name]
    is_graded = file.reward is not None and bool(rewards) and not may_label
    if not is_graded or not all(map(needs_label, rewards)):
        return None
    if lacks_label(sample.label):
        return f"there is no label, which the reward {rewards[0]} needs; {file.keys.flags[1]} names its field"
    if not compares_as_text(sample.label):
        return (
            f"the label is {type(sample.label).__name__}, and the reward {rewards[0]} compares with one text or number; "
            f"{file.keys.flags[1]} names a field that holds one, or --custom-rm-path a function of yours that grades"
        )
    return None
