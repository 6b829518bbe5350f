"""Attention of a server without a GPU: one call per layer for all requests of a length class, not one for each request.

sglang 0.5.21's torch_native walks through the requests of a batch in Python, which costs more in decoding than the rest of a
small model. Here the keys and values of requests of about the same length are gathered and padded, and attention is called
once. The answer to a request does not depend on the others: its class follows from its own lengths, and it is padded with its
own first token, so that wrong numbers of another request (NaN in the cache) cannot reach it.

Where an indexer chooses what a query attends to (DeepSeek V3.2, GLM-5), the rest is hidden from it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.rotary_embedding import get_rope_wrapper
from sglang.srt.model_executor.forward_context import get_attn_backend

# Queries of one piece of a prompt. A piece sees no token behind its last query, so less above the diagonal is computed.
QUERIES_OF_A_PIECE = 256
# Elements of the mask of one call, and of its scores for one head.
ELEMENTS_OF_A_CALL = 1 << 22


class Piece(NamedTuple):
    """`queries` consecutive queries of one request, which begin at `first_query` in the batch; the last one sees `length`
    tokens."""

    request: int
    first_query: int
    queries: int
    length: int


@dataclasses.dataclass(frozen=True)
class Call:
    """Pieces that are attended to at once, padded to the same sizes.

    queries: int64 `[pieces, queries]`, rows of the batch; a padded one repeats the piece's first.
    slots: int64 `[pieces, tokens]`, places in the cache; a padded one repeats the request's first.
    mask: float `[pieces, 1, queries, tokens]` in the dtype of the queries: 0 where a query sees a token, −inf elsewhere.
    filled: int64, which of the flat `[pieces · queries]` are no padding; None where all are.
    """

    queries: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor
    filled: torch.Tensor | None

    def mask_among(self, chosen: torch.Tensor | None) -> torch.Tensor:
        """The mask of attention to the tokens that were chosen for a query.

        Args:
            chosen: integers `[rows of the batch, choices]`, places in the request, or −1; None: all that a query sees.
        """
        if chosen is None:
            return self.mask
        tokens = self.mask.shape[-1]
        places = chosen[self.queries].long()
        # What is no token of the call gets a column of its own.
        places = places.masked_fill_((places < 0) | (places >= tokens), tokens)
        hidden = torch.ones(*self.queries.shape, tokens + 1, dtype=torch.bool).scatter_(-1, places, False)[..., :tokens]
        return self.mask.masked_fill(hidden[:, None], float("-inf"))


def size_class(length: int, step: int) -> int:
    """The size to which a length is padded: a multiple of `step`, with at most eight sizes in an octave."""
    step = max(step, 1 << max((length - 1).bit_length() - 4, 0))
    return -(-length // step) * step


def pieces_of(extended: Sequence[int], lengths: Sequence[int]) -> Iterator[Piece]:
    """The pieces of requests of `lengths` tokens, of which the last `extended` ones are queries of this batch."""
    first = 0
    for request, (queries, length) in enumerate(zip(extended, lengths, strict=True)):
        for start in range(0, queries, QUERIES_OF_A_PIECE):
            count = min(QUERIES_OF_A_PIECE, queries - start)
            yield Piece(request, first + start, count, length - queries + start + count)
        first += queries


def plan_calls(pieces: Iterator[Piece], slots_of_requests: torch.Tensor, dtype: torch.dtype) -> list[Call]:
    """Puts pieces of the same size class into calls of at most `ELEMENTS_OF_A_CALL`.

    Args:
        slots_of_requests: integers `[requests, longest length or more]`, where the cache has a request's tokens.
    """
    classes: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        queries = 1 if piece.queries == 1 else size_class(piece.queries, step=16)
        classes[queries, size_class(piece.length, step=32)].append(piece)
    calls = []
    for (queries, tokens), members in classes.items():
        at_once = max(1, ELEMENTS_OF_A_CALL // (queries * tokens))
        calls += [
            _call(members[start : start + at_once], queries, tokens, slots_of_requests, dtype)
            for start in range(0, len(members), at_once)
        ]
    return calls


def _call(pieces: list[Piece], queries: int, tokens: int, slots_of_requests: torch.Tensor, dtype: torch.dtype) -> Call:
    requests, firsts, counts, lengths = torch.tensor(pieces).unbind(1)
    query, token = torch.arange(queries), torch.arange(tokens)
    is_query, is_token = query < counts[:, None], token < lengths[:, None]
    # No request is longer than the table is wide, but its class may be.
    slots = slots_of_requests[requests[:, None], token.clamp(max=slots_of_requests.shape[1] - 1)]
    last_seen = lengths[:, None] - counts[:, None] + torch.where(is_query, query, 0)
    hidden = token > last_seen[:, :, None]
    return Call(
        torch.where(is_query, firsts[:, None] + query, firsts[:, None]),
        torch.where(is_token, slots, slots[:, :1]).long(),
        torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None],
        None if bool(is_query.all()) else is_query.flatten().nonzero()[:, 0],
    )


def _slots(table: torch.Tensor, requests: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The rows of `requests`, as far as the longest of them reaches: the table is as wide as the model's context."""
    return table[:, : max(lengths, default=0)][requests]


