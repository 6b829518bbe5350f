"""MiMo: the layers of Qwen2, and layers for multi-token prediction beside them.

Their projection takes [state; embedding] where Megatron's takes [embedding; state].
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime.models.config_entries import decoder, grouped_query_attention, mtp_layers
from slime.models.family import DENSE_LAYER, ENDS, LAYER, Family, Rule
from slime.models.tensor_layouts import Layout, Replicated, Sharded, Stored, TensorSizes

if TYPE_CHECKING:
    import torch

_MEGATRON = f"mtp.layers.{LAYER}."
_HF = f"model.mtp_layers.{LAYER}."


class _SwappedInputs(Sharded):
    """One HF tensor, its columns' halves exchanged, cut along the rows."""

    def __init__(self) -> None:
        super().__init__(dim=0)

    def part(self, tensors: Sequence[Stored], sizes: TensorSizes, rank: int, size: int) -> torch.Tensor:
        rows = super().part(tensors, sizes, rank, size)
        return rows.roll(rows.shape[1] // 2, dims=1)

    def split(self, whole: torch.Tensor, sizes: TensorSizes) -> Sequence[torch.Tensor]:
        return (whole.roll(whole.shape[1] // 2, dims=1),)


def _own(megatron: str, hf: str, layout: Layout) -> Rule:
    return Rule((f"{_MEGATRON}{megatron}.weight",), (f"{_HF}{hf}.weight",), layout)


def _inner(rule: Rule) -> Rule:
    """The rule of a decoder layer for the same parameter inside a prediction layer."""
    megatron = (name.replace(f"decoder.layers.{LAYER}.", f"{_MEGATRON}transformer_layer.") for name in rule.megatron)
    hf = (name.replace(f"model.layers.{LAYER}.", _HF) for name in rule.hf)
    return dataclasses.replace(rule, megatron=tuple(megatron), hf=tuple(hf))


MIMO = Family(
    model_types=("mimo",),
    names=("mimo",),
    other_models=("mimov2", "mimovl", "mimoaudio"),
    parts=(decoder, grouped_query_attention, mtp_layers),
    constants={"add_qkv_bias": True},
    rules=(
        *ENDS,
        *DENSE_LAYER,
        _own("enorm", "token_layernorm", Replicated()),
        _own("hnorm", "hidden_layernorm", Replicated()),
        _own("eh_proj", "input_proj", _SwappedInputs()),
        _own("final_layernorm", "final_layernorm", Replicated()),
        *(_inner(rule) for rule in DENSE_LAYER),
    ),
    predictions=re.compile(r"^model\.mtp_layers\."),
)
