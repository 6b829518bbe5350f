"""The layers of GLM-5 and DeepSeek V3.2: latent attention to the keys that an indexer chooses.

An indexer scores all keys that a row may see, with few narrow heads, and the row attends only to the best of them
(DeepSeek-V3.2, arXiv 2512.02556, section 2.1). A layer without an indexer takes the choice of the last layer before it that has
one. The choice passes no gradient: an indexer learns from a loss of its own alone (`indexer_loss`), or does not change.

The choice belongs to one stream and travels with it (`StreamParams`), so that micro-batches that are under way at the same
time, and layers that are recomputed, never see the choice of another stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime.backends.megatron_utils.attention import LatentAttention, StreamParams
from slime.backends.megatron_utils.indexer_loss import IndexerLoss, IndexVectors, blocks_of, index_scores
from slime.backends.megatron_utils.layer_spec import get_decoder_spec, with_normed_query_latents
from slime.training.context_parallel import gather_rows
from slime.training.packed_stream import PackedStream
from slime.utils.errors import UserError

# Elements of a matrix of scores in float32, which makes 256 MiB. Two exist at a time: those of one head, and the sum of all.
_SCORES = 2**26


def get_glm5_spec(args: Any, config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The decoder's spec with sparse attention in every layer.

    Raises:
        UserError: the first layer of a pipeline stage takes the choice of a layer on another stage; or it is not known what
            sizes the indexer has, or which layers have one.
    """
    sizes = (config.dsa_indexer_n_heads, config.dsa_indexer_head_dim, config.dsa_indexer_topk, config.q_lora_rank)
    if None in sizes:
        raise UserError(
            "--spec with sparse attention needs --q-lora-rank and the sizes of its indexer: give --hf-checkpoint, or "
            "--dsa-indexer-n-heads, --dsa-indexer-head-dim and --dsa-indexer-topk"
        )
    owners = args.dsa_indexer_layers or [1] * config.num_layers
    if len(owners) < config.num_layers:
        raise UserError(f"--dsa-indexer-layers has {len(owners)} numbers, and the model {config.num_layers} layers")
    block = get_decoder_spec(config, vp_stage)
    if not isinstance(block, TransformerBlockSubmodules):
        raise UserError("--spec with sparse attention needs --num-experts, or --transformer-impl local")
    first = get_transformer_layer_offset(config, vp_stage)
    if block.layer_specs and not owners[first]:
        raise UserError(
            f"layer {first} stands first on its pipeline stage and takes the keys that an indexer of another stage chooses; "
            "change --pipeline-model-parallel-size or the numbers of layers of its stages so that each begins with a layer "
            "that has an indexer"
        )
    learns = bool(args.dsa_indexer_loss_coeff)
    block.layer_specs = [_with_sparse_attention(layer, args, config, owners, learns) for layer in block.layer_specs]
    return block


def prediction_layer_spec(layer: ModuleSpec, args: Any, config: TransformerConfig) -> ModuleSpec:
    """The spec of a layer of multi-token prediction: each has an indexer, which learns if the layer does. The backend finds
    this function by its name."""
    # They are numbered on, behind the decoder's layers.
    owners = [1] * (config.num_layers + args.mtp_num_layers)
    learns = bool(args.dsa_indexer_loss_coeff) and args.enable_mtp_training
    return _with_sparse_attention(layer, args, config, owners, learns)


def _with_sparse_attention(
    layer: ModuleSpec, args: Any, config: TransformerConfig, owners: Sequence[int], learns: bool
) -> ModuleSpec:
    # An indexer reads the latent vectors.
    layer = with_normed_query_latents(layer, config)
    attention = layer.submodules.self_attention
    attention.module = SparseLatentAttention
    attention.params = {
        **attention.params,
        "owners": tuple(map(bool, owners)),
        "rotates_pairs": args.dsa_indexer_rope_interleave,
        "learns": learns,
    }
    return layer


class SparseLatentAttention(LatentAttention):
    """Latent attention of packed streams to the keys of `StreamParams.chosen`.

    If no sequence of a stream has more keys than a row may choose, no choice is made.

    Args:
        owners: for each layer of the model, whether it has an indexer.
        rotates_pairs: see `Indexer`.
        learns: whether the indexer has a loss.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        owners: Sequence[bool],
        rotates_pairs: bool,
        learns: bool,
        **options: Any,
    ) -> None:
        super().__init__(config, *args, **options)
        layer = self.layer_number - 1
        self.owner = max(number for number in range(layer + 1) if owners[number])
        self.is_shared = layer + 1 < len(owners) and not owners[layer + 1]
        self.indexer = Indexer(config, rotates_pairs) if owners[layer] else None
        self.indexer_loss = IndexerLoss(config, self.softmax_scale) if learns and self.indexer is not None else None

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: StreamParams | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As in `LatentAttention`; the keys that the rows may see are also put into `packed_seq_params.chosen`."""
        query, key, value, query_latent, latent = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params=packed_seq_params
        )
        chooses = max(packed_seq_params.stream.sequence_lengths) > self.config.dsa_indexer_topk
        learns = self.indexer_loss is not None and self.indexer_loss.is_due
        vectors = None
        if self.indexer is not None and (chooses or learns):
            rotation = self._rotation(len(packed_seq_params.stream.tokens), packed_seq_params)
            inputs = hidden_states.detach().squeeze(1), query_latent.detach().squeeze(1)
            with torch.set_grad_enabled(learns):
                vectors = self.indexer(*inputs, *rotation, packed_seq_params.stream)
        packed_seq_params.chosen = self._chosen(vectors, packed_seq_params) if chooses else None
        if learns:
            query = self.indexer_loss(query, vectors, query.squeeze(1), key.squeeze(1), packed_seq_params)
        return query, key, value, query_latent, latent

    def _chosen(self, vectors: IndexVectors | None, packed: StreamParams) -> torch.Tensor:
        if self.indexer is None:
            return packed.choices[self.owner]
        chosen = self.indexer.choose(vectors, packed.stream)
        if self.is_shared:
            if not self.training:
                # Nothing will be recomputed, so the layers that shared earlier choices do not need them any more.
                packed.choices.clear()
            packed.choices[self.owner] = chosen
        return chosen

    def _checkpointed_attention_forward(self, *tensors: Any, packed_seq_params: StreamParams, **options: Any) -> Any:
        # A copy, so that attention that is recomputed alone finds the choice of its own layer, and not that of later ones.
        own = dataclasses.replace(packed_seq_params)
        return super()._checkpointed_attention_forward(*tensors, packed_seq_params=own, **options)


