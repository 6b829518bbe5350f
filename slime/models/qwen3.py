"""Qwen3: dense, with norms of query and key."""

from slime.models.config_entries import decoder, grouped_query_attention
from slime.models.family import DENSE_LAYER, ENDS, Family

QWEN3 = Family(
    model_types=("qwen3",),
    names=("qwen3",),
    other_models=("qwen3omni",),
    parts=(decoder, grouped_query_attention),
    constants={"qk_layernorm": True},
    rules=ENDS + DENSE_LAYER,
)
