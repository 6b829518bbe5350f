"""Kernels of the gated delta net for servers without a GPU, beside the definition, token by token. Whole models are served in
`tests/e2e/test_families.py`."""

import sys

import pytest

torch = pytest.importorskip("torch")

from slime.backends.sglang_utils import cpu_delta_net as kernels  # noqa: E402

KEY_HEADS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH, KERNEL = 2, 4, 5, 3, 4
CHANNELS = 2 * KEY_HEADS * KEY_WIDTH + VALUE_HEADS * VALUE_WIDTH
# Rows of the pools that three requests have, of seven.
ROWS = torch.tensor([5, 0, 3])


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def convolve(conv_states, x, lengths, weight, bias, has_initial_state):
    return kernels.causal_conv1d_fn_cpu(
        x, weight, bias, activation="silu", conv_states=conv_states, has_initial_state=torch.tensor(has_initial_state),
        cache_indices=ROWS, query_start_loc=starts(lengths), seq_lens_cpu=lengths,
    )  # fmt: skip


@pytest.mark.parametrize("biased", [False, True])
def test_a_convolution_goes_on_where_the_last_tokens_ended(draw, biased):
    """Three requests, of which one is shorter than the kernel, in one piece, in two, and token by token."""
    lengths = [9, 2, 6]
    weight, bias = draw(CHANNELS, KERNEL), draw(CHANNELS) if biased else None
    inputs = [draw(CHANNELS, length) for length in lengths]
    expected = []
    for one in inputs:
        padded = torch.cat([torch.zeros(CHANNELS, KERNEL - 1), one], 1)
        rows = [(padded[:, at : at + KERNEL] * weight).sum(1) + (bias if biased else 0) for at in range(one.shape[1])]
        expected.append(torch.stack([row * torch.sigmoid(row) for row in rows], 1))
    # What was in the pool before does not count.
    states = draw(7, CHANNELS, KERNEL - 1)
    untouched = states[[1, 2, 4, 6]].clone()
    whole = convolve(states, torch.cat(inputs, 1), lengths, weight, bias, [False] * 3)
    torch.testing.assert_close(whole, torch.cat(expected, 1))
    first, rest = [7, 1, 3], [2, 1, 3]
    halved = draw(7, CHANNELS, KERNEL - 1)
    begun = [one[:, :cut] for one, cut in zip(inputs, first, strict=True)]
    ended = [one[:, cut:] for one, cut in zip(inputs, first, strict=True)]
    convolve(halved, torch.cat(begun, 1), first, weight, bias, [False] * 3)
    found = convolve(halved, torch.cat(ended, 1), rest, weight, bias, [True] * 3)
    torch.testing.assert_close(found, torch.cat([one[:, -left:] for one, left in zip(expected, rest, strict=True)], 1))
    torch.testing.assert_close(halved[ROWS], states[ROWS])
    stepped = draw(7, CHANNELS, KERNEL - 1)
    convolve(stepped, torch.cat([one[:, :1] for one in inputs], 1), [1] * 3, weight, bias, [False] * 3)
    second = torch.stack([one[:, 1] for one in inputs])
    found = kernels.causal_conv1d_update_cpu(second, stepped, weight, bias, "silu", conv_state_indices=ROWS)
    torch.testing.assert_close(found, torch.stack([one[:, 1] for one in expected]))
    assert torch.equal(states[[1, 2, 4, 6]], untouched)


def test_a_convolution_keeps_its_last_inputs_in_the_dtype_of_the_pool(draw):
    states, weight = torch.zeros(7, CHANNELS, KERNEL - 1, dtype=torch.bfloat16), draw(CHANNELS, KERNEL)
    x = draw(3, CHANNELS)
    found = kernels.causal_conv1d_update_cpu(x, states, weight, None, None, conv_state_indices=ROWS)
    torch.testing.assert_close(found, x * weight[:, -1])
    assert torch.equal(states[ROWS][..., -1], x.bfloat16())


