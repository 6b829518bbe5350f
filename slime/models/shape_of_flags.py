"""The model shape that Megatron-LM's flags describe, and the FLOPs that follow from it.

Only `num_layers`, `hidden_size`, `num_attention_heads` and `vocab_size` are required: FLOPs are counted for plain namespaces
too, which have only the flags of their model. A missing flag counts with its default.
"""

from collections.abc import Sequence
from typing import Any, Literal

from slime.estimates.flops import FlopsModel, model_flops
from slime.estimates.shape import (
    IndexerShape,
    LinearAttentionShape,
    MlaShape,
    ModelShape,
    MoeShape,
    expert_layers,
    linear_attention_layers,
)
from slime.models.families import qk_norm_spans_heads

# Without these flags a model is not described.
SHAPE_FLAGS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")


def model_shape_from_args(args: Any) -> ModelShape:
    """The shape of the run's model.

    Args:
        args: the flags under the names of Megatron-LM; the shape flags have their final values.

    Raises:
        UserError: a layer pattern (`--moe-layer-freq`, `--linear-attention-freq`) that does not fit `--num-layers`.
    """
    heads, hidden = args.num_attention_heads, args.hidden_size
    groups = _get(args, "num_query_groups", heads) if _get(args, "group_query_attention", True) else heads
    return ModelShape(
        num_layers=args.num_layers,
        hidden_size=hidden,
        ffn_hidden_size=_get(args, "ffn_hidden_size", 4 * hidden),
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=_get(args, "kv_channels", hidden // heads),
        vocab_size=args.vocab_size,
        padded_vocab_size=_get(args, "padded_vocab_size", args.vocab_size),
        tied_embeddings=not _get(args, "untie_embeddings_and_output_weights", True),
        qkv_bias=_get(args, "add_qkv_bias", False),
        linear_bias=_get(args, "add_bias_linear", False),
        qk_norm=_qk_norm(args),
        num_extra_norms=sum(_get(args, name, False) for name in ("post_self_attn_layernorm", "post_mlp_layernorm")),
        norm_bias=_get(args, "normalization", "RMSNorm") == "LayerNorm",
        gated_mlp=_get(args, "swiglu", True),
        attention_output_gate=_get(args, "attention_output_gate", False),
        mla=_mla(args),
        moe=_moe(args),
        linear_attention=_linear_attention(args),
        mtp_num_layers=_get(args, "mtp_num_layers", 0),
    )


def padded_vocabulary(args: Any) -> int:
    """The rows of the embedding in memory: `--padded-vocab-size`, or `--vocab-size` rounded up so that ranks share evenly.

    Args:
        args: parsed flags, in which `vocab_size` is set.
    """
    if args.padded_vocab_size is not None:
        return args.padded_vocab_size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-args.vocab_size // multiple) * multiple


def flops_model_from_args(args: Any) -> FlopsModel:
    """The FLOPs of the model whose shape `args` has under Megatron's names (`hidden_size`, `num_query_groups`, …)."""
    return model_flops(model_shape_from_args(args))


def calculate_fwd_flops(seqlens: Sequence[int], args: Any) -> int:
    """Forward FLOPs of sequences of these lengths, each attending only to itself, for the model shape in `args`."""
    model = flops_model_from_args(args)
    return sum(model.forward_flops(int(length)) for length in seqlens)


def _get(args: Any, name: str, default: Any) -> Any:
    value = getattr(args, name, None)
    return default if value is None else value


def _qk_norm(args: Any) -> Literal["head", "full"] | None:
    if not _get(args, "qk_layernorm", False):
        return None
    return "full" if qk_norm_spans_heads(_get(args, "spec", ())) else "head"


def _mla(args: Any) -> MlaShape | None:
    if not _get(args, "multi_latent_attention", False):
        return None
    indexer = None
    sizes = [_get(args, f"dsa_indexer_{name}", None) for name in ("n_heads", "head_dim", "topk")]
    if None not in sizes:
        layers = _get(args, "dsa_indexer_layers", [1] * args.num_layers)
        is_trained = bool(_get(args, "dsa_indexer_loss_coeff", 0))
        indexer = IndexerShape(*sizes, tuple(bool(own) for own in layers[: args.num_layers]), is_trained)
    return MlaShape(
        q_lora_rank=args.q_lora_rank,
        kv_lora_rank=args.kv_lora_rank,
        qk_head_dim=args.qk_head_dim,
        qk_pos_emb_head_dim=args.qk_pos_emb_head_dim,
        v_head_dim=args.v_head_dim,
        indexer=indexer,
    )


def _moe(args: Any) -> MoeShape | None:
    num_experts = _get(args, "num_experts", None)
    if not num_experts:
        return None
    return MoeShape(
        num_experts=num_experts,
        topk=args.moe_router_topk,
        ffn_hidden_size=_get(args, "moe_ffn_hidden_size", _get(args, "ffn_hidden_size", 4 * args.hidden_size)),
        shared_ffn_hidden_size=_get(args, "moe_shared_expert_intermediate_size", 0),
        shared_gate=_get(args, "moe_shared_expert_gate", False),
        expert_bias=_get(args, "moe_router_enable_expert_bias", False),
        layers=expert_layers(_get(args, "moe_layer_freq", 1), args.num_layers),
    )


def _linear_attention(args: Any) -> LinearAttentionShape | None:
    frequency = _get(args, "linear_attention_freq", None)
    if frequency is None:
        return None
    return LinearAttentionShape(
        num_key_heads=args.linear_num_key_heads,
        key_head_dim=args.linear_key_head_dim,
        num_value_heads=args.linear_num_value_heads,
        value_head_dim=args.linear_value_head_dim,
        conv_kernel=args.linear_conv_kernel_dim,
        layers=linear_attention_layers(frequency, args.num_layers),
    )
