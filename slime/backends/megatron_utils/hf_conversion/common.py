"""Rules that most decoder-only families share."""

from __future__ import annotations

from slime.backends.megatron_utils.hf_conversion.family import Rule
from slime.backends.megatron_utils.hf_conversion.layouts import (
    GatedLinear,
    QueryKeyValue,
    Replicated,
    Sharded,
    Vocabulary,
)

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