class Rule:
    """Inputs of the rule for some requests, and its definition: the state decays, is corrected towards the value at the key,
    and is read at the query (equation 10 of Gated Delta Networks, arXiv 2412.06464)."""

    def __init__(self, draw, lengths):
        tokens = sum(lengths)
        self.lengths = lengths
        self.q, self.k = draw(1, tokens, KEY_HEADS, KEY_WIDTH), draw(1, tokens, KEY_HEADS, KEY_WIDTH)
        self.v = draw(1, tokens, VALUE_HEADS, VALUE_WIDTH)
        self.a, self.b = draw(tokens, VALUE_HEADS), draw(tokens, VALUE_HEADS)
        self.A_log, self.dt_bias = draw(VALUE_HEADS), draw(VALUE_HEADS)

    def expected(self, states):
        """Outputs [1, T, V, value width]; `states` [requests, V, value width, key width] become those behind the tokens."""
        outputs = torch.zeros_like(self.v)
        for request, (first, end) in enumerate(zip(starts(self.lengths), starts(self.lengths)[1:], strict=False)):
            for at in range(first, end):
                for head in range(VALUE_HEADS):
                    query, key = (x[0, at, head // (VALUE_HEADS // KEY_HEADS)] for x in (self.q, self.k))
                    query, key = (x / (x.square().sum() + 1e-6).sqrt() for x in (query, key))
                    rate = torch.log1p(torch.exp(self.a[at, head] + self.dt_bias[head])) * self.A_log[head].exp()
                    state = states[request, head] * torch.exp(-rate)
                    error = self.v[0, at, head] - state @ key
                    state = state + torch.sigmoid(self.b[at, head]) * torch.outer(error, key)
                    outputs[0, at, head] = state @ query / KEY_WIDTH**0.5
                    states[request, head] = state
        return outputs

    def part(self, kept):
        """The rule of these tokens alone, one range for each request."""
        tokens = torch.cat([torch.arange(self.lengths[i])[one] + starts(self.lengths)[i] for i, one in enumerate(kept)])
        one = object.__new__(Rule)
        one.lengths = [len(range(self.lengths[i])[some]) for i, some in enumerate(kept)]
        one.q, one.k, one.v = (x[:, tokens] for x in (self.q, self.k, self.v))
        one.a, one.b, one.A_log, one.dt_bias = self.a[tokens], self.b[tokens], self.A_log, self.dt_bias
        return one, tokens

    def extend(self, pool):
        g, beta = kernels.fused_gdn_gating_cpu(self.A_log, self.a, self.b, self.dt_bias)
        return kernels.chunk_gated_delta_rule_cpu(
            q=self.q, k=self.k, v=self.v, g=g, beta=beta, initial_state=pool, initial_state_indices=ROWS,
            cu_seqlens=starts(self.lengths), head_first=False, use_qk_l2norm_in_kernel=True,
        )[0]  # fmt: skip

    def decode(self, pool):
        return kernels.fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=self.A_log, dt_bias=self.dt_bias, q=self.q, k=self.k, v=self.v, a=self.a, b=self.b,
            initial_state_source=pool, initial_state_indices=ROWS, cu_seqlens=starts(self.lengths),
            use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0,
        )  # fmt: skip


def test_the_rule_over_prompts_and_token_by_token_is_its_definition(draw):
    """Three requests, one longer than a chunk of 64: their prompts in one piece, or in two, and then one more token each."""
    rule = Rule(draw, [70, 2, 9])
    states = draw(3, VALUE_HEADS, VALUE_WIDTH, KEY_WIDTH)
    pool, halved = (torch.zeros(7, VALUE_HEADS, VALUE_WIDTH, KEY_WIDTH) for _ in range(2))
    pool[ROWS], halved[ROWS] = states, states
    expected = rule.expected(states)
    torch.testing.assert_close(rule.extend(pool), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pool[ROWS], states, atol=1e-5, rtol=1e-5)
    assert not pool[[1, 2, 4, 6]].any()
    begun, _ = rule.part([slice(0, 65), slice(0, 1), slice(0, 8)])
    begun.extend(halved)
    middle, tokens = rule.part([slice(65, 69), slice(1, 1), slice(8, 8)])
    torch.testing.assert_close(middle.extend(halved), expected[:, tokens], atol=1e-5, rtol=1e-5)
    last, tokens = rule.part([slice(69, 70), slice(1, 2), slice(8, 9)])
    torch.testing.assert_close(last.decode(halved), expected[:, tokens], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(halved[ROWS], states, atol=1e-5, rtol=1e-5)


def test_projections_are_taken_apart_in_the_order_of_the_layer(draw):
    tokens, values = 3, VALUE_HEADS * VALUE_WIDTH
    qkvz, ba = draw(tokens, CHANNELS + values), draw(tokens, 2 * VALUE_HEADS)
    qkv, z, b, a = kernels.fused_qkvzba_split_reshape_cat_contiguous_cpu(
        qkvz, ba, KEY_HEADS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH
    )
    assert torch.equal(torch.cat([qkv, z.flatten(1)], 1), qkvz) and z.shape == (tokens, VALUE_HEADS, VALUE_WIDTH)
    assert torch.equal(torch.cat([b, a], 1), ba)


def test_heads_are_normed_and_gates_taken_out(draw):
    heads, width, eps = 4, 6, 1e-3
    q_and_gate, k = draw(3, heads * 2 * width), draw(3, 2 * width)
    weights = draw(width), draw(width)
    pairs = q_and_gate.view(3, heads, 2, width)
    q, normed_k, gate = kernels.fused_qk_gemma_rmsnorm_with_gate_cpu(q_and_gate, k, *weights, eps, width, heads)

    def normed(rows, weight):
        return rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + weight)

    torch.testing.assert_close(q.view(3, heads, width), normed(pairs[:, :, 0], weights[0]))
    torch.testing.assert_close(normed_k.view(3, 2, width), normed(k.view(3, 2, width), weights[1]))
    assert torch.equal(gate, pairs[:, :, 1])


def test_an_output_is_gated_in_place(draw):
    x, gate = draw(3, 8), draw(3, 2, 4)
    expected = x / (1 + torch.exp(-gate.flatten(1)))
    assert kernels.fused_sigmoid_mul_cpu(x, gate) is None
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_a_norm_comes_before_its_gate(draw, activation):
    x, gate = draw(4, 6), draw(4, 6)
    norm = torch.nn.Module()
    norm.weight, norm.eps, norm.activation = torch.nn.Parameter(draw(6)), 1e-3, activation
    factor = torch.sigmoid(gate) * (1 if activation == "sigmoid" else gate)
    expected = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight * factor
    torch.testing.assert_close(kernels.norm_and_gate(norm, x, gate), expected)


def test_they_stand_where_sglang_looks(monkeypatch):
    # What the call puts there goes after the test.
    for name in ("sgl_kernel.mamba", "sglang.kernels.ops.attention.fla.chunk_delta_h"):
        monkeypatch.setitem(sys.modules, name, None)
    kernels.provide_delta_net()
    assert sys.modules["sgl_kernel.mamba"].causal_conv1d_fn_cpu is kernels.causal_conv1d_fn_cpu
    assert torch.ops.sgl_kernel.fused_gdn_gating_cpu is kernels.fused_gdn_gating_cpu
