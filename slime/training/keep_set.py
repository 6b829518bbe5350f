"""The sets of tokens that a nucleus (top-p) sampler kept, one per row of logits, and sums over them.

Names carry dimensions: T rows of the logits, R of them that are computed, V vocabulary entries of this rank, K kept entries of
the whole stream, P pairs of one block, those of other ranks included.

Invariants
- The sampled token belongs to its row's set whatever the set says; among the pairs below it does not count, but by its own
  logit, so that it is never counted twice and an empty set means {sampled token}, log-prob 0.
- How many pairs there are is known on the host. How many of them are this rank's is not, and a device would be waited for to
  pick these out; so a rank goes through all of them, and what is another's adds 0.
- Work and memory go with the number of kept entries, not with the vocabulary: no tensor [T, V] is made. Kept logits are
  picked out in float64, block of rows by block of rows.
- Pairs (row, column) come sorted by row and are distinct, so sums over rows are segment sums: the same bits every time.

`kept_tokens` puts the sets into the order of the rows that predict response tokens. Engines report them per response token, as
ids and offsets. The trainer's softmax then runs over the same tokens, so that its log-probs are those of the distribution that
was sampled from. The columns are whole on every context-parallel rank, and on the host: they are taken apart sample by sample.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from slime.scheduling.zigzag import response_ranges
from slime.training.rollout_data import MicroBatch

# Kept entries whose float64 values and int64 places exist at a time: some tens of MiB.
PAIRS_PER_BLOCK = 1 << 20
# Stands for the maximum of no logits; finite, so that differences of two of them are 0 and not NaN.
NO_LOGIT = -1e20


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Row i keeps the tokens `token_ids[offsets[i] : offsets[i + 1]]`, as engines report nuclei.

    token_ids: [K] integer, ids in the whole vocabulary, distinct within a row. offsets: [R + 1] integer, ascending from 0
    to K.
    """

    token_ids: torch.Tensor
    offsets: torch.Tensor


