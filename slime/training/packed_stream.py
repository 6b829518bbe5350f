"""Samples of a micro-batch as one packed stream of tokens, and per-token results cut back to responses.

Logit at stream position t predicts token t + 1, so the log-probs of a response of length R that ends at position e
(exclusive) stand at rows e − R − 1 … e − 2. The stream is padded by one pseudo-sequence that carries no loss.

With context parallelism a rank holds part of the stream. Zigzag: two chunks of every sequence, each sequence (that of
padding too) padded to whole chunks. All-gather: one contiguous piece of the whole stream. In both, results per response
token come out in the zigzag layout, and the token that a row predicts is known to the row, also where it stands elsewhere.

What follows from lengths is made on the host and copied without waiting for the device. Where the host's memory is not pinned,
the copy has left it when it returns, so it may go.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from slime.scheduling.zigzag import (
    Range,
    Segment,
    chunk_size,
    contiguous_segments,
    logits_and_tokens_offsets,
    zigzag_runs,
    zigzag_segments,
)
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel, gather_rows, slice_with_cp


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a rank's stream, ascending; known on the host, so that nobody waits to learn where they are."""

    ranges: tuple[range, ...]
    index: torch.Tensor  # the same rows, int64, on the device of the stream

    @classmethod
    def at(cls, ranges: Sequence[range], device: torch.device) -> Rows:
        """The rows of `ranges`, which are ascending and have no row twice."""
        rows = [torch.empty(0, dtype=torch.int64), *(torch.arange(r.start, r.stop) for r in ranges)]
        return cls(tuple(ranges), torch.cat(rows).to(device, non_blocking=True))

    def within(self, logits: torch.Tensor) -> Rows:
        """Where these rows are in `logits`, which a model has made of the whole stream or of these rows alone."""
        if len(logits) != len(self.index):
            return self
        # Made on the device: nothing is copied there while the model is still at work.
        return Rows((range(len(logits)),), torch.arange(len(logits), device=logits.device))

    def one_at_least(self) -> Rows:
        """These rows, or the first of the stream where there are none: kernels for products need one."""
        return self if self.ranges else Rows((range(1),), self.index.new_zeros(1))


