"""Packed attention against attention written out as a masked matrix product.

Attention of context-parallel ranks against a masked matrix product over the whole stream, and the rotary positions.
"""

import itertools
import math
from unittest import mock

import pytest
import torch

from slime.scheduling.zigzag import chunk_size
from tests.support.processes.distributed import run_distributed

HEADS, GROUPS, DIM = 4, 2, 8


def _by_hand(query, key, value, lengths):
    """softmax over each token's own sequence, up to itself; float64."""
    query, key, value = (tensor.double() for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, dim=1) for tensor in (key, value))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(sequence))
    visible = (sequence[:, None] == sequence[None]) & (position[:, None] >= position[None])
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(DIM)
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def _attention(config_overrides=None):
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from slime.backends.megatron_utils.attention import PackedAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        **{"attention_dropout": 0.0, **(config_overrides or {})},
    )
    return PackedAttention(config, 1, AttnMaskType.causal, "self")


def _inputs(tokens):
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, HEADS, DIM), (tokens, GROUPS, DIM), (tokens, GROUPS, DIM))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def _worker(lengths):
    attention = _attention()
    from megatron.core.packed_seq_params import PackedSeqParams

    query, key, value = _inputs(sum(lengths))
    boundaries = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries)
    output = attention(query, key, value, None, packed_seq_params=packed)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    (output * weights).sum().backward()

    batch = [tensor.detach().unflatten(0, (2, -1)).transpose(0, 1) for tensor in (query, key, value)]
    unpacked = attention(*batch, None)
    try:
        _attention({"attention_dropout": 0.1})
        refusal = None
    except ValueError as error:
        refusal = str(error)
    return output.detach(), [tensor.grad for tensor in (query, key, value)], unpacked, refusal


def test_packed_and_batched_attention_equal_masked_products():
    # An empty sequence may stand anywhere in a stream.
    lengths = [5, 1, 0, 11, 7]
    ((output, gradients, unpacked, refusal),) = run_distributed(_worker, 1, (lengths,))

    query, key, value = _inputs(sum(lengths))
    expected = _by_hand(query, key, value, lengths)
    torch.testing.assert_close(output.double(), expected.detach(), rtol=0, atol=1e-6)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    for gradient, tensor in zip(gradients, (query, key, value), strict=True):
        torch.testing.assert_close(gradient, tensor.grad, rtol=0, atol=5e-6)

    halves = _by_hand(*(tensor.detach() for tensor in (query, key, value)), [12, 12])
    torch.testing.assert_close(unpacked.transpose(0, 1).flatten(0, 1).double(), halves, rtol=0, atol=1e-6)
    assert "--attention-dropout 0" in refusal


def _neighbours_worker(lengths, place):
    """Output and gradients of the sequence at `place` among others, and alone."""
    attention = _attention()
    from megatron.core.packed_seq_params import PackedSeqParams

    whole = _inputs(sum(lengths))

    def attended(rows, lengths):
        inputs = [tensor.detach()[rows].requires_grad_() for tensor in whole]
        boundaries = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries)
        output = attention(*inputs, None, packed_seq_params=packed)
        output.square().sum().backward()
        return [output.detach(), *(tensor.grad for tensor in inputs)]

    own = slice(sum(lengths[:place]), sum(lengths[: place + 1]))
    among_others = [tensor[own] for tensor in attended(slice(0, sum(lengths)), lengths)]
    return among_others, attended(own, [lengths[place]])


@pytest.mark.parametrize(
    ("lengths", "place"), [([40, 23, 1, 700], 1), ([40, 23, 23, 23, 1, 700], 2), ([1, 1, 200, 200, 200], 4)]
)
def test_a_sequence_is_attended_to_the_same_bits_whatever_its_neighbours_are(lengths, place):
    ((among_others, alone),) = run_distributed(_neighbours_worker, 1, (lengths, place))
    for found, expected in zip(among_others, alone, strict=True):
        assert torch.equal(found, expected)


