"""The families of GLM.

GLM-4 and GLM-Z1 are dense. They have one tensor for gate and up, and further norms behind attention and MLP of every layer.
GLM-4.5 and later have leading dense layers, then layers with experts.
"""

from slime.models import config_entries as hf
from slime.models.family import (
    ATTENTION,
    DENSE_LAYER,
    ENDS,
    EXPERT_BIAS,
    LAYER_NORMS,
    Family,
    layer_rule,
    prediction_layer,
    routed_experts,
    shared_experts,
)
from slime.models.tensor_layouts import FusedGatedLinear, Replicated, Sharded

_FURTHER_NORMS = tuple(
    layer_rule(f"{name}.weight", f"{name}.weight", Replicated())
    for name in ("post_self_attn_layernorm", "post_mlp_layernorm")
)
_MLP = (
    layer_rule("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", FusedGatedLinear()),
    layer_rule("mlp.linear_fc2.weight", "mlp.down_proj.weight", Sharded(dim=1)),
)

GLM4 = Family(
    model_types=("glm4",),
    names=("glm4",),
    other_models=("glm4v",),
    parts=(hf.decoder, hf.grouped_query_attention, hf.qkv_bias, hf.partial_rope),
    constants={
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
        "rotary_interleaved": True,
        "apply_rope_fusion": False,
    },
    absent={"partial_rotary_factor": 0.5, "attention_bias": True},
    layer_spec="slime_plugins.models.glm4.get_glm_spec",
    rules=ENDS + LAYER_NORMS + ATTENTION + _FURTHER_NORMS + _MLP,
    fsdp=True,
)

_LAYER_WITH_EXPERTS = DENSE_LAYER + routed_experts() + EXPERT_BIAS + shared_experts("mlp.shared_experts")
GLM4_MOE = Family(
    model_types=("glm4_moe",),
    names=("glm4moe",),
    parts=(
        hf.decoder,
        hf.grouped_query_attention,
        hf.experts,
        hf.sigmoid_router,
        hf.frozen_expert_bias,
        hf.qkv_bias,
        hf.qk_norm,
        hf.partial_rope,
    ),
    constants={"moe_token_dispatcher_type": "alltoall"},
    absent={"partial_rotary_factor": 0.5, "first_k_dense_replace": 1},
    rules=ENDS + _LAYER_WITH_EXPERTS + prediction_layer(_LAYER_WITH_EXPERTS),
    predictions_follow=True,
    engines_draft=True,
)
