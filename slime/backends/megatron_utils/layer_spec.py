"""The modules of which a transformer layer is built, and three of these modules.

With Transformer Engine installed (and `--transformer-impl transformer_engine`) layers are built by Megatron's own spec for it.
Otherwise they are built by Megatron's local spec, completed by its missing parts for packed sequences and sequence parallelism:
`PackedAttention`, and the norm below. Layers for multi-token prediction contain a layer like those of the decoder.

`RMSNorm` is the norm of the local spec. Megatron-Core's own fallback (`WrappedTorchNorm`) refuses sequence parallelism, in
which each rank normalises only its part of the sequence, so that the gradient of the weight has to be summed over the
tensor-parallel ranks. It suffices to mark the weight; Megatron's `finalize_model_grads` does the rest.

`RotaryByPosition` picks rotary frequencies by position ids, once for all layers. Megatron derives the positions of packed rows
from sequence lengths. Each layer copies these to the host, for queries and for keys, and with context parallelism they imply
the zigzag layout; but a rank that holds a contiguous piece of the stream (`--allgather-cp`) starts in the middle of a sequence.
Here each row gets the frequencies of its own position id, without any wait for the device.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import get_mtp_layer_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import nn
from torch.autograd.function import once_differentiable

from slime.backends.megatron_utils.attention import LatentAttention, PackedAttention
from slime.backends.megatron_utils.routers import PredictionRouter, Router
from slime.utils.device import fused, get_accelerator
from slime.utils.errors import UserError

# The prefix of a norm → the prefix of its name in checkpoints.
_NORM_OF_QUERY_LATENTS = {"self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_"}


def transformer_engine_available() -> bool:
    """Whether Transformer Engine can be imported (looked up without importing it)."""
    return importlib.util.find_spec("transformer_engine") is not None


def get_decoder_spec(config: TransformerConfig, vp_stage: int | None = None) -> ModuleSpec | TransformerBlockSubmodules:
    """The spec of the decoder that `GPTModel` takes, for the layers of this pipeline stage (and virtual stage)."""
    is_local = config.transformer_impl == "local"
    if config.num_moe_experts is None:
        if not is_local:
            return _engine_layer_spec(config)
        layers = [_local_layer_spec(config)] * get_num_layers_to_build(config, vp_stage=vp_stage)
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
    # Megatron knows which layers of this stage have experts (`--moe-layer-freq`).
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=not is_local, normalization=config.normalization, vp_stage=vp_stage
    )
    block.layer_specs = [_among_experts(layer, config, Router) for layer in block.layer_specs]
    if is_local:
        block.layer_norm = RMSNorm
    return block


def _among_experts(layer: ModuleSpec, config: TransformerConfig, router: type[nn.Module]) -> ModuleSpec:
    """A copy of Megatron's spec of a layer of a model with experts, with our parts and this router."""
    layer = copy.deepcopy(layer)
    if layer.submodules.mlp.module is MoELayer:
        layer.submodules.mlp.submodules.router = router
    return (_with_own_parts if config.transformer_impl == "local" else _with_own_attention)(layer, config)


def get_prediction_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """The spec of a layer for multi-token prediction. Inside it is like the last decoder layer, whichever stage has that."""
    is_local = config.transformer_impl == "local"
    if config.num_moe_experts is None:
        layer = (_local_layer_spec if is_local else _engine_layer_spec)(config)
    else:
        layers = get_gpt_decoder_layer_specs(
            config, use_transformer_engine=not is_local, normalization=config.normalization
        )
        layer = _among_experts(layers[-1], config, PredictionRouter)
    spec = get_mtp_layer_spec(layer, use_transformer_engine=not is_local)
    if is_local:
        spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = RMSNorm
    return spec


def as_block(
    spec: ModuleSpec | TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """A spec of `get_decoder_spec` with one entry for each layer of the stage; equal layers may share it."""
    if isinstance(spec, TransformerBlockSubmodules):
        return spec
    layers = [spec] * get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm_class(config))


