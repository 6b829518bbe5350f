"""Expert choices that came with the rollout, laid out over the rows of a packed stream.

A sample has no row for its last token, and padding has none at all. A missing row at position t gets the ids t·k, t·k + 1, …
modulo the number of experts: nothing depends on where these tokens go, but all on one expert they would make that one, and its
rank, slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime.training.packed_stream import PackedStream
from slime.training.routed_experts import COLUMN


def experts_of_stream(batch: dict[str, Any], layer_numbers: Sequence[int], num_experts: int) -> torch.Tensor:
    """Expert ids [T, layers, k] int16, on the host, for the rows of this rank's part of the batch's stream.

    Args:
        batch: micro-batch with the column, whose tensors are on the host.
        layer_numbers: the layers wanted, from 1.
    """
    stream: PackedStream = batch["stream"]
    layers = torch.tensor(layer_numbers) - 1
    samples = [sample.index_select(1, layers).to(torch.int16) for sample in batch[COLUMN]]
    # The last sequence may be padding alone, without a sample.
    samples += [samples[0][:0]] * (len(stream.sequence_lengths) - len(samples))
    # Every sequence comes in its full length, so no row is left to be filled up with zeros.
    return stream.rows_of(
        [_pad(sample, length, num_experts) for sample, length in zip(samples, stream.sequence_lengths, strict=True)]
    )


def _pad(experts: torch.Tensor, length: int, num_experts: int) -> torch.Tensor:
    have, layers, topk = experts.shape
    filler = torch.arange(have * topk, length * topk).remainder(num_experts).view(-1, 1, topk)
    return torch.cat([experts, filler.expand(-1, layers, -1).to(experts.dtype)])
