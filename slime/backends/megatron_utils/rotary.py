"""Rotary frequencies picked by position ids, for streams whose rows Megatron cannot place by itself.

Megatron derives the positions of packed rows from sequence lengths, and with context parallelism assumes the zigzag layout.
A rank that holds a contiguous piece of the stream (`--allgather-cp`) starts in the middle of a sequence; there each row
gets the frequencies of its own position id.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class RotaryByPosition(nn.Module):
    """In place of a model's rotary embedding: row r of the result belongs to position `position_ids[r]`.

    `position_ids`, [T] or [1, T], are those of the forward pass that is under way.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self.position_ids: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: Any, **options: Any) -> int:
        return self.rotary.get_rotary_seq_len(*args, **options)

    def forward(self, max_seq_len: int, **layout: Any) -> torch.Tensor:
        """Frequencies [T, 1, 1, dim]; `layout` (Megatron's own rule for packed and cut sequences) does not apply."""
        return self.rotary.get_emb(max_seq_len).index_select(0, self.position_ids.flatten())


def rotate_by_position(model: nn.Module) -> None:
    """Make `model` (Megatron's `GPTModel` with rotary embedding) rotate every row by the position ids that it is given."""
    rotary = RotaryByPosition(model.rotary_pos_emb)
    model.rotary_pos_emb = rotary

    def remember(module: nn.Module, args: tuple, inputs: dict[str, Any]) -> None:
        rotary.position_ids = inputs["position_ids"]

    model.register_forward_pre_hook(remember, with_kwargs=True)
