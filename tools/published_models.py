"""The `config.json` of published models: name of `scripts/models/<name>.sh` → the entries that describe the model.

The entries are copied from the checkpoints' own files, in their published form (older files have the RoPE base at the top
level, newer ones in `rope_parameters`). `write_model_scripts` derives the scripts from them. Nothing in this module is computed
from our tables, so that it can check them.
"""

from typing import Any

Config = dict[str, Any]


def _qwen2(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, tied: bool, **changes: Any
) -> Config:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": vocab,
        "tie_word_embeddings": tied, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "hidden_act": "silu",
        "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": layers,
        **changes,
    }  # fmt: skip


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, tied: bool, **changes: Any) -> Config:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": tied, "rms_norm_eps": 1e-06, "rope_theta": 1000000,
        "rope_scaling": None, "hidden_act": "silu", "max_position_embeddings": 40960, "attention_bias": False,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": layers,
        **changes,
    }  # fmt: skip


def _llama3(layers: int, hidden: int, ffn: int, heads: int, *, scaling: float | None, tied: bool = False) -> Config:
    llama3 = {
        "factor": scaling, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": tied, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "hidden_act": "silu",
        "rope_scaling": llama3 if scaling else None, "max_position_embeddings": 131072 if scaling else 8192,
        "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
    }  # fmt: skip


def _glm4(layers: int, hidden: int, ffn: int, heads: int, bias: bool) -> Config:
    return {
        "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": 128,
        "vocab_size": 151552, "tie_word_embeddings": False, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5, "hidden_act": "silu", "max_position_embeddings": 32768, "attention_bias": bias,
    }  # fmt: skip


_MIMO_7B = {
    "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_hidden_layers": 36, "hidden_size": 4096,
    "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151680, "tie_word_embeddings": False, "rms_norm_eps": 1e-05, "rope_theta": 640000,
    "rope_scaling": None, "hidden_act": "silu", "max_position_embeddings": 32768, "attention_bias": True,
    "num_nextn_predict_layers": 1, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 36,
}  # fmt: skip


def _qwen3_5_text(layers: int, hidden: int, heads: int, groups: int, value_heads: int, tied: bool) -> Config:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": groups,
        "head_dim": 256, "vocab_size": 248320, "tie_word_embeddings": tied, "rms_norm_eps": 1e-06, "hidden_act": "silu",
        "max_position_embeddings": 262144, "attention_bias": False, "attn_output_gate": True,
        "full_attention_interval": 4, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads, "linear_value_head_dim": 128, "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    }  # fmt: skip


def _qwen3_5(layers: int, hidden: int, ffn: int, heads: int, groups: int, value_heads: int, tied: bool) -> Config:
    text = _qwen3_5_text(layers, hidden, heads, groups, value_heads, tied)
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": tied,
        "text_config": {**text, "model_type": "qwen3_5_text", "intermediate_size": ffn},
        "vision_config": {"model_type": "qwen3_5", "depth": 12, "hidden_size": 768, "num_heads": 12},
    }  # fmt: skip


_QWEN3_5_35B_A3B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "tie_word_embeddings": False,
    "text_config": {
        **_qwen3_5_text(40, 2048, 16, 2, 32, False), "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
    },
    "vision_config": {"model_type": "qwen3_5_moe", "depth": 27, "hidden_size": 1152, "num_heads": 16},
}  # fmt: skip


def _qwen3_moe(layers: int, hidden: int, ffn: int, heads: int, expert_ffn: int) -> Config:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": layers,
        "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "rope_scaling": None, "hidden_act": "silu", "max_position_embeddings": 40960,
        "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": expert_ffn,
        "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": layers,
    }  # fmt: skip


def _qwen3_vl(model_type: str, architecture: str, text: Config) -> Config:
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    changes = {"rope_theta": 5000000, "rope_scaling": rope, "max_position_embeddings": 262144}
    of_text = {
        key: text[key]
        for key in text
        if key not in ("architectures", "use_sliding_window", "sliding_window", "max_window_layers")
    }
    return {
        "architectures": [architecture], "model_type": model_type, "tie_word_embeddings": False,
        "text_config": {**of_text, **changes, "model_type": f"{model_type}_text"},
        "vision_config": {
            "model_type": model_type, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
            "out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": [8, 16, 24],
        },
    }  # fmt: skip


_QWEN3_NEXT_80B_A3B = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048,
    "intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "vocab_size": 151936, "tie_word_embeddings": False, "rms_norm_eps": 1e-06, "rope_theta": 10000000,
    "rope_scaling": None, "partial_rotary_factor": 0.25, "hidden_act": "silu", "max_position_embeddings": 262144,
    "attention_bias": False, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
    "num_experts": 512, "num_experts_per_tok": 10, "router_aux_loss_coef": 0.001,
}  # fmt: skip


