"""Prompt data sets: files in, `Sample`s out.

A row becomes a sample by the rules of one place, `_RowReader`: which field is the prompt, whether it is rendered in the
chat template, what is label, tools and metadata. A row that breaks a rule is an error with file, line and cause.
Nothing here touches the global random generators.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slime.utils.data_files import BadRow, bad_row, fingerprint, iterate_rows, parse_data_path, raise_bad_row, read_file
from slime.utils.epoch_order import Part, epoch_order, shares
from slime.utils.errors import UserError
from slime.utils.image_rows import image_sources, media_keys_problem, messages_with_images
from slime.utils.misc import no_garbage_collection
from slime.utils.processing_utils import (
    ANY_KEYS,
    at_row,
    encode_with_images,
    images_of,
    no_processor,
    render_chat,
    require_chat_template,
)
from slime.utils.row_index import RowIndex, index_rows
from slime.utils.types import Sample

__all__ = [
    "Dataset",
    "RowKeys",
    "StreamedDataset",
    "check_first_row",
    "filter_long_prompt",
    "read_file",
    "scan_rows",
]

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
        images: the field of the images; None: prompts are text.
        folder: of the file, against which paths of images are read; `resolve` fills it in.
    """

    prompt: str | None
    label: str | None
    tools: str | None
    metadata: str | None
    flags: tuple[str, str] = ("--input-key", "--label-key")
    images: str | None = None
    folder: str = ""

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
        return replace(self, prompt=prompt, folder=os.path.dirname(os.path.abspath(place.rpartition(":")[0])))


