"""The tokens that the engine's top-p sampling kept, laid out over the rows of a micro-batch's logits.

Engines report them per response token, as ids and offsets. The trainer's softmax then runs over the same tokens, so that its
log-probs are those of the distribution that was sampled from. The columns are whole on every context-parallel rank, and on the
host: they are taken apart sample by sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slime.scheduling.context_parallel import response_ranges
from slime.training.keep_set import KeptTokens
from slime.training.packed_stream import PackedStream

TOKEN_IDS = "rollout_top_p_token_ids"
OFFSETS = "rollout_top_p_token_offsets"


def kept_tokens(batch: dict[str, Any]) -> KeptTokens | None:
    """The sets of this rank's rows; rows that predict no response token keep nothing. None if the batch has no sets.

    `batch[TOKEN_IDS]`: per sample int32 [K], `batch[OFFSETS]`: per sample int32 [R + 1]; response token t keeps
    ids[offsets[t] : offsets[t + 1]].

    Raises:
        ValueError: the offsets of a sample are not those of its response.
    """
    if OFFSETS not in batch:
        return None
    stream: PackedStream = batch["stream"]
    ids, sizes, rows = [torch.empty(0, dtype=torch.int32)], [torch.empty(0, dtype=torch.int64)], []
    for sample, start, end, first_row in _pieces(batch, stream):
        offsets = batch[OFFSETS][sample].long()
        ids.append(batch[TOKEN_IDS][sample][int(offsets[start]) : int(offsets[end])])
        sizes.append(offsets[start : end + 1].diff())
        rows.append(torch.arange(first_row, first_row + end - start))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(sizes).cumsum(0)])
    device = stream.tokens.device
    kept = KeptTokens(torch.cat(ids).to(device), offsets.to(device))
    rows = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
    return kept.at_rows(rows.to(device), len(stream.tokens))


def _pieces(batch: dict[str, Any], stream: PackedStream) -> Iterator[tuple[int, int, int, int]]:
    """(sample, start, end, row): response tokens start … end − 1 of a sample are predicted by the rank's rows from `row` on."""
    done = 0
    begins = stream.cu_seqlens.tolist()
    rows = stream.response_rows.cpu()
    for sample, (total, response) in enumerate(zip(batch["total_lengths"], batch["response_lengths"], strict=True)):
        if len(batch[OFFSETS][sample]) != response + 1:
            raise ValueError(
                f"{OFFSETS} of sample {sample} has {len(batch[OFFSETS][sample])} entries for {response} response tokens"
            )
        if stream.cp.all_gather:
            first = begins[sample] + total - response - 1 - stream.cp.rank * len(stream.tokens)
            start, end = max(0, -first), min(response, len(stream.tokens) - first)
            if start < end:
                yield sample, start, end, first + start
            continue
        for start, end in response_ranges(total, response, stream.cp.size, stream.cp.rank):
            if start < end:
                yield sample, start, end, int(rows[done])
                done += end - start
