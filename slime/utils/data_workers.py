"""Processes that prepare the rows of data sets: read them as samples, render their templates, count their tokens.

Invariants:
- Rows come back in the order in which they were given. If their source raises, the error comes after the rows before it.
- A row that a worker cannot prepare comes back as it was. The caller prepares it, and so gets the same error as a run without
  workers.
- At most two batches of rows per worker are under way, and no more rows are read from the source.
- If a worker dies, or does not answer in time, the error names it and its rows.
- A worker imports neither Ray nor this process's main program. It imports torch, which takes most of a tokenizer's memory and
  start, only if code of the checkpoint or its processor may need it.
- Workers end with this process, in whatever way that ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import sys
import time
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from slime.utils.child_process import close_lifeline, describe_exit_status, end_with, open_lifeline
from slime.utils.data_files import BadRow
from slime.utils.errors import RunError
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.prompt_rows import PreparedRow, PromptRow, RowReader, prompt_lengths
from slime.utils.types import Sample

# A batch takes some milliseconds to render, so the way to a worker and back costs little in comparison.
_ROWS_OF_A_BATCH = 64
_BATCHES_OF_A_WORKER = 2
# Time limit of a batch, including the start of its worker. Batches with images take seconds.
_BATCH_SECONDS = 600.0
_EXIT_SECONDS = 5.0
_EXIT_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Preparation:
    """How each row is prepared; the same settings as those of a data set.

    Attributes:
        checkpoint: Hugging Face directory of tokenizer and processor.
        rendered: whether prompts are rendered in the chat template.
        template_kwargs: keywords of that template, which a sample has even if its prompt is not rendered yet.
        measures: whether tokens are counted.
        sees_images: whether the processor counts the tokens of prompts with images.
    """

    checkpoint: str
    trust_remote_code: bool
    rendered: bool
    template_kwargs: dict[str, Any]
    measures: bool
    sees_images: bool


class DataWorkers:
    """`count` processes, which start at once. They end by `close`, or when this object is garbage."""

    def __init__(self, count: int, preparation: Preparation) -> None:
        self._workers = [_Worker(f"{number} of {count}", preparation) for number in range(1, count + 1)]
        # Not at exit: workers end with this process by themselves, and a forked copy must not end those of its parent.
        weakref.finalize(self, _close_all, self._workers).atexit = False

    def prepare(self, rows: Iterable[PromptRow]) -> Iterator[PreparedRow]:
        """Each of `rows`, in order, with its sample if it could be read, and the number of its tokens if it was counted.

        `rows` is read as far as workers have room. If it raises, the error is raised after the rows before it.

        Raises:
            RunError: a worker died, cannot load the tokenizer, or did not answer in time. Then all have ended.
        """
        source, workers = iter(rows), itertools.cycle(self._workers)
        under_way: deque[tuple[_Worker, Sequence[PromptRow], Future]] = deque()
        end: Exception | None = None
        while True:
            while end is None and len(under_way) < _BATCHES_OF_A_WORKER * len(self._workers):
                batch = []
                try:
                    while len(batch) < _ROWS_OF_A_BATCH:
                        batch.append(next(source))
                except Exception as error:
                    end = error
                if batch:
                    worker = next(workers)
                    under_way.append((worker, batch, worker.submit(batch)))
            if not under_way:
                break
            worker, batch, answer = under_way.popleft()
            try:
                prepared = worker.result(answer, batch)
            except RunError:
                self.close()
                raise
            for row, (sample, length) in zip(batch, prepared, strict=True):
                yield PreparedRow(row, sample, length)
        if not isinstance(end, StopIteration):
            raise end

    def close(self) -> None:
        """End the workers; rows that are under way are lost."""
        _close_all(self._workers)


def _close_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.take_no_more()
    # All end at the same time, so many workers take no longer than one.
    deadline = time.monotonic() + _EXIT_SECONDS
    for worker in workers:
        worker.close(deadline)


class _Worker:
    """A pool of one process. In a pool of several it would not be known which process has which rows."""

    def __init__(self, name: str, preparation: Preparation) -> None:
        self._name = name
        lifeline, self._lifeline = open_lifeline()
        with contextlib.closing(Connection(lifeline, writable=False)) as watched:
            context = _Context()
            self._pool = ProcessPoolExecutor(1, context, initializer=_begin, initargs=(watched, preparation))
            # A pool starts its process with the first task.
            self._pool.submit(_prepare, [])
            [self._process] = context.started

    def submit(self, batch: Sequence[PromptRow]) -> Future:
        try:
            return self._pool.submit(_prepare, batch)
        except RuntimeError as error:  # the worker died, or all were closed: the caller gets the error with these rows
            answer = Future()
            answer.set_exception(error)
            return answer

    def result(self, answer: Future, batch: Sequence[PromptRow]) -> list[tuple[Sample | None, int | None]]:
        try:
            return answer.result(_BATCH_SECONDS)
        except BrokenProcessPool:
            self.close(time.monotonic() + _EXIT_SECONDS)
            what = describe_exit_status(self._process.exitcode)
        except TimeoutError:
            # A process that does not answer may be unable to end by itself.
            self._process.kill()
            what = f"no answer for {_BATCH_SECONDS:g} s"
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
        raise RunError(
            f"data worker {self._name} (--num-data-workers; process {self._process.pid}), which had to prepare "
            f"{batch[0].place} to {batch[-1].place}: {what}"
        )

    def take_no_more(self) -> None:
        """Finish the rows at hand and take no more. May be called again."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self, deadline: float) -> None:
        """Wait for the worker's end until `deadline` (monotonic clock), then kill it. May be called again."""
        if self._lifeline is None:
            return
        self.take_no_more()
        self._await_end(deadline)
        self._process.kill()
        self._await_end(time.monotonic() + _EXIT_SECONDS)
        close_lifeline(self._lifeline)
        self._lifeline = None

    def _await_end(self, deadline: float) -> None:
        # Polled, because a thread of the pool waits for the process as well, and for a moment it alone has the exit status.
        while self._process.is_alive() and time.monotonic() < deadline:
            time.sleep(_EXIT_POLL_SECONDS)


