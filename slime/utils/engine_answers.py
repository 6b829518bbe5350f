"""An engine's answer, from bytes to arrays, without holding the interpreter.

Nearly all of a long answer is `[log-prob, id, null]` per token. A JSON parser makes Python objects of it, in every thread
under the interpreter's lock, so that an event loop stands still meanwhile. Here those stretches are cut out and read as
a table, by numpy and Arrow, which leave the lock to others; what remains of the answer is short. Whatever does not look
like such a stretch is parsed as any JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv

from slime.utils.sample_fields import exactly_as, read_only

_TABLES = ("output_token_logprobs", "input_token_logprobs")
_OPENING = re.compile(rb"\s*:\s*\[(?=\s*\[)")
_QUOTE, _COMMA, _OPEN, _CLOSE, _SPACE, _NEWLINE = b'",[] \n'
_COLUMNS = pyarrow.csv.ConvertOptions(
    column_types={"log_prob": pyarrow.float64(), "token": pyarrow.int64()},
    include_columns=["log_prob", "token"],
    # Numbers are trimmed, these are not.
    null_values=[" " * blanks + "null" for blanks in range(4)],
)
_LINES = pyarrow.csv.ParseOptions(quote_char=False, double_quote=False)


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
    spans = [span for name in _TABLES if (span := _table_span(content, name))]
    tables, pieces, position = {}, [], 0
    for name, start, end in sorted(spans, key=lambda span: span[1]):
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


def _table_span(content: bytes, name: str) -> tuple[str, int, int] | None:
    """(name, start, end) of the array that is the value of the only key `name`."""
    key = b'"%b"' % name.encode()
    at = content.find(key)
    # Within a text the quotes are escaped, so the second one of `key` would not follow the name.
    if at < 0 or content.find(key, at + 1) >= 0 or not (opening := _OPENING.match(content, at + len(key))):
        return None
    start = opening.end() - 1
    closing = np.frombuffer(content, np.uint8, offset=start) == _CLOSE
    both = closing[:-1] & closing[1:]
    last = int(both.argmax())
    return (name, start, start + last + 2) if len(both) and both[last] else None


def _read_table(content: bytes, start: int, end: int) -> TokenLogProbs | None:
    """`[[a,b,c],[a,b,c]]` as lines of three columns; None if it is something else."""
    entries = np.frombuffer(content, np.uint8, count=end - start - 2, offset=start + 1)
    if (entries == _QUOTE).any() or (entries < _SPACE).any():
        return None
    # Whole-array arithmetic: unlike assignment under a mask it never holds the lock. `[` and the comma between two
    # entries become spaces, `]` the end of a line.
    closing = entries == _CLOSE
    lines = entries - (entries == _OPEN) * np.uint8(_OPEN - _SPACE) - closing * np.uint8(_CLOSE - _NEWLINE)
    lines[1:] -= ((entries[1:] == _COMMA) & closing[:-1]) * np.uint8(_COMMA - _SPACE)
    reading = pyarrow.csv.ReadOptions(
        use_threads=False, block_size=len(lines) + 1, column_names=["log_prob", "token", "rest"]
    )
    try:
        table = pyarrow.csv.read_csv(
            pyarrow.py_buffer(lines), read_options=reading, parse_options=_LINES, convert_options=_COLUMNS
        )
    except pyarrow.ArrowInvalid:
        return None
    if table["token"].null_count:
        return None
    # Copies, because Arrow's own memory would be held with them.
    return TokenLogProbs._exact(np.array(table["log_prob"].to_numpy()), np.array(table["token"].to_numpy()))


def num_requests(loads: Any) -> int:
    """How many requests an engine has, running and waiting, by its answer to `/v1/loads`."""
    of_ranks = loads.get("loads", []) if isinstance(loads, dict) else loads
    return sum(_requests_of_rank(load) for load in of_ranks)


def _requests_of_rank(load: dict[str, Any]) -> int:
    for name in ("num_reqs", "total_reqs", "num_total_reqs"):
        if name in load:
            return load[name]
    return load.get("num_running_reqs", 0) + load.get("num_waiting_reqs", 0)
