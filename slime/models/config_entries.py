"""The flags that follow from the entries of a Hugging Face config. Each function handles one part of a model.

Flags have the names and the types that they have in `args`. A part sets only flags that its own entries decide.

Before anything is computed from the entries, `wrong_entries` checks their types.
"""

from collections.abc import Callable, Iterator
from typing import Any

from slime.utils.errors import UserError

Config = dict[str, Any]
ModelArgs = dict[str, Any]

# Features that a model does not have unless a part says otherwise. They are set, so that a flag typed for a feature that the
# model lacks shows as a difference.
_PLAIN: ModelArgs = {
    "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": False, "attention_output_gate": False,
    "multi_latent_attention": False, "post_self_attn_layernorm": False, "post_mlp_layernorm": False,
    "layernorm_zero_centered_gamma": False, "rotary_interleaved": False, "rotary_percent": 1.0, "use_rope_scaling": False,
    "num_experts": None, "experimental_attention_variant": None,
}  # fmt: skip
_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "rms_norm_eps", "vocab_size")
_NEEDED_BY_LATENT_ATTENTION = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# The names that families give to one and the same number.
NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_EXPERT_WIDTH = ("moe_intermediate_size", "intermediate_size")
# Entries of a multimodal config that speak of the whole model; the same entries inside `text_config` are only defaults.
_OF_THE_WHOLE_MODEL = ("model_type", "architectures", "tie_word_embeddings")


