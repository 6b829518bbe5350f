"""Packed attention against attention written out as a masked matrix product."""

import math

import torch

from tests.support.distributed import run_distributed

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
