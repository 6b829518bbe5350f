"""The flags of engines and router that a run refuses, wherever they are given, and other questions about these flags.

`NOT_YET` has layouts that are not built, and features that a server would accept and that would silently go wrong: weights or
cached keys and values would stay those of an older version, or the weight groups would not reach all ranks.
"""

import argparse

from slime.arguments.flag import NotYet, features
from slime.arguments.origins import Origin

_OWN_ENGINES = "the run starts its engines and registers them with the router; drop it"
_FOUND_ENGINES = "engines that the router finds by itself would not get the trainer's weights; drop it"
_OWN_ADDRESS = "it binds the address that its node announces; set SLIME_HOST_IP there for another one"
_ONE_KEY = "router and engines of a run share one key; give it as --router-api-key"
_ROLES = "it follows from --prefill-num-servers, or the worker types in --sglang-config; drop it"
_HTTP_ONLY = "engines are controlled over HTTP; drop it"

# Flags that every server accepts but a run cannot leave to the user: attribute → reason and way out. They are on the command
# line all the same, so that a user who types one reads why.
REFUSED: dict[str, str] = {
    "sglang_host": f"an engine is not free to choose: {_OWN_ADDRESS}",
    "sglang_api_key": _ONE_KEY,
    "sglang_admin_api_key": f"control requests carry the same key as all others: {_ONE_KEY}",
    "sglang_tokenizer_path": "the run encodes prompts with the tokenizer of --hf-checkpoint, and engines must agree; "
    "put the tokenizer there",
    "sglang_skip_tokenizer_init": "rollouts need the text of responses; drop it",
    "sglang_is_embedding": "rollouts need engines that generate; drop it",
    "sglang_preferred_sampling_params": "it would change what answers are sampled from, and the trainer would not know; give "
    "--rollout-temperature, --rollout-top-p, --rollout-top-k or --rollout-stop, or sampling parameters with a request of yours",
    "sglang_weight_version": "the run numbers the versions of its weights; drop it",
    "sglang_allow_auto_truncate": "the trainer would learn from prompts of which the engine saw a part; give "
    "--rollout-max-prompt-len, which leaves out prompts that are too long",
    "sglang_delete_ckpt_after_loading": "it deletes --hf-checkpoint, which the run reads again; drop it",
    "sglang_checkpoint_engine_wait_weights_before_ready": "weights are pushed to engines that are ready, so the engine "
    "and the run would wait for each other; drop it",
    "sglang_gated_launch_port": "nobody in a run opens that gate, so the engine would never be ready; drop it",
    **dict.fromkeys(("sglang_grpc_mode", "sglang_smg_grpc_mode"), _HTTP_ONLY),
    "sglang_use_ray": "engines already live in Ray actors; drop it",
    "router_host": f"the router of a run is not free to choose: {_OWN_ADDRESS}, or start a router yourself and give "
    "--sglang-router-ip and --sglang-router-port",
    "router_port": "the router of a run takes a free port; start a router yourself and give --sglang-router-ip and "
    "--sglang-router-port",
    **dict.fromkeys(("router_worker_urls", "router_prefill_urls", "router_decode_urls"), _OWN_ENGINES),
    "router_mini_lb": "it belongs to another program than the router; drop it",
    "router_enable_igw": "one router serves one model; drop it",
    **dict.fromkeys(("router_service_discovery", "router_service_discovery_port", "router_service_discovery_namespace",
        "router_selector", "router_prefill_selector", "router_decode_selector", "router_bootstrap_port_annotation"),
        _FOUND_ENGINES),
    **dict.fromkeys(map("sglang_{}".format, ("encoder_only", "encoder_transfer_backend", "encoder_urls", "language_only",
        "encoder_bootstrap_port", "encoder_register_urls", "enable_adaptive_dispatch_to_encoder")),
        "engines of SGLang that only encode media take no weights, and ask nobody for a key; drop it"),
    **dict.fromkeys(("sglang_disaggregation_mode", "sglang_disaggregation_bootstrap_port", "router_pd_disaggregation"), _ROLES),
}  # fmt: skip


ONE_MODEL = "the trainer does not see it, so engines would serve another model; put it into config.json, or drop it"
NO_SHARE = "it is a share of the GPU's memory, such as 0.8"


def is_share(share: float | None) -> bool:
    """Whether engines can be given this share of the GPU's memory; None leaves it to the server."""
    return share is None or 0 < share < 1


# Server field → its other names, all without `sglang_`.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "cuda_graph_bs_decode": ("cuda_graph_bs",), "cuda_graph_max_bs_decode": ("cuda_graph_max_bs",),
    "dp_size": ("dp", "data_parallel_size"), "ep_size": ("ep", "expert_parallel_size"),
    "pp_size": ("pp", "pipeline_parallel_size"), "tp_size": ("tp", "tensor_parallel_size"),
}  # fmt: skip