def text_config_of(config: Config) -> Config:
    """The config of the language model: `config` itself; if it is multimodal, its `text_config`, completed by the rest."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    whole = {name: config[name] for name in _OF_THE_WHOLE_MODEL if config.get(name) is not None}
    return {**config, **text, **whole}


def without_nulls(config: Config) -> Config:
    """The entries that are not null, also those inside of objects: null counts as absent."""
    found = {name: without_nulls(value) if isinstance(value, dict) else value for name, value in config.items()}
    return {name: value for name, value in found.items() if value is not None}


def decoder(config: Config) -> ModelArgs:
    """Sizes, norms and embedding: what every model has."""
    require(config, _NEEDED)
    # A model whose layers all have experts may name no other width.
    width = first_of(config, ("intermediate_size", "moe_intermediate_size"))
    if width is None:
        require(config, ("intermediate_size",))
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": width,
        "num_attention_heads": config["num_attention_heads"],
        "vocab_size": config["vocab_size"],
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(config["rms_norm_eps"]),
        "swiglu": True,
        "position_embedding_type": "rope",
        "rotary_base": rope_base(config),
        "max_position_embeddings": config.get("max_position_embeddings"),
        **_PLAIN,
    }


def grouped_query_attention(config: Config) -> ModelArgs:
    """Softmax attention with its own keys and values per group of heads."""
    heads = config["num_attention_heads"]
    return {
        "group_query_attention": True,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": _head_dim(config),
    }


def latent_attention(config: Config) -> ModelArgs:
    """Multi-head latent attention and its YaRN; without scaling the factor is 1, which is plain RoPE."""
    require(config, _NEEDED_BY_LATENT_ATTENTION)
    rope = {**rope_scaling(config), "original_max_position_embeddings": unscaled_length(config)}
    scaled = rope_type(config) != "default"
    factor = float(rope.get("factor", 1.0)) if scaled else 1.0
    args = {
        "multi_latent_attention": True,
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "kv_channels": config["qk_nope_head_dim"],
        "qk_layernorm": True,
        "rotary_scaling_factor": factor,
        # A factor of 1 is the same with both types.
        **({"rope_type": "yarn"} if factor != 1.0 else {}),
        **(yarn_attention_scale(config) if rope_type(config) == "yarn" else {}),
    }
    names = {"original_max_position_embeddings": int, "beta_fast": float, "beta_slow": float}
    return {**args, **{name: kind(rope[name]) for name, kind in names.items() if scaled and rope.get(name)}}


def yarn_attention_scale(config: Config) -> ModelArgs:
    """How YaRN scales the softmax. Both values are 1 if nothing is scaled, which then has no effect.

    Raises:
        UserError: one of the two is set without the other; transformers then uses neither, and engines use that one.
    """
    rope, is_yarn = rope_scaling(config), rope_type(config) == "yarn"
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if is_yarn and not (mscale and all_dim) and (all_dim or mscale not in (None, 1)):
        raise UserError(
            f"YaRN with mscale {mscale} and mscale_all_dim {all_dim}: transformers and engines read this differently; set both"
        )
    return {
        "mscale": 1.0 if mscale is None else float(mscale),
        "mscale_all_dim": float(not is_yarn) if all_dim is None else float(all_dim),
    }


def qkv_bias(config: Config) -> ModelArgs:
    """Biases in the projections of queries, keys and values, where the config decides that."""
    return {"add_qkv_bias": bool(config.get("qkv_bias", config.get("attention_bias", False)))}


def qk_norm(config: Config) -> ModelArgs:
    """Norms of queries and keys, where the config decides that."""
    return {"qk_layernorm": bool(config.get("use_qk_norm", False))}


def mtp_layers(config: Config) -> ModelArgs:
    """Layers that predict further tokens, in families that are always trained with theirs."""
    count = config.get("num_nextn_predict_layers") or 0
    return {"mtp_num_layers": count} if count else {}


def partial_rope(config: Config) -> ModelArgs:
    """The share of each head that is rotated."""
    return {"rotary_percent": rotated_share(config)}


def rotated_share(config: Config) -> float:
    """The share of each head that is rotated, a number of channels before all else."""
    if config.get("rotary_dim"):
        return config["rotary_dim"] / _head_dim(config)
    return float(rope_scaling(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))


# Entries that scale RoPE for which Megatron has fixed values, and no flags: by type of scaling, these values.
FIXED_BY_SCALING: dict[str, Config] = {
    # These decide at which wavelengths the scaling begins and ends.
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    # The factor follows from mscale and mscale_all_dim.
    "yarn": {"attention_factor": None, "truncate": True},
}


def llama3_rope(config: Config) -> ModelArgs:
    """The frequency scaling of Llama 3.1 and later. The factor has two names on the command line."""
    if rope_type(config) != "llama3":
        return {}
    factor = float(rope_scaling(config).get("factor", 8.0))
    return {"use_rope_scaling": True, "rotary_scaling_factor": factor, "rope_scaling_factor": factor}


def experts(config: Config) -> ModelArgs:
    """Number and widths of the experts, and which layers have them."""
    number, width = first_of(config, NUM_EXPERTS), first_of(config, _EXPERT_WIDTH)
    if number is None or width is None or config.get("num_experts_per_tok") is None:
        raise UserError(f"it lacks one of {' | '.join(NUM_EXPERTS)}, {' | '.join(_EXPERT_WIDTH)}, num_experts_per_tok")
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
    return {
        "num_experts": number,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": False,
        "moe_layer_freq": _moe_layer_freq(config),
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0.0,
    }


def softmax_router(config: Config) -> ModelArgs:
    """Scores are a softmax: over the chosen experts when they are normalised, else over all."""
    return {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not config.get("norm_topk_prob", True),
        "moe_router_enable_expert_bias": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_token_drop_policy": "probs",
    }


def sigmoid_router(config: Config) -> ModelArgs:
    """Scores are sigmoids, and experts are chosen with a bias each. Groups of experts are set only if there are several."""
    factor = float(config.get("routed_scaling_factor") or 1.0)
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": factor if factor != 1.0 else None,
        **(expert_groups(config) if (config.get("n_group") or 1) > 1 else {}),
    }


def frozen_expert_bias(config: Config) -> ModelArgs:
    """The bias per expert stays as it was pretrained."""
    return {"moe_router_load_balancing_type": "seq_aux_loss", "moe_router_bias_update_rate": 0.0}


def expert_groups(config: Config) -> ModelArgs:
    """The router chooses groups of experts first, then experts within these groups."""
    return {
        "moe_router_num_groups": config.get("n_group") or 1,
        "moe_router_group_topk": config.get("topk_group") or 1,
    }


def linear_attention(config: Config) -> ModelArgs:
    """Gated delta-net layers, and softmax layers between them whose output is gated."""
    sizes = {
        name: config[name]
        for name in (
            "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
            "linear_num_value_heads",
        )
        if name in config
    }  # fmt: skip
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": _linear_attention_freq(config),
        "attention_output_gate": True,
        **sizes,
    }


def sparse_attention(config: Config) -> ModelArgs:
    """The indexer that chooses keys, and which layers have one if not all do."""
    names = {
        "index_n_heads": "dsa_indexer_n_heads", "index_head_dim": "dsa_indexer_head_dim", "index_topk": "dsa_indexer_topk",
    }  # fmt: skip
    require(config, tuple(names))
    own = _indexer_layers(config)
    return {
        "experimental_attention_variant": "dsa",
        **{flag: config[name] for name, flag in names.items()},
        "dsa_indexer_layers": None if all(own) else own,
        "dsa_indexer_rope_interleave": bool(config.get("indexer_rope_interleave", False)),
    }


def rope_scaling(config: Config) -> Config:
    """The entries that scale RoPE. Newer configs keep them, and the base, in `rope_parameters`."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def rope_type(config: Config) -> str:
    """`default` (plain), `llama3`, `yarn`, …"""
    parameters = rope_scaling(config)
    name = parameters.get("rope_type", parameters.get("type", "default"))
    return "default" if name == "mrope" else name  # mrope is plain RoPE for text


def rope_base(config: Config) -> int | float:
    """The base of the rotation: an int, as Megatron's flag has it, or what is between two of them as it is."""
    # A stale top-level `rope_theta` must not win over that beside the scaling.
    base = rope_scaling(config).get("rope_theta", config.get("rope_theta", 10000))
    return int(base) if base == int(base) else base


