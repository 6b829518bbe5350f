"""Qwen2 / Qwen2.5 (query, key and value biases) and Qwen3 (query and key norms), dense."""

import re

from slime.backends.megatron_utils.hf_conversion.common import ATTENTION, ENDS, GATED_MLP, LAYER_NORMS
from slime.backends.megatron_utils.hf_conversion.family import Family

QWEN_DENSE = Family(
    model_types=("qwen2", "qwen3"),
    name_pattern=re.compile(r"qwen2(?!moe|5?vl|audio)|qwen3(?!moe|next|vl|5|omni)"),
    rules=ENDS + LAYER_NORMS + ATTENTION + GATED_MLP,
    ignored=re.compile(r"\.rotary_emb\.inv_freq$"),
)
