"""Families that are converted: which HF tensors make up each Megatron parameter, in which layout, and how one is found.

A family is a table of rules over a few layouts (`layouts`); most rules are shared by all decoder-only families. Qwen2 and
Qwen2.5 have biases of query, key and value, Qwen3 has norms of query and key; all are dense. MiMo has the layers of Qwen2, and
layers for multi-token prediction beside them, whose projection takes [state; embedding] where Megatron's takes
[embedding; state].
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slime.arguments.hf_config import read_hf_config
from slime.backends.megatron_utils.hf_conversion.layouts import (
    GatedLinear,
    Layout,
    ModelShape,
    QueryKeyValue,
    Replicated,
    Sharded,
    Vocabulary,
)
from slime.utils.errors import UserError

_LAYER_NUMBER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_PREDICTION_LAYERS = "mtp."
LAYER = "{layer}"


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of Megatron parameter.

    megatron: its names, with `{layer}` for the layer's number; several where the layer specs name it differently.
    hf: the HF tensors it is made of, with `{layer}`, in the order that the layout expects.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of models.

    model_types: `model_type` values of the HF configs it loads.
    name_pattern: matches the family's names in lower case without punctuation ("qwen3forcausallm").
    ignored: matches HF tensors that carry no weights of the model.
    predictions: matches HF tensors of layers for multi-token prediction; None where the family's checkpoints have none.
    """

    model_types: tuple[str, ...]
    name_pattern: re.Pattern[str]
    rules: tuple[Rule, ...]
    ignored: re.Pattern[str]
    predictions: re.Pattern[str] | None = None

    def find(self, megatron_name: str) -> tuple[Rule, tuple[str, ...]]:
        """The rule for a global Megatron name (wrapper prefixes allowed), and the HF names with the layer's number.

        Raises:
            KeyError: no rule has this name.
        """
        name = strip_wrappers(megatron_name)
        match = _LAYER_NUMBER.search(name)
        layer = match.group() if match else ""
        rule = self._rule(name)
        if rule is None:
            raise KeyError(f"no conversion rule for the Megatron parameter {name}")
        return rule, tuple(hf_name.replace(LAYER, layer) for hf_name in rule.hf)

    def leaves_out(self, megatron_name: str) -> bool:
        """Whether a parameter of a multi-token-prediction layer has no place in the family's HF checkpoints."""
        name = strip_wrappers(megatron_name)
        return name.startswith(_PREDICTION_LAYERS) and self._rule(name) is None

    def is_prediction(self, hf_name: str) -> bool:
        """Whether an HF tensor belongs to a layer for multi-token prediction."""
        return self.predictions is not None and self.predictions.search(hf_name) is not None

    def _rule(self, name: str) -> Rule | None:
        generic = _LAYER_NUMBER.sub(LAYER, name, count=1)
        return next((rule for rule in self.rules if generic in rule.megatron), None)


def strip_wrappers(name: str) -> str:
    """A parameter's name without the `module.` prefixes of data-parallel and mixed-precision wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."


def layer_rule(megatron: str | tuple[str, ...], hf: str | tuple[str, ...], layout) -> Rule:
    """A rule for a parameter of a decoder layer, names given relative to the layer."""
    megatron = (megatron,) if isinstance(megatron, str) else megatron
    hf = (hf,) if isinstance(hf, str) else hf
    return Rule(tuple(_MEGATRON + name for name in megatron), tuple(_HF + name for name in hf), layout)


def _query_key_value(kind: str) -> Rule:
    hf = tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv")
    return layer_rule(f"self_attention.linear_qkv.{kind}", hf, QueryKeyValue())


ENDS = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Vocabulary()),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), Replicated()),
    Rule(("output_layer.weight",), ("lm_head.weight",), Vocabulary()),
)

# Transformer Engine fuses a norm with the linear layer behind it and keeps the norm's weight there.
LAYER_NORMS = (
    layer_rule(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        "input_layernorm.weight",
        Replicated(),
    ),
    layer_rule(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        "post_attention_layernorm.weight",
        Replicated(),
    ),
)

ATTENTION = (
    _query_key_value("weight"),
    _query_key_value("bias"),
    layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Sharded(dim=1)),
    layer_rule("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", Replicated()),
    layer_rule("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", Replicated()),
)

GATED_MLP = (
    layer_rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GatedLinear()),
    layer_rule("mlp.linear_fc2.weight", "mlp.down_proj.weight", Sharded(dim=1)),
)


QWEN_DENSE = Family(
    model_types=("qwen2", "qwen3"),
    name_pattern=re.compile(r"qwen2(?!moe|5?vl|audio)|qwen3(?!moe|next|vl|5|omni)"),
    rules=ENDS + LAYER_NORMS + ATTENTION + GATED_MLP,
    ignored=re.compile(r"\.rotary_emb\.inv_freq$"),
)


_PREDICTION_MEGATRON = f"mtp.layers.{LAYER}."
_PREDICTION_HF = f"model.mtp_layers.{LAYER}."


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
    return Rule((f"{_PREDICTION_MEGATRON}{megatron}.weight",), (f"{_PREDICTION_HF}{hf}.weight",), layout)


def _inner(rule: Rule) -> Rule:
    """The rule of a decoder layer for the same parameter inside a prediction layer."""
    megatron = (
        name.replace(f"decoder.layers.{LAYER}.", f"{_PREDICTION_MEGATRON}transformer_layer.") for name in rule.megatron
    )
    hf = (name.replace(f"model.layers.{LAYER}.", _PREDICTION_HF) for name in rule.hf)
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


FAMILIES: tuple[Family, ...] = (QWEN_DENSE, MIMO)


def supported_model_types() -> list[str]:
    """The `model_type` values of HF configs that can be loaded and exported."""
    return sorted(model_type for family in FAMILIES for model_type in family.model_types)


def family_of_directory(hf_dir: str | Path) -> Family:
    """The family of an HF model directory, by `model_type` in its config.json.

    Raises:
        UserError: no readable config.json, or an unsupported type.
    """
    model_type = read_hf_config(hf_dir, flag="checkpoint").get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    raise UserError(f"{hf_dir}/config.json: model_type {model_type!r} is not one of {supported_model_types()}")


def family_of_name(model_name: str) -> Family:
    """The family of a model or config class name ("qwen3", "Qwen3ForCausalLM", "qwen3config").

    Raises:
        UserError: no family has this name.
    """
    plain = re.sub(r"[^a-z0-9]", "", model_name.lower())
    for family in FAMILIES:
        if family.name_pattern.search(plain):
            return family
    raise UserError(f"--model-name {model_name}: no conversion for this family; supported: {supported_model_types()}")


def family_of_args(args: Any) -> Family:
    """The family of the run's model: `--model-name` if given, else the config of `--hf-checkpoint`."""
    if getattr(args, "model_name", None):
        return family_of_name(args.model_name)
    return family_of_directory(args.hf_checkpoint)
