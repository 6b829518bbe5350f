"""Forward FLOPs of one sequence: a·L + b·L², exact integers.

A multiplication and an addition count as two operations. Of attention, the causal half counts. The backward pass costs twice
the forward pass, so a training step costs three times these numbers, except for the choice of keys in sparse attention, which
has no backward pass.
"""

from dataclasses import dataclass

from slime.estimates.shape import IndexerShape, LinearAttentionShape, ModelShape


@dataclass(frozen=True)
class FlopsModel:
    """FLOPs of a sequence of L tokens: `per_token`·L + `per_token_pair`·L², and for L above `topk` another
    `choosing_per_token`·L + `choosing_per_token_pair`·L².

    In sparse attention each row chooses `topk` keys; in a sequence that has no more, nothing is chosen.
    """

    per_token: int
    per_token_pair: int
    choosing_per_token: int = 0
    choosing_per_token_pair: int = 0
    topk: int = 0

    def forward_flops(self, length: int) -> int:
        per_token, per_token_pair = self.per_token, self.per_token_pair
        if length > self.topk:
            per_token += self.choosing_per_token
            per_token_pair += self.choosing_per_token_pair
        return (per_token + per_token_pair * length) * length


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
    """One layer of multi-head latent attention (arXiv 2405.04434, section 2.1); without `q_lora_rank`, q is one projection.

    What the kernel on CUDA computes with values that are padded to the width of keys is not counted.
    """
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


def linear_attention_flops(hidden_size: int, linear: LinearAttentionShape) -> FlopsModel:
    """One layer of gated delta net (arXiv 2412.06464): projections, convolution, and the recurrence over its state.

    The state of a head is a matrix of key width by value width; each token reads it twice and writes it once.
    """
    inputs = 2 * hidden_size * (2 * linear.key_width + 2 * linear.value_width + 2 * linear.num_value_heads)
    convolution = 2 * linear.conv_kernel * (2 * linear.key_width + linear.value_width)
    recurrence = 6 * linear.key_head_dim * linear.value_width
    output = 2 * linear.value_width * hidden_size
    return FlopsModel(per_token=inputs + convolution + recurrence + output, per_token_pair=0)


def indexer_flops(hidden_size: int, query_input: int, indexer: IndexerShape) -> FlopsModel:
    """One layer's choice of keys (arXiv 2512.02556, equation 1): projections to queries, keys and weights; then, for each key
    that a row sees, a product per head and the weighted sum of these."""
    width = indexer.num_heads * indexer.head_dim
    projections = 2 * (query_input * width + hidden_size * (indexer.head_dim + indexer.num_heads))
    return FlopsModel(per_token=projections, per_token_pair=width + indexer.num_heads)


def mlp_flops_per_token(hidden_size: int, ffn_width: int, *, gated: bool = True) -> int:
    """An MLP of three projections, or two without a gate. With experts, `ffn_width` is expert width · top-k + shared width."""
    return (6 if gated else 4) * hidden_size * ffn_width


def model_flops(shape: ModelShape) -> FlopsModel:
    """The whole model without multi-token prediction.

    Sparse attention multiplies with all keys that a row sees and masks those that were not chosen. So it counts like dense
    attention, with its indexers on top.
    """
    softmax = _softmax_attention_flops(shape)
    per_token, per_token_pair = 2 * shape.hidden_size * shape.vocab_size, 0
    for layer in range(shape.num_layers):
        attention = softmax
        if shape.has_linear_attention(layer):
            attention = linear_attention_flops(shape.hidden_size, shape.linear_attention)
        width = shape.ffn_hidden_size
        if shape.has_experts(layer):
            width = shape.moe.ffn_hidden_size * shape.moe.topk + shape.moe.shared_ffn_hidden_size
        per_token += attention.per_token + mlp_flops_per_token(shape.hidden_size, width, gated=shape.gated_mlp)
        per_token_pair += attention.per_token_pair
    indexer = shape.mla.indexer if shape.mla is not None else None
    if indexer is None:
        return FlopsModel(per_token=per_token, per_token_pair=per_token_pair)
    query_input = shape.mla.q_lora_rank or shape.hidden_size
    one, count = indexer_flops(shape.hidden_size, query_input, indexer), sum(indexer.layers)
    choosing = {"choosing_per_token": one.per_token * count, "choosing_per_token_pair": one.per_token_pair * count}
    return FlopsModel(per_token=per_token, per_token_pair=per_token_pair, **choosing, topk=indexer.topk)


def _softmax_attention_flops(shape: ModelShape) -> FlopsModel:
    if shape.mla is not None:
        return mla_attention_flops(
            shape.hidden_size,
            shape.num_attention_heads,
            shape.mla.q_lora_rank,
            shape.mla.kv_lora_rank,
            shape.mla.qk_head_dim,
            shape.mla.qk_pos_emb_head_dim,
            shape.mla.v_head_dim,
        )
    attention = gqa_attention_flops(
        shape.hidden_size, shape.num_attention_heads, shape.num_query_groups, shape.head_dim
    )
    gate = 2 * shape.hidden_size * shape.query_width if shape.attention_output_gate else 0
    return FlopsModel(attention.per_token + gate, attention.per_token_pair)
