"""MiMo has the layers of Qwen2, and layers for multi-token prediction beside them.

The projection of these takes [state; embedding], whereas Megatron's takes [embedding; state].
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime.models.config_entries import decoder, grouped_query_attention, mtp_layers
from slime.models.family import DENSE_LAYER, ENDS, LAYER, Family, prediction_layer
from slime.models.tensor_layouts import Sharded, Stored, TensorSizes

if TYPE_CHECKING:
    import torch


class _SwappedInputs(Sharded):
    """One HF tensor, cut along the rows, whose left and right halves of columns are exchanged."""

    moves_columns = True

    def __init__(self) -> None:
        super().__init__(dim=0)

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        rows = super().part(tensors, sizes, rank, size)
        return rows.roll(rows.shape[1] // 2, dims=1)

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return (whole.roll(whole.shape[1] // 2, dims=1),)


MIMO = Family(
    model_types=("mimo",),
    names=("mimo",),
    other_models=("mimov2", "mimovl", "mimoaudio"),
    parts=(decoder, grouped_query_attention, mtp_layers),
    constants={"add_qkv_bias": True},
    rules=(
        *ENDS,
        *DENSE_LAYER,
        *prediction_layer(
            DENSE_LAYER,
            f"model.mtp_layers.{LAYER}.",
            ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
            _SwappedInputs(),
        ),
    ),
    predictions=re.compile(r"^model\.mtp_layers\."),
    engines_draft=True,
    engines_have_stages=False,
)