def unscaled_length(config: Config) -> int | None:
    """The length from which RoPE is scaled: that of the model if none is told. None: the config tells neither."""
    return rope_scaling(config).get("original_max_position_embeddings", config.get("max_position_embeddings"))


def ropes_differ(config: Config) -> bool:
    """Whether `rope_parameters` and `rope_scaling` are both there and do not mean the same. Engines take the latter for most
    types, and do not look for its base in the former."""
    both = [rope for name in _OBJECTS if (rope := config.get(name))]
    common = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    forms = [{**common, **rope, "type": None, "rope_type": rope_type({"rope_scaling": rope})} for rope in both]
    return len(forms) == 2 and forms[0] != forms[1]


def require(config: Config, names: tuple[str, ...]) -> None:
    """Raises a `UserError` that lists which of `names` the config lacks."""
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise UserError(f"it lacks {', '.join(missing)}")


def first_of(config: Config, names: tuple[str, ...]) -> Any:
    """The value of the first entry out of `names` that the config has; None if it has none of them."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _head_dim(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _moe_layer_freq(config: Config) -> int | list[int]:
    """1 when every layer has experts, else one entry per layer."""
    layers = range(config["num_hidden_layers"])
    kinds, step = config.get("mlp_layer_types"), config.get("decoder_sparse_step") or 1
    if kinds is not None:
        pattern = [int(kind == "sparse") for kind in kinds[: len(layers)]]
    elif config.get("first_k_dense_replace") is not None:
        pattern = [int(layer >= config["first_k_dense_replace"]) for layer in layers]
    else:
        dense = set(config.get("mlp_only_layers") or ())
        pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in layers]
    return 1 if all(pattern) else pattern


def _linear_attention_freq(config: Config) -> int | list[int]:
    """N when the last of every N layers has softmax attention, else one entry per layer."""
    interval, kinds = config.get("full_attention_interval") or 4, config.get("layer_types")
    if kinds is None:
        return interval
    pattern = [int(kind == "linear_attention") for kind in kinds[: config["num_hidden_layers"]]]
    regular = [int((layer + 1) % interval != 0) for layer in range(len(pattern))]
    return interval if pattern == regular else pattern


def _indexer_layers(config: Config) -> list[int]:
    """For each layer, 1 if it has an indexer of its own, else 0: it then uses the choice of the last layer that has one."""
    count = config["num_hidden_layers"]
    kinds, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    if kinds is not None:
        return [int(kind == "full") for kind in kinds[:count]]
    if pattern is not None:
        return [int(letter in ("F", "full")) for letter in pattern[:count]]
    every, start = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset")
    start = 2 if start is None else start
    return [int(max(layer - start + 1, 0) % every == 0) for layer in range(count)]


_SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "num_experts", "n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "index_n_heads", "index_head_dim", "index_topk",
)  # fmt: skip
_COUNTS = (
    "shared_expert_intermediate_size", "n_shared_experts", "num_nextn_predict_layers", "first_k_dense_replace", "n_group",
    "topk_group", "decoder_sparse_step", "rotary_dim", "full_attention_interval", "index_topk_freq",
    "index_skip_topk_offset",
)  # fmt: skip
_FACTORS = (
    "rms_norm_eps", "rope_theta", "partial_rotary_factor", "routed_scaling_factor", "factor", "beta_fast", "beta_slow",
    "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
)  # fmt: skip
_SWITCHES = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "use_qk_norm", "norm_topk_prob", "use_sliding_window",
    "indexer_rope_interleave",
)  # fmt: skip
_LISTS = ("layer_types", "mlp_layer_types", "mlp_only_layers", "indexer_types")
_OBJECTS = ("rope_parameters", "rope_scaling")


def wrong_entries(config: Config) -> list[str]:
    """`name value, must be …` for every entry of a wrong type or range. Null counts as absent."""
    found = [*_wrong(config), *(f"{name}: {text}" for name in _OBJECTS for text in _wrong_inside(config.get(name)))]
    layers = config.get("num_hidden_layers")
    return found or [
        f"{name} has {len(config[name])} entries, must have one for each of the {layers} layers"
        for name in ("layer_types", "mlp_layer_types")
        if config.get(name) is not None and layers is not None and len(config[name]) < layers
    ]


def _wrong_inside(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from _wrong(value)


def _wrong(config: Config) -> Iterator[str]:
    for names, fits, kind in _KINDS:
        for name in names:
            value = config.get(name)
            if value is not None and not fits(value):
                yield f"{name} {value!r}, must be {kind}"


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


_KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_SIZES, lambda value: _whole(value, 1), "a whole number above 0"),
    (_COUNTS, lambda value: _whole(value, 0), "a whole number, at least 0"),
    (_FACTORS, _above_zero, "a number above 0"),
    (_SWITCHES, lambda value: isinstance(value, bool), "true or false"),
    (_LISTS, lambda value: isinstance(value, list), "a list"),
    (_OBJECTS, lambda value: isinstance(value, dict), "an object"),
)
