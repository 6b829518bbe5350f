"""The gated delta net (Qwen3-Next, Qwen3.5) in servers without a GPU: what sglang 0.5.21 calls there of `sgl_kernel`, which has
no package for CPUs, in plain PyTorch.

The delta rule is that of transformers 5.12.1. sglang keeps a state of a request in a row of a pool: of the convolution its last
inputs, [channels, kernel − 1]; of the rule a matrix for each value head, [value width, key width], in float32.

Shapes: T tokens of all requests, one behind the other; R requests; H key heads and V value heads, V a multiple of H.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence

import torch
from torch.nn import functional


def provide_delta_net() -> None:
    """Put the functions below where sglang looks for them. Must run before it imports such layers."""
    for function in (
        fused_gdn_gating_cpu,
        fused_qk_gemma_rmsnorm_cpu,
        fused_qk_gemma_rmsnorm_with_gate_cpu,
        fused_qkvzba_split_reshape_cat_contiguous_cpu,
        fused_sigmoid_gating_delta_rule_update_cpu,
        fused_sigmoid_mul_cpu,
    ):
        setattr(torch.ops.sgl_kernel, function.__name__, function)
    module = types.ModuleType("sgl_kernel.mamba")
    for function in (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu):
        setattr(module, function.__name__, function)
    sys.modules[module.__name__] = module
    # A file of Triton kernels, from which sglang takes one number for its cache of prefixes; it knows that without the file.
    sys.modules["sglang.kernels.ops.attention.fla.chunk_delta_h"] = None  # type: ignore[assignment]


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: Sequence[int],
) -> torch.Tensor:
    """Convolve the new tokens of each request behind those before them, x [channels, T]; notes the last inputs of each.

    Args:
        weight: [channels, kernel].
        has_initial_state: [R]; other requests begin with these tokens.
        cache_indices: [R], rows of the pool.
    """
    pieces = []
    for part, row, goes_on in zip(
        x.split(list(seq_lens_cpu), dim=1), cache_indices.tolist(), has_initial_state.tolist(), strict=True
    ):
        before = conv_states[row].to(x.dtype) if goes_on else x.new_zeros(conv_states.shape[1:])
        inputs = torch.cat([before, part], dim=1)
        conv_states[row] = inputs[:, part.shape[1] :]
        pieces.append(functional.conv1d(inputs[None], weight[:, None], bias, groups=len(weight))[0])
    return _activated(torch.cat(pieces, dim=1), activation)


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolve one more token of each request, x [R, channels]; notes it as the last input."""
    inputs = torch.cat([conv_states[conv_state_indices].to(x.dtype), x[..., None]], dim=-1)
    conv_states[conv_state_indices] = inputs[..., 1:].to(conv_states.dtype)
    convolved = (inputs * weight).sum(-1)
    return _activated(convolved if bias is None else convolved + bias, activation)


def _activated(convolved: torch.Tensor, activation: str | None) -> torch.Tensor:
    return functional.silu(convolved) if activation in ("silu", "swish") else convolved


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithm of the decay, and weight of the new value, each [1, T, V]; a and b [T, V]."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, None, None]:
    """The rule over the new tokens of each request; notes the states behind them.

    Args:
        q, k: [1, T, H, key width]; v: [1, T, V, value width].
        g, beta: as of `fused_gdn_gating_cpu`.
        initial_state: the pool.
        initial_state_indices: [R], rows of it.
        cu_seqlens: [R + 1], where requests begin.

    Returns:
        [1, T, V, value width]; and neither states nor steps between, which are noted or not asked for.
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    lengths = cu_seqlens.diff().tolist()
    q, k = (heads.repeat_interleave(v.shape[2] // heads.shape[2], dim=2) for heads in (q, k))
    pieces = []
    parts = zip(*(tensor.split(lengths, dim=1) for tensor in (q, k, v, g, beta)), strict=True)
    for part, row in zip(parts, initial_state_indices.tolist(), strict=True):
        output, state = torch_chunk_gated_delta_rule(
            *part, initial_state=initial_state[row][None].mT, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        initial_state[row] = state[0].mT.to(initial_state.dtype)
        pieces.append(output)
    return torch.cat(pieces, dim=1), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> torch.Tensor:
    """The rule for one more token of each request; notes the states behind them.

    q, k: [1, R, H, key width]; v: [1, R, V, value width]; a, b: [R, V]. Returns [1, R, V, value width].
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    q, k = (heads.repeat_interleave(v.shape[2] // heads.shape[2], dim=2) for heads in (q, k))
    # Requests become the batch, of one token each.
    q, k, v, g, beta = (tensor.transpose(0, 1) for tensor in (q, k, v, g, beta))
    states = initial_state_source[initial_state_indices].mT
    output, states = torch_recurrent_gated_delta_rule(
        q, k, v, g, beta, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    initial_state_source[initial_state_indices] = states.mT.to(initial_state_source.dtype)
    return output.transpose(0, 1)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, num_k_heads: int, num_v_heads: int, head_k: int, head_v: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as they lie, [T, …]; gates z [T, V, value width]; b and a, [T, V] each."""
    channels = 2 * num_k_heads * head_k + num_v_heads * head_v
    qkv, z = mixed_qkvz[:, :channels], mixed_qkvz[:, channels:]
    b, a = mixed_ba.split(num_v_heads, dim=-1)
    return qkv, z.reshape(len(z), num_v_heads, head_v), b.contiguous(), a.contiguous()


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply x by the sigmoid of the gate, in place."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of each head, by a weight that is stored less one."""
    return _normed(q, q_weight, eps, head_dim), _normed(k, k_weight, eps, head_dim)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_and_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same, where a gate lies behind each head of queries. Returns queries, keys and gates, [T, heads, head width]."""
    q, gate = q_and_gate.view(-1, num_heads, 2 * head_dim).chunk(2, dim=-1)
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate.contiguous()


def _normed(heads: torch.Tensor, weight: torch.Tensor, eps: float, head_dim: int) -> torch.Tensor:
    rows = heads.reshape(-1, head_dim).float()
    return (functional.rms_norm(rows, (head_dim,), eps=eps) * (1 + weight.float())).to(heads.dtype)


def norm_and_gate(norm: torch.nn.Module, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """RMS norm of the rows of x, times the activation of the gate."""
    activation = torch.sigmoid if norm.activation == "sigmoid" else functional.silu
    normed = functional.rms_norm(x.float(), (x.shape[-1],), norm.weight.float(), norm.eps)
    return (normed * activation(gate.float())).to(x.dtype)