@dataclass(frozen=True, eq=False)
class PackedStream:
    """Token stream of a micro-batch: T positions on this rank, padding included.

    `cu_seqlens` and `sequence_lengths` speak of the whole stream, over all context-parallel ranks; they include the
    pseudo-sequence of padding, if there is one, and in the zigzag layout the padding to whole chunks.
    """

    tokens: torch.Tensor  # [T] int64
    next_tokens: torch.Tensor  # [T] int64: what each row predicts; any token where it predicts nothing
    position_ids: torch.Tensor  # [T] int64, the place of each row in its sequence
    cu_seqlens: torch.Tensor  # [sequences + 1] int32
    sequence_lengths: tuple[int, ...]
    # On the host, int64, one per response token that this rank owns: the row whose logits predict it. With all-gather context
    # parallelism a row of the whole stream, else one of this rank's.
    host_response_rows: torch.Tensor
    local_response_lengths: tuple[int, ...]  # response tokens that this rank owns, per sample
    predicting_positions: tuple[
        Range, ...
    ]  # per sample, from its start: the positions whose logits predict the response
    cp: ContextParallel = NO_CONTEXT_PARALLEL

    def responses(self, per_row: torch.Tensor) -> torch.Tensor:
        """Values of this rank's response tokens, concatenated over samples, from values per row [T, …].

        With all-gather context parallelism the rows of all ranks are exchanged: every rank has to call it, and to run the
        backward pass through the result.
        """
        if self.cp.all_gather:
            per_row = gather_rows(per_row, self.cp)
        return per_row.index_select(0, self.response_rows)

    def responses_of_predictions(self, per_prediction: torch.Tensor) -> torch.Tensor:
        """As `responses`, from values of the `predicting_rows` alone, which elsewhere than in all-gather context parallelism
        are those of this rank's response tokens."""
        if not self.cp.all_gather:
            return per_prediction
        per_row = per_prediction.new_zeros(len(self.tokens))
        return self.responses(per_row.index_copy(0, self.predicting_rows.index, per_prediction))

    @cached_property
    def predicting_rows(self) -> Rows:
        """This rank's rows that predict a token of a response, whichever rank owns it."""
        return self.rows_predicting(1)

    def rows_predicting(self, distance: int) -> Rows:
        """This rank's rows for which the token `distance` positions later in their sequence is of the response."""
        sample_at = {start: sample for sample, start in enumerate(_starts(self.sequence_lengths))}
        found, first_row = [], 0
        for queries, first_key, keys in self.segments:
            sample, first = sample_at[first_key], keys - queries
            # The pseudo-sequence of padding predicts nothing.
            begin, end = self.predicting_positions[sample] if sample < len(self.predicting_positions) else (0, 0)
            start, stop = max(begin + 1 - distance, first), min(end + 1 - distance, keys)
            if start < stop:
                found.append(range(first_row + start - first, first_row + stop - first))
            first_row += queries
        return Rows.at(found, self.tokens.device)

    def rows_of(self, per_position: Sequence[torch.Tensor]) -> torch.Tensor:
        """Values of this rank's rows, [T], from one tensor per sample with values for its positions from the first on.

        Positions behind the end of a tensor, and padding, get 0.
        """
        padded = [
            F.pad(values, (0, length - len(values)))
            for values, length in zip(per_position, self.sequence_lengths, strict=False)
        ]
        padded += [per_position[0].new_zeros(length) for length in self.sequence_lengths[len(padded) :]]
        if self.cp.all_gather:
            return torch.cat(padded).narrow(0, self.cp.rank * len(self.tokens), len(self.tokens))
        return torch.cat([slice_with_cp(values, 0, self.cp) for values in padded])

    def rows_of_rank(self, whole: torch.Tensor) -> torch.Tensor:
        """From values of all rows of the whole stream, in its order, those of this rank's rows, in theirs; [rows, …] both."""
        rows = len(self.tokens)
        if self.gather_order is None:
            return whole.narrow(0, self.cp.rank * rows, rows)
        places = torch.empty_like(self.gather_order)
        places[self.gather_order] = torch.arange(len(places), device=places.device)
        return whole.index_select(0, places.narrow(0, self.cp.rank * rows, rows))

    @cached_property
    def is_padding(self) -> torch.Tensor:
        """Of each of this rank's rows whether it belongs to no sample, bool [T]."""
        samples = [torch.ones(end + 1, dtype=torch.int8) for _, end in self.predicting_positions]
        return (self.rows_of(samples) == 0).to(self.tokens.device, non_blocking=True)

    @cached_property
    def response_rows(self) -> torch.Tensor:
        """`host_response_rows` on the device of the tokens."""
        return self.host_response_rows.to(self.tokens.device, non_blocking=True)

    def split(self, per_response_token: torch.Tensor) -> list[torch.Tensor]:
        """One tensor per sample from values concatenated over samples."""
        return list(per_response_token.split(self.local_response_lengths))

    @cached_property
    def segments(self) -> list[Segment]:
        """This rank's rows as pieces of one sequence each, with the keys that each piece sees."""
        if self.cp.all_gather or self.cp.size == 1:
            return contiguous_segments(self.sequence_lengths, self.cp.rank * len(self.tokens), len(self.tokens))
        return zigzag_segments(self.sequence_lengths, self.cp.size, self.cp.rank)

    @cached_property
    def segment_keys(self) -> torch.Tensor:
        """Rows of the whole stream, int64: those that the segments see, one segment after the other."""
        seen = [torch.arange(s.first_key, s.first_key + s.keys) for s in self.segments]
        return torch.cat(seen).to(self.tokens.device, non_blocking=True)

    @cached_property
    def query_boundaries(self) -> torch.Tensor:
        """Cumulative numbers of rows of the segments, int32 [segments + 1]."""
        return _boundaries([s.queries for s in self.segments], self.tokens.device)

    @cached_property
    def key_boundaries(self) -> torch.Tensor:
        """Cumulative numbers of keys that the segments see, int32 [segments + 1]."""
        return _boundaries([s.keys for s in self.segments], self.tokens.device)

    @cached_property
    def gather_order(self) -> torch.Tensor | None:
        """Puts the rows of all ranks, laid end to end, into the order of the whole stream; None where they are in it."""
        if self.cp.all_gather or self.cp.size == 1:
            return None
        runs = [torch.arange(start, end) for start, end in zigzag_runs(self.sequence_lengths, self.cp.size)]
        return torch.cat(runs).to(self.tokens.device, non_blocking=True)


