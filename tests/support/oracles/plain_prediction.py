"""Multi-token prediction of one sequence, written out in float64 with Megatron's weights by their global names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def prediction_log_probs(
    weights: dict[str, torch.Tensor], args: SimpleNamespace, embedding: Any, output: Any, hidden: Any, tokens: list[int]
) -> list[dict[int, torch.Tensor]]:
    """For each prediction layer: position of the predicted token -> its log-prob.

    Args:
        weights: the weights of the prediction layers, with their `mtp.` names.
        embedding, output: the model's embedding and head [V, h]; hidden: its last hidden states [T, h].
    """
    found = []
    state = hidden
    for i in range(args.mtp_num_layers):
        layer = {n.removeprefix(f"mtp.layers.{i}."): w for n, w in weights.items() if n.startswith(f"mtp.layers.{i}.")}
        shifted = torch.stack([embedding[tokens[min(t + i + 1, len(tokens) - 1)]] for t in range(len(tokens))])
        joined = torch.cat(
            [_norm(shifted, layer["enorm.weight"], args), _norm(state, layer["hnorm.weight"], args)], dim=-1
        )
        inner = {
            n.removeprefix("transformer_layer."): w for n, w in layer.items() if n.startswith("transformer_layer.")
        }
        state = _norm(_layer(joined @ layer["eh_proj.weight"].T, inner, args), layer["final_layernorm.weight"], args)
        distribution = torch.log_softmax(state @ output.T, -1)
        found.append({t + i + 2: distribution[t, tokens[t + i + 2]] for t in range(len(tokens) - i - 2)})
    return found


def _layer(x: torch.Tensor, weights: dict[str, torch.Tensor], args: SimpleNamespace) -> torch.Tensor:
    x = x + _attention(_norm(x, weights["input_layernorm.weight"], args), weights, args)
    inner = _norm(x, weights["pre_mlp_layernorm.weight"], args) @ weights["mlp.linear_fc1.weight"].T
    gate, up = inner.chunk(2, -1)
    return x + (torch.nn.functional.silu(gate) * up) @ weights["mlp.linear_fc2.weight"].T


def _attention(x: torch.Tensor, weights: dict[str, torch.Tensor], args: SimpleNamespace) -> torch.Tensor:
    width, groups = args.kv_channels, args.num_query_groups
    queries = args.num_attention_heads // groups
    fused = (x @ weights["self_attention.linear_qkv.weight"].T).view(len(x), groups, queries + 2, width)
    outputs = []
    for group in range(groups):
        key = _rotated(_norm(fused[:, group, -2], weights["self_attention.k_layernorm.weight"], args), args)
        for head in range(queries):
            query = _norm(fused[:, group, head], weights["self_attention.q_layernorm.weight"], args)
            scores = _rotated(query, args) @ key.T / width**0.5
            visible = torch.ones_like(scores).tril().bool()
            outputs.append(scores.masked_fill(~visible, -torch.inf).softmax(-1) @ fused[:, group, -1])
    return torch.cat(outputs, -1) @ weights["self_attention.linear_proj.weight"].T


def _rotated(x: torch.Tensor, args: SimpleNamespace) -> torch.Tensor:
    half = args.kv_channels // 2
    frequencies = args.rotary_base ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(len(x), dtype=x.dtype)[:, None] * frequencies
    first, second = x[:, :half], x[:, half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def _norm(x: torch.Tensor, weight: torch.Tensor, args: SimpleNamespace) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + args.layernorm_epsilon).sqrt() * weight
