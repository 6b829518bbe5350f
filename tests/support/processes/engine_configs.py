"""What engines read of configs, which come as a list in JSON: by flag, the values that SGLang's models take of each.

The models themselves are not built. Beside each value stands the place in sglang 0.5.21 where a model takes it.
"""

import json
import os
import sys
import tempfile

from slime.backends.sglang_utils import cpu_runtime

cpu_runtime.install()

from sglang.srt.utils.hf_transformers_utils import get_config, get_rope_config  # noqa: E402


def read(config: dict) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        with open(os.path.join(directory, "config.json"), "w") as file:
            json.dump(config, file)
        found = get_config(directory, trust_remote_code=False)
    found, kind = getattr(found, "text_config", None) or found, config["model_type"]
    base, rope = get_rope_config(found)
    rope = rope or {}
    values = {"rotary_base": found.rope_theta if kind == "qwen3_next" else base}  # qwen3_next.py: `config.rope_theta`
    if kind.startswith(("qwen3_next", "qwen3_5")):
        values["rotary_percent"] = found.partial_rotary_factor
    elif kind.startswith("glm4") and "kv_lora_rank" not in config:
        # glm4.py and glm4_moe.py look beside the scaling first.
        values["rotary_percent"] = rope.get("partial_rotary_factor", getattr(found, "partial_rotary_factor", 0.5))
    elif kind == "minimax_m2":
        values["rotary_percent"] = getattr(found, "rotary_dim", found.head_dim) / found.head_dim
    if rope.get("rope_type") == "yarn":
        values["original_max_position_embeddings"] = rope.get("original_max_position_embeddings")
    return values


print(json.dumps([read(config) for config in json.load(sys.stdin)]))
