"""Prompt data sets: files in, `Sample`s out.

A row becomes a sample by the rules of one place, `_RowReader`: which field is the prompt, whether it is rendered in the
chat template, what is label, tools and metadata. A row that breaks a rule is an error with file, line and cause.
Nothing here touches the global random generators.
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slime.utils.data_files import bad_row, fingerprint, iterate_rows, raise_bad_row, read_file
from slime.utils.errors import UserError
from slime.utils.processing_utils import render_chat, require_chat_template
from slime.utils.types import Sample

__all__ = ["Dataset", "RowKeys", "check_first_row", "epoch_permutation", "filter_long_prompt", "read_file", "scan_rows"]

logger = logging.getLogger(__name__)

_TOKENIZE_BATCH = 1024
# A scan says no more than this about one file: the next ones are most often of the same kind.
_MOST_PROBLEMS = 5
_FIRST_ROW_SECONDS = 5.0


@dataclass(frozen=True)
class RowKeys:
    """The fields of a row; None: `Dataset` says what is taken.

    Attributes:
        flags: where the names of the prompt's and the label's field come from, for messages.
    """

    prompt: str | None
    label: str | None
    tools: str | None
    metadata: str | None
    flags: tuple[str, str] = ("--input-key", "--label-key")

    def resolve(self, row: dict[str, Any], place: str) -> RowKeys:
        """The names for a file whose first row is `row`."""
        prompt = self.prompt or next((name for name in ("prompt", "input") if name in row), None)
        has = ", ".join(map(str, row))
        if prompt is None:
            raise UserError(
                f"{place}: the row has neither `prompt` nor `input`, only {has}; name one with {self.flags[0]}"
            )
        for name, flag in zip((prompt, self.label), self.flags, strict=True):
            if name is not None and name not in row:
                raise UserError(f"{place}: there is no field {name!r} ({flag}); the row has {has}")
        return replace(self, prompt=prompt)


class Dataset:
    """The samples of one or several files, in file order, held in memory.

    Args:
        path: file or list of files, each with an optional slice `@[a:b]`.
        tokenizer: needed for `apply_chat_template` and for `max_length`.
        processor: must be None; media are not supported yet.
        max_length: prompts with more tokens are left out; None keeps all.
        prompt_key: field of the prompt; None takes `prompt`, else `input`, whichever the first row of a file has.
        label_key: field of the reference answer; None takes `label` where the first row has it.
        tool_key: field of the tool schemas; they become `metadata["tools"]`.
        metadata_key: field of the metadata object.
        seed: of `shuffle`.
        allow_bad_rows: skip bad rows and count them in `num_bad_rows`.
        flag: the flag that messages name.

    Raises:
        UserError: missing, unreadable or empty file; missing key; bad row; no prompt left after filtering.
    """

    def __init__(
        self,
        path: str | Sequence[str],
        tokenizer: Any,
        processor: Any = None,
        max_length: int | None = None,
        *,
        prompt_key: str | None = None,
        multimodal_keys: dict[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = "tools",
        metadata_key: str | None = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
        allow_bad_rows: bool = False,
        flag: str = "--prompt-data",
    ):
        if multimodal_keys or processor is not None:
            raise UserError("--multimodal-keys: data sets with images, video or audio are not supported")
        if apply_chat_template:
            require_chat_template(tokenizer, "--apply-chat-template is given")
        self.paths = [path] if isinstance(path, str) else list(path)
        self.seed = seed
        self.num_bad_rows = 0
        self._flag = flag
        self._allow_bad_rows = allow_bad_rows
        self._fingerprint: list[dict[str, Any]] | None = None
        keys = RowKeys(prompt_key, label_key, tool_key, metadata_key)
        reader = _RowReader(keys, tokenizer if apply_chat_template else None, dict(apply_chat_template_kwargs or {}))
        with _no_garbage_collection():
            samples = [sample for file in self.paths for sample in self._read_samples(file, reader)]
        if self.num_bad_rows:
            logger.warning("%s: skipped %d bad rows", flag, self.num_bad_rows)
        self.origin_samples = filter_long_prompt(
            samples, tokenizer, None, max_length, add_special_tokens=not apply_chat_template
        )
        if not self.origin_samples:
            raise UserError(
                f"{flag} {' '.join(self.paths)}: none of the {len(samples)} prompts has at most {max_length} tokens"
            )
        self.samples = self.origin_samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def shuffle(self, epoch: int) -> None:
        """Put the samples into the order of `epoch`, whatever their order is now."""
        order = epoch_permutation(len(self.origin_samples), self.seed, epoch)
        self.samples = [self.origin_samples[index] for index in order]

    def fingerprint(self) -> list[dict[str, Any]]:
        """Per file `path, slice, size, sha256`, read from disk by the first call."""
        if self._fingerprint is None:
            self._fingerprint = [fingerprint(path, self._flag) for path in self.paths]
        return self._fingerprint

    def _read_samples(self, path: str, reader: _RowReader) -> Iterator[Sample]:
        keys: RowKeys | None = None
        empty = True
        for place, row in iterate_rows(path, self._flag, self._on_bad_row):
            if keys is None:
                keys = reader.keys.resolve(row, place)
            try:
                sample = reader.read(row, keys)
            except _BadRow as error:
                self._on_bad_row(place, str(error))
                continue
            empty = False
            yield sample
        if empty:
            raise UserError(f"{self._flag} {path}: holds no (readable) rows")

    def _on_bad_row(self, place: str, cause: str) -> None:
        if not self._allow_bad_rows:
            raise_bad_row(place, cause)
        self.num_bad_rows += 1
        logger.debug("skipped %s: %s", place, cause)


def check_first_row(path: str, keys: RowKeys, flag: str) -> dict[str, Any] | None:
    """Read one row, so that a wrong file is found before anything starts. Unreadable rows are left to `Dataset`, and so is a
    first row that lies too far inside the file to be reached within seconds.

    Returns:
        The row; None where none can be read.

    Raises:
        UserError: missing or empty file; the row lacks the prompt or label field.
    """
    unreadable: list[str] = []
    deadline = time.monotonic() + _FIRST_ROW_SECONDS

    def watch() -> None:
        if time.monotonic() > deadline:
            raise _EndOfScan

    try:
        for place, row in iterate_rows(path, flag, lambda place, cause: unreadable.append(place), watch):
            keys.resolve(row, place)
            return row
    except _EndOfScan:
        return None
    if not unreadable:
        raise UserError(f"{flag} {path}: holds no rows")
    return None


@dataclass(frozen=True)
class RowScan:
    """What a look at the rows of one file found: messages that name file and line, the number of rows that were read, and
    whether these were all."""

    problems: tuple[str, ...]
    rows: int
    finished: bool


def scan_rows(
    path: str,
    keys: RowKeys,
    *,
    flag: str,
    objection: Callable[[Sample], str | None],
    deadline: float,
    advance: Callable[[], object] = lambda: None,
) -> RowScan:
    """Read rows as `Dataset` does, without a tokenizer, until `deadline`, which counts for rows in front of a slice too; a few
    problems end it as well.

    Args:
        objection: why a row that can be read is of no use to the run all the same; None when it is.
        deadline: on the clock of `time.monotonic`, seconds.
        advance: called after each row.

    Raises:
        UserError: what is wrong with the file as a whole.
    """
    problems: list[str] = []
    reader = _RowReader(keys, None, {})
    of_file: RowKeys | None = None
    rows = 0

    def tell(problem: str) -> None:
        problems.append(problem)
        if len(problems) >= _MOST_PROBLEMS:
            raise _EndOfScan

    def watch() -> None:
        if time.monotonic() > deadline:
            raise _EndOfScan

    # Neither rows that cannot be read nor those in front of a slice come out of the loop, so it is ended from inside.
    try:
        for place, row in iterate_rows(path, flag, lambda place, cause: tell(bad_row(place, cause)), watch):
            of_file = of_file or keys.resolve(row, place)
            rows += 1
            advance()
            try:
                cause = objection(reader.read(row, of_file))
            except _BadRow as error:
                tell(bad_row(place, str(error)))
            else:
                if cause is not None:
                    tell(f"{place}: {cause}")
    except _EndOfScan:
        return RowScan(tuple(problems), rows, finished=False)
    return RowScan(tuple(problems), rows, finished=True)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Rows make many objects and no cycles: looking for cycles among them takes longer than reading them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def epoch_permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `length` items in `epoch`: int64 [length], a function of its arguments only.

    Sorted raw PCG64 output: numpy keeps the streams of its bit generators stable over versions, which it does not
    promise for `Generator.permutation`; a resumed run must find the same order.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed % 2**64, epoch])).random_raw(length)
    return np.argsort(bits, kind="stable")


def filter_long_prompt(
    samples: list[Sample],
    tokenizer: Any,
    processor: Any,
    max_length: int | None,
    *,
    add_special_tokens: bool = False,
) -> list[Sample]:
    """The samples whose prompt has at most `max_length` tokens, in their order; the number left out is logged.

    Message lists are measured as rendered by the chat template; without a template they are kept, because only the
    function that consumes them knows their length. `add_special_tokens` applies to string prompts.
    """
    if max_length is None:
        return samples
    kept: list[Sample] = []
    for start in range(0, len(samples), _TOKENIZE_BATCH):
        batch = samples[start : start + _TOKENIZE_BATCH]
        lengths = _prompt_lengths(batch, tokenizer, add_special_tokens)
        kept.extend(sample for sample, length in zip(batch, lengths, strict=True) if length <= max_length)
    if len(kept) < len(samples):
        logger.info(
            "left out %d of %d prompts: more than %d tokens", len(samples) - len(kept), len(samples), max_length
        )
    return kept


def _prompt_lengths(samples: list[Sample], tokenizer: Any, add_special_tokens: bool) -> list[int]:
    lengths = [0] * len(samples)
    for is_text, special in ((True, add_special_tokens), (False, False)):
        chosen = [index for index, sample in enumerate(samples) if isinstance(sample.prompt, str) is is_text]
        if not is_text and not getattr(tokenizer, "chat_template", None):
            continue
        texts = [_prompt_text(samples[index], tokenizer) for index in chosen]
        ids = tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []
        for index, prompt_ids in zip(chosen, ids, strict=True):
            lengths[index] = len(prompt_ids)
    return lengths


def _prompt_text(sample: Sample, tokenizer: Any) -> str:
    if isinstance(sample.prompt, str):
        return sample.prompt
    return render_chat(tokenizer, sample.prompt, sample.metadata.get("tools"), sample.apply_chat_template_kwargs)


class _EndOfScan(Exception):
    """A scan has told enough, or its time is over."""


class _BadRow(Exception):
    """A row breaks a rule; the message is the cause, the caller knows the place."""


class _RowReader:
    """Turns a row into a sample. `tokenizer` is None unless prompts are rendered in its chat template."""

    def __init__(self, keys: RowKeys, tokenizer: Any | None, template_kwargs: dict[str, Any]):
        self.keys = keys
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs

    def read(self, row: dict[str, Any], keys: RowKeys) -> Sample:
        """The sample of `row`; raises `_BadRow`."""
        metadata = self._metadata(row, keys)
        return Sample(
            prompt=self._prompt(row, keys, metadata.get("tools")),
            label=self._label(row, keys),
            metadata=metadata,
            apply_chat_template_kwargs=dict(self._template_kwargs),
        )

    def _prompt(self, row: dict[str, Any], keys: RowKeys, tools: list | None) -> str | list[dict[str, Any]]:
        if keys.prompt not in row:
            raise _BadRow(f"there is no field {keys.prompt!r}; the row has {', '.join(map(str, row))}")
        prompt = row[keys.prompt]
        if isinstance(prompt, list):
            for position, message in enumerate(prompt):
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    raise _BadRow(f"message {position} of {keys.prompt!r} is no object with a `role`")
            if not prompt:
                raise _BadRow(f"{keys.prompt!r} is an empty list of messages")
        elif not isinstance(prompt, str):
            raise _BadRow(f"{keys.prompt!r} is {type(prompt).__name__}, expected a string or a list of messages")
        if self._tokenizer is None:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return render_chat(self._tokenizer, messages, tools, self._template_kwargs)
        except Exception as error:  # a template runs arbitrary code over the row
            raise _BadRow(f"the chat template refused {keys.prompt!r} ({type(error).__name__}: {error})") from error

    def _label(self, row: dict[str, Any], keys: RowKeys) -> Any:
        if keys.label is None:
            return row.get("label")
        if keys.label not in row:
            raise _BadRow(f"there is no field {keys.label!r} ({keys.flags[1]})")
        return row[keys.label]

    def _metadata(self, row: dict[str, Any], keys: RowKeys) -> dict[str, Any]:
        metadata = row.get(keys.metadata) if keys.metadata else None
        if metadata is None:
            metadata = {}
        if not isinstance(metadata, dict):
            raise _BadRow(f"{keys.metadata!r} is {type(metadata).__name__}, expected an object (--metadata-key)")
        tools = row.get(keys.tools) if keys.tools else None
        if tools is not None:
            metadata = {**metadata, "tools": _parse_tools(tools, keys.tools)}
        return metadata


def _parse_tools(tools: Any, key: str) -> list[Any]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise _BadRow(f"{key!r} is no valid JSON ({error})") from error
    elif isinstance(tools, np.ndarray):
        tools = tools.tolist()
    if not isinstance(tools, list):
        raise _BadRow(f"{key!r} is {type(tools).__name__}, expected a list of tool schemas (--tool-key)")
    return tools
