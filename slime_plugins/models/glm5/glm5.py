"""The layers of GLM-5 and DeepSeek V3.2: latent attention to the keys that an indexer chooses.

An indexer scores all keys that a row may see, with few narrow heads, and the row attends only to the best of them
(DeepSeek-V3.2, arXiv 2512.02556, section 2.1). A layer without an indexer takes the choice of the last layer before it that has
one. The indexer is not trained: the choice passes no gradient, so its weights do not change.

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
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime.backends.megatron_utils.attention import LatentAttention, StreamParams
from slime.backends.megatron_utils.layer_spec import get_decoder_spec, with_normed_query_latents
from slime.training.context_parallel import gather_rows
from slime.training.packed_stream import PackedStream
from slime.utils.errors import UserError

# Elements of a matrix of scores in float32, which makes 256 MiB. Two exist at a time: those of one head, and the sum of all.
_SCORES = 2**26


def get_glm5_spec(args: Any, config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The decoder's spec with sparse attention in every layer.

    Raises:
        UserError: the first layer of a pipeline stage takes the choice of a layer on another stage; layers for multi-token
            prediction are asked for; or it is not known what sizes the indexer has, or which layers have one.
    """
    sizes = (config.dsa_indexer_n_heads, config.dsa_indexer_head_dim, config.dsa_indexer_topk, config.q_lora_rank)
    if None in sizes:
        raise UserError(
            "--spec with sparse attention needs --q-lora-rank and the sizes of its indexer: give --hf-checkpoint, or "
            "--dsa-indexer-n-heads, --dsa-indexer-head-dim and --dsa-indexer-topk"
        )
    if args.mtp_num_layers:
        raise UserError(
            f"--mtp-num-layers {args.mtp_num_layers}: prediction layers with sparse attention are not built; drop the flag"
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
    # An indexer reads the latent vectors.
    block.layer_specs = [with_normed_query_latents(layer, config) for layer in block.layer_specs]
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        attention.module = SparseLatentAttention
        attention.params = {
            **attention.params,
            "owners": tuple(map(bool, owners)),
            "rotates_pairs": args.dsa_indexer_rope_interleave,
        }
    return block


class SparseLatentAttention(LatentAttention):
    """Latent attention of packed streams to the keys of `StreamParams.chosen`.

    If no sequence of a stream has more keys than a row may choose, no choice is made.

    Args:
        owners: for each layer of the model, whether it has an indexer.
        rotates_pairs: see `Indexer`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        owners: Sequence[bool],
        rotates_pairs: bool,
        **options: Any,
    ) -> None:
        super().__init__(config, *args, **options)
        layer = self.layer_number - 1
        self.owner = max(number for number in range(layer + 1) if owners[number])
        self.is_shared = layer + 1 < len(owners) and not owners[layer + 1]
        self.indexer = Indexer(config, rotates_pairs) if owners[layer] else None

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: StreamParams | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As in `LatentAttention`; the keys that the rows may see are also put into `packed_seq_params.chosen`."""
        made = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params=packed_seq_params
        )
        packed_seq_params.chosen = self._chosen(hidden_states, made[3], packed_seq_params)
        return made

    def _chosen(self, hidden: torch.Tensor, query_latent: torch.Tensor, packed: StreamParams) -> torch.Tensor | None:
        if max(packed.stream.sequence_lengths) <= self.config.dsa_indexer_topk:
            return None
        if self.indexer is None:
            return packed.choices[self.owner]
        rotation = self._rotation(len(packed.stream.tokens), packed)
        chosen = self.indexer(hidden.squeeze(1), query_latent.squeeze(1), *rotation, packed.stream)
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

    @torch.no_grad()
    def forward(
        self,
        hidden: torch.Tensor,
        query_latent: torch.Tensor,
        frequencies: torch.Tensor,
        concentration: float,
        stream: PackedStream,
    ) -> torch.Tensor:
        """The keys that each row of this rank attends to. Collective.

        Args:
            hidden, query_latent: [rows, channels]; with sequence parallelism this rank's part of the rows.
            frequencies: [T, 1, 1, rotated channels] of the positions of all rows of the context-parallel rank's `stream`.
            concentration: factor on cosine and sine.

        Returns:
            int32 [T, k]: places of keys in the row's own sequence, in any order, padded with −1 if the row sees fewer than k.
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
        return self._of_all_rows(self._choose(query, weight, key, stream, first))

    def _of_all_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return gather_from_sequence_parallel_region(rows) if self.config.sequence_parallel else rows

    def _choose(
        self, query: torch.Tensor, weight: torch.Tensor, key: torch.Tensor, stream: PackedStream, first: int
    ) -> torch.Tensor:
        """The choice for the rows of `query`, [n, heads, channels], which are those of the stream from row `first` on. `weight`
        is [n, heads]; `key`, [rows of all ranks, channels], is of the whole stream."""
        count = self.config.dsa_indexer_topk
        chosen, start = [], 0
        for segment in stream.segments:
            begin, end = max(start, first), min(start + segment.queries, first + len(query))
            keys = key.narrow(0, segment.first_key, segment.keys)
            at_once = max(_SCORES // segment.keys, 1)
            for row in range(begin, end, at_once):
                rows = slice(row - first, min(row + at_once, end) - first)
                # How many keys the first of these rows sees.
                seen = segment.keys - segment.queries + row - start + 1
                chosen.append(_best(query[rows], weight[rows], keys[: seen + rows.stop - rows.start - 1], seen, count))
            start += segment.queries
        return torch.cat(chosen)


def _best(query: torch.Tensor, weight: torch.Tensor, key: torch.Tensor, seen: int, count: int) -> torch.Tensor:
    """The `count` best keys of each row, int32, padded with −1. The first row sees `seen` keys, and every further row one
    more."""
    scores = query.new_zeros(len(query), len(key), dtype=torch.float32)
    key = key.float().t()
    for head, head_weight in zip(query.float().unbind(1), weight.split(1, dim=1), strict=True):
        scores.addcmul_((head @ key).relu_(), head_weight)
    hidden = torch.ones_like(scores, dtype=torch.bool).triu_(seen)
    best = scores.masked_fill_(hidden, -torch.inf).topk(min(count, scores.shape[1]), dim=-1)
    places = best.indices.int().masked_fill_(best.values == -torch.inf, -1)
    return torch.nn.functional.pad(places, (0, count - places.shape[1]), value=-1)