class KeepSet:
    """This rank's part of every row's kept set, without the sampled token.

    `kept` is a mask [R, V] of this rank's columns or `KeptTokens` of the whole vocabulary; `tokens_R` are the sampled
    tokens, ids in the whole vocabulary; this rank's columns are the ids first_id … first_id + V − 1. Rows are counted over
    those R; `rows_R` says where they stand in the logits.
    """

    def __init__(
        self, kept: torch.Tensor | KeptTokens, tokens_R: torch.Tensor, first_id: int, column_count: int
    ) -> None:
        self._kept = kept
        self._tokens_R = tokens_R
        self._first_id, self._column_count = first_id, column_count
        if isinstance(kept, KeptTokens):
            # `kept_tokens` leaves both on the host, where nobody has to wait for these numbers.
            self._offsets: list[int] = kept.offsets.tolist()
            _check_offsets(self._offsets, len(kept.token_ids), len(tokens_R))
            device = tokens_R.device
            self._kept = KeptTokens(
                kept.token_ids.to(device, non_blocking=True), kept.offsets.to(device, non_blocking=True)
            )
        else:
            _check_mask(kept, len(tokens_R), column_count)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Row ranges (start, stop) that cover all rows, each with a bounded number of pairs unless it is a single row."""
        rows = len(self._tokens_R)
        if isinstance(self._kept, KeptTokens):
            start = 0
            while start < rows:
                stop = bisect_right(self._offsets, self._offsets[start] + PAIRS_PER_BLOCK) - 1
                stop = min(max(stop, start + 1), rows)
                yield start, stop
                start = stop
            return
        # How many entries a mask row keeps is not known before it is read.
        step = max(PAIRS_PER_BLOCK // max(self._column_count, 1), 1)
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def pairs(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Kept entries of rows start … stop − 1: rows counted from `start` and columns of this rank, int64 [P], and whether a
        pair counts here, bool [P]. The sampled tokens do not, nor do entries of other ranks, whose columns are any."""
        if isinstance(self._kept, KeptTokens):
            offsets = self._kept.offsets[start : stop + 1].long()
            ids = self._kept.token_ids[self._offsets[start] : self._offsets[stop]].long()
            rows = torch.repeat_interleave(
                torch.arange(stop - start, device=ids.device), offsets.diff(), output_size=len(ids)
            )
            columns = ids - self._first_id
            is_here = (columns >= 0) & (columns < self._column_count)
            # Spread over the row: a sum into one place is slow.
            columns = columns.remainder(max(self._column_count, 1))
        else:
            rows, columns = self._kept[start:stop].nonzero(as_tuple=True)
            ids, is_here = columns + self._first_id, torch.ones_like(columns, dtype=torch.bool)
        return rows, columns, is_here & (ids != self._tokens_R[start:stop][rows])

    def exponential_sums(
        self, logits_TV: torch.Tensor, rows_R: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest x = logit / temperature of every row's pairs and Σ e^{x − it}, float64 [R]; NO_LOGIT and 0 without pairs."""
        max_R = torch.full((len(rows_R),), NO_LOGIT, dtype=torch.float64, device=logits_TV.device)
        sum_R = torch.zeros_like(max_R)
        for start, stop in self.blocks():
            rows, columns, counts = self.pairs(start, stop)
            boundaries = torch.searchsorted(rows, torch.arange(stop - start + 1, device=rows.device))
            values = _logits_at(logits_TV, rows_R[start:stop][rows], columns, temperature)
            values = values.masked_fill_(~counts, -torch.inf)
            max_R[start:stop] = _segments(values, "max", boundaries, NO_LOGIT)
            exponentials = (values - max_R[start:stop][rows]).exp_()
            sum_R[start:stop] = _segments(exponentials, "sum", boundaries, 0.0)
        return max_R, sum_R

    def add_gradient(
        self,
        out: torch.Tensor,
        out_rows: torch.Tensor,
        logits_TV: torch.Tensor,
        rows_R: torch.Tensor,
        log_sum_R: torch.Tensor,
        factor_R: torch.Tensor,
        temperature: float,
        start: int,
        stop: int,
    ) -> None:
        """Add factor·e^{x − log_sum} at every pair of rows start … stop − 1 to `out`, whose rows `out_rows` they are.

        log_sum_R, factor_R: float64 [R].
        """
        rows, columns, counts = self.pairs(start, stop)
        logits = _logits_at(logits_TV, rows_R[start:stop][rows], columns, temperature)
        values = (logits - log_sum_R[start:stop][rows]).exp_().mul_(factor_R[start:stop][rows])
        # A place has one pair that counts at most, so the sum is exact in whatever order.
        values = values.masked_fill_(~counts, 0.0).to(out.dtype)
        out.index_put_((out_rows[rows], columns), values, accumulate=True)


def _logits_at(logits_TV: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits_TV[rows, columns].double().div_(temperature)


def _segments(values: torch.Tensor, reduction: str, boundaries: torch.Tensor, initial: float) -> torch.Tensor:
    return torch.segment_reduce(values, reduction, lengths=boundaries.diff(), initial=initial, unsafe=True)


def _check_offsets(offsets: list[int], kept_count: int, row_count: int) -> None:
    if len(offsets) != row_count + 1 or offsets[0] != 0 or offsets[-1] != kept_count:
        ends = f"from {offsets[0]} to {offsets[-1]}" if offsets else "without an entry"
        raise ValueError(
            f"kept tokens of {row_count} rows need {row_count + 1} offsets from 0 to their number {kept_count}, "
            f"got {len(offsets)} {ends}"
        )


def _check_mask(mask: torch.Tensor, row_count: int, column_count: int) -> None:
    if mask.dtype != torch.bool or tuple(mask.shape) != (row_count, column_count):
        raise ValueError(
            f"the keep mask must be bool and as large as the logits, {(row_count, column_count)}, "
            f"got {str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"
        )


TOKEN_IDS = "rollout_top_p_token_ids"
OFFSETS = "rollout_top_p_token_offsets"


def kept_tokens(batch: MicroBatch) -> KeptTokens | None:
    """The sets of this rank's rows that predict response tokens, in their order, on the host. None if the batch has no sets.

    `batch[TOKEN_IDS]`: per sample int32 [K], `batch[OFFSETS]`: per sample int32 [R + 1]; response token t keeps
    ids[offsets[t] : offsets[t + 1]].

    Raises:
        ValueError: the offsets of a sample are not those of its response.
    """
    if OFFSETS not in batch:
        return None
    ids, sizes = [torch.empty(0, dtype=torch.int32)], [torch.empty(0, dtype=torch.int64)]
    for sample, start, end in _pieces(batch):
        offsets = batch[OFFSETS][sample].long()
        ids.append(batch[TOKEN_IDS][sample][int(offsets[start]) : int(offsets[end])])
        sizes.append(offsets[start : end + 1].diff())
    return KeptTokens(torch.cat(ids), torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(sizes).cumsum(0)]))


def _pieces(batch: MicroBatch) -> Iterator[tuple[int, int, int]]:
    """(sample, start, end): the rank's next rows predict response tokens start … end − 1 of a sample."""
    stream = batch.stream
    begins = [0, *itertools.accumulate(stream.sequence_lengths)]
    for sample, (total, response) in enumerate(zip(batch["total_lengths"], batch["response_lengths"], strict=True)):
        if len(batch[OFFSETS][sample]) != response + 1:
            raise ValueError(
                f"{OFFSETS} of sample {sample} has {len(batch[OFFSETS][sample])} entries for {response} response tokens"
            )
        ranges = response_ranges(total, response, stream.cp.size, stream.cp.rank)
        if stream.cp.all_gather:
            first = begins[sample] + total - response - 1 - stream.cp.rank * len(stream.tokens)
            ranges = ((max(0, -first), min(response, len(stream.tokens) - first)),)
        yield from ((sample, start, end) for start, end in ranges if start < end)
