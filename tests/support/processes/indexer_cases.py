"""Compares the keys that the indexer of a CPU server chooses with a plain computation, for `attention_cases`."""

from types import SimpleNamespace
from typing import Any

import torch

HIDDEN, LATENT, HEADS, WIDTH, ROTATED, COUNT = 12, 10, 8, 16, 8, 4
BASE = 100.0
PLACES, TABLE = 64, 40
# Tokens that each of two requests has after a pass: two of prompts, the second with a cached beginning, and one of decoding.
PASSES = ((20, 3), (29, 7), (30, 8))


def compare() -> dict[str, Any]:
    """Whether all choices are the plain ones where halves and where pairs of a vector are rotated; and the number of tokens.

    The CPU adapter is installed before.
    """
    from slime.backends.sglang_utils import cpu_attention

    draw = torch.Generator().manual_seed(1)
    lengths = PASSES[-1]
    hidden, latent = ([torch.randn(length, width, generator=draw) for length in lengths] for width in (HIDDEN, LATENT))
    figures = {}
    for halves in (True, False):
        indexer = made(cpu_attention.Indexer, halves, draw)
        backend = cpu_attention.BatchedAttention.__new__(cpu_attention.BatchedAttention)
        backend.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer: torch.empty(PLACES, 1))
        table = torch.randperm(PLACES, generator=draw)[: 2 * 30].view(2, 30)
        backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
        cpu_attention.get_attn_backend = lambda backend=backend: backend
        found: list[list[set]] = [[], []]
        for before, after in zip(((0, 0), *PASSES), PASSES, strict=False):
            spans = [slice(begin, end) for begin, end in zip(before, after, strict=True)]
            batch = SimpleNamespace(
                req_pool_indices=torch.arange(2),
                seq_lens=torch.tensor(after),
                extend_seq_lens=torch.tensor(after) - torch.tensor(before),
                forward_mode=SimpleNamespace(is_decode=lambda after=after: after == PASSES[-1]),
                out_cache_loc=torch.cat([row[span] for row, span in zip(table, spans, strict=True)]),
            )
            backend._calls = None
            rows = [
                torch.cat([of[span] for of, span in zip(states, spans, strict=True)]) for states in (hidden, latent)
            ]
            positions = torch.cat([torch.arange(span.start, span.stop) for span in spans])
            with torch.no_grad():
                chosen = indexer(*rows, positions, batch, layer_id=0)
            assert chosen.dtype == torch.int32 and chosen.shape == (len(positions), COUNT)
            for request, part in enumerate(chosen.split([span.stop - span.start for span in spans])):
                seen = range(spans[request].start, spans[request].stop)
                found[request] += [
                    {place for place in row if 0 <= place <= last}
                    for row, last in zip(part.tolist(), seen, strict=True)
                ]
        expected = [plain(indexer, *states, halves) for states in zip(hidden, latent, strict=True)]
        figures["halves" if halves else "pairs"] = found == expected
        figures["tokens"] = sum(map(len, found))
    return figures


def made(kind, halves: bool, draw: torch.Generator):
    indexer = kind(
        hidden_size=HIDDEN, index_n_heads=HEADS, index_head_dim=WIDTH, rope_head_dim=ROTATED, index_topk=COUNT,
        q_lora_rank=LATENT, max_position_embeddings=TABLE, rope_theta=BASE, rope_scaling=None, is_neox_style=halves,
        block_size=128, layer_id=0, prefix="",
    )  # fmt: skip
    with torch.no_grad():
        for parameter in indexer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return indexer


def plain(indexer, hidden: torch.Tensor, latent: torch.Tensor, halves: bool) -> list[set]:
    """For each token the set of places that it chooses, in float64, one pair after the other."""
    state = {name: tensor.double() for name, tensor in indexer.state_dict().items()}

    def rotated(vector: torch.Tensor, position: int) -> torch.Tensor:
        turned, rest = vector[:ROTATED], vector[ROTATED:]
        half = ROTATED // 2
        first, second = (turned[:half], turned[half:]) if halves else (turned[0::2], turned[1::2])
        angles = position * BASE ** -(torch.arange(half).double() / half)
        one = first * angles.cos() - second * angles.sin()
        other = second * angles.cos() + first * angles.sin()
        return torch.cat([torch.cat([one, other]) if halves else torch.stack([one, other], 1).flatten(), rest])

    keys = []
    for position, row in enumerate(hidden.double()):
        key = state["wk.weight"] @ row
        key = (key - key.mean()) / (key.var(correction=0) + 1e-6).sqrt()
        keys.append(rotated(key * state["k_norm.weight"] + state["k_norm.bias"], position))
    chosen = []
    for position, (row, of_query) in enumerate(zip(hidden.double(), latent.double(), strict=True)):
        queries = (state["wq_b.weight"] @ of_query).unflatten(0, (HEADS, WIDTH))
        weights = state["weights_proj.weight"] @ row
        scores = {
            place: sum(
                float(weight) * max(float(rotated(query, position) @ keys[place]), 0.0)
                for query, weight in zip(queries, weights, strict=True)
            )
            for place in range(position + 1)
        }
        chosen.append(set(sorted(scores, key=scores.get, reverse=True)[:COUNT]))
    return chosen
