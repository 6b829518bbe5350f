"""The gated delta rule of `slime_plugins`: token by token from its formula, over chunks and packed sequences."""

import itertools
import logging
import math
import sys
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slime.models.qwen import DELTA_RULE_PACKAGES
from slime.utils import device
from slime.utils.errors import UserError
from slime_plugins.models import qwen_gdn_backend
from slime_plugins.models.qwen_gdn_backend import CHUNK, Sequences, causal_convolution, gated_delta_rule, rule_of
from tests.support.models.args import default_args

NAMES = ("query", "key", "value", "decay", "rate")
# Shorter than a chunk, of one and a bit, of several, with and without a rest.
LENGTHS = (3, CHUNK + 1, 1, 2 * CHUNK, 3 * CHUNK - 7)


def inputs(rows, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows)
    query, key = (torch.randn(rows, 2, 6, dtype=dtype, generator=generator) for _ in range(2))
    value = torch.randn(rows, 4, 5, dtype=dtype, generator=generator)
    # Some states are forgotten within a few tokens, others reach through several chunks.
    decay = -torch.rand(rows, 4, dtype=dtype, generator=generator) * torch.tensor([1e-3, 1e-2, 0.1, 3.0], dtype=dtype)
    rate = torch.rand(rows, 4, dtype=dtype, generator=generator)
    return [tensor.requires_grad_() for tensor in (query, key, value, decay, rate)]


def sequences(*lengths):
    return Sequences(lengths, torch.device("cpu"))


def token_by_token(query, key, value, decay, rate):
    """The two lines of the module's docstring, for one sequence."""
    query, key = (rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt() for rows in (query, key))
    heads = value.shape[1] // key.shape[1]
    query, key = (rows.repeat_interleave(heads, dim=1) for rows in (query, key))
    state = value.new_zeros(value.shape[1], key.shape[2], value.shape[2])
    outputs = []
    for q, k, v, g, beta in zip(query, key, value, decay, rate, strict=True):
        state = state * g.exp()[:, None, None]
        written = beta[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + torch.einsum("hk,hv->hkv", k, written)
        outputs.append(torch.einsum("hkv,hk->hv", state, q) / math.sqrt(q.shape[-1]))
    return torch.stack(outputs)


def with_gradients(rule, tensors):
    output = rule(*tensors)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return output.detach(), torch.autograd.grad((output * weights).sum(), tensors)


def test_a_state_by_hand():
    """One channel: 0.5·2 = 1 is written; it decays to 0.5, and half of what 4 is more is written: 0.5 + 0.5·3.5 = 2.25."""
    one = torch.ones(2, 1, 1, dtype=torch.float64)
    value = torch.tensor([2.0, 4.0], dtype=torch.float64).view(2, 1, 1)
    decay = torch.tensor([0.0, math.log(0.5)], dtype=torch.float64).view(2, 1)
    output = gated_delta_rule(one, one, value, decay, torch.full((2, 1), 0.5, dtype=torch.float64), sequences(2))
    torch.testing.assert_close(output.flatten().tolist(), [1.0, 2.25], rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_give_what_single_tokens_give(length):
    tensors = inputs(length)
    output, gradients = with_gradients(lambda *given: gated_delta_rule(*given, sequences(length)), tensors)
    expected, expected_gradients = with_gradients(token_by_token, tensors)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    for name, ours, theirs in zip(NAMES, gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_packed_sequences_do_not_see_their_neighbours():
    tensors = inputs(sum(LENGTHS), torch.float32)
    with torch.no_grad():
        # Nothing decays: what leaks from a neighbour stays.
        tensors[3].zero_()
    whole = gated_delta_rule(*tensors, sequences(*LENGTHS))
    weights = torch.linspace(-1, 1, whole.numel()).view_as(whole)
    gradients = torch.autograd.grad((whole * weights).sum(), tensors)
    start = 0
    for length in LENGTHS:
        own = slice(start, start + length)
        start += length
        alone = [tensor.detach()[own].requires_grad_() for tensor in tensors]
        output = gated_delta_rule(*alone, sequences(length))
        torch.testing.assert_close(whole[own], output, rtol=0, atol=1e-6)
        own_gradients = torch.autograd.grad((output * weights[own]).sum(), alone)
        for ours, theirs in zip(gradients, own_gradients, strict=True):
            torch.testing.assert_close(ours[own], theirs, rtol=1e-5, atol=1e-5)


def test_every_operation_has_a_deterministic_kernel_on_gpus():
    """Sums of floats up to each place have none: `--deterministic-mode` would end the first pass."""
    seen = set()

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if torch.is_tensor(args[0] if args else None) and args[0].is_floating_point():
                seen.add(function.overloadpacket)
            return function(*args, **(kwargs or {}))

    tensors = inputs(CHUNK + 5, torch.float32)
    with Recorded():
        with_gradients(lambda *given: gated_delta_rule(*given, sequences(CHUNK + 5)), tensors)
    assert torch.ops.aten.bmm in seen and not seen & {torch.ops.aten.cumsum, torch.ops.aten.cumprod}


def test_16_bits_are_computed_in_float32():
    tensors = [tensor.detach().bfloat16() for tensor in inputs(CHUNK + 5)]
    output = gated_delta_rule(*tensors, sequences(CHUNK + 5))
    exact = gated_delta_rule(*(tensor.float() for tensor in tensors), sequences(CHUNK + 5))
    assert output.dtype == torch.bfloat16 and torch.equal(output, exact.bfloat16())


def test_the_convolution_of_a_sequence_starts_at_zeros():
    lengths, width = (1, 2, 9, 4), 4
    rows, weight = torch.randn(sum(lengths), 6, dtype=torch.float64), torch.randn(6, 1, width, dtype=torch.float64)
    expected = []
    for sequence in rows.split(lengths):
        padded = torch.cat([rows.new_zeros(width - 1, 6), sequence])
        expected += [(padded[t : t + width] * weight[:, 0].T).sum(0) for t in range(len(sequence))]
    found = causal_convolution(rows, weight, sequences(*lengths))
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-12)


def chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel, cu_seqlens):
    """What the packages document, of one row of packed sequences, all with as many heads."""
    assert use_qk_l2norm_in_kernel and all(len(tensor) == 1 for tensor in (q, k, v, g, beta))
    assert q.shape == k.shape and q.shape[:3] == v.shape[:3] == g.shape == beta.shape
    lengths = [end - start for start, end in itertools.pairwise(cu_seqlens.tolist())]
    return gated_delta_rule(q[0], k[0], v[0], g[0], beta[0], sequences(*lengths))[None], None


@pytest.mark.parametrize("backend", DELTA_RULE_PACKAGES)
def test_kernels_get_whole_heads_and_each_number_in_its_place(monkeypatch, on_gpu, backend):
    module = ModuleType(DELTA_RULE_PACKAGES[backend][0])
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    for name in itertools.accumulate(module.__name__.split("."), "{}.{}".format):
        monkeypatch.setitem(sys.modules, name, module if name == module.__name__ else ModuleType(name))
    rule = rule_of(default_args(qwen_gdn_backend=backend, typed_flags=frozenset()))
    query, key, value, decay, rate = (tensor.detach() for tensor in inputs(sum(LENGTHS), torch.float32))
    # As a layer gives them: rates and decays are float32 beside 16 bits.
    tensors = [query.bfloat16(), key.bfloat16(), value.bfloat16(), decay, rate]
    assert torch.equal(rule(*tensors, sequences(*LENGTHS)), gated_delta_rule(*tensors, sequences(*LENGTHS)))


def test_a_package_without_the_function_is_named(monkeypatch, on_gpu):
    monkeypatch.setitem(sys.modules, "flash_qla", ModuleType("flash_qla"))
    args = default_args(qwen_gdn_backend="flashqla", typed_flags=frozenset({"qwen_gdn_backend"}))
    with pytest.raises(UserError, match=r"flash-qla .* has no chunk_gated_delta_rule to import here"):
        rule_of(args)


def test_pytorch_in_place_of_kernels_is_told_once(on_gpu, caplog):
    qwen_gdn_backend._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, qwen_gdn_backend.logger.name):
        assert all(rule_of(default_args(typed_flags=frozenset())) is gated_delta_rule for _ in range(2))
    assert len(caplog.messages) == 1 and "install flash-linear-attention" in caplog.text


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(qwen_gdn_backend, "get_accelerator", lambda: device.CudaAccelerator())
    for module, _ in DELTA_RULE_PACKAGES.values():
        monkeypatch.setitem(sys.modules, module, None)


