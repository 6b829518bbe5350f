"""Which positions of a sequence a context-parallel rank holds, in plain integers.

Zigzag layout: a sequence of T tokens is cut into 2·size chunks of c = ceil(T / 2·size) positions, and rank k holds chunks k
and 2·size − 1 − k. Early chunks see few keys and late ones many, so the two together cost every rank the same.

The logit at position t predicts token t + 1. A response token belongs to the rank that holds the *logit* which predicts it,
so every response token has exactly one owner. Ranges are (start, end), end exclusive; an empty one is (0, 0).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Range = tuple[int, int]


class Segment(NamedTuple):
    """Consecutive rows of a rank's stream that lie in one sequence, and the keys that its attention needs.

    The keys are the rows `first_key` … `first_key + keys − 1` of the whole stream: the sequence from its start up to the
    last query, so the mask is causal with both ends aligned on the right.
    """

    queries: int
    first_key: int
    keys: int


def chunk_size(total_length: int, cp_size: int) -> int:
    """c = ceil(T / 2·size)."""
    return -(-total_length // (2 * cp_size))


def logits_and_tokens_offsets(
    total_length: int, response_length: int, cp_size: int, cp_rank: int
) -> tuple[int, tuple[Range, Range], tuple[Range, Range], tuple[Range, Range]]:
    """What the rank owns of a response, in positions of the whole sequence.

    Returns:
        chunk size; the two chunks (which may reach past the end of the sequence); in each of them the logits that predict
        response tokens; and those tokens, one position later.

    Raises:
        ValueError: the response has tokens and nothing stands before it, so that its first token has no logit.
    """
    prompt_length = total_length - response_length
    if response_length and prompt_length < 1:
        raise ValueError(f"a response of {response_length} in {total_length} tokens leaves none to predict it from")
    size = chunk_size(total_length, cp_size)
    first, second = cp_rank * size, (2 * cp_size - 1 - cp_rank) * size
    chunks = ((first, first + size), (second, second + size))
    # An empty sequence has no logit, not even one in front of it.
    predicting = (max(prompt_length - 1, 0), max(total_length - 1, 0))
    logits = tuple(_intersection(predicting, chunk) for chunk in chunks)
    tokens = tuple((start + 1, end + 1) if end > start else (0, 0) for start, end in logits)
    return size, chunks, logits, tokens


def response_ranges(total_length: int, response_length: int, cp_size: int, cp_rank: int) -> tuple[Range, Range]:
    """The response tokens that the rank owns in each of its chunks, counted from the start of the response."""
    prompt_length = total_length - response_length
    _, _, _, tokens = logits_and_tokens_offsets(total_length, response_length, cp_size, cp_rank)
    return tuple((start - prompt_length, end - prompt_length) if end > start else (0, 0) for start, end in tokens)


def local_response_length(total_length: int, response_length: int, cp_size: int, cp_rank: int) -> int:
    """Number of response tokens that the rank owns."""
    return sum(end - start for start, end in response_ranges(total_length, response_length, cp_size, cp_rank))


def zigzag_segments(lengths: Sequence[int], cp_size: int, cp_rank: int) -> list[Segment]:
    """Two segments per sequence, in the order of the rank's stream. `lengths` are padded: multiples of 2·size."""
    segments = []
    for start, length in _starts(lengths):
        size = length // (2 * cp_size)
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            segments.append(Segment(size, start, (chunk + 1) * size))
    return segments


def contiguous_segments(lengths: Sequence[int], first_row: int, rows: int) -> list[Segment]:
    """Segments of a rank that holds `rows` rows of the whole stream from `first_row` on; at most one per sequence."""
    segments = []
    for start, length in _starts(lengths):
        begin, end = _intersection((start, start + length), (first_row, first_row + rows))
        if end > begin:
            segments.append(Segment(end - begin, start, end - start))
    return segments


def zigzag_runs(lengths: Sequence[int], cp_size: int) -> list[Range]:
    """Where each chunk of the whole stream, in order, stands in the zigzag streams of all ranks laid end to end."""
    local_rows = sum(lengths) // cp_size
    runs = []
    for start, length in _starts(lengths):
        size = length // (2 * cp_size)
        for chunk in range(2 * cp_size):
            is_second = chunk >= cp_size
            owner = 2 * cp_size - 1 - chunk if is_second else chunk
            begin = owner * local_rows + start // cp_size + is_second * size
            runs.append((begin, begin + size))
    return runs


def _starts(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for length in lengths:
        yield start, length
        start += length


def _intersection(left: Range, right: Range) -> Range:
    start, end = max(left[0], right[0]), min(left[1], right[1])
    return (start, end) if end > start else (0, 0)