def _rotation_worker():
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.backends.megatron_utils import attention
    from slime.backends.megatron_utils.attention import _megatrons_rotation, rotate, rotation

    kept = []

    def rotated(rotate, width, scale):
        generator = torch.Generator().manual_seed(0)
        half = torch.rand(7, 1, 1, width // 2, generator=generator) * 6
        channels = torch.randn(7, 1, HEADS, DIM, generator=generator).transpose(1, 2).requires_grad_()
        kept.append(0)

        def count(tensor):
            kept[-1] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            output = rotate(channels, torch.cat([half, half], -1).transpose(1, 2), mscale=scale)
        (output * torch.randn(output.shape, generator=generator)).sum().backward()
        return output.detach(), channels.grad

    cases = [(DIM, 1.0), (DIM // 2, 1.0), (DIM, 1.5)]
    pairs = [(rotated(rotate, *case), rotated(_megatrons_rotation, *case)) for case in cases]
    by_hand = rotate(torch.tensor([[3.0, 4.0, 5.0]]), torch.full((1, 2), math.pi / 2))
    # What a GPU compiles, as it stands.
    half = torch.rand(2, 7, 1, 1, 3)
    parts = torch.randn(7, 1, HEADS, DIM), *torch.cat([half, half], -1)
    pairs.append(((rotation(*parts),), (attention._rotated(*parts, 1),)))
    pairs.append(((rotation(*parts[:2], -parts[2]),), (attention._rotated(*parts, -1),)))
    return pairs, kept, by_hand, _kept_of_layers(rotate)


def _kept_of_layers(rotate):
    """How many tensors are kept of rotations by the same and by other frequencies, and whether two of them are one."""
    kept = []

    def remember(tensor):
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    outputs = []
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        for angle in (0.5, 0.25):
            frequencies = torch.full((3, 1, 4), angle)
            for heads, dtype, scale in ((4, torch.float32, 1.0), (2, torch.float32, 1.0), (2, torch.bfloat16, 1.0),
                                        (2, torch.float32, 2.0)):  # fmt: skip
                channels = torch.ones(3, heads, 4, dtype=dtype, requires_grad=True)
                outputs.append(rotate(channels, frequencies, mscale=scale))
            del frequencies
    return len(kept), len(set(kept)), [float(output[0, 0, 0]) for output in outputs]


def test_rotation_is_megatrons_and_keeps_cosines_and_sines_alone():
    ((pairs, kept, by_hand, of_layers),) = run_distributed(_rotation_worker, 1)
    # Queries and keys of a dtype and factor keep the same two, those of other frequencies have their own.
    assert of_layers[:2] == (2 * 8, 2 * 6)
    first, second = (math.cos(angle) - math.sin(angle) for angle in (0.5, 0.25))
    expected = [first, first, first, 2 * first, second, second, second, 2 * second]
    assert of_layers[2] == pytest.approx(expected, abs=4e-3)
    for ours, megatrons in pairs:
        for found, expected in zip(ours, megatrons, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert kept[0::2] == [2 * 7 * DIM, 7 * DIM, 2 * 7 * DIM]
    # A quarter of a turn: (a, b) becomes (−b, a), and what is not rotated stays.
    torch.testing.assert_close(by_hand, torch.tensor([[-4.0, 3.0, 5.0]]))


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
    from slime.training import stream_attention
    from slime.training.context_parallel import ContextParallel, gather_rows
    from slime.training.packed_stream import pack_stream

    dist.init_process_group("gloo")
    stream_attention._CPU_QUERIES = BLOCK
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
        output = stream_attention.attend_over_context(*local, stream, 1 / math.sqrt(DIM))
        with mock.patch("torch.nn.attention.varlen.varlen_attn", variable_length_attention), torch.no_grad():
            whole = (gather_rows(tensor, cp, stream.gather_order) for tensor in local[1:])
            kernel = stream_attention.causal_varlen_attention()
            by_kernel = stream_attention._attend_cuda(local[0], *whole, stream, 1 / math.sqrt(DIM), None, kernel, None)
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
    from slime.scheduling.zigzag import zigzag_segments

    length = 8 * 1024
    work = [sum(s.queries * (s.keys - s.queries / 2) for s in zigzag_segments([length], 4, rank)) for rank in range(4)]
    assert chunk_size(length, 4) == 1024 and max(work) == min(work)
