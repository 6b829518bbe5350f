"""Qwen2 and Qwen2.5: dense, with biases of query, key and value."""

from slime.models.config_entries import decoder, grouped_query_attention
from slime.models.family import DENSE_LAYER, ENDS, Family

QWEN2 = Family(
    model_types=("qwen2",),
    names=("qwen2",),
    other_models=("qwen2vl", "qwen25vl", "qwen2audio", "qwen25omni"),
    parts=(decoder, grouped_query_attention),
    constants={"add_qkv_bias": True},
    rules=ENDS + DENSE_LAYER,
)
