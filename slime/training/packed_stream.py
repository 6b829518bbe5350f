"""Samples of a micro-batch as one packed stream of tokens, and per-token results cut back to responses.

Logit at stream position t predicts token t + 1, so the log-probs of a response of length R that ends at position e
(exclusive) stand at rows e − R − 1 … e − 2. The stream is padded by one pseudo-sequence that carries no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class PackedStream:
    """Token stream of a micro-batch: T positions, padding included.

    `sequence_lengths` include the pseudo-sequence of padding, if there is one.
    """

    tokens: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64, restarting with every sequence
    cu_seqlens: torch.Tensor  # [sequences + 1] int32
    sequence_lengths: tuple[int, ...]
    response_rows: torch.Tensor  # [sum of response lengths] int64: rows whose logits predict response tokens
    response_lengths: tuple[int, ...]

    @property
    def next_tokens(self) -> torch.Tensor:
        """Target of every row, [T] int64; the last row, which predicts nothing, gets token 0 of the stream."""
        return torch.roll(self.tokens, -1)

    def responses(self, per_row: torch.Tensor) -> torch.Tensor:
        """Values of the response tokens, concatenated over samples, from one value per row [T]."""
        return per_row.index_select(0, self.response_rows)

    def split(self, per_response_token: torch.Tensor) -> list[torch.Tensor]:
        """One tensor per sample from values concatenated over samples."""
        return list(per_response_token.split(self.response_lengths))


def pack_stream(
    tokens: Sequence[torch.Tensor], response_lengths: Sequence[int], pad_multiple: int, pad_token: int = 0
) -> PackedStream:
    """Concatenate `tokens` (one [T_i] int64 tensor per sample) and pad the stream to a multiple of `pad_multiple`."""
    device = tokens[0].device
    lengths = [len(sample) for sample in tokens]
    total = sum(lengths)
    padding = -total % pad_multiple
    if padding:
        tokens = [*tokens, torch.full((padding,), pad_token, dtype=torch.int64, device=device)]
        lengths.append(padding)
    length_tensor = torch.tensor(lengths, dtype=torch.int64)
    ends = torch.cumsum(length_tensor, 0)
    starts = ends - length_tensor
    positions = torch.arange(total + padding) - torch.repeat_interleave(starts, length_tensor)
    rows = [
        torch.arange(end - response - 1, end - 1)
        for end, response in zip(ends.tolist(), response_lengths, strict=False)
    ]
    return PackedStream(
        tokens=torch.cat(list(tokens)),
        position_ids=positions.to(device),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(device, torch.int32),
        sequence_lengths=tuple(lengths),
        response_rows=torch.cat(rows).to(device) if rows else torch.empty(0, dtype=torch.int64, device=device),
        response_lengths=tuple(int(length) for length in response_lengths),
    )
