"""Decodes an engine's answer from bytes to arrays, without holding the interpreter lock.

Nearly all of a long answer is `[log-prob, id, null]` per token. A JSON parser would make Python objects of these, under the
interpreter lock whatever its thread, so that the event loop stands still. Here those stretches are cut out and read as a table
by numpy and Arrow, which release the lock; the rest of the answer is short. Anything that does not look like such a stretch is
parsed as plain JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow

from slime.utils.sample_fields import exactly_as, read_only

_TABLES = ("output_token_logprobs", "input_token_logprobs")
_OPENING = re.compile(rb"\s*:\s*\[(?=\s*\[)")
# What versions of SGLang call the requests of a rank: all of them, or running and waiting ones.
_COUNTS_OF_REQUESTS = (("num_reqs",), ("total_reqs",), ("num_total_reqs",), ("num_running_reqs", "num_waiting_reqs"))
_COMMA, _OPEN, _CLOSE, _SPACE, _NULL = b",[] n"


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
        """Of the entries `[log-prob, id, …]` of an answer's `…_token_logprobs`; a `TokenLogProbs` is returned as it is."""
        if isinstance(entries, cls):
            return entries
        log_probs = [entry[0] for entry in entries or ()]
        tokens, narrow = np.array([entry[1] for entry in entries or ()], np.int64), np.array(log_probs, np.float32)
        # So few Python numbers are compared faster than arrays are.
        if narrow.tolist() == log_probs:
            return cls(read_only(narrow), read_only(tokens))
        return cls._exact(np.array(log_probs, np.float64), tokens)

    def with_log_probs(self, log_probs: Sequence[float]) -> TokenLogProbs:
        """The same tokens with other log-probs. Raises ValueError if their number differs."""
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
    """(start, end, name) of the array that is the value of the only key `name`, if it contains no text; else None.

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
    # `key` cannot occur within a text, where quotes are escaped.
    if last < 0 or _find_outside(content, key, last, others) >= 0:
        return None
    return start, last + 2, name


def _find_outside(content: bytes, key: bytes, at: int, spans: Sequence[tuple[int, int, str]]) -> int:
    """The first position of `key` from `at` on, or -1. The search skips `spans`, which contain no quotes, and are nearly all of
    an answer."""
    for start, end, _ in spans:
        if at < start and (found := content.find(key, at, start)) >= 0:
            return found
        at = max(at, end)
    return content.find(key, at)


def _read_table(content: bytes, start: int, end: int) -> TokenLogProbs | None:
    """`[[a,b,null],[a,b,null]]`, or the same with a blank after each comma; None if it is something else."""
    text = np.frombuffer(content, np.uint8, count=end)
    commas = np.flatnonzero(text[start:end] == _COMMA)
    if len(commas) % 3 != 2:
        return None
    # For each entry: the comma before it, the two commas within, and the comma behind it; at the ends there are brackets
    # instead.
    bounds = np.empty((4, len(commas) // 3 + 1), np.int64)
    bounds[0, 0], bounds[3, -1] = start, end - 1
    bounds[0, 1:] = bounds[3, :-1] = commas[2::3] + start
    bounds[1:3] = commas[0::3] + start, commas[1::3] + start
    before, first, second, behind = bounds
    blank = int(text[second[0] + 1] == _SPACE)
    opening = before + 1
    opening[1:] += blank
    third = second + (1 + blank)
    if (
        (behind - third != len("null]")).any()
        or (text[third] != _NULL).any()
        or (text[behind - 1] != _CLOSE).any()
        or (text[opening] != _OPEN).any()
        or (blank and (text[first + 1] != _SPACE).any())
    ):
        return None
    try:
        log_probs = _numbers(content, opening + 1, first, pyarrow.float64(), text[opening + 1] != _NULL)
        tokens = _numbers(content, first + (1 + blank), second, pyarrow.int64())
    except pyarrow.ArrowInvalid:
        return None
    return TokenLogProbs._exact(log_probs, tokens)


def _numbers(
    content: bytes, starts: np.ndarray, ends: np.ndarray, kind: pyarrow.DataType, present: np.ndarray | None = None
) -> np.ndarray:
    """The numbers whose digits lie from `starts` to `ends`; NaN where they are not `present`.

    Raises:
        pyarrow.ArrowInvalid: something else lies there.
    """
    # Arrow's texts are contiguous, so the bytes between two numbers are a text, too: a null one, which is not parsed.
    offsets = np.stack([starts, ends], axis=1)
    mask = np.zeros(offsets.shape, np.bool_)
    mask[:, 0] = True if present is None else present
    buffers = [np.packbits(mask, bitorder="little"), offsets, content]
    texts = pyarrow.Array.from_buffers(
        pyarrow.large_string(), offsets.size - 1, [pyarrow.py_buffer(one) for one in buffers]
    )
    found = texts.cast(kind)
    numbers = np.frombuffer(found.buffers()[1], kind.to_pandas_dtype(), count=offsets.size - 1)[::2].copy()
    if present is not None:
        numbers[~present] = np.nan
    return numbers


def num_requests(loads: Any) -> int:
    """How many requests an engine has, running and waiting, by its answer to `/v1/loads`.

    Raises:
        ValueError: the answer is something else, say the page of a proxy on the way.
    """
    of_ranks = loads.get("loads") if isinstance(loads, dict) else loads
    if not isinstance(of_ranks, list) or not all(isinstance(load, dict) for load in of_ranks):
        raise ValueError(f"{str(loads)[:500]!r} does not tell the requests of an engine")
    return sum(map(_requests_of_rank, of_ranks))


def _requests_of_rank(load: dict[str, Any]) -> int:
    for names in _COUNTS_OF_REQUESTS:
        counts = [load[name] for name in names if type(load.get(name)) is int]
        if counts:
            return sum(counts)
    raise ValueError(f"{str(load)[:500]!r} does not tell the requests of a rank")