def _glm4_moe(layers: int, dense: int, hidden: int, ffn: int, experts: int, expert_ffn: int, **changes: Any) -> Config:
    return {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": layers,
        "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151552, "tie_word_embeddings": False, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000, "rope_scaling": None, "partial_rotary_factor": 0.5, "hidden_act": "silu",
        "max_position_embeddings": 131072, "attention_bias": True, "first_k_dense_replace": dense, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": expert_ffn, "n_routed_experts": experts, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, **changes,
    }  # fmt: skip


_GLM4_5_355B = _glm4_moe(92, 3, 5120, 12288, 160, 1536, routed_scaling_factor=2.5, use_qk_norm=True)

_GLM4_7_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "num_hidden_layers": 47,
    "hidden_size": 2048, "intermediate_size": 10240, "num_attention_heads": 20, "num_key_value_heads": 20,
    "vocab_size": 154880, "tie_word_embeddings": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
    "rope_scaling": None, "partial_rotary_factor": 1.0, "hidden_act": "silu", "max_position_embeddings": 202752,
    "attention_bias": False, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_experts_per_tok": 4, "num_nextn_predict_layers": 1, "routed_scaling_factor": 1.8,
}  # fmt: skip


def _glm5(rope_theta: int) -> Config:
    return {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_hidden_layers": 78,
        "hidden_size": 6144, "intermediate_size": 12288, "num_attention_heads": 64, "num_key_value_heads": 64,
        "head_dim": 64, "vocab_size": 154880, "tie_word_embeddings": False, "rms_norm_eps": 1e-05, "hidden_act": "silu",
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"}, "max_position_embeddings": 202752,
        "attention_bias": False, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "qk_head_dim": 256, "v_head_dim": 256, "index_head_dim": 128, "index_n_heads": 32,
        "index_topk": 2048, "indexer_rope_interleave": True, "first_k_dense_replace": 3, "moe_layer_freq": 1,
        "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5,
    }  # fmt: skip


def _yarn(factor: float, beta_fast: float) -> Config:
    return {
        "type": "yarn", "factor": factor, "beta_fast": beta_fast, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    }  # fmt: skip


def _deepseek(layers: int = 61, **changes: Any) -> Config:
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": layers,
        "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128, "num_key_value_heads": 128,
        "vocab_size": 129280, "tie_word_embeddings": False, "rms_norm_eps": 1e-06, "rope_theta": 10000,
        "rope_scaling": _yarn(40, 32), "hidden_act": "silu", "max_position_embeddings": 163840, "attention_bias": False,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5,
        **changes,
    }  # fmt: skip


def _kimi_k2(**changes: Any) -> Config:
    return _deepseek(
        model_type="kimi_k2", num_attention_heads=64, num_key_value_heads=64, vocab_size=163840, rope_theta=50000.0,
        first_k_dense_replace=1, n_group=1, topk_group=1, n_routed_experts=384, num_nextn_predict_layers=0,
        routed_scaling_factor=2.827, **changes,
    )  # fmt: skip


_KIMI_K2 = _kimi_k2(rope_scaling=_yarn(32.0, 1.0), max_position_embeddings=131072)

_MOONLIGHT = _deepseek(
    27, hidden_size=2048, intermediate_size=11264, num_attention_heads=16, num_key_value_heads=16, vocab_size=163840,
    rms_norm_eps=1e-05, rope_theta=50000.0, rope_scaling=None, max_position_embeddings=8192, q_lora_rank=None,
    first_k_dense_replace=1, n_group=1, topk_group=1, moe_intermediate_size=1408, n_routed_experts=64,
    n_shared_experts=2, num_experts_per_tok=6, num_nextn_predict_layers=0, routed_scaling_factor=2.446,
)  # fmt: skip

_MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "num_hidden_layers": 62, "hidden_size": 3072,
    "intermediate_size": 1536, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64,
    "vocab_size": 200064, "tie_word_embeddings": False, "rms_norm_eps": 1e-06, "rope_theta": 5000000,
    "hidden_act": "silu", "max_position_embeddings": 196608, "attn_type_list": [1] * 62, "num_local_experts": 256,
    "num_experts_per_tok": 8, "scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_qk_norm": True,
    "qk_norm_type": "per_layer", "use_routing_bias": True, "use_mtp": True, "num_mtp_modules": 3,
    "mtp_transformer_layers": 1,
}  # fmt: skip

_QWEN3_30B = _qwen3_moe(48, 2048, 6144, 32, 768)
_QWEN3_235B = _qwen3_moe(94, 4096, 12288, 64, 1536)

