"""Zigzag arithmetic: worked numbers, and every length by brute force."""

import pytest

from slime.scheduling.zigzag import (
    chunk_size,
    contiguous_segments,
    local_response_length,
    logits_and_tokens_offsets,
    response_ranges,
    zigzag_runs,
    zigzag_segments,
)

NOTHING = (0, 0)
SIZES = (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("total", "response", "rank", "logits", "tokens"),
    [
        (10, 4, 0, (NOTHING, NOTHING), (NOTHING, NOTHING)),
        (10, 4, 1, ((5, 6), (6, 9)), ((6, 7), (7, 10))),
        (16, 10, 0, (NOTHING, (12, 15)), (NOTHING, (13, 16))),
        (16, 10, 1, ((5, 8), (8, 12)), ((6, 9), (9, 13))),
        (8, 6, 0, ((1, 2), (6, 7)), ((2, 3), (7, 8))),
        (8, 6, 1, ((2, 4), (4, 6)), ((3, 5), (5, 7))),
    ],
)
def test_offsets_of_two_ranks(total, response, rank, logits, tokens):
    size, chunks, found_logits, found_tokens = logits_and_tokens_offsets(total, response, 2, rank)
    assert size == {10: 3, 16: 4, 8: 2}[total]
    assert chunks == ((rank * size, (rank + 1) * size), ((3 - rank) * size, (4 - rank) * size))
    assert (found_logits, found_tokens) == (logits, tokens)


def owner(position, total, cp_size):
    """By counting: the chunk that a position falls into, then the rank that holds it."""
    chunk = position // chunk_size(total, cp_size)
    return chunk if chunk < cp_size else 2 * cp_size - 1 - chunk


@pytest.mark.parametrize("cp_size", SIZES)
def test_every_response_token_is_owned_exactly_once_at_every_length(cp_size):
    # For 8 ranks chunks of up to seven tokens, and every rest of a length.
    for total in range(1, 101):
        owner_of_logit = [owner(position, total, cp_size) for position in range(total)]
        for response in range(total):
            expected = owner_of_logit[total - response - 1 : total - 1]
            found = [None] * response
            for rank in range(cp_size):
                for start, end in response_ranges(total, response, cp_size, rank):
                    assert found[start:end] == [None] * (end - start)
                    found[start:end] = [rank] * (end - start)
                assert local_response_length(total, response, cp_size, rank) == expected.count(rank)
            assert found == expected, (total, response)


def test_a_response_without_prompt_has_no_first_logit():
    with pytest.raises(ValueError, match="leaves none to predict it from"):
        logits_and_tokens_offsets(5, 5, 2, 0)
    assert logits_and_tokens_offsets(0, 0, 2, 1)[2] == (NOTHING, NOTHING)


def zigzag_rows(lengths, cp_size):
    """(sequence, position) of every row of each rank, by counting."""
    rows = {rank: [] for rank in range(cp_size)}
    for rank in range(cp_size):
        for sequence, length in enumerate(lengths):
            size = length // (2 * cp_size)
            for chunk in (rank, 2 * cp_size - 1 - rank):
                rows[rank] += [(sequence, position) for position in range(chunk * size, (chunk + 1) * size)]
    return rows


def visible_pairs(segments, rows):
    """(query row, key row of the whole stream) for all that a segment's right-aligned causal mask lets through."""
    pairs, row = set(), 0
    for segment in segments:
        for query in range(segment.queries):
            seen = segment.keys - segment.queries + query + 1
            pairs |= {(rows[row + query], segment.first_key + key) for key in range(seen)}
        row += segment.queries
    assert row == len(rows)
    return pairs


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_segments_see_exactly_the_prefix_of_their_sequence(cp_size):
    lengths = [8 * cp_size, 2 * cp_size, 6 * cp_size]
    stream = [(sequence, position) for sequence, length in enumerate(lengths) for position in range(length)]
    index = {row: i for i, row in enumerate(stream)}

    def expected(rows):
        return {(row, index[row[0], key]) for row in rows for key in range(row[1] + 1)}

    for rank, rows in zigzag_rows(lengths, cp_size).items():
        assert visible_pairs(zigzag_segments(lengths, cp_size, rank), rows) == expected(rows)
    local = len(stream) // cp_size
    for rank in range(cp_size):
        rows = stream[rank * local : (rank + 1) * local]
        assert visible_pairs(contiguous_segments(lengths, rank * local, local), rows) == expected(rows)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_runs_put_gathered_rows_in_order(cp_size):
    lengths = [4 * cp_size, 2 * cp_size, 8 * cp_size]
    gathered = [row for rows in zigzag_rows(lengths, cp_size).values() for row in rows]
    ordered = [row for start, end in zigzag_runs(lengths, cp_size) for row in gathered[start:end]]
    assert ordered == [(sequence, position) for sequence, length in enumerate(lengths) for position in range(length)]