def rows_on_rank(lengths: Sequence[int], pad_multiple: int, cp: ContextParallel = NO_CONTEXT_PARALLEL) -> int:
    """Rows of every rank's stream of samples of these lengths, padding included; see `pack_stream`."""
    if cp.size == 1 or cp.all_gather:
        return -(-sum(lengths) // (pad_multiple * cp.size)) * pad_multiple
    # The pseudo-sequence of padding has two chunks as well.
    multiple = math.lcm(pad_multiple, 2)
    return -(-sum(2 * chunk_size(length, cp.size) for length in lengths) // multiple) * multiple


def pack_stream(
    tokens: Sequence[torch.Tensor],
    response_lengths: Sequence[int],
    pad_multiple: int,
    cp: ContextParallel = NO_CONTEXT_PARALLEL,
) -> PackedStream:
    """Concatenate samples into the stream of this context-parallel rank.

    Args:
        tokens: one int64 tensor [T_i] per sample.
        response_lengths: how many of the last tokens of each sample are its response.
        pad_multiple: the length of every rank's stream is a multiple of it; padding is token 0.
    """
    if cp.size == 1:
        return _whole_stream(tokens, response_lengths, pad_multiple, cp)
    if cp.all_gather:
        return _contiguous_part(tokens, response_lengths, pad_multiple, cp)
    return _zigzag_part(tokens, response_lengths, pad_multiple, cp)


def _whole_stream(
    tokens: Sequence[torch.Tensor],
    response_lengths: Sequence[int],
    pad_multiple: int,
    cp: ContextParallel,
) -> PackedStream:
    """The stream of all samples, one behind the other, with the padding at its end."""
    device = tokens[0].device
    lengths = [len(sample) for sample in tokens]
    padding = rows_on_rank(lengths, pad_multiple) - sum(lengths)
    if padding:
        tokens = [*tokens, torch.zeros(padding, dtype=torch.int64, device=device)]
    stream = torch.cat(list(tokens))
    padded_lengths = [*lengths, padding] if padding else lengths
    starts = [(start, start) for start in _starts(lengths)]
    rows, counts = _response_rows(starts, lengths, response_lengths, cp)
    return PackedStream(
        tokens=stream,
        next_tokens=torch.roll(stream, -1),
        position_ids=torch.cat([torch.arange(length) for length in padded_lengths]).to(device, non_blocking=True),
        cu_seqlens=_boundaries(padded_lengths, device),
        sequence_lengths=tuple(padded_lengths),
        host_response_rows=rows,
        local_response_lengths=counts,
        predicting_positions=_predicting_positions(lengths, response_lengths),
        cp=cp,
    )


def _contiguous_part(
    tokens: Sequence[torch.Tensor],
    response_lengths: Sequence[int],
    pad_multiple: int,
    cp: ContextParallel,
) -> PackedStream:
    """With `--allgather-cp`: the whole stream is cut into equal pieces, and this rank has the piece of its number."""
    whole = _whole_stream(tokens, response_lengths, pad_multiple * cp.size, cp)
    rows = len(whole.tokens) // cp.size
    mine = slice(cp.rank * rows, (cp.rank + 1) * rows)
    return dataclasses.replace(
        whole,
        tokens=whole.tokens[mine],
        next_tokens=whole.next_tokens[mine],
        position_ids=whole.position_ids[mine],
    )


def _zigzag_part(
    tokens: Sequence[torch.Tensor],
    response_lengths: Sequence[int],
    pad_multiple: int,
    cp: ContextParallel,
) -> PackedStream:
    """Each sample is padded and cut into 2 x `cp.size` chunks, and this rank has two of them: the one of its number, counted
    from the front, and the one of its number counted from the back. So all ranks have equally much causal attention to do."""
    device = tokens[0].device
    lengths = [len(sample) for sample in tokens]
    padded_lengths = [2 * cp.size * chunk_size(length, cp.size) for length in lengths]
    padding = rows_on_rank(lengths, pad_multiple, cp) - sum(padded_lengths) // cp.size
    if padding:
        padded_lengths.append(padding * cp.size)
    # One cell more, for what lies behind the end of a sequence.
    flat = torch.cat([*tokens, torch.zeros(1, dtype=torch.int64, device=device)])
    begins, ends = _starts(lengths), list(itertools.accumulate(lengths))
    positions = [slice_with_cp(torch.arange(length), 0, cp) for length in padded_lengths]
    places, following = (
        torch.cat(
            [
                torch.where(begin + shift + local < end, begin + shift + local, len(flat) - 1)
                for begin, end, local in zip([*begins, 0], [*ends, 0], positions, strict=False)
            ]
        ).to(device, non_blocking=True)
        for shift in (0, 1)
    )
    starts = [
        _zigzag_starts(start, length, cp) for start, length in zip(_starts(padded_lengths), lengths, strict=False)
    ]
    rows, counts = _response_rows(starts, lengths, response_lengths, cp)
    return PackedStream(
        tokens=flat.index_select(0, places),
        next_tokens=flat.index_select(0, following),
        position_ids=torch.cat(positions).to(device, non_blocking=True),
        cu_seqlens=_boundaries(padded_lengths, device),
        sequence_lengths=tuple(padded_lengths),
        host_response_rows=rows,
        local_response_lengths=counts,
        predicting_positions=_predicting_positions(lengths, response_lengths),
        cp=cp,
    )


def _response_rows(
    starts: Sequence[tuple[int, int]], lengths: Sequence[int], response_lengths: Sequence[int], cp: ContextParallel
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Rows that predict the response tokens of this rank, and their number per sample.

    Args:
        starts: per sample and chunk, the row at which position 0 of the sequence would stand if all of it lay in one piece.
    """
    rows, counts = [torch.empty(0, dtype=torch.int64)], []
    for sample_starts, length, response in zip(starts, lengths, response_lengths, strict=True):
        _, _, logits, _ = logits_and_tokens_offsets(length, int(response), cp.size, cp.rank)
        rows += [
            torch.arange(start + begin, start + end) for start, (begin, end) in zip(sample_starts, logits, strict=True)
        ]
        counts.append(sum(end - begin for begin, end in logits))
    return torch.cat(rows), tuple(counts)


def _predicting_positions(lengths: Sequence[int], response_lengths: Sequence[int]) -> tuple[Range, ...]:
    return tuple(
        (length - int(response) - 1, length - 1) for length, response in zip(lengths, response_lengths, strict=True)
    )


def _zigzag_starts(start: int, length: int, cp: ContextParallel) -> tuple[int, int]:
    """`start`: where the padded sequence begins in the whole stream; a rank holds an equal part of all that is before."""
    size = chunk_size(length, cp.size)
    first = start // cp.size
    return first - cp.rank * size, first + size - (2 * cp.size - 1 - cp.rank) * size


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)][:-1]


def _boundaries(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