class Dataset:
    """The samples of one or several files, in file order, held in memory.

    Args:
        path: file or list of files, each with an optional slice `@[a:b]` and weight `*w` (`epoch_order`).
        tokenizer: needed for `apply_chat_template` and for `max_length`.
        processor: needed for `max_length` where prompts have images.
        max_length: prompts with more tokens are left out; None keeps all.
        prompt_key: field of the prompt; None takes `prompt`, else `input`, whichever the first row of a file has.
        multimodal_keys: `{"image": field}`: prompts are messages whose images are in that field (`slime.utils.image_rows`).
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
        if (problem := media_keys_problem(multimodal_keys or {})) is not None:
            raise UserError(f"--multimodal-keys: {problem}")
        if apply_chat_template:
            require_chat_template(tokenizer, "--apply-chat-template is given")
        self.paths = [path] if isinstance(path, str) else list(path)
        self.seed = seed
        self.num_bad_rows = 0
        self._flag = flag
        self._allow_bad_rows = allow_bad_rows
        self._fingerprint: list[dict[str, Any]] | None = None
        keys = RowKeys(prompt_key, label_key, tool_key, metadata_key, images=(multimodal_keys or {}).get("image"))
        reader = _RowReader(keys, tokenizer if apply_chat_template else None, dict(apply_chat_template_kwargs or {}))
        # Rows make many objects and no cycles: looking for cycles among them takes longer than reading them.
        with no_garbage_collection():
            samples = [list(self._read_samples(file, reader)) for file in self.paths]
        if self.num_bad_rows:
            logger.warning("%s: skipped %d bad rows", flag, self.num_bad_rows)
        special = not apply_chat_template
        kept = [
            filter_long_prompt(own, tokenizer, processor, max_length, add_special_tokens=special) for own in samples
        ]
        self.origin_samples = [sample for own in kept for sample in own]
        if not self.origin_samples:
            total = sum(map(len, samples))
            raise UserError(
                f"{flag} {' '.join(self.paths)}: none of the {total} prompts has at most {max_length} tokens"
            )
        self.parts = _parts(self.paths, map(len, kept), flag)
        self.samples = self.origin_samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def shuffle(self, epoch: int) -> None:
        """Put the samples into the order of `epoch`, whatever their order is now."""
        order = epoch_order(self.parts, self.seed, epoch, shuffled=True)
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
                sample = reader.read(row, keys, place)
            except BadRow as error:
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


class StreamedDataset:
    """The samples of one or several files, in file order, each read and rendered when it is asked for.

    What is held in memory is where the rows lie (`slime.utils.row_index`). Arguments, order and fingerprint are those of
    `Dataset`. Which rows cannot be used is found when they are met: a bad one raises then, and where `allow_bad_rows` is set it
    is None, as is a prompt of more than `max_length` tokens; `len` counts both.

    Raises:
        UserError: as `Dataset`, of the files as a whole and of their first rows.
    """

    def __init__(
        self,
        path: str | Sequence[str],
        tokenizer: Any,
        max_length: int | None,
        *,
        keys: RowKeys,
        seed: int,
        apply_chat_template: bool,
        apply_chat_template_kwargs: dict[str, Any] | None,
        allow_bad_rows: bool,
        processor: Any = None,
        flag: str = "--prompt-data",
    ) -> None:
        if apply_chat_template:
            require_chat_template(tokenizer, "--apply-chat-template is given")
        self.paths = [path] if isinstance(path, str) else list(path)
        self.seed = seed
        self.num_bad_rows = self.num_long_prompts = 0
        self._flag, self._allow_bad_rows = flag, allow_bad_rows
        self._tokenizer, self._max_length, self._rendered = tokenizer, max_length, apply_chat_template
        self._processor = processor
        self._reader = _RowReader(
            keys, tokenizer if apply_chat_template else None, dict(apply_chat_template_kwargs or {})
        )
        self._indices = [index_rows(file, flag) for file in self.paths]
        self._keys = [self._keys_of(file, index) for file, index in zip(self.paths, self._indices, strict=True)]
        self.parts = _parts(self.paths, map(len, self._indices), flag)
        self._ends = np.cumsum([part.size for part in self.parts])
        self._order: Sequence[int] = range(int(self._ends[-1]))
        self._fingerprint: list[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Sample | None:
        row = int(self._order[index])
        file = int(np.searchsorted(self._ends, row, side="right"))
        rows = self._indices[file]
        position = row - int(self._ends[file]) + len(rows)
        try:
            sample = self._reader.read(rows.read(position), self._keys[file], rows.place(position))
        except BadRow as error:
            if not self._allow_bad_rows:
                raise_bad_row(rows.place(position), str(error))
            self.num_bad_rows += 1
            logger.warning("skipped %s (bad row %d of this run): %s", rows.place(position), self.num_bad_rows, error)
            return None
        if self._max_length is None:
            return sample
        [length] = _prompt_lengths([sample], self._tokenizer, self._processor, not self._rendered)
        if length <= self._max_length:
            return sample
        self.num_long_prompts += 1
        if self.num_long_prompts & (self.num_long_prompts - 1) == 0:  # told of ever more seldom
            logger.info("left out %d prompts so far: more than %d tokens", self.num_long_prompts, self._max_length)
        return None

    def shuffle(self, epoch: int) -> None:
        """Put the samples into the order of `epoch`, whatever their order is now."""
        self._order = epoch_order(self.parts, self.seed, epoch, shuffled=True)

    def fingerprint(self) -> list[dict[str, Any]]:
        """As that of `Dataset`."""
        if self._fingerprint is None:
            self._fingerprint = [fingerprint(path, self._flag) for path in self.paths]
        return self._fingerprint

    def _keys_of(self, path: str, index: RowIndex) -> RowKeys:
        """The names of the fields of a file, from the first of its rows that can be read."""
        for position in range(len(index)):
            try:
                row = index.read(position)
            except BadRow as error:
                if not self._allow_bad_rows:
                    raise_bad_row(index.place(position), str(error))
            else:
                return self._reader.keys.resolve(row, index.place(position))
        raise UserError(f"{self._flag} {path}: holds no (readable) rows")


def _parts(paths: Sequence[str], sizes: Iterable[int], flag: str) -> list[Part]:
    """Raises UserError where an epoch would have nothing of a file."""
    parts = [Part(size, parse_data_path(path, flag).weight) for path, size in zip(paths, sizes, strict=True)]
    for path, part, count in zip(paths, parts, shares(parts), strict=True):
        if part.size and not count:
            raise UserError(
                f"{flag} {path}: with {part.size} rows of this weight the file has a share of less than one row in an epoch of "
                f"{sum(part.size for part in parts)}; give it a larger weight, or leave it out"
            )
    return parts


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
                cause = objection(reader.read(row, of_file, place))
            except BadRow as error:
                tell(bad_row(place, str(error)))
            else:
                if cause is not None:
                    tell(f"{place}: {cause}")
    except _EndOfScan:
        return RowScan(tuple(problems), rows, finished=False)
    return RowScan(tuple(problems), rows, finished=True)


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
    function that consumes them knows their length. `add_special_tokens` applies to string prompts. Prompts with images are
    measured by `processor`, one at a time.

    Raises:
        UserError: a prompt has images and there is no processor, or an image cannot be read.
    """
    if max_length is None:
        return samples
    kept: list[Sample] = []
    for start in range(0, len(samples), _TOKENIZE_BATCH):
        batch = samples[start : start + _TOKENIZE_BATCH]
        lengths = _prompt_lengths(batch, tokenizer, processor, add_special_tokens)
        kept.extend(sample for sample, length in zip(batch, lengths, strict=True) if length <= max_length)
    if len(kept) < len(samples):
        logger.info(
            "left out %d of %d prompts: more than %d tokens", len(samples) - len(kept), len(samples), max_length
        )
    return kept


