"""MiMo: layers as in Qwen2, and layers for multi-token prediction beside them.

In those the projection takes [state; embedding], Megatron's takes [embedding; state].
"""

import dataclasses
import re
from collections.abc import Sequence

import torch

from slime.backends.megatron_utils.hf_conversion.common import ATTENTION, ENDS, GATED_MLP, LAYER_NORMS
from slime.backends.megatron_utils.hf_conversion.family import LAYER, Family, Rule
from slime.backends.megatron_utils.hf_conversion.layouts import Layout, ModelShape, Replicated, Sharded

_MEGATRON = f"mtp.layers.{LAYER}."
_HF = f"model.mtp_layers.{LAYER}."


class _SwappedInputs(Sharded):
    """One HF tensor, its columns' halves exchanged, cut along the rows."""

    def __init__(self) -> None:
        super().__init__(dim=0)

    def merge(self, tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
        (tensor,) = tensors
        return _swapped(tensor)

    def split(self, whole: torch.Tensor, shape: ModelShape) -> Sequence[torch.Tensor]:
        return (_swapped(whole),)


def _swapped(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def _own(megatron: str, hf: str, layout: Layout) -> Rule:
    return Rule((f"{_MEGATRON}{megatron}.weight",), (f"{_HF}{hf}.weight",), layout)


def _inner(rule: Rule) -> Rule:
    """The rule of a decoder layer for the same parameter inside a prediction layer."""
    megatron = (name.replace(f"decoder.layers.{LAYER}.", f"{_MEGATRON}transformer_layer.") for name in rule.megatron)
    hf = (name.replace(f"model.layers.{LAYER}.", _HF) for name in rule.hf)
    return dataclasses.replace(rule, megatron=tuple(megatron), hf=tuple(hf))


_LAYER = LAYER_NORMS + ATTENTION + GATED_MLP

MIMO = Family(
    model_types=("mimo",),
    name_pattern=re.compile(r"mimo(?!v2|vl|audio)"),
    rules=(
        *ENDS,
        *_LAYER,
        _own("enorm", "token_layernorm", Replicated()),
        _own("hnorm", "hidden_layernorm", Replicated()),
        _own("eh_proj", "input_proj", _SwappedInputs()),
        _own("final_layernorm", "final_layernorm", Replicated()),
        *(_inner(rule) for rule in _LAYER),
    ),
    ignored=re.compile(r"\.rotary_emb\.inv_freq$"),
    predictions=re.compile(r"^model\.mtp_layers\."),
)
