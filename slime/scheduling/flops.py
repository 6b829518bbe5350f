"""Forward FLOPs of one sequence: a·L + b·L², exact integers.

A multiplication and an addition count as two operations. Attention counts its causal half. Backward is twice the forward, so a
training step costs three times these numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FlopsModel:
    """FLOPs of a sequence of L tokens = `per_token`·L + `per_token_pair`·L²."""

    per_token: int
    per_token_pair: int

    def forward_flops(self, length: int) -> int:
        return (self.per_token + self.per_token_pair * length) * length


def gqa_attention_flops(hidden_size: int, num_heads: int, num_query_groups: int, head_dim: int) -> FlopsModel:
    """One layer of grouped-query attention: q, k, v and output projections, QKᵀ and AV."""
    query_width = num_heads * head_dim
    projections = 2 * hidden_size * query_width + 4 * hidden_size * num_query_groups * head_dim
    output = 2 * query_width * hidden_size
    return FlopsModel(per_token=projections + output, per_token_pair=2 * query_width)


def mla_attention_flops(
    hidden_size: int,
    num_heads: int,
    q_lora_rank: int | None,
    kv_lora_rank: int,
    qk_head_dim: int,
    qk_pos_emb_head_dim: int,
    v_head_dim: int,
) -> FlopsModel:
    """One layer of multi-head latent attention (arXiv 2405.04434, section 2.1); without `q_lora_rank`, q is one projection."""
    query_width = num_heads * (qk_head_dim + qk_pos_emb_head_dim)
    value_width = num_heads * v_head_dim
    if q_lora_rank:
        query = 2 * q_lora_rank * (hidden_size + query_width)
    else:
        query = 2 * hidden_size * query_width
    latent = kv_lora_rank * (hidden_size + num_heads * (qk_head_dim + v_head_dim))
    key_value = 2 * (latent + hidden_size * qk_pos_emb_head_dim)
    output = 2 * value_width * hidden_size
    return FlopsModel(per_token=query + key_value + output, per_token_pair=query_width + value_width)


def mlp_flops_per_token(hidden_size: int, ffn_width: int) -> int:
    """A gated MLP (three projections). Of mixture-of-experts layers: `ffn_width` = expert width · top-k + shared width."""
    return 6 * hidden_size * ffn_width


def model_flops(
    attention: FlopsModel, *, hidden_size: int, vocab_size: int, ffn_widths: Sequence[tuple[int, int]]
) -> FlopsModel:
    """The whole model; `ffn_widths` = (number of layers, MLP width of these layers) for each kind of layer."""
    num_layers = sum(count for count, _ in ffn_widths)
    mlps = sum(count * mlp_flops_per_token(hidden_size, width) for count, width in ffn_widths)
    head = 2 * hidden_size * vocab_size
    return FlopsModel(
        per_token=num_layers * attention.per_token + mlps + head,
        per_token_pair=num_layers * attention.per_token_pair,
    )


def flops_model_from_args(args: Any) -> FlopsModel:
    """The model shape named as in Megatron's arguments (`hidden_size`, `num_query_groups`, `kv_channels`, …)."""
    num_heads = args.num_attention_heads
    if getattr(args, "multi_latent_attention", False):
        attention = mla_attention_flops(
            args.hidden_size,
            num_heads,
            args.q_lora_rank,
            args.kv_lora_rank,
            args.qk_head_dim,
            args.qk_pos_emb_head_dim,
            args.v_head_dim,
        )
    else:
        attention = gqa_attention_flops(
            args.hidden_size,
            num_heads,
            getattr(args, "num_query_groups", None) or num_heads,
            getattr(args, "kv_channels", None) or args.hidden_size // num_heads,
        )
    return model_flops(
        attention, hidden_size=args.hidden_size, vocab_size=args.vocab_size, ffn_widths=_ffn_widths_from_args(args)
    )


def _ffn_widths_from_args(args: Any) -> list[tuple[int, int]]:
    num_layers = args.num_layers
    dense_width = getattr(args, "ffn_hidden_size", None) or 4 * args.hidden_size
    if not getattr(args, "num_experts", None):
        return [(num_layers, dense_width)]
    frequency = getattr(args, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        num_moe_layers = sum(layer % frequency == 0 for layer in range(num_layers))
    else:
        num_moe_layers = sum(bool(is_moe) for is_moe in frequency)
    expert_width = getattr(args, "moe_ffn_hidden_size", None) or dense_width
    shared_width = getattr(args, "moe_shared_expert_intermediate_size", None) or 0
    moe_width = expert_width * args.moe_router_topk + shared_width
    return [(num_layers - num_moe_layers, dense_width), (num_moe_layers, moe_width)]


def calculate_fwd_flops(seqlens: Sequence[int], args: Any) -> int:
    """Forward FLOPs of sequences of these lengths, each attending only to itself, for the model shape in `args`."""
    model = flops_model_from_args(args)
    return sum(model.forward_flops(int(length)) for length in seqlens)
