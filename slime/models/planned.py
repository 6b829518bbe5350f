"""Families that are planned and not trained: their configs become flags, their weights have no rules yet.

One that is built moves to a file of its own and gets the rules of its weights.
"""

import dataclasses

from slime.models import config_entries as hf
from slime.models.family import Family

_DENSE = (hf.decoder, hf.grouped_query_attention)
_SOFTMAX_MOE = (*_DENSE, hf.experts, hf.softmax_router)
_SIGMOID_MOE = (*_DENSE, hf.experts, hf.sigmoid_router)
_LATENT_MOE = (
    hf.decoder, hf.latent_attention, hf.experts, hf.sigmoid_router, hf.frozen_expert_bias,
)  # fmt: skip

_LLAMA = Family(
    model_types=("llama",),
    names=("llama",),
    parts=(*_DENSE, hf.llama3_rope),
    rope_types=("default", "llama3"),
)

_QWEN2_MOE = Family(
    model_types=("qwen2_moe",),
    names=("qwen2moe",),
    parts=(*_SOFTMAX_MOE, hf.qkv_bias),
    constants={"moe_shared_expert_gate": True},
    absent={"qkv_bias": True, "norm_topk_prob": False},
)
_QWEN3_MOE = Family(
    model_types=("qwen3_moe",),
    names=("qwen3moe",),
    parts=(*_SOFTMAX_MOE, hf.partial_rope),
    constants={"qk_layernorm": True},
    absent={"norm_topk_prob": False},
)
_QWEN3_NEXT = Family(
    model_types=("qwen3_next",),
    names=("qwen3next",),
    parts=(*_SOFTMAX_MOE, hf.partial_rope, hf.linear_attention),
    constants={"qk_layernorm": True, "layernorm_zero_centered_gamma": True, "moe_shared_expert_gate": True},
    absent={"partial_rotary_factor": 0.25},
    layer_spec="slime_plugins.models.qwen3_next.get_qwen3_next_spec",
)
# Text-only checkpoints of multimodal models carry the type of their language model.
_QWEN3_5 = Family(
    model_types=("qwen3_5", "qwen3_5_text"),
    names=("qwen35",),
    parts=(*_DENSE, hf.partial_rope, hf.linear_attention),
    constants={"qk_layernorm": True, "layernorm_zero_centered_gamma": True},
    absent={"partial_rotary_factor": 0.25},
    layer_spec="slime_plugins.models.qwen3_5.get_qwen3_5_spec",
)
_QWEN3_5_MOE = dataclasses.replace(
    _QWEN3_5,
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    names=(),
    parts=(*_SOFTMAX_MOE, hf.partial_rope, hf.linear_attention),
    constants={**_QWEN3_5.constants, "moe_shared_expert_gate": True},
)
# Known by name; what its config says is not written down yet.
_QWEN3_VL = Family(model_types=(), names=("qwen3vl",))

_GLM4 = Family(
    model_types=("glm4",),
    names=("glm4",),
    parts=(*_DENSE, hf.qkv_bias, hf.partial_rope),
    constants={
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
        "rotary_interleaved": True,
        "apply_rope_fusion": False,
    },
    absent={"partial_rotary_factor": 0.5, "attention_bias": True},
    layer_spec="slime_plugins.models.glm4.get_glm_spec",
)
_GLM4_MOE = Family(
    model_types=("glm4_moe",),
    names=("glm4moe",),
    parts=(*_SIGMOID_MOE, hf.frozen_expert_bias, hf.qkv_bias, hf.qk_norm, hf.partial_rope),
    constants={"moe_token_dispatcher_type": "alltoall"},
    absent={"partial_rotary_factor": 0.5, "first_k_dense_replace": 1},
)
_GLM4_MOE_LITE = Family(
    model_types=("glm4_moe_lite",),
    names=("glm4moelite",),
    parts=_LATENT_MOE,
    constants={
        # Of no effect on latent attention; the published launch scripts have it.
        "add_qkv_bias": True,
        "add_position_embedding": False,
        "apply_rope_fusion": False,
        "make_vocab_size_divisible_by": 64,
    },
    absent={"first_k_dense_replace": 1},
    rope_types=("default", "yarn"),
)
_GLM_MOE_DSA = Family(
    model_types=("glm_moe_dsa",),
    names=("glmmoedsa",),
    parts=(*_LATENT_MOE, hf.sparse_attention),
    constants={
        "add_position_embedding": False,
        "enable_experimental": True,
        "allgather_cp": True,
        "make_vocab_size_divisible_by": 16,
    },
    absent={"first_k_dense_replace": 3},
    rope_types=("default", "yarn"),
    layer_spec="slime_plugins.models.glm5.glm5.get_glm5_spec",
)

_DEEPSEEK_V3 = Family(
    model_types=("deepseek_v3",),
    names=("deepseekv3",),
    parts=(*_LATENT_MOE, hf.expert_groups, hf.yarn_attention_scale),
    constants={"attention_softmax_in_fp32": True, "apply_rope_fusion": False, "moe_token_dispatcher_type": "alltoall"},
    absent={"first_k_dense_replace": 3},
    rope_types=("default", "yarn"),
)
_DEEPSEEK_V32 = dataclasses.replace(
    _DEEPSEEK_V3,
    model_types=("deepseek_v32",),
    names=("deepseekv32",),
    parts=(*_DEEPSEEK_V3.parts, hf.sparse_attention),
    constants={**_DEEPSEEK_V3.constants, "enable_experimental": True, "allgather_cp": True},
    layer_spec=_GLM_MOE_DSA.layer_spec,
)
_KIMI_K2 = dataclasses.replace(
    _DEEPSEEK_V3,
    model_types=("kimi_k2",),
    names=("kimi",),
    # The width that published launch scripts give; latent attention does not read it.
    constants={**_DEEPSEEK_V3.constants, "kv_channels": 64},
    absent={"first_k_dense_replace": 1},
)

_MINIMAX_M2 = Family(
    model_types=("minimax_m2",),
    names=("minimaxm2",),
    parts=(*_SIGMOID_MOE, hf.partial_rope),
    constants={
        "qk_layernorm": True,
        "apply_rope_fusion": False,
        "attention_softmax_in_fp32": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
    },
    layer_spec="slime_plugins.models.minimax_m2.get_minimax_m2_layer_spec",
    qk_norm_spans_heads=True,
)

PLANNED = (
    _LLAMA, _QWEN2_MOE, _QWEN3_MOE, _QWEN3_NEXT, _QWEN3_5, _QWEN3_5_MOE, _QWEN3_VL, _GLM4, _GLM4_MOE, _GLM4_MOE_LITE,
    _GLM_MOE_DSA, _DEEPSEEK_V3, _DEEPSEEK_V32, _KIMI_K2, _MINIMAX_M2,
)  # fmt: skip
