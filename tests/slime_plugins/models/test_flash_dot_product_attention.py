"""Flash attention as a core attention: the kernel that it takes, and the layers that it is put into."""

import itertools
import logging
import math
import sys
from types import ModuleType

import pytest
import torch

from tests.support.models.tiny_families import LAYOUTS, TINY_FAMILIES
from tests.support.models.tiny_model import tiny_args, write_tiny_model
from tests.support.processes.distributed import run_distributed

SPEC = ["slime_plugins.models.flash_dot_product_attention", "get_flash_attention_spec"]
LENGTHS = (7, 1, 12)


def _config(**changes):
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    return TransformerConfig(**sizes, attention_dropout=0.0, **changes)


@pytest.fixture
def flash():
    from slime_plugins.models import flash_dot_product_attention

    flash_dot_product_attention._flash_attention.cache_clear()
    yield flash_dot_product_attention
    flash_dot_product_attention._flash_attention.cache_clear()


@pytest.fixture
def package(monkeypatch):
    """What stands in for flash-attn, and the calls that it gets."""
    calls = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, deterministic
    ):
        """What the package documents: causal masks end at the last query and the last key; fewer groups of keys than heads."""
        calls.append((int(max_seqlen_q), int(max_seqlen_k), causal, deterministic))
        outputs = []
        ends = zip(itertools.pairwise(cu_seqlens_q), itertools.pairwise(cu_seqlens_k), strict=True)
        for (q0, q1), (k0, k1) in ends:
            keys, values = (rows[k0:k1].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for rows in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[q0:q1], keys) * softmax_scale
            visible = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(keys) - (q1 - q0))
            outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(-1), values))
        return torch.cat(outputs)

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls


def _attention(flash, **changes):
    from megatron.core.transformer.enums import AttnMaskType

    return flash.FlashDotProductAttention(_config(**changes), 1, AttnMaskType.causal, "self")


def _stream():
    from slime.backends.megatron_utils.attention import StreamParams
    from slime.training.packed_stream import pack_stream

    stream = pack_stream([torch.zeros(length, dtype=torch.int64) for length in LENGTHS], [0] * len(LENGTHS), 1)
    ends = {"cu_seqlens_q": stream.cu_seqlens, "cu_seqlens_kv": stream.cu_seqlens}
    return StreamParams(stream=stream, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS), **ends)


def _tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(sum(LENGTHS), heads, 8, generator=generator) for heads in (4, 2, 2)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_streams_on_a_gpu_go_to_flash_attn(flash, package, deterministic):
    attention, packed = _attention(flash, deterministic_mode=deterministic), _stream()
    tensors = [tensor.bfloat16() for tensor in _tensors()]
    output = attention._attend_packed_cuda(*tensors, packed)
    assert package == [(max(LENGTHS), max(LENGTHS), True, deterministic)]
    expected = attention(*tensors, None, packed_seq_params=packed)
    torch.testing.assert_close(output, expected, rtol=0, atol=0.03)
    # The kernel has no float32, and a CPU no kernel.
    torch.testing.assert_close(attention._attend_packed_cuda(*_tensors(), packed), expected.float(), rtol=0, atol=0.03)
    assert len(package) == 1


def test_parts_of_a_context_go_there_too(flash, package):
    from slime.training import stream_attention

    attention, packed = _attention(flash), _stream()
    query, key, value = _tensors()
    stream, kernel = packed.stream, attention.kernel()
    part = stream_attention._attend_cuda(query, key, value, stream, attention.softmax_scale, None, kernel, None)
    torch.testing.assert_close(part, attention(query, key, value, None, packed_seq_params=packed), rtol=0, atol=1e-6)
    assert len(package) == 1


def test_without_the_package_it_is_pytorchs_kernel(flash, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(flash.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, flash.logger.name):
        kernels = [_attention(flash).kernel() for _ in range(2)]
    assert {kernel.func.__name__ for kernel in kernels} == {"varlen_attn"}
    assert caplog.messages == ["flash-attn is not installed: PyTorch's flash kernel computes attention"]


def test_a_package_that_does_not_import_is_told(flash, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(flash.importlib.util, "find_spec", lambda name: object())
    with caplog.at_level(logging.INFO, flash.logger.name):
        _attention(flash).kernel()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.message.startswith("flash-attn does not import (")


def _cores(cases):
    """Of each model its logits, and of each of its layers which class attends and which one is inside of it."""
    from tests.support.processes import megatron_worker as megatron

    found = []
    for args in cases:
        chunks = megatron.load_model(args)
        from slime.backends.megatron_utils.parameter_names import unwrap_model

        with torch.no_grad():
            logits = megatron.packed_forward(chunks[0], [[3, 1, 4, 1, 5], [9, 2, 6]])
        layers = [layer.self_attention for layer in unwrap_model(chunks[0]).decoder.layers]
        inside = [(type(layer), type(getattr(layer, "core_attention", None))) for layer in layers]
        found.append((logits, [tuple(kind.__name__ for kind in pair) for pair in inside]))
    return found


def test_layers_of_every_kind_keep_what_is_around_it(tmp_path):
    write_tiny_model(tmp_path / "qwen3")
    TINY_FAMILIES["qwen3_next"].save(tmp_path / "qwen3_next")
    cases = [
        tiny_args(tmp_path / name, **options, **sizes)
        for name in ("qwen3", "qwen3_next")
        for options in ({}, {"spec": SPEC})
        for sizes in ({}, LAYOUTS["recomputed"])
    ]
    (found,) = run_distributed(_cores, 1, (cases,))
    for own, with_flash in zip((*found[:2], *found[4:6]), (*found[2:4], *found[6:]), strict=True):
        assert torch.equal(own[0], with_flash[0])
    flash = "FlashDotProductAttention"
    assert found[2][1] == [("SelfAttention", flash)] * 2
    assert found[6][1] == [("GatedDeltaNet", "NoneType")] * 3 + [("GatedAttention", flash)]