def with_attention(layer: ModuleSpec, config: TransformerConfig, attention: ModuleSpec) -> ModuleSpec:
    """A copy of the spec of a layer, with another kind of attention, which is given normed hidden states."""
    layer = copy.deepcopy(layer)
    # In a layer of softmax attention the norm may be fused into the projection.
    layer.submodules.input_layernorm = norm_class(config)
    # Here it never is, so it is stored under its own name, whatever the other layers are.
    layer.submodules.sharded_state_dict_keys_map.pop("input_layernorm.", None)
    layer.submodules.self_attention = attention
    return layer


def with_normed_query_latents(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """A copy of the spec of a layer of latent attention, in which others than the projection up can read the normed latent
    vectors of the queries: Transformer Engine fuses their norm into that projection."""
    layer = copy.deepcopy(layer)
    submodules = layer.submodules.self_attention.submodules
    submodules.q_layernorm = norm_class(config) if config.qk_layernorm else IdentityOp
    submodules.linear_q_up_proj = submodules.linear_q_proj
    layer.submodules.sharded_state_dict_keys_map.update(_NORM_OF_QUERY_LATENTS)
    return layer


def with_core_attention(layer: ModuleSpec, core_attention: type[PackedAttention]) -> ModuleSpec:
    """A copy of the spec of a layer, with another softmax attention between its projections, if it has softmax attention."""
    layer = copy.deepcopy(layer)
    submodules = layer.submodules.self_attention.submodules
    if hasattr(submodules, "core_attention"):
        submodules.core_attention = core_attention
    return layer


def norm_class(config: TransformerConfig) -> type[nn.Module]:
    """The norm of layers of this implementation, as a module of its own."""
    if config.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    return RMSNorm


def _engine_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """The spec of a layer of Transformer Engine without experts."""
    layer = get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=config.qk_layernorm, multi_latent_attention=config.multi_latent_attention
    )
    return _with_own_attention(layer, config)


def _local_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """The spec of a layer without experts."""
    layer = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    return _with_own_parts(layer, config)


