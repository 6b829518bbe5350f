"""The families of Qwen: those that train, and others that are planned: their weights have no rules yet."""

import dataclasses

from slime.models import config_entries as hf
from slime.models.family import DENSE_LAYER, ENDS, SHARED_EXPERT_GATE, Family, routed_experts, shared_experts

_DENSE = (hf.decoder, hf.grouped_query_attention)
_MOE = (*_DENSE, hf.experts, hf.softmax_router)

# Qwen2.5 too.
QWEN2 = Family(
    model_types=("qwen2",),
    names=("qwen2",),
    other_models=("qwen2vl", "qwen25vl", "qwen2audio", "qwen25omni"),
    parts=_DENSE,
    constants={"add_qkv_bias": True},
    rules=ENDS + DENSE_LAYER,
)
QWEN3 = Family(
    model_types=("qwen3",),
    names=("qwen3",),
    other_models=("qwen3omni",),
    parts=_DENSE,
    constants={"qk_layernorm": True},
    rules=ENDS + DENSE_LAYER,
)

QWEN2_MOE = Family(
    model_types=("qwen2_moe",),
    names=("qwen2moe",),
    parts=(*_MOE, hf.qkv_bias),
    constants={"moe_shared_expert_gate": True},
    absent={"qkv_bias": True, "norm_topk_prob": False},
    rules=ENDS + DENSE_LAYER + routed_experts() + shared_experts("mlp.shared_expert") + SHARED_EXPERT_GATE,
)
QWEN3_MOE = Family(
    model_types=("qwen3_moe",),
    names=("qwen3moe",),
    parts=(*_MOE, hf.partial_rope),
    constants={"qk_layernorm": True},
    absent={"norm_topk_prob": False},
    rules=ENDS + DENSE_LAYER + routed_experts(),
)
_QWEN3_NEXT = Family(
    model_types=("qwen3_next",),
    names=("qwen3next",),
    parts=(*_MOE, hf.partial_rope, hf.linear_attention),
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
    parts=(*_MOE, hf.partial_rope, hf.linear_attention),
    constants={**_QWEN3_5.constants, "moe_shared_expert_gate": True},
)
# Known by name; what its config says is not written down yet.
_QWEN3_VL = Family(model_types=(), names=("qwen3vl",))

QWEN = (QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, _QWEN3_NEXT, _QWEN3_5, _QWEN3_5_MOE, _QWEN3_VL)
