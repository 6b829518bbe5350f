"""Prompt data sets: files in, `Sample`s out.

A row becomes a sample as `slime.utils.prompt_rows` says, here or in other processes (`slime.utils.data_workers`); either way
the samples are the same, in the same order. A row that breaks a rule is an error with file, line and cause. Nothing here
touches the global random generators.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.utils.data_files import BadRow, bad_row, fingerprint, iterate_rows, parse_data_path, raise_bad_row, read_file
from slime.utils.epoch_order import Part, epoch_order, shares
from slime.utils.errors import UserError
from slime.utils.image_rows import media_keys_problem
from slime.utils.misc import no_garbage_collection
from slime.utils.processing_utils import require_chat_template
from slime.utils.prompt_rows import PreparedRow, PromptRow, RowKeys, RowReader, prompt_lengths
from slime.utils.row_index import RowIndex, index_rows
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.utils.data_workers import DataWorkers

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
# A scan reports no more problems than this in one file, because further ones are most often of the same kind.
_MOST_PROBLEMS = 5
_FIRST_ROW_SECONDS = 5.0


class Dataset:
    """The samples of one or several files, in file order, held in memory.

    Args:
        path: file or list of files, each with an optional slice `@[a:b]` and weight `*w` (`epoch_order`).
        tokenizer: needed for `apply_chat_template` and for `max_length`.
        processor: needed for `max_length` if prompts have images.
        max_length: prompts with more tokens are left out; None keeps all.
        prompt_key: field of the prompt; None takes `prompt`, else `input`, whichever the first row of a file has.
        multimodal_keys: `{"image": field}`: prompts are messages whose images are in that field (`slime.utils.image_rows`).
        label_key: field of the reference answer; None takes `label` where the first row has it.
        tool_key: field of the tool schemas; they become `metadata["tools"]`.
        metadata_key: field of the metadata object.
        seed: the seed of `shuffle`.
        allow_bad_rows: skip bad rows and count them in `num_bad_rows`.
        flag: the flag that messages name.
        workers: processes that prepare the rows, with the same arguments; None: this process prepares them.

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
        workers: DataWorkers | None = None,
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
        reader = RowReader(tokenizer if apply_chat_template else None, dict(apply_chat_template_kwargs or {}))
        measure = functools.partial(
            prompt_lengths, tokenizer=tokenizer, processor=processor, add_special_tokens=not apply_chat_template
        )
        # Rows make many objects and no cycles, and a search for cycles among them takes longer than reading them.
        samples, lengths = [], []
        with no_garbage_collection():
            for file in self.paths:
                samples.append([])
                lengths.append([])
                rows = self._read_samples(file, reader, keys, workers)
                for sample, length in self._measured(file, rows, None if max_length is None else measure):
                    samples[-1].append(sample)
                    lengths[-1].append(length)
        if self.num_bad_rows:
            logger.warning("%s: skipped %d bad rows", flag, self.num_bad_rows)
        kept = [
            filter_long_prompt(own, tokenizer, processor, max_length, lengths=known)
            for own, known in zip(samples, lengths, strict=True)
        ]
        self.origin_samples = [sample for own in kept for sample in own]
        if not self.origin_samples:
            total = sum(map(len, samples))
            raise UserError(
                f"{flag} {' '.join(self.paths)}: none of the {total} prompts has at most {max_length} tokens"
            )
        self.parts = _parts(self.paths, map(len, kept), flag)
        self.samples = self.origin_samples
        self._arranged = self.samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def shuffle(self, epoch: int) -> None:
        """Put the samples into the order of `epoch`, which does not depend on their order now."""
        self.put_in_order(epoch_order(self.parts, self.seed, epoch, shuffled=True))

    def put_in_order(self, order: Sequence[int]) -> None:
        """Let `samples` be those at these positions of the files."""
        self.samples = self._arranged = [self.origin_samples[index] for index in order]

    def row(self, position: int) -> Sample:
        """The sample at this position of the files.

        Raises:
            UserError: somebody has put other `samples` there, which the next epoch would not have.
        """
        if self.samples is not self._arranged:
            raise UserError(
                "--data-source-path: the `samples` of the data set were replaced, and each epoch is shuffled from all rows; "
                "let `self.dataset` be a list of the samples that are wanted"
            )
        return self.origin_samples[position]

    def fingerprint(self) -> list[dict[str, Any]]:
        """Per file `path, slice, size, sha256`, read from disk by the first call."""
        if self._fingerprint is None:
            self._fingerprint = [fingerprint(path, self._flag) for path in self.paths]
        return self._fingerprint

    def _read_samples(
        self, path: str, reader: RowReader, keys: RowKeys, workers: DataWorkers | None
    ) -> Iterator[tuple[str, Sample, int | None]]:
        """(place, sample, number of tokens in its prompt; None if no worker has counted them) of each row that can be read."""
        rows = self._rows(path, keys)
        for row, sample, length in map(PreparedRow, rows) if workers is None else workers.prepare(rows):
            if sample is None:
                try:
                    sample = reader.read(row)
                except BadRow as error:
                    self._on_bad_row(row.place, str(error))
                    continue
            yield row.place, sample, length

    def _measured(
        self,
        path: str,
        rows: Iterator[tuple[str, Sample, int | None]],
        measure: Callable[[list[Sample]], list[int | BadRow]] | None,
    ) -> Iterator[tuple[Sample, int]]:
        """(sample, number of tokens in its prompt; 0 without `measure`) of each row whose prompt can be measured."""
        empty = True
        for batch in _batches(rows):
            open_ones = [sample for _, sample, length in batch if length is None]
            measured = iter(measure(open_ones) if measure is not None else [0] * len(open_ones))
            for place, sample, length in batch:
                found = next(measured) if length is None else length
                if isinstance(found, BadRow):
                    self._on_bad_row(place, str(found))
                    continue
                empty = False
                yield sample, found
        if empty:
            raise UserError(f"{self._flag} {path}: holds no (readable) rows")

    def _rows(self, path: str, keys: RowKeys) -> Iterator[PromptRow]:
        of_file: RowKeys | None = None
        for place, row in iterate_rows(path, self._flag, self._on_bad_row):
            of_file = of_file or keys.resolve(row, place)
            yield PromptRow(of_file, place, row)

    def _on_bad_row(self, place: str, cause: str) -> None:
        if not self._allow_bad_rows:
            raise_bad_row(place, cause)
        self.num_bad_rows += 1
        logger.debug("skipped %s: %s", place, cause)


