"""Families with multi-head latent attention, some with sparse attention on top.

Queries, keys and values of all heads are computed from one small vector per token. HF tensors have the rotated channels of a
head as interleaved pairs, and Megatron rotates them in that order, so no rows are moved.
"""

import dataclasses

from slime.models import config_entries as hf
from slime.models.family import (
    ENDS,
    EXPERT_BIAS,
    GATED_MLP,
    LAYER_NORMS,
    Family,
    layer_rule,
    prediction_layer,
    routed_experts,
    shared_experts,
)
from slime.models.tensor_layouts import IndexerHeads, Replicated, Sharded

_LATENT_MOE = (
    hf.decoder, hf.latent_attention, hf.experts, hf.sigmoid_router, hf.frozen_expert_bias,
)  # fmt: skip

# Tensor-parallel ranks each have a part of the rows of the projections down to the latent vectors.
_ATTENTION = (
    layer_rule("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", Sharded(dim=0)),
    layer_rule("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", Sharded(dim=0)),
    layer_rule("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", Sharded(dim=0)),
    layer_rule("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", Sharded(dim=0)),
    layer_rule("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", Sharded(dim=0)),
    layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Sharded(dim=1)),
    layer_rule(
        ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
        "self_attn.q_a_layernorm.weight",
        Replicated(),
    ),
    layer_rule(
        ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
        "self_attn.kv_a_layernorm.weight",
        Replicated(),
    ),
)

# Leading layers are dense; the others have routed experts, and shared ones that see every token.
_LAYER = LAYER_NORMS + _ATTENTION + GATED_MLP + routed_experts() + EXPERT_BIAS + shared_experts("mlp.shared_experts")
_RULES = ENDS + _LAYER + prediction_layer(_LAYER)

# Every tensor-parallel rank has the whole indexer.
_INDEXER = (
    *(
        layer_rule(f"self_attention.indexer.{name}", f"self_attn.indexer.{name}", IndexerHeads())
        for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")
    ),
    layer_rule("self_attention.indexer.weights_proj.weight", "self_attn.indexer.weights_proj.weight", Replicated()),
)
_SPARSE_LAYER = _LAYER + _INDEXER
_SPARSE = {"enable_experimental": True, "allgather_cp": True}

GLM4_MOE_LITE = Family(
    model_types=("glm4_moe_lite",),
    names=("glm4moelite",),
    parts=_LATENT_MOE,
    constants={
        # It has no effect on latent attention, but published launch scripts have it.
        "add_qkv_bias": True,
        "add_position_embedding": False,
        "apply_rope_fusion": False,
        "make_vocab_size_divisible_by": 64,
    },
    absent={"first_k_dense_replace": 1},
    rope_types=("default", "yarn"),
    rules=_RULES,
    predictions_follow=True,
    engines_draft=True,
)
GLM_MOE_DSA = dataclasses.replace(
    GLM4_MOE_LITE,
    model_types=("glm_moe_dsa",),
    names=("glmmoedsa",),
    parts=(*_LATENT_MOE, hf.sparse_attention),
    constants={"add_position_embedding": False, "make_vocab_size_divisible_by": 16, **_SPARSE},
    absent={"first_k_dense_replace": 3},
    rules=ENDS + _SPARSE_LAYER + prediction_layer(_SPARSE_LAYER),
    layer_spec="slime_plugins.models.glm5.glm5.get_glm5_spec",
)

DEEPSEEK_V3 = Family(
    model_types=("deepseek_v3",),
    names=("deepseekv3",),
    parts=(*_LATENT_MOE, hf.expert_groups, hf.yarn_attention_scale),
    constants={"attention_softmax_in_fp32": True, "apply_rope_fusion": False, "moe_token_dispatcher_type": "alltoall"},
    absent={"first_k_dense_replace": 3},
    rope_types=("default", "yarn"),
    rules=_RULES,
    predictions_follow=True,
    engines_draft=True,
)
DEEPSEEK_V32 = dataclasses.replace(
    DEEPSEEK_V3,
    model_types=("deepseek_v32",),
    names=("deepseekv32",),
    parts=(*DEEPSEEK_V3.parts, hf.sparse_attention),
    constants={**DEEPSEEK_V3.constants, **_SPARSE},
    rules=GLM_MOE_DSA.rules,
    layer_spec=GLM_MOE_DSA.layer_spec,
)
KIMI_K2 = dataclasses.replace(
    DEEPSEEK_V3,
    model_types=("kimi_k2",),
    names=("kimi",),
    other_models=("kimivl", "kimilinear"),
    # Published launch scripts give this width; latent attention does not read it.
    constants={**DEEPSEEK_V3.constants, "kv_channels": 64},
    absent={"first_k_dense_replace": 1},
)

LATENT = (GLM4_MOE_LITE, GLM_MOE_DSA, DEEPSEEK_V3, DEEPSEEK_V32, KIMI_K2)
