"""An engine's answer, from bytes to arrays, without holding the interpreter.

Nearly all of a long answer is `[log-prob, id, null]` per token. A JSON parser makes Python objects of it, in every thread
under the interpreter's lock, so that an event loop stands still meanwhile. Here those stretches are cut out and read as
a table, by numpy and Arrow, which leave the lock to others; what remains of the answer is short. Whatever does not look
like such a stretch is parsed as any JSON.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv

from slime.utils.sample_fields import exactly_as, read_only

_TABLES = ("output_token_logprobs", "input_token_logprobs")
_OPENING = re.compile(rb"\s*:\s*\[(?=\s*\[)")
_COMMA, _OPEN, _CLOSE, _SPACE, _NEWLINE = b",[] \n"
# What is read at a time.
_BLOCK_BYTES = 1 << 20
_kept = threading.local()
_COLUMNS = pyarrow.csv.ConvertOptions(
    column_types={"log_prob": pyarrow.float64(), "token": pyarrow.int64()},
    include_columns=["log_prob", "token"],
    # Numbers are trimmed, these are not.
    null_values=[" " * blanks + "null" for blanks in range(4)],
)
# An empty line is what brackets within an entry would make.
_LINES = pyarrow.csv.ParseOptions(quote_char=False, double_quote=False, ignore_empty_lines=False)
_BLOCKS = pyarrow.csv.ReadOptions(
    use_threads=False, block_size=_BLOCK_BYTES + 1, column_names=["nothing", "log_prob", "token", "rest"]
)


@dataclass(frozen=True, eq=False)
class TokenLogProbs:
    """One log-prob and one id per token, read-only. A log-prob that the engine left out is NaN."""

    log_probs: np.ndarray  # [n] float32, or float64 where float32 would round
    tokens: np.ndarray  # [n] int64

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> TokenLogProbs:
        return TokenLogProbs(self.log_probs[part], self.tokens[part])

    @classmethod
    def of(cls, entries: TokenLogProbs | Sequence[Sequence[Any]] | None) -> TokenLogProbs:
        """From the entries of an answer's `…_token_logprobs`: `[log-prob, id, …]` each, or what they were read into."""
        if isinstance(entries, cls):
            return entries
        log_probs, tokens = [*zip(*entries, strict=False)][:2] if entries else ((), ())
        return cls._exact(np.array(log_probs, dtype=np.float64), np.array(tokens, dtype=np.int64))

    def with_log_probs(self, log_probs: Sequence[float]) -> TokenLogProbs:
        """The same tokens with other log-probs. Raises ValueError where these are not as many."""
        if len(log_probs) != len(self):
            raise ValueError(f"{len(log_probs)} log-probs for {len(self)} tokens")
        return self._exact(np.array(log_probs, dtype=np.float64), self.tokens)

    @classmethod
    def _exact(cls, log_probs: np.ndarray, tokens: np.ndarray) -> TokenLogProbs:
        narrow = exactly_as(log_probs, np.float32)
        return cls(read_only(log_probs if narrow is None else narrow), read_only(tokens))


def decode_engine_answer(content: bytes, decode_json: Callable[[bytes], Any]) -> Any:
    """The parsed answer, whose token log-probs are `TokenLogProbs` where they are a table of three columns.

    Args:
        decode_json: parses what remains, and everything where there is no such table.
    """
    spans: list[tuple[int, int, str]] = []
    for name in _TABLES:
        if span := _table_span(content, name, spans):
            spans = sorted([*spans, span])
    tables, pieces, position = {}, [], 0
    for start, end, name in spans:
        table = _read_table(content, start, end)
        if table is not None:
            tables[name] = table
            pieces += [content[position:start], b"[]"]
            position = end
    if not tables:
        return decode_json(content)
    answer = decode_json(b"".join([*pieces, content[position:]]))
    meta_info = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta_info, dict) or any(meta_info.get(name) != [] for name in tables):
        return decode_json(content)
    meta_info.update(tables)
    return answer