class StreamedDataset:
    """The samples of one or several files, in file order, each read and rendered when it is asked for.

    Only the places of the rows are held in memory (`slime.utils.row_index`). Arguments, order and fingerprint are those of
    `Dataset`. Unusable rows are found only when they are read: a bad one raises then, or is None if `allow_bad_rows` is set. A
    prompt of more than `max_length` tokens is None, too. `len` counts both.

    Raises:
        UserError: as `Dataset`, about the files as a whole and their first rows.
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
        workers: DataWorkers | None = None,
    ) -> None:
        if apply_chat_template:
            require_chat_template(tokenizer, "--apply-chat-template is given")
        self.paths = [path] if isinstance(path, str) else list(path)
        self.seed = seed
        self.num_bad_rows = self.num_long_prompts = 0
        self._flag, self._allow_bad_rows = flag, allow_bad_rows
        self._tokenizer, self._max_length, self._rendered = tokenizer, max_length, apply_chat_template
        self._processor = processor
        self._reader = RowReader(tokenizer if apply_chat_template else None, dict(apply_chat_template_kwargs or {}))
        self._indices = [index_rows(file, flag) for file in self.paths]
        self._keys = [self._keys_of(file, index, keys) for file, index in zip(self.paths, self._indices, strict=True)]
        self.parts = _parts(self.paths, map(len, self._indices), flag)
        self._ends = np.cumsum([part.size for part in self.parts])
        self._order: Sequence[int] = range(int(self._ends[-1]))
        self._fingerprint: list[dict[str, Any]] | None = None
        self._workers = workers
        # (rows that the workers are preparing, the order that they follow, the offset in it of the next row).
        self._ahead: tuple[Iterator[PreparedRow], Sequence[int], int] | None = None

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Sample | None:
        file, position = self._place(index)
        place = self._indices[file].place(position)
        try:
            sample = self._reader.read(PromptRow(self._keys[file], place, self._indices[file].read(position)))
            length = self._length(sample)
        except BadRow as error:
            if not self._allow_bad_rows:
                raise_bad_row(place, str(error))
            self.num_bad_rows += 1
            logger.warning("skipped %s (bad row %d of this run): %s", place, self.num_bad_rows, error)
            return None
        return self._unless_long(sample, length)

    def in_order(self, order: Sequence[int], offset: int) -> Sample | None:
        """`self[order[offset]]`. Workers, if there are any, prepare the rows that follow in `order` meanwhile.

        Those were prepared in vain unless the next call asks for `offset + 1` in the same `order`.
        """
        if self._workers is None:
            return self[int(order[offset])]
        if self._ahead is None or self._ahead[1] is not order or self._ahead[2] != offset:
            self._ahead = self._workers.prepare(self._rows(order, offset)), order, offset
        rows, self._ahead = self._ahead[0], None
        _, sample, length = next(rows)
        self._ahead = rows, order, offset + 1
        # The worker could not prepare it. Reading it here raises the error of a bad row, a changed file or a missing image.
        if sample is None or (length is None and self._max_length is not None):
            return self[int(order[offset])]
        return self._unless_long(sample, length or 0)

    def _rows(self, order: Sequence[int], offset: int) -> Iterator[PromptRow]:
        for index in range(offset, len(order)):
            file, position = self._place(int(order[index]))
            rows = self._indices[file]
            try:
                content = rows.read(position)
            except (BadRow, UserError):
                content = None
            yield PromptRow(self._keys[file], rows.place(position), content)

    def _place(self, index: int) -> tuple[int, int]:
        """(number of the file, number of the row in it)."""
        row = int(self._order[index])
        file = int(np.searchsorted(self._ends, row, side="right"))
        return file, row - int(self._ends[file]) + len(self._indices[file])

    def _length(self, sample: Sample) -> int:
        """The number of tokens in its prompt; 0 if there is no limit. Raises `BadRow` if the chat template refuses it."""
        if self._max_length is None:
            return 0
        [length] = prompt_lengths([sample], self._tokenizer, self._processor, not self._rendered)
        if isinstance(length, BadRow):
            raise length
        return length

    def _unless_long(self, sample: Sample, length: int) -> Sample | None:
        if self._max_length is None or length <= self._max_length:
            return sample
        self.num_long_prompts += 1
        if self.num_long_prompts & (self.num_long_prompts - 1) == 0:  # logged ever more seldom: at powers of two
            logger.info("left out %d prompts so far: more than %d tokens", self.num_long_prompts, self._max_length)
        return None

    def shuffle(self, epoch: int) -> None:
        """Put the samples into the order of `epoch`, which does not depend on their order now."""
        self._order = epoch_order(self.parts, self.seed, epoch, shuffled=True)
        self._ahead = None

    def fingerprint(self) -> list[dict[str, Any]]:
        """See `Dataset.fingerprint`."""
        if self._fingerprint is None:
            self._fingerprint = [fingerprint(path, self._flag) for path in self.paths]
        return self._fingerprint

    def _keys_of(self, path: str, index: RowIndex, keys: RowKeys) -> RowKeys:
        """The names of the fields of a file, from the first of its rows that can be read."""
        for position in range(len(index)):
            try:
                row = index.read(position)
            except BadRow as error:
                if not self._allow_bad_rows:
                    raise_bad_row(index.place(position), str(error))
            else:
                return keys.resolve(row, index.place(position))
        raise UserError(f"{self._flag} {path}: holds no (readable) rows")


def _batches(rows: Iterator[tuple[str, Sample, int | None]]) -> Iterator[list[tuple[str, Sample, int | None]]]:
    """The rows in batches. If an error ends them, the rows before it come first, so that the first bad row is the one told."""
    batch = []
    try:
        for row in rows:
            batch.append(row)
            if len(batch) == _TOKENIZE_BATCH:
                yield batch
                batch = []
    except UserError:
        yield batch
        raise
    yield batch


def _parts(paths: Sequence[str], sizes: Iterable[int], flag: str) -> list[Part]:
    """Size and weight of each file. Raises UserError if an epoch would have no row of a file."""
    parts = [Part(size, parse_data_path(path, flag).weight) for path, size in zip(paths, sizes, strict=True)]
    for path, part, count in zip(paths, parts, shares(parts), strict=True):
        if part.size and not count:
            raise UserError(
                f"{flag} {path}: with {part.size} rows of this weight the file has a share of less than one row in an epoch of "
                f"{sum(part.size for part in parts)}; give it a larger weight, or leave it out"
            )
    return parts


def check_first_row(path: str, keys: RowKeys, flag: str) -> dict[str, Any] | None:
    """Read one row, so that a wrong file is found before anything starts.

    Unreadable rows are left to `Dataset`, as is a first row so deep inside the file that it takes seconds to reach.

    Returns:
        The row; None if none was read.

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
    """The result of a scan of one file: messages that name file and line, the number of rows read, whether these were all, and
    the fields that some of them have."""

    problems: tuple[str, ...]
    rows: int
    finished: bool
    fields: frozenset[str]