def _with_own_parts(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """Put the missing parts for packed sequences and sequence parallelism into the local spec of a layer, and return it."""
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    if config.fp32_residual_connection:
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = add_to_float32_residual
    layer.submodules.sharded_state_dict_keys_map = _names_on_disk(layer, config)
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    attention.q_layernorm = norm = RMSNorm if config.qk_layernorm else IdentityOp
    if config.multi_latent_attention:
        attention.kv_layernorm = norm
    else:
        attention.k_layernorm = norm
    return _with_own_attention(layer, config)


def _names_on_disk(layer: ModuleSpec, config: TransformerConfig) -> dict[str, str]:
    """Prefixes of the norms of a local layer → prefixes of their names in checkpoints. The latter are those of Transformer
    Engine, which keeps a norm in the linear layer behind it. Megatron's own mapping for local layers does so only for layers
    without experts and without latent attention."""
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if config.multi_latent_attention:
        names = {
            **_NORM_OF_QUERY_LATENTS,
            "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
        }
    if layer.submodules.mlp.module is not MoELayer:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names


def _with_own_attention(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """Put our latent attention into the spec of a layer, if it has latent attention, and return it."""
    if config.multi_latent_attention:
        attention = layer.submodules.self_attention
        attention.module = LatentAttention
        attention.submodules.core_attention = PackedAttention
        # In Transformer Engine's layer every rank has the whole down-projections.
        column_parallel = attention.submodules.linear_q_proj
        attention.submodules.linear_q_down_proj = attention.submodules.linear_kv_down_proj = column_parallel
    return layer


def add_to_float32_residual(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """A function that adds the output of attention or MLP, after dropout, to a residual stream that stays in float32.
    Megatron's own function rounds the stream to the output's dtype first."""

    def add(
        output_and_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        output, bias = output_and_bias
        output = output if bias is None else output + bias
        return residual + F.dropout(output, dropout, training)

    return add


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019, arXiv 1910.07467).

    With `--apply-layernorm-1p` the weight is stored as its distance from one, and added to it in float32: 16 bits have fewer
    numbers near one than near zero.

    The constructor takes what Megatron's layer specs pass to a norm: `config`, `hidden_size`, `eps`.

    Raises:
        UserError: `--normalization` is not RMSNorm.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise UserError(
                f"--normalization {config.normalization} needs Transformer Engine; the local layer spec has RMSNorm only"
            )
        self.normalized_shape = (hidden_size,)
        self.eps = eps
        self.is_around_zero = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.is_around_zero else torch.ones
        self.rounds = config.fp32_residual_connection
        self.weight = torch.nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [..., hidden_size], any float dtype. The result has the same shape, and the dtype of `hidden`, or that of the
        weights if the residual stream has another."""
        dtype = self.weight.dtype if self.rounds else hidden.dtype
        if not self.is_around_zero:
            return self._normed(hidden, self.weight).to(dtype)
        return self._normed(hidden.float(), 1 + self.weight.float()).to(dtype)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        compiled = fused(norm_of_rows, get_accelerator())
        if hidden.device.type == "cpu" or (compiled is not None and compiled.works):
            return _Normed.apply(hidden, weight, self.eps)
        return F.rms_norm(hidden, self.normalized_shape, weight, self.eps)


class _Normed(torch.autograd.Function):
    """y = x·r·w with r = 1 / sqrt(mean(x²) + ε). Only x and r are kept, and each row of y and of ∂L/∂x depends on that row
    alone.

    PyTorch would use eight operations on a CPU, and keep tensors for the backward pass of each; on a GPU its backward pass
    takes four times as long as a compiled one.
    """

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        output, r = _compiled_or_not(norm_of_rows, rows, weight, eps)
        ctx.save_for_backward(hidden, weight, r)
        return output.view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight, r = ctx.saved_tensors
        rows = (tensor.reshape(-1, hidden.shape[-1]) for tensor in (hidden, gradient))
        of_hidden, of_weight = _compiled_or_not(gradients_of_norm, *rows, weight, r)
        return of_hidden.view(hidden.shape), of_weight, None


def norm_of_rows(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """y and r of `_Normed` for hidden [rows, width]; in float32, or float64 for float64."""
    x = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * r).mul_(weight).to(hidden.dtype), r


def gradients_of_norm(
    hidden: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """With the gradient g of y: ∂L/∂x = r·(g·w) − x·r³·mean(g·w·x), and ∂L/∂w = Σ g·x·r over all rows."""
    x, g = hidden.to(r.dtype), gradient.to(r.dtype)
    product = g * x
    # On a CPU the matrix product needs few passes over memory; on a GPU the compiler fuses the sum.
    of_weight = r.flatten() @ product if product.device.type == "cpu" else (product * r).sum(0)
    share = product.mul_(weight).sum(-1, keepdim=True).mul_(r**3).div_(-hidden.shape[-1])
    of_hidden = torch.mul(g, weight, out=product).mul_(r).addcmul_(x, share)
    return of_hidden.to(hidden.dtype), of_weight.to(weight.dtype)


def _compiled_or_not(function: Callable[..., Any], *arguments: Any) -> Any:
    compiled = fused(function, get_accelerator())
    found = None if compiled is None else compiled(*arguments)
    return function(*arguments) if found is None else found


class RotaryByPosition(nn.Module):
    """Replaces a model's rotary embedding: row r of the result belongs to position `position_ids[r]`.

    `position_ids`, [T] or [1, T], are those of the current forward pass.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self.position_ids: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: Any, **options: Any) -> int:
        return self.rotary.get_rotary_seq_len(*args, **options)

    def forward(self, max_seq_len: int, **layout: Any) -> torch.Tensor:
        """Frequencies [T, 1, 1, dim]; `layout` (Megatron's own rule for packed and cut sequences) does not apply."""
        return self.rotary.get_emb(max_seq_len).index_select(0, self.position_ids.flatten())


def rotates_by_position(model: nn.Module) -> bool:
    """Whether `rotate_by_position` was called for the bare `model`."""
    return any(isinstance(module, RotaryByPosition) for module in model.children())


def rotate_by_position(model: nn.Module) -> None:
    """Make `model` (Megatron's `GPTModel` with rotary embedding) rotate every row by the position ids that it is given."""
    rotary = RotaryByPosition(model.rotary_pos_emb)
    model.rotary_pos_emb = rotary

    def remember(module: nn.Module, args: tuple, inputs: dict[str, Any]) -> None:
        rotary.position_ids = inputs["position_ids"] if "position_ids" in inputs else args[1]

    model.register_forward_pre_hook(remember, with_kwargs=True)
