"""Attention of context-parallel ranks against a masked matrix product over the whole stream, and the rotary positions."""

import itertools
import math
from unittest import mock

import pytest
import torch

from slime.scheduling.context_parallel import chunk_size
from tests.support.distributed import run_distributed

HEADS, GROUPS, DIM = 4, 2, 8
# With blocks of 4 queries, chunks of one and of several blocks.
LENGTHS = [21, 1, 5, 40]
BLOCK = 4


def inputs(lengths, sequence_seed):
    """Query, key and value [length, heads, dim] of every sequence; the same for every layout."""
    generator = torch.Generator().manual_seed(sequence_seed)
    return [
        [torch.randn(length, heads, DIM, generator=generator) for heads in (HEADS, GROUPS, GROUPS)]
        for length in lengths
    ]


def by_hand(query, key, value):
    """One sequence, float64: softmax of scores up to and including the token itself."""
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(DIM)
    visible = torch.ones(len(query), len(query), dtype=torch.bool).tril()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(-1), value).flatten(1)


def variable_length_attention(query, key, value, query_ends, key_ends, most_queries, most_keys, *, scale, **_):
    """What the kernel of that name on CUDA computes: causal per segment, the last query of which sees all of its keys."""
    assert query_ends.diff().max() == most_queries and key_ends.diff().max() == most_keys
    outputs = []
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(query_ends), itertools.pairwise(key_ends), strict=True):
        keys, values = (tensor[k0:k1].repeat_interleave(HEADS // GROUPS, dim=1) for tensor in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], keys) * scale
        visible = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(keys) - (q1 - q0))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(-1), values))
    return torch.cat(outputs)


def attention_worker():
    """Per layout: this rank's output and gradients, by (sequence, position)."""
    import torch.distributed as dist

    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.backends.megatron_utils import attention as context_attention
    from slime.training.context_parallel import ContextParallel, gather_rows
    from slime.training.packed_stream import pack_stream

    dist.init_process_group("gloo")
    context_attention._CPU_QUERIES = BLOCK
    results = {}
    for name in ("zigzag", "gathered"):
        cp = ContextParallel(dist.get_world_size(), dist.get_rank(), dist.group.WORLD, all_gather=name == "gathered")
        # Tokens tell which sequence and position a row is: 100 · sequence + position + 1, padding is 0.
        tokens = [100 * i + 1 + torch.arange(length) for i, length in enumerate(LENGTHS)]
        stream = pack_stream(tokens, [0] * len(LENGTHS), 6, cp=cp)
        rows = [(int(token) // 100, int(token) % 100 - 1) if token else None for token in stream.tokens]
        parts = inputs(LENGTHS, 0)
        local = []
        for index, heads in enumerate((HEADS, GROUPS, GROUPS)):
            values = [parts[row[0]][index][row[1]] if row else torch.full((heads, DIM), 9.0) for row in rows]
            local.append(torch.stack(values).requires_grad_())
        output = context_attention.attend_over_context(*local, stream, 1 / math.sqrt(DIM))
        with mock.patch("torch.nn.attention.varlen.varlen_attn", variable_length_attention), torch.no_grad():
            whole = (gather_rows(tensor, cp, stream.gather_order) for tensor in local[1:])
            by_kernel = context_attention._attend_cuda(local[0], *whole, stream, 1 / math.sqrt(DIM))
        results[f"{name}, kernel"] = (by_kernel - output).abs().max().item()
        weights = [
            torch.full_like(line, row[0] + 0.1 * row[1]).sin() if row else 0 * line
            for row, line in zip(rows, output, strict=True)
        ]
        (output * torch.stack(weights)).sum().backward()
        results[name] = {
            row: (output[i].detach(), *(tensor.grad[i] for tensor in local)) for i, row in enumerate(rows) if row
        }
    return results


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(attention_worker, 2)


@pytest.mark.parametrize("layout", ["zigzag", "gathered"])
def test_l20_every_row_sees_its_own_sequence_up_to_itself(ranks, layout):
    found = {row: values for rank in ranks for row, values in rank[layout].items()}
    assert len(found) == sum(LENGTHS)
    for sequence, tensors in enumerate(inputs(LENGTHS, 0)):
        tensors = [tensor.double().requires_grad_() for tensor in tensors]
        output = by_hand(*tensors)
        positions = torch.arange(len(output), dtype=torch.float64)
        weights = (sequence + 0.1 * positions).sin()[:, None]
        (output * weights).sum().backward()
        for position in range(len(output)):
            expected = (output[position].detach(), *(tensor.grad[position] for tensor in tensors))
            for values, wanted in zip(found[sequence, position], expected, strict=True):
                torch.testing.assert_close(values.double(), wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("layout", ["zigzag", "gathered"])
def test_the_variable_length_kernel_is_told_the_same_segments(ranks, layout):
    assert max(rank[f"{layout}, kernel"] for rank in ranks) < 2e-6


def test_zigzag_ranks_compute_the_same_number_of_scores():
    from slime.scheduling.context_parallel import zigzag_segments

    length = 8 * 1024
    work = [sum(s.queries * (s.keys - s.queries / 2) for s in zigzag_segments([length], 4, rank)) for rank in range(4)]
    assert chunk_size(length, 4) == 1024 and max(work) == min(work)