DENSE: dict[str, Config] = {
    "qwen2.5-0.5B": _qwen2(24, 896, 4864, 14, 2, 151936, True),
    "qwen2.5-1.5B": _qwen2(28, 1536, 8960, 12, 2, 151936, True),
    "qwen2.5-3B": _qwen2(36, 2048, 11008, 16, 2, 151936, True),
    "qwen2.5-7B": _qwen2(28, 3584, 18944, 28, 4, 152064, False),
    "qwen2.5-32B": _qwen2(64, 5120, 27648, 40, 8, 152064, False, rms_norm_eps=1e-05),
    "qwen3-0.6B": _qwen3(28, 1024, 3072, 16, True),
    "qwen3-1.7B": _qwen3(28, 2048, 6144, 16, True),
    "qwen3-4B": _qwen3(36, 2560, 9728, 32, True),
    "qwen3-4B-Instruct-2507": _qwen3(36, 2560, 9728, 32, True, rope_theta=5000000, max_position_embeddings=262144),
    "qwen3-8B": _qwen3(36, 4096, 12288, 32, False),
    "qwen3-vl-8B": _qwen3_vl("qwen3_vl", "Qwen3VLForConditionalGeneration", _qwen3(36, 4096, 12288, 32, False)),
    "qwen3-14B": _qwen3(40, 5120, 17408, 40, False),
    "qwen3-32B": _qwen3(64, 5120, 25600, 64, False),
    "llama3.1-8B-Instruct": _llama3(32, 4096, 14336, 32, scaling=8.0),
    "llama3.2-3B-Instruct": _llama3(28, 3072, 8192, 24, scaling=32.0, tied=True),
    "llama3.2-3B-Instruct-amd": _llama3(28, 3072, 8192, 24, scaling=32.0, tied=True),
    "llama3-8B": _llama3(32, 4096, 14336, 32, scaling=None),
    "llama3-70B": _llama3(80, 8192, 28672, 64, scaling=None),
    "glm4-9B": _glm4(40, 4096, 13696, 32, True),
    "glm-z1-9B": _glm4(40, 4096, 13696, 32, True),
    "glm4-32B": _glm4(61, 6144, 23040, 48, False),
    "mimo-7B-rl": _MIMO_7B,
    "qwen3.5-0.8B": _qwen3_5(24, 1024, 3584, 8, 2, 16, True),
    "qwen3.5-4B": _qwen3_5(32, 2560, 9216, 16, 4, 32, True),
    "qwen3.5-9B": _qwen3_5(32, 4096, 12288, 16, 4, 32, False),
    "qwen3.5-27B": _qwen3_5(64, 5120, 17408, 24, 4, 48, False),
}

MIXTURE_OF_EXPERTS: dict[str, Config] = {
    "qwen3-30B-A3B": _QWEN3_30B,
    "qwen3-moe-30B-A3B": _QWEN3_30B,
    "qwen3-235B-A22B": _QWEN3_235B,
    "qwen3-moe-235B-A22B": _QWEN3_235B,
    "qwen3-vl-30B-A3B": _qwen3_vl("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", _QWEN3_30B),
    "qwen3-next-80B-A3B": _QWEN3_NEXT_80B_A3B,
    "qwen3.5-35B-A3B": _QWEN3_5_35B_A3B,
    "qwen3.5-35B-A3B-vl": _QWEN3_5_35B_A3B,
    "glm4.5-106B-A12B": _glm4_moe(46, 1, 4096, 10944, 128, 1408, routed_scaling_factor=1.0, use_qk_norm=False),
    "glm4.5-355B-A32B": _GLM4_5_355B,
    "glm4.6-355B-A32B": _GLM4_5_355B,
    "glm4.7-355B-A32B": _GLM4_5_355B,
    "glm4.7-30B-A3B": _GLM4_7_FLASH,
    "glm5-744B-A40B": _glm5(1000000),
    "glm5.2-744B-A40B": _glm5(8000000),
    "deepseek-v3": _deepseek(),
    "deepseek-v3.1": _deepseek(),
    "deepseek-r1": _deepseek(),
    "deepseek-v3-20layer": _deepseek(20),
    "deepseek-v3-5layer": _deepseek(5),
    "kimi-k2": _KIMI_K2,
    "kimi-k2-instruct": _KIMI_K2,
    "kimi-k2-thinking": _kimi_k2(rope_scaling=_yarn(64.0, 1.0), rms_norm_eps=1e-05, max_position_embeddings=262144),
    "moonlight": _MOONLIGHT,
    "moonlight-16B-A3B": _MOONLIGHT,
    "minimax-m2": _MINIMAX_M2,
}

PUBLISHED_MODELS: dict[str, Config] = {**DENSE, **MIXTURE_OF_EXPERTS}