def _table_span(content: bytes, name: str, others: Sequence[tuple[int, int, str]]) -> tuple[int, int, str] | None:
    """(start, end, name) of the array that is the value of the only key `name`, as far as it holds no text.

    Args:
        others: such spans of other keys, in order.
    """
    key = b'"%b"' % name.encode()
    at = _find_outside(content, key, 0, others)
    if at < 0 or not (opening := _OPENING.match(content, at + len(key))):
        return None
    start = opening.end() - 1
    quote = content.find(b'"', start)
    last = content.rfind(b"]]", start, len(content) if quote < 0 else quote)
    # Within a text the quotes are escaped, so the second one of `key` would not follow the name.
    if last < 0 or _find_outside(content, key, last, others) >= 0:
        return None
    return start, last + 2, name


def _find_outside(content: bytes, key: bytes, at: int, spans: Sequence[tuple[int, int, str]]) -> int:
    """Where `key` first is from `at` on, or -1. Nearly all of an answer is in `spans`, which hold no quotes."""
    for start, end, _ in spans:
        if at < start and (found := content.find(key, at, start)) >= 0:
            return found
        at = max(at, end)
    return content.find(key, at)


def _read_table(content: bytes, start: int, end: int) -> TokenLogProbs | None:
    """`[[a,b,c],[a,b,c]]` as lines of four columns, the first of them empty; None if it is something else."""
    pieces = []
    at = start
    while at < end - 1:
        # An entry and what stands before it stay together; the comma between two of them begins a line.
        stop = content.rfind(b"]", at, min(at + _BLOCK_BYTES, end - 1)) + 1
        if stop <= at:
            return None
        lines = _as_lines(np.frombuffer(content, np.uint8, count=stop - at, offset=at))
        if at == start:
            lines[0] = _COMMA
        try:
            piece = pyarrow.csv.read_csv(
                pyarrow.py_buffer(lines), read_options=_BLOCKS, parse_options=_LINES, convert_options=_COLUMNS
            )
        except pyarrow.ArrowInvalid:
            return None
        if piece["token"].null_count:
            return None
        pieces.append(piece)
        at = stop
    # Joined is copied: Arrow's own memory would be held with its arrays.
    log_probs, tokens = (np.concatenate([piece[name].to_numpy() for piece in pieces]) for name in ("log_prob", "token"))
    return TokenLogProbs._exact(log_probs, tokens)


def _as_lines(entries: np.ndarray) -> np.ndarray:
    """`entries` with a space for `[`, and the end of a line for `]`: [n] uint8, until this thread asks again.

    Whole-array arithmetic never holds the lock, unlike assignment under a mask. It is done in memory that the thread keeps,
    as new memory, page by page from the system, would cost half as much as all else.
    """
    if not hasattr(_kept, "scratch"):
        _kept.scratch = np.empty((2, _BLOCK_BYTES), np.uint8)
    lines, change = _kept.scratch[:, : len(entries)]
    np.equal(entries, _OPEN, out=change.view(np.bool_))
    np.multiply(change, _OPEN - _SPACE, out=change)
    np.subtract(entries, change, out=lines)
    np.equal(entries, _CLOSE, out=change.view(np.bool_))
    np.multiply(change, _CLOSE - _NEWLINE, out=change)
    return np.subtract(lines, change, out=lines)


def num_requests(loads: Any) -> int:
    """How many requests an engine has, running and waiting, by its answer to `/v1/loads`."""
    of_ranks = loads.get("loads", []) if isinstance(loads, dict) else loads
    return sum(_requests_of_rank(load) for load in of_ranks)


def _requests_of_rank(load: dict[str, Any]) -> int:
    for name in ("num_reqs", "total_reqs", "num_total_reqs"):
        if name in load:
            return load[name]
    return load.get("num_running_reqs", 0) + load.get("num_waiting_reqs", 0)
