"""The kinds of values that entries of a `config.json` may have, asked before anything is computed from them."""

from collections.abc import Callable, Iterator
from typing import Any

Config = dict[str, Any]

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
)  # fmt: skip
_FACTORS = (
    "rms_norm_eps", "rope_theta", "partial_rotary_factor", "routed_scaling_factor", "factor", "beta_fast", "beta_slow",
    "original_max_position_embeddings",
)  # fmt: skip
_SWITCHES = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "use_qk_norm", "norm_topk_prob", "use_sliding_window",
)  # fmt: skip
_LISTS = ("layer_types", "mlp_layer_types", "mlp_only_layers", "indexer_types")
_OBJECTS = ("rope_parameters", "rope_scaling")


def wrong_entries(config: Config) -> list[str]:
    """`name value, must be …` for every entry of the wrong kind. Null counts as absent."""
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