def _prompt_lengths(samples: list[Sample], tokenizer: Any, processor: Any, add_special_tokens: bool) -> list[int]:
    lengths = [0] * len(samples)
    seeing = [bool(images_of(sample)) for sample in samples]
    for is_text, special in ((True, add_special_tokens), (False, False)):
        chosen = [
            index
            for index, sample in enumerate(samples)
            if isinstance(sample.prompt, str) is is_text and not seeing[index]
        ]
        if not is_text and not getattr(tokenizer, "chat_template", None):
            continue
        texts = [_prompt_text(samples[index], tokenizer) for index in chosen]
        ids = tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []
        for index, prompt_ids in zip(chosen, ids, strict=True):
            lengths[index] = len(prompt_ids)
    for index, sample in enumerate(samples):
        if seeing[index]:
            special = add_special_tokens and isinstance(sample.prompt, str)
            lengths[index] = _length_with_images(sample, tokenizer, processor, special)
    return lengths


def _length_with_images(sample: Sample, tokenizer: Any, processor: Any, add_special_tokens: bool) -> int:
    with at_row(sample):
        if processor is None:
            raise UserError(no_processor(getattr(tokenizer, "name_or_path", ""), ANY_KEYS))
        text = _prompt_text(sample, tokenizer)
        return len(encode_with_images(processor, text, images_of(sample), add_special_tokens=add_special_tokens)[0])


def _prompt_text(sample: Sample, tokenizer: Any) -> str:
    if isinstance(sample.prompt, str):
        return sample.prompt
    return render_chat(tokenizer, sample.prompt, sample.metadata.get("tools"), sample.apply_chat_template_kwargs)


class _EndOfScan(Exception):
    """A scan has told enough, or its time is over."""


class _RowReader:
    """Turns a row into a sample. `tokenizer` is None unless prompts are rendered in its chat template."""

    def __init__(self, keys: RowKeys, tokenizer: Any | None, template_kwargs: dict[str, Any]):
        self.keys = keys
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs

    def read(self, row: dict[str, Any], keys: RowKeys, place: str) -> Sample:
        """The sample of `row`, which stands at `place`; raises `BadRow`."""
        metadata = self._metadata(row, keys)
        prompt, images = self._prompt(row, keys), []
        if keys.images is not None:
            images = image_sources(row.get(keys.images), keys.folder, keys.images)
            prompt, images = messages_with_images(prompt, images, keys.folder, (keys.prompt, keys.images))
        sample = Sample(
            prompt=prompt if self._tokenizer is None else self._rendered(prompt, keys, metadata.get("tools")),
            label=self._label(row, keys),
            metadata=metadata,
            apply_chat_template_kwargs=dict(self._template_kwargs),
        )
        if images:
            sample.multimodal_inputs = {"images": images}
            # Whether an image is whole is found when it is decoded, long after the row was read.
            sample.data_place = place
        return sample

    def _prompt(self, row: dict[str, Any], keys: RowKeys) -> str | list[dict[str, Any]]:
        if keys.prompt not in row:
            raise BadRow(f"there is no field {keys.prompt!r}; the row has {', '.join(map(str, row))}")
        prompt = row[keys.prompt]
        if isinstance(prompt, list):
            for position, message in enumerate(prompt):
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    raise BadRow(f"message {position} of {keys.prompt!r} is no object with a `role`")
            if not prompt:
                raise BadRow(f"{keys.prompt!r} is an empty list of messages")
        elif not isinstance(prompt, str):
            raise BadRow(f"{keys.prompt!r} is {type(prompt).__name__}, expected a string or a list of messages")
        return prompt

    def _rendered(self, prompt: str | list[dict[str, Any]], keys: RowKeys, tools: list | None) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return render_chat(self._tokenizer, messages, tools, self._template_kwargs)
        except Exception as error:  # a template runs arbitrary code over the row
            raise BadRow(f"the chat template refused {keys.prompt!r} ({type(error).__name__}: {error})") from error

    def _label(self, row: dict[str, Any], keys: RowKeys) -> Any:
        if keys.label is None:
            return row.get("label")
        if keys.label not in row:
            raise BadRow(f"there is no field {keys.label!r} ({keys.flags[1]})")
        return row[keys.label]

    def _metadata(self, row: dict[str, Any], keys: RowKeys) -> dict[str, Any]:
        metadata = row.get(keys.metadata) if keys.metadata else None
        if metadata is None:
            metadata = {}
        if not isinstance(metadata, dict):
            raise BadRow(f"{keys.metadata!r} is {type(metadata).__name__}, expected an object (--metadata-key)")
        tools = row.get(keys.tools) if keys.tools else None
        if tools is not None:
            metadata = {**metadata, "tools": _parse_tools(tools, keys.tools)}
        return metadata


def _parse_tools(tools: Any, key: str) -> list[Any]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadRow(f"{key!r} is no valid JSON ({error})") from error
    elif isinstance(tools, np.ndarray):
        tools = tools.tolist()
    if not isinstance(tools, list):
        raise BadRow(f"{key!r} is {type(tools).__name__}, expected a list of tool schemas (--tool-key)")
    return tools
