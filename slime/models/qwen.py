"""The families of Qwen.

Qwen3-VL and Qwen3.5 are published as models of text and images. Only the language model is trained; their other parts stay as
they are.
"""

import dataclasses
import re

from slime.models import config_entries as hf
from slime.models.family import (
    ATTENTION,
    DENSE_LAYER,
    ENDS,
    GATED_MLP,
    LAYER,
    LAYER_NORMS,
    SHARED_EXPERT_GATE,
    Family,
    Rule,
    layer_rule,
    prediction_layer,
    routed_experts,
    shared_experts,
)
from slime.models.tensor_layouts import GatedQueryKeyValue, PerKeyHead, QueryKeyValue, Replicated, Sharded

# Value of --qwen-gdn-backend -> module with `chunk_gated_delta_rule`, and the package that has it.
DELTA_RULE_PACKAGES = {
    "fla": ("fla.ops.gated_delta_rule", "flash-linear-attention"),
    "flashqla": ("flash_qla", "flash-qla"),
}

_DENSE = (hf.decoder, hf.grouped_query_attention)
_MOE = (*_DENSE, hf.experts, hf.softmax_router)

# Qwen2.5 has this type as well.
QWEN2 = Family(
    model_types=("qwen2",),
    names=("qwen2",),
    other_models=("qwen2vl", "qwen25vl", "qwen2audio", "qwen25omni"),
    parts=_DENSE,
    constants={"add_qkv_bias": True},
    rules=ENDS + DENSE_LAYER,
    stages_tie=True,
    fsdp=True,
)
QWEN3 = Family(
    model_types=("qwen3",),
    names=("qwen3",),
    other_models=("qwen3omni",),
    parts=_DENSE,
    constants={"qk_layernorm": True},
    rules=ENDS + DENSE_LAYER,
    stages_tie=True,
    fsdp=True,
)

_SHARED_AND_ROUTED = routed_experts() + shared_experts("mlp.shared_expert") + SHARED_EXPERT_GATE

QWEN2_MOE = Family(
    model_types=("qwen2_moe",),
    names=("qwen2moe",),
    parts=(*_MOE, hf.qkv_bias),
    constants={"moe_shared_expert_gate": True},
    absent={"qkv_bias": True, "norm_topk_prob": False},
    rules=ENDS + DENSE_LAYER + _SHARED_AND_ROUTED,
)
QWEN3_MOE = Family(
    model_types=("qwen3_moe",),
    names=("qwen3moe",),
    parts=(*_MOE, hf.partial_rope),
    constants={"qk_layernorm": True},
    absent={"norm_topk_prob": False},
    rules=ENDS + DENSE_LAYER + routed_experts(),
)
# A model has layers of two kinds: those with these parameters, and those with the ones of `_DELTA_NET`.
_GATED_ATTENTION = (
    layer_rule(
        "self_attention.linear_qkv.weight",
        tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
        GatedQueryKeyValue(),
    ),
    *(rule for rule in ATTENTION if not isinstance(rule.layout, QueryKeyValue)),
)
_DELTA_NET = (
    layer_rule("self_attention.conv1d.weight", "linear_attn.conv1d.weight", PerKeyHead(("k", "k", "v"))),
    dataclasses.replace(
        layer_rule("self_attention.A_log", "linear_attn.A_log", Sharded(dim=0)),
        # It is the only parameter of the layer that enters through an exponential of an exponential: small errors grow large.
        keeps_float32=True,
    ),
    layer_rule("self_attention.dt_bias", "linear_attn.dt_bias", Sharded(dim=0)),
    layer_rule("self_attention.norm.weight", "linear_attn.norm.weight", Replicated()),
    layer_rule("self_attention.out_proj.weight", "linear_attn.out_proj.weight", Sharded(dim=1)),
)
_MIXED_LAYERS = LAYER_NORMS + _GATED_ATTENTION + _DELTA_NET
# The model has one layer of softmax attention for multi-token prediction, whose tensors are named apart from the others.
_OF_PREDICTION = re.compile(r"^mtp\.")


def _predicting(mlp: tuple[Rule, ...]) -> tuple[Rule, ...]:
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    return prediction_layer(LAYER_NORMS + _GATED_ATTENTION + mlp, f"mtp.layers.{LAYER}.", names, own="mtp.")


