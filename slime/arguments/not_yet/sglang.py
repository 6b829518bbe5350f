"""Rows for engine and router flags.

Beside layouts that are not built, these are the features that a server would accept and that would go wrong in silence:
weights or cached keys and values that stay those of an older version, ranks that the weight groups do not reach.
"""

from slime.arguments.not_yet.row import NotYet

_LAYOUTS = (
    ("prefill and decode on different engines", (
        "prefill_num_servers", "sglang_disaggregation_*", "sglang_enable_pd_role_switch", "sglang_optimistic_prefill_attempts",
        "sglang_num_reserved_decode_tokens", "router_pd_disaggregation", "router_prefill_policy", "router_decode_policy",
        "router_bootstrap_port_annotation",
    )),
    ("a serving topology from YAML", ("sglang_config",)),
    ("engines that only encode media", (
        "sglang_encoder_*", "sglang_language_only", "sglang_enable_adaptive_dispatch_to_encoder",
    )),
    ("data-parallel attention (weight groups and routing over its ranks)", (
        "sglang_enable_dp_attention*", "sglang_enable_dp_lm_head", "router_dp_aware",
    )),
    ("growing and shrinking expert-parallel engines", (
        "sglang_ep_join_*", "sglang_elastic_ep_*", "sglang_max_ep_size", "sglang_enable_elastic_expert_backup",
    )),
)  # fmt: skip
_WEIGHTS = (
    ("speculative decoding with weights that change (nothing trains the draft)", (
        "sglang_speculative_*", "sglang_decoupled_spec_*", "sglang_enable_multi_layer_eagle", "sglang_uno_lora_path",
    )),
    ("LoRA adapters in the engines", (
        "sglang_enable_lora*", "sglang_lora_*", "sglang_max_lora*", "sglang_max_loaded_loras",
        "sglang_experts_shared_outer_loras",
    )),
    ("quantisation by the engine (pushed weights would not be quantised; give a quantised --hf-checkpoint)", (
        "sglang_modelopt_*", "sglang_quantize_and_serve", "sglang_rl_quant_profile",
    )),
    ("engine weights in host memory (pushed weights would not reach them)", (
        "sglang_kt_*",
    )),
)  # fmt: skip
_CACHES = (
    ("a KV cache outside the engines (it would outlive the weights it was computed with)", (
        "sglang_hicache_storage_*", "sglang_enable_lmcache", "sglang_lmcache_*", "sglang_enable_flexkv", "sglang_flexkv_*",
        "sglang_enable_unified_cache_external_linker", "sglang_unified_cache_external_linker_backend",
    )),
)  # fmt: skip
_SECURITY = (
    ("TLS between our processes", (
        "sglang_ssl_*", "sglang_enable_ssl_refresh", "router_client_cert_path", "router_client_key_path",
        "router_ca_cert_paths", "router_server_cert_path", "router_server_key_path",
    )),
    ("separate keys for the router's control plane", ("router_control_plane_*", "router_jwt_*")),
)  # fmt: skip

ROWS: tuple[NotYet, ...] = (
    *(NotYet(name, feature) for feature, names in (*_LAYOUTS, *_WEIGHTS, *_CACHES, *_SECURITY) for name in names),
    NotYet("sglang_pp_size", "a weight group over pipeline stages of an engine", works=(1,)),
    NotYet("sglang_dp_size", "data-parallel attention (weight groups and routing over its ranks)", works=(1,)),
    NotYet(
        "sglang_quantization", "quantisation by the engine (pushed weights would not be quantised)", works=("unquant",)
    ),
    NotYet("sglang_cpu_offload_gb", "engine weights in host memory (pushed weights would not reach them)", works=(0,)),
    NotYet(
        "sglang_offload_group_size", "engine weights in host memory (pushed weights would not reach them)", works=(-1,)
    ),
    NotYet(
        "sglang_weight_cache_mode",
        "a cache of weights beside the engines (it would keep the first ones)",
        works=("off",),
    ),
    NotYet("sglang_tokenizer_worker_num", "one weight version over several tokenizer processes", works=(1,)),
)