class Indexer(MegatronModule):
    """Scores keys for rows: sum over heads h of w_h · relu(q_h · k), arXiv 2512.02556, equation 1.

    Queries are made of the queries' latent vectors; keys and the weights w are made of the hidden states. Every tensor-parallel
    rank has all weights; with sequence parallelism each chooses for its own rows.

    Args:
        rotates_pairs: whether neighbouring channels are rotated together, rather than those of the two halves.
    """

    def __init__(self, config: TransformerConfig, rotates_pairs: bool) -> None:
        super().__init__(config=config)
        self.heads, self.head_dim = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.rotates_pairs = rotates_pairs
        dtype = config.params_dtype
        self.wq_b = torch.nn.Linear(config.q_lora_rank, self.heads * self.head_dim, bias=False, dtype=dtype)
        self.wk = torch.nn.Linear(config.hidden_size, self.head_dim, bias=False, dtype=dtype)
        self.k_norm = torch.nn.LayerNorm(self.head_dim, eps=1e-6, dtype=dtype)
        self.weights_proj = torch.nn.Linear(config.hidden_size, self.heads, bias=False, dtype=dtype)
        for parameter in self.parameters():
            # Then each tensor-parallel rank has the gradient of its own rows, and they are summed.
            parameter.sequence_parallel = config.sequence_parallel

    def forward(
        self,
        hidden: torch.Tensor,
        query_latent: torch.Tensor,
        frequencies: torch.Tensor,
        concentration: float,
        stream: PackedStream,
    ) -> IndexVectors:
        """What scores are made of. Collective.

        Args:
            hidden, query_latent: [rows, channels]; with sequence parallelism this rank's part of the rows.
            frequencies: [T, 1, 1, rotated channels] of the positions of all rows of the context-parallel rank's `stream`.
            concentration: factor on cosine and sine.
        """
        first = 0
        if self.config.sequence_parallel:
            first = parallel_state.get_tensor_model_parallel_rank() * len(hidden)
            frequencies = frequencies.narrow(0, first, len(hidden))

        def rotated(vectors: torch.Tensor) -> torch.Tensor:
            """`vectors`, [rows, heads, channels], with their last channels rotated."""
            plain, turned = vectors.split([self.head_dim - frequencies.shape[-1], frequencies.shape[-1]], dim=-1)
            turned = _apply_rotary_pos_emb_bshd(
                turned, frequencies.squeeze(1), multi_latent_attention=self.rotates_pairs, mscale=concentration
            )
            return torch.cat([plain, turned], dim=-1)

        query = rotated(self.wq_b(query_latent).unflatten(-1, (self.heads, -1)))
        key = rotated(self.k_norm(self.wk(hidden)).unsqueeze(1)).squeeze(1)
        weight = self.weights_proj(hidden).float() * (self.heads * self.head_dim) ** -0.5
        key = gather_rows(self._of_all_rows(key), stream.cp, stream.gather_order)
        return IndexVectors(query, weight, key, first)

    @torch.no_grad()
    def choose(self, vectors: IndexVectors, stream: PackedStream) -> torch.Tensor:
        """The keys that each row of this rank attends to. Collective.

        Returns:
            int32 [T, k]: places of keys in the row's own sequence, in any order, padded with −1 if the row sees fewer than k.
        """
        count, chosen = self.config.dsa_indexer_topk, []
        for block in blocks_of(stream, vectors.rows, _SCORES):
            rows = slice(block.rows.start - vectors.first, block.rows.stop - vectors.first)
            chosen.append(_best(vectors.query[rows], vectors.weight[rows], vectors.key[block.keys], block.seen, count))
        return self._of_all_rows(torch.cat(chosen))

    def _of_all_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return gather_from_sequence_parallel_region(rows) if self.config.sequence_parallel else rows


def _best(query: torch.Tensor, weight: torch.Tensor, key: torch.Tensor, seen: int, count: int) -> torch.Tensor:
    """The `count` best keys of each row, int32, padded with −1. The first row sees `seen` keys, and every further row one
    more."""
    scores = index_scores(query, weight, key)
    hidden = torch.ones_like(scores, dtype=torch.bool).triu_(seen)
    best = scores.masked_fill_(hidden, -torch.inf).topk(min(count, scores.shape[1]), dim=-1)
    places = best.indices.int().masked_fill_(best.values == -torch.inf, -1)
    return torch.nn.functional.pad(places, (0, count - places.shape[1]), value=-1)