def scan_rows(
    path: str,
    keys: RowKeys,
    *,
    flag: str,
    objection: Callable[[Sample], str | None],
    deadline: float,
    advance: Callable[[], object] = lambda: None,
    allow_bad_rows: bool = False,
) -> RowScan:
    """Read rows as `Dataset` does, without a tokenizer, until the end, until `deadline`, or until a few problems were found.

    The deadline also holds while rows before a slice are skipped.

    Args:
        objection: tells why a readable row is still of no use to the run; None if it is of use.
        deadline: on the clock of `time.monotonic`, seconds.
        advance: called after each row.
        allow_bad_rows: say nothing of rows that cannot be read.

    Raises:
        UserError: something is wrong with the file as a whole.
    """
    problems: list[str] = []
    fields: set[str] = set()
    reader = RowReader(None, {})
    of_file: RowKeys | None = None
    rows = 0

    def tell(problem: str, is_bad_row: bool = True) -> None:
        if is_bad_row and allow_bad_rows:
            return
        problems.append(problem)
        if len(problems) >= _MOST_PROBLEMS:
            raise _EndOfScan

    def watch() -> None:
        if time.monotonic() > deadline:
            raise _EndOfScan

    # The loop yields neither unreadable rows nor those before a slice, so it is ended from inside, by an exception.
    try:
        for place, row in iterate_rows(path, flag, lambda place, cause: tell(bad_row(place, cause)), watch):
            of_file = of_file or keys.resolve(row, place)
            rows += 1
            fields.update(row)
            advance()
            try:
                cause = objection(reader.read(PromptRow(of_file, place, row)))
            except BadRow as error:
                tell(bad_row(place, str(error)))
            else:
                if cause is not None:
                    tell(f"{place}: {cause}", is_bad_row=False)
    except _EndOfScan:
        return RowScan(tuple(problems), rows, False, frozenset(fields))
    return RowScan(tuple(problems), rows, True, frozenset(fields))