def test_on_a_gpu_a_typed_backend_needs_its_package(on_gpu):
    args = default_args(qwen_gdn_backend="flashqla", typed_flags=frozenset({"qwen_gdn_backend"}))
    with pytest.raises(
        UserError, match=r"--qwen-gdn-backend flashqla needs the package flash-qla \(module flash_qla\)"
    ):
        rule_of(args)
    assert rule_of(default_args(typed_flags=frozenset())) is gated_delta_rule


def spec_of(monkeypatch, **changes):
    # Seconds, which only these tests cost then, and not whoever collects them.
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    from slime_plugins.models.qwen3_next import get_qwen3_next_spec

    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    sizes = {
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4, **changes,
    }  # fmt: skip
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, **sizes)
    config.transformer_impl = "local"
    args = default_args(linear_attention_freq=[1, 0], num_layers=2, typed_flags=frozenset())
    return get_qwen3_next_spec(args, config)


def test_the_norm_before_linear_attention_is_stored_as_itself(monkeypatch):
    """With Transformer Engine the norm of softmax attention is a part of its projection, and is stored as that everywhere."""
    linear, softmax = (layer.submodules.sharded_state_dict_keys_map for layer in spec_of(monkeypatch).layer_specs)
    assert softmax["input_layernorm."] == "self_attention.linear_qkv.layer_norm_"
    assert "input_layernorm." not in linear and linear["pre_mlp_layernorm."] == softmax["pre_mlp_layernorm."]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": None}, "give --hf-checkpoint, or .*--linear-num-key-heads"),
        ({"linear_conv_kernel_dim": None}, "--linear-conv-kernel-dim"),
        ({"linear_num_key_heads": 3}, "--linear-num-key-heads 3 does not divide --linear-num-value-heads 4"),
    ],
)
def test_sizes_that_no_layer_can_have_are_named(monkeypatch, changes, message):
    with pytest.raises(UserError, match=message):
        spec_of(monkeypatch, **changes)
