"""What is done with a derived flag: most are compared with the config, these are not, or not always."""

from slime.arguments.types import written_pattern

# Filled in when `--model-args-from-hf` is given and nothing was typed, never compared: how to compute, not what.
CHOICES = frozenset({
    "max_position_embeddings", "mtp_num_layers", "make_vocab_size_divisible_by", "add_position_embedding",
    "attention_softmax_in_fp32", "apply_rope_fusion", "masked_softmax_fusion", "enable_experimental", "allgather_cp",
    "moe_grouped_gemm", "moe_permute_fusion", "moe_router_dtype", "moe_aux_loss_coeff", "moe_router_load_balancing_type",
    "moe_router_bias_update_rate", "moe_token_dispatcher_type", "moe_token_drop_policy",
})  # fmt: skip

# Details that scripts with explicit flags usually leave out: filled in from the config unless typed, compared if typed.
SUPPLEMENTS = frozenset({
    "rope_scaling_factor", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk",
    "dsa_indexer_layers",
})  # fmt: skip

# Attributes whose usual flag has another name.
_SPELLINGS = {
    "layernorm_epsilon": "--norm-epsilon",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "add_bias_linear": "--disable-bias-linear",
}
# Switches that set their attribute to False.
_NEGATIVE = frozenset({"add_bias_linear"})


def spelling(name: str) -> str:
    """The flag that sets `args.{name}`."""
    return _SPELLINGS.get(name, "--" + name.replace("_", "-"))


def shown(name: str, value: object) -> str:
    """The value of `args.{name}` as one would type it: switches are given or not, lists are written as patterns."""
    if isinstance(value, bool):
        return "given" if value is (name not in _NEGATIVE) else "not given"
    if value is None:
        return "unset"
    if isinstance(value, list) and value and all(entry in (0, 1) for entry in value):
        return written_pattern(value)
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