def filter_long_prompt(
    samples: list[Sample],
    tokenizer: Any,
    processor: Any,
    max_length: int | None,
    *,
    add_special_tokens: bool = False,
    lengths: Sequence[int] | None = None,
) -> list[Sample]:
    """The samples whose prompt has at most `max_length` tokens, in their order; how many are left out is logged.

    Message lists are measured as rendered by the chat template; without a template they are kept, because only the
    function that consumes them knows their length. `add_special_tokens` applies to string prompts. Prompts with images are
    measured by `processor`, one at a time. `lengths`: the lengths if they are known; None measures them.

    Raises:
        UserError: a prompt has images and there is no processor, an image cannot be read, or the chat template refuses a
            prompt.
    """
    if max_length is None:
        return samples
    if lengths is None:
        lengths = []
        for start in range(0, len(samples), _TOKENIZE_BATCH):
            batch = samples[start : start + _TOKENIZE_BATCH]
            for length in prompt_lengths(batch, tokenizer, processor, add_special_tokens):
                if isinstance(length, BadRow):
                    raise UserError(f"prompt {len(lengths)}: {length}")
                lengths.append(length)
    kept = [sample for sample, length in zip(samples, lengths, strict=True) if length <= max_length]
    if len(kept) < len(samples):
        logger.info(
            "left out %d of %d prompts: more than %d tokens", len(samples) - len(kept), len(samples), max_length
        )
    return kept


class _EndOfScan(Exception):
    """Ends a scan that has reported enough problems, or whose time is over."""