_HYBRID_IN_ENGINES = {
    "rotary_percent": ("partial_rotary_factor", lambda config: config.get("partial_rotary_factor", 0.25)),
    "linear_attention_freq": ("full_attention_interval", lambda config: config.get("full_attention_interval")),
}
QWEN3_NEXT = Family(
    model_types=("qwen3_next",),
    names=("qwen3next",),
    parts=(*_MOE, hf.partial_rope, hf.linear_attention),
    constants={"qk_layernorm": True, "layernorm_zero_centered_gamma": True, "moe_shared_expert_gate": True},
    absent={"partial_rotary_factor": 0.25},
    engine_flags={
        "rotary_base": ("rope_theta", lambda config: config.get("rope_theta", 10000)),
        **_HYBRID_IN_ENGINES,
    },
    layer_spec="slime_plugins.models.qwen3_next.get_qwen3_next_spec",
    rules=ENDS
    + _MIXED_LAYERS
    + (
        layer_rule(
            "self_attention.in_proj.weight",
            ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
            PerKeyHead(("kkvv",), ("hh",)),
        ),
    )
    + GATED_MLP
    + _SHARED_AND_ROUTED
    + _predicting(_SHARED_AND_ROUTED),
    not_trained=_OF_PREDICTION,
    predictions=_OF_PREDICTION,
    engines_draft=True,
    engines_have_stages=False,
)


def _of_language_model(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules of a language model inside a model of text and images: all HF names but the head's get a longer prefix."""
    return tuple(
        dataclasses.replace(rule, hf=tuple(re.sub(r"^model\.", "model.language_model.", name) for name in rule.hf))
        for rule in rules
    )


_QWEN3_5_LAYERS = (
    *_MIXED_LAYERS,
    layer_rule(
        "self_attention.in_proj.weight",
        tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
        PerKeyHead(("k", "k", "v"), ("v",), ("h",), ("h",)),
    ),
)
_QWEN3_5_MLP = GATED_MLP + _SHARED_AND_ROUTED
# Text-only checkpoints of multimodal models carry the type of their language model. A name without "moe", such as
# Qwen3.5-35B-A3B, may be that of a model with experts, so models of either kind have the rules of both.
_QWEN3_5_TEXT = Family(
    model_types=("qwen3_5_text",),
    names=("qwen35text",),
    parts=(*_DENSE, hf.partial_rope, hf.linear_attention),
    constants={"qk_layernorm": True, "layernorm_zero_centered_gamma": True},
    absent={"partial_rotary_factor": 0.25},
    engine_flags=_HYBRID_IN_ENGINES,
    layer_spec="slime_plugins.models.qwen3_5.get_qwen3_5_spec",
    rules=ENDS + _QWEN3_5_LAYERS + _QWEN3_5_MLP + _predicting(_QWEN3_5_MLP),
    not_trained=re.compile(r"^(mtp|model\.visual)\."),
    predictions=_OF_PREDICTION,
    engines_draft=True,
)
_QWEN3_5 = dataclasses.replace(
    _QWEN3_5_TEXT,
    model_types=("qwen3_5",),
    names=("qwen35",),
    rules=_of_language_model(_QWEN3_5_TEXT.rules),
    stages_tie=True,
)
_QWEN3_5_MOE_TEXT = dataclasses.replace(
    _QWEN3_5_TEXT,
    model_types=("qwen3_5_moe_text",),
    names=("qwen35moetext",),
    parts=(*_MOE, hf.partial_rope, hf.linear_attention),
    constants={**_QWEN3_5_TEXT.constants, "moe_shared_expert_gate": True},
)
_QWEN3_5_MOE = dataclasses.replace(
    _QWEN3_5_MOE_TEXT,
    model_types=("qwen3_5_moe",),
    names=("qwen35moe",),
    rules=_QWEN3_5.rules,
    stages_tie=True,
)
_QWEN3_VL = dataclasses.replace(
    QWEN3,
    model_types=("qwen3_vl",),
    names=("qwen3vl",),
    other_models=(),
    absent={"rope_theta": 500000},
    rules=_of_language_model(QWEN3.rules),
    not_trained=re.compile(r"^model\.visual\."),
    fsdp=False,
)
# The weights of a token's experts sum to one, although configs of this type do not say so: the default of `norm_topk_prob`.
_QWEN3_VL_MOE = dataclasses.replace(
    QWEN3_MOE,
    model_types=("qwen3_vl_moe",),
    names=("qwen3vlmoe",),
    absent=_QWEN3_VL.absent,
    rules=_of_language_model(QWEN3_MOE.rules),
    not_trained=_QWEN3_VL.not_trained,
    stacks_experts=True,
)

QWEN = (
    QWEN2,
    QWEN3,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    _QWEN3_5,
    _QWEN3_5_TEXT,
    _QWEN3_5_MOE,
    _QWEN3_5_MOE_TEXT,
    _QWEN3_VL,
    _QWEN3_VL_MOE,
)