class _Process(SpawnProcess):
    """A process that does not import this one's main program (in an actor, Ray's), as Python's own would."""

    def start(self) -> None:
        program = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = program


class _Context(SpawnContext):
    """Spawns processes instead of forking: a copy of this one would have its memory, and locks that other threads hold."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[_Process] = []

    def Process(self, *arguments: Any, **keywords: Any) -> _Process:
        self.started.append(_Process(*arguments, **keywords))
        return self.started[-1]


# -- in a worker ---------------------------------------------------------------------------------------------------------

_begun_with: tuple[Connection, Preparation] | None = None


def _begin(watched: Connection, preparation: Preparation) -> None:
    global _begun_with
    _begun_with = watched, preparation
    end_with(watched.fileno(), os.getpid())
    # An interrupt (Ctrl-C) is meant for the driver.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Parallelism comes from the number of workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if not (preparation.trust_remote_code or preparation.sees_images):
        sys.modules["torch"] = None


@functools.cache
def _preparer() -> _Preparer:
    return _Preparer(_begun_with[1])


def _prepare(batch: Sequence[PromptRow]) -> list[tuple[Sample | None, int | None]]:
    return _preparer().prepare(batch)


class _Preparer:
    """Prepares rows as a data set does, but leaves all errors to the data set."""

    def __init__(self, preparation: Preparation) -> None:
        path, trusted = preparation.checkpoint, preparation.trust_remote_code
        self._tokenizer = load_tokenizer(path, trust_remote_code=trusted)
        self._processor = load_processor(path, trust_remote_code=trusted) if preparation.sees_images else None
        self._measures, self._rendered = preparation.measures, preparation.rendered
        self._reader = RowReader(self._tokenizer if self._rendered else None, preparation.template_kwargs)

    def prepare(self, batch: Sequence[PromptRow]) -> list[tuple[Sample | None, int | None]]:
        samples = [self._sample(row) for row in batch]
        there = [sample for sample in samples if sample is not None]
        lengths = iter(self._lengths(there))
        return [(sample, None if sample is None else next(lengths)) for sample in samples]

    def _sample(self, row: PromptRow) -> Sample | None:
        try:
            return None if row.content is None else self._reader.read(row)
        except Exception:
            return None

    def _lengths(self, samples: list[Sample]) -> Sequence[int | None]:
        try:
            if self._measures:
                lengths = prompt_lengths(samples, self._tokenizer, self._processor, not self._rendered)
                return [None if isinstance(length, BadRow) else length for length in lengths]
        except Exception:
            # One of the samples is bad; the data set will find out which.
            pass
        return [None] * len(samples)
