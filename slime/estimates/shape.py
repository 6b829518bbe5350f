"""The shape of a decoder-only model, from which its number of parameters, its memory and its FLOPs follow.

A shape is plain numbers and needs no framework. It describes every layer: `moe.layers`, `linear_attention.layers` and
`indexer.layers` hold one boolean per decoder layer. A vision tower is not part of it.
"""

from dataclasses import dataclass
from typing import Literal

from slime.utils.errors import UserError


@dataclass(frozen=True)
class IndexerShape:
    """The indexer of sparse attention.

    layers[i]: decoder layer i has an indexer of its own; a layer without one reuses the choice of the layer before it.
    topk: how many keys each row chooses.
    is_trained: whether it has a loss (`--dsa-indexer-loss-coeff`).
    """

    num_heads: int
    head_dim: int
    topk: int
    layers: tuple[bool, ...]
    is_trained: bool = False


@dataclass(frozen=True)
class MlaShape:
    """Multi-head latent attention. A query/key head is `qk_head_dim` without position plus `qk_pos_emb_head_dim` with.

    `q_lora_rank` None: queries come from one projection instead of two.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    indexer: IndexerShape | None = None

    @property
    def latent_width(self) -> int:
        """Width to which a token is projected down: its latent vectors, and the part of the keys that carries the position."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim + (self.q_lora_rank or 0)


@dataclass(frozen=True)
class MoeShape:
    """Experts. `layers[i]`: decoder layer i has them. `shared_ffn_hidden_size` is the total of all shared experts."""

    num_experts: int
    topk: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int
    shared_gate: bool
    expert_bias: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class LinearAttentionShape:
    """Gated delta net. `layers[i]`: decoder layer i uses it instead of softmax attention."""

    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int
    conv_kernel: int
    layers: tuple[bool, ...]

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class ModelShape:
    """A whole model; widths in elements.

    head_dim: width of one softmax-attention head; of no meaning with `mla`.
    padded_vocab_size: rows of the embedding as they are held in memory.
    qk_norm: norms of queries and keys, one weight vector for all heads ("head") or one entry per channel ("full").
    num_extra_norms: norms of a layer beyond the two before attention and MLP.
    norm_bias: norms have a bias (LayerNorm).
    attention_output_gate: queries are projected together with a gate of the same width.
    mtp_num_layers: layers that predict further tokens; they are no decoder layers.
    value_head: in place of the vocabulary projection there is one row, whole on every tensor-parallel rank (a critic).
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    num_extra_norms: int = 0
    norm_bias: bool = False
    gated_mlp: bool = True
    attention_output_gate: bool = False
    mla: MlaShape | None = None
    moe: MoeShape | None = None
    linear_attention: LinearAttentionShape | None = None
    mtp_num_layers: int = 0
    value_head: bool = False

    # In what follows layer -1 is one of multi-token prediction: like the last decoder layer, but always with softmax attention,
    # and with an indexer if any layer has one.

    def has_experts(self, layer: int) -> bool:
        """Whether decoder layer `layer`, counted from 0, has experts instead of one MLP."""
        return self.moe is not None and self.moe.layers[layer]

    def has_linear_attention(self, layer: int) -> bool:
        """Whether decoder layer `layer`, counted from 0, has linear attention instead of softmax attention."""
        return self.linear_attention is not None and layer >= 0 and self.linear_attention.layers[layer]

    @property
    def trains_indexers(self) -> bool:
        return self.mla is not None and self.mla.indexer is not None and self.mla.indexer.is_trained

    def has_indexer(self, layer: int) -> bool:
        """Whether decoder layer `layer`, counted from 0, has its own indexer of sparse attention."""
        if self.mla is None or self.mla.indexer is None:
            return False
        return layer < 0 or self.mla.indexer.layers[layer]

    @property
    def query_width(self) -> int:
        """All query heads side by side."""
        if self.mla is not None:
            return self.num_attention_heads * (self.mla.qk_head_dim + self.mla.qk_pos_emb_head_dim)
        return self.num_attention_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """What the output projection of softmax attention reads: one value per query head."""
        return self.num_attention_heads * (self.mla.v_head_dim if self.mla is not None else self.head_dim)

    @property
    def key_width(self) -> int:
        """All key heads side by side, which is also the width of all values (grouped-query attention only)."""
        return self.num_query_groups * self.head_dim


def expert_layers(frequency: int | list[int], num_layers: int) -> tuple[bool, ...]:
    """For each decoder layer, whether it has experts.

    Args:
        frequency: `--moe-layer-freq`: N (layers 0, N, 2N, …) or one entry per layer.

    Raises:
        UserError: another number of entries than layers, or N below 1.
    """
    if isinstance(frequency, int):
        _require_positive(frequency, "--moe-layer-freq")
        return tuple(layer % frequency == 0 for layer in range(num_layers))
    return _entries(frequency, num_layers, "--moe-layer-freq")


def linear_attention_layers(frequency: int | list[int], num_layers: int) -> tuple[bool, ...]:
    """For each decoder layer, whether it has linear attention.

    Args:
        frequency: `--linear-attention-freq`: N (the last of every N layers has softmax attention) or one entry per layer.

    Raises:
        UserError: another number of entries than layers, or N below 1.
    """
    if isinstance(frequency, int):
        _require_positive(frequency, "--linear-attention-freq")
        return tuple((layer + 1) % frequency != 0 for layer in range(num_layers))
    return _entries(frequency, num_layers, "--linear-attention-freq")


def _require_positive(frequency: int, flag: str) -> None:
    if frequency < 1:
        raise UserError(f"{flag} {frequency}: give a number from 1, or one entry per layer such as [0]*3+[1]*58")


def _entries(pattern: list[int], num_layers: int, flag: str) -> tuple[bool, ...]:
    if len(pattern) != num_layers:
        raise UserError(
            f"{flag} has {len(pattern)} entries, but --num-layers is {num_layers}; give one entry per layer, such as "
            f"[0]*1+[1]*{num_layers - 1}"
        )
    return tuple(bool(entry) for entry in pattern)