def keep_names_equal(args: argparse.Namespace) -> None:
    """Give every other name of a server field the value of the field, for functions of the user that read it there."""
    for field, names in OTHER_NAMES.items():
        attribute = f"sglang_{field}"
        for name in names if hasattr(args, attribute) else ():
            setattr(args, f"sglang_{name}", vars(args)[attribute])
            args.origins[f"sglang_{name}"] = args.origins.get(attribute, Origin.DEFAULT)


def tensor_parallel_size(args: argparse.Namespace) -> int:
    """How many ranks share each layer of an engine: its GPUs divided by its pipeline stages."""
    return args.rollout_num_gpus_per_engine // (args.sglang_pp_size or 1)


def attention_groups(args: argparse.Namespace) -> int:
    """How many groups an engine's ranks form in data-parallel attention, each with requests of its own; 1: one for all."""
    return (args.sglang_dp_size or 1) if args.sglang_enable_dp_attention else 1


# How many tokens of a kept set a server reports unless --sglang-sampling-mask-max-tokens says otherwise.
TOLD_TOKENS = 4096
# Those of the flags below that a model whose weights are never updated may be given.
ONLY_AGAINST_PUSHES = ("sglang_cpu_offload_gb", "sglang_quantization")
_WEIGHTS_ON_THE_HOST = "engine weights in host memory (pushed weights would not reach them)"

NOT_YET: tuple[NotYet, ...] = (
    # Layouts
    NotYet("sglang_enable_pd_role_switch", "engines that prefill at one time and decode at another (routers keep their roles)"),
    NotYet("sglang_enable_dp_attention_local_control_broadcast",
        "control requests to each group of data-parallel attention by itself (groups would be paused one after the other)"),
    NotYet("sglang_dwdp_size", "ranks that fetch experts from each other (each is made a group of data-parallel attention)",
        works=(1,)),
    *features("growing and shrinking expert-parallel engines", "sglang_ep_join_*", "sglang_elastic_ep_*",
        "sglang_max_ep_size", "sglang_enable_elastic_expert_backup"),
    # Weights
    *features("another draft than the model's own layer for multi-token prediction (it would get the model's weights)",
        "sglang_speculative_draft_*", "sglang_speculative_d[fos]*", "sglang_speculative_ngram_*",
        "sglang_speculative_token_map", "sglang_decoupled_spec_*", "sglang_enable_multi_layer_eagle",
        "sglang_uno_lora_path"),
    NotYet("sglang_speculative_algorithm", "drafting by another way than EAGLE, or NEXTN, which is the same",
        works=("EAGLE", "NEXTN")),
    *features("drafts that branch (experts would be told of other tokens)", sglang_speculative_eagle_topk=1),
    *features("choosing how drafts are made and accepted (answers might be no samples of the model)",
        "sglang_speculative_a[cdt]*", "sglang_speculative_moe_*", "sglang_speculative_skip_*", "sglang_speculative_use_*"),
    *features("LoRA adapters in the engines (they would change what pushed weights compute)", "sglang_enable_lora*",
        "sglang_lora_*", "sglang_max_lora*", "sglang_max_loaded_loras", "sglang_experts_shared_outer_loras"),
    *features("quantisation by the engine (pushed weights would not be quantised; give a quantised --hf-checkpoint)",
        "sglang_modelopt_*", "sglang_quantize_and_serve", "sglang_rl_quant_profile"),
    *features(_WEIGHTS_ON_THE_HOST, "sglang_kt_*"),
    # Caches
    *features("a KV cache outside the engines (it would outlive the weights it was computed with)",
        "sglang_hicache_storage_*", "sglang_enable_lmcache", "sglang_lmcache_*", "sglang_enable_flexkv", "sglang_flexkv_*",
        "sglang_*unified_cache_external_linker*", "sglang_disaggregation_decode_enable_offload_kvcache"),
    *features("streams of pieces instead of whole answers so far", "sglang_incremental_streaming_output"),
    # Security
    *features("TLS between our processes", "sglang_ssl_*", "sglang_enable_ssl_refresh", "router_client_cert_path",
        "router_client_key_path", "router_ca_cert_paths", "router_server_cert_path", "router_server_key_path"),
    *features("separate keys for the router's control plane", "router_control_plane_*", "router_jwt_*"),
    # Other values than these
    NotYet("sglang_quantization", "quantisation by the engine (pushed weights would not be quantised)", works=("unquant",)),
    NotYet("sglang_cpu_offload_gb", _WEIGHTS_ON_THE_HOST, works=(0,)),
    NotYet("sglang_offload_group_size", _WEIGHTS_ON_THE_HOST, works=(-1,)),
    NotYet("sglang_weight_cache_mode", "a cache of weights beside the engines (it would keep the first ones)", works=("off",)),
    NotYet("sglang_tokenizer_worker_num", "several tokenizer processes (one alone would know the weight version)", works=(1,)),
)  # fmt: skip