class BatchedAttention(TorchNativeAttnBackend):
    """The backend for `torch_native` without a GPU. Sliding windows, cross-attention and encoders use SGLang's own methods."""

    def __init__(self, model_runner):
        super().__init__(model_runner)
        self._calls: list[Call] | None = None
        self._chosen: torch.Tensor | None = None
        self._workspace: dict[str, torch.Tensor] = {}

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """How many tokens a padding row sees, with which SGLang fills up batches if ranks attend to batches of their own."""
        return 1

    def init_forward_metadata(self, forward_batch) -> None:
        super().init_forward_metadata(forward_batch)
        self._calls = None

    def calls_of(self, forward_batch, dtype: torch.dtype) -> list[Call]:
        """The calls by which all layers attend in this forward pass, with masks of `dtype`, that of the queries."""
        table, extended = self.req_to_token_pool.req_to_token, forward_batch.extend_seq_lens
        if forward_batch.forward_mode.is_decode():
            extended = None
        return self._planned(table, forward_batch.req_pool_indices, forward_batch.seq_lens, extended, dtype)

    def _planned(self, table, requests, seq_lens, extended, dtype: torch.dtype) -> list[Call]:
        if self._calls is None:
            lengths = seq_lens.tolist()
            queries = [1] * len(lengths) if extended is None else extended.tolist()
            self._calls = plan_calls(pieces_of(queries, lengths), _slots(table, requests, lengths), dtype)
        return self._calls

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, topk_indices=None):
        """As of SGLang; `topk_indices` are those of `Indexer`, None: a query attends to all that it sees."""
        self._chosen = topk_indices
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, topk_indices=None):
        """As `forward_decode`."""
        self._chosen = topk_indices
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)

    def _run_sdpa_forward_decode(
        self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens=None, **options
    ):
        if encoder_lens is not None or options["sliding_window_size"] is not None:
            tables = (req_to_token, req_pool_indices, seq_lens, encoder_lens)
            return super()._run_sdpa_forward_decode(query, output, k_cache, v_cache, *tables, **options)
        calls = self._planned(req_to_token, req_pool_indices, seq_lens, None, query.dtype)
        return self._attend(calls, query, output, k_cache, v_cache, options["scaling"])

    def _run_sdpa_forward_extend(
        self,
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        extend_prefix_lens,
        extend_seq_lens,
        encoder_lens=None,
        **options,
    ):
        if encoder_lens is not None or options["sliding_window_size"] is not None or not options["causal"]:
            tables = (req_to_token, req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens)
            return super()._run_sdpa_forward_extend(query, output, k_cache, v_cache, *tables, **options)
        calls = self._planned(req_to_token, req_pool_indices, seq_lens, extend_seq_lens, query.dtype)
        return self._attend(calls, query, output, k_cache, v_cache, options["scaling"])

    def _attend(self, calls: list[Call], query, output, k_cache, v_cache, scaling: float | None) -> torch.Tensor:
        """Fills `output` `[queries, query heads, value channels]`.

        Query heads that share a key are further queries of it, so no key is repeated.
        """
        heads = k_cache.shape[1]
        grouped = query.shape[1] // heads
        # In latent attention the values are the first channels of the keys.
        one_cache = v_cache.data_ptr() == k_cache.data_ptr()
        for call in calls:
            pieces, queries = call.queries.shape
            keys = self._gather("keys", k_cache, call.slots).to(query.dtype)
            if one_cache:
                values = keys[..., : v_cache.shape[-1]]
            else:
                values = self._gather("values", v_cache, call.slots).to(query.dtype)
            asked = query[call.queries].unflatten(2, (heads, grouped)).permute(0, 2, 3, 1, 4).flatten(2, 3)
            answered = torch.nn.functional.scaled_dot_product_attention(
                asked,
                keys.transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=call.mask_among(self._chosen).expand(-1, grouped, -1, -1).flatten(1, 2)[:, None],
                scale=scaling,
            )
            answered = answered.unflatten(2, (grouped, queries)).permute(0, 3, 1, 2, 4).reshape(-1, *output.shape[1:])
            rows = call.queries.flatten()
            if call.filled is not None:
                answered, rows = answered[call.filled], rows[call.filled]
            output[rows] = answered
        return output

    def _gather(self, name: str, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """`cache[slots]`, in memory that is kept: allocating and freeing megabytes at each layer costs more than filling
        them."""
        size = slots.numel() * cache[0].numel()
        kept = self._workspace.get(name)
        if kept is None or kept.numel() < size or kept.dtype != cache.dtype:
            kept = self._workspace[name] = cache.new_empty(size)
        gathered = kept[:size].view(slots.numel(), *cache.shape[1:])
        torch.index_select(cache, 0, slots.flatten(), out=gathered)
        return gathered.view(*slots.shape, *cache.shape[1:])


class Indexer(torch.nn.Module):
    """Chooses the keys that the tokens of a batch attend to (DeepSeek V3.2, GLM-5), in the place of sglang's indexer.

    A score is the sum over heads of w · relu(q · k) (DeepSeek-V3.2, arXiv 2512.02556, equation 1). sglang 0.5.21 stores keys in
    FP8, in a cache of its own kind, and scores them by kernels for GPUs. Here they are stored as they are, a row for each place
    of the ordinary cache, and scored in float32. The constructor takes what sglang's takes; parameters are those of a
    checkpoint, and every tensor-parallel rank has all of them.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        index_n_heads: int,
        index_head_dim: int,
        rope_head_dim: int,
        index_topk: int,
        q_lora_rank: int,
        max_position_embeddings: int,
        rope_theta: float,
        rope_scaling: dict[str, Any] | None,
        is_neox_style: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        self.heads, self.rotated, self.count = index_n_heads, rope_head_dim, index_topk
        self.wq_b = torch.nn.Linear(q_lora_rank, index_n_heads * index_head_dim, bias=False)
        self.wk = torch.nn.Linear(hidden_size, index_head_dim, bias=False)
        self.k_norm = torch.nn.LayerNorm(index_head_dim, eps=1e-6)
        self.weights_proj = torch.nn.Linear(hidden_size, index_n_heads, bias=False)
        self.rotary_emb = get_rope_wrapper(
            rope_head_dim,
            rotary_dim=rope_head_dim,
            max_position=max_position_embeddings,
            base=rope_theta,
            rope_scaling=rope_scaling,
            is_neox_style=is_neox_style,
            device="cpu",
        )
        self.keys: torch.Tensor | None = None

    def forward(
        self,
        x: torch.Tensor,
        q_lora: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        layer_id: int,
        return_indices: bool = True,
    ) -> torch.Tensor | None:
        """The keys that each of T tokens attends to: int32 [T, count], places in its own request, in any order; of those that
        it does not see, some may be among them.

        Args:
            x, q_lora: hidden states and normed latent vectors of the queries, [T, channels].
        """
        backend = get_attn_backend()
        query, key = self.wq_b(q_lora).unflatten(-1, (self.heads, -1)), self.k_norm(self.wk(x))
        turning = [vectors[..., : self.rotated] for vectors in (query, key.unsqueeze(1))]
        turned = self.rotary_emb(positions, *(vectors.contiguous() for vectors in turning))
        for vectors, values in zip(turning, turned, strict=True):
            # Some rotations of halves give one dimension more.
            vectors.copy_(values.view_as(vectors))
        if self.keys is None:
            self.keys = key.new_zeros(len(backend.token_to_kv_pool.get_key_buffer(layer_id)), key.shape[-1])
        self.keys[forward_batch.out_cache_loc] = key
        if not return_indices:
            return None
        weight = self.weights_proj(x).float() * query[0].numel() ** -0.5
        return self._best(query, weight, backend.calls_of(forward_batch, x.dtype))

    def _best(self, query: torch.Tensor, weight: torch.Tensor, calls: Sequence[Call]) -> torch.Tensor:
        chosen = torch.full((len(query), self.count), -1, dtype=torch.int32)
        for call in calls:
            keys = self.keys[call.slots].float()
            scores = call.mask[:, 0].float()
            for of_head, of_weight in zip(query.unbind(1), weight.unbind(1), strict=True):
                products = of_head[call.queries].float() @ keys.transpose(1, 2)
                scores = scores + products.relu_() * of_weight[call.queries].unsqueeze(-1)
            best = scores.topk(min(self.count, scores.shape[-1]), dim=-1).indices.int()
            # A padded query is that of the row it repeats.
            chosen[call.queries.flatten(), : best.shape[-1]] = best.flatten(0, 1)
        return chosen
