"""Which modules a transformer layer is built from.

With Transformer Engine installed (and `--transformer-impl transformer_engine`) Megatron's own spec for it is used.
Otherwise the local spec, with the two parts that it lacks for packed sequences and sequence parallelism put in. Layers for
multi-token prediction contain a layer like those of the decoder.
"""

from __future__ import annotations

import importlib.util

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import get_mtp_layer_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from slime.backends.megatron_utils.attention import PackedAttention
from slime.backends.megatron_utils.normalization import RMSNorm


def transformer_engine_available() -> bool:
    """Whether Transformer Engine can be imported (looked up without importing it)."""
    return importlib.util.find_spec("transformer_engine") is not None


def get_decoder_spec(config: TransformerConfig, vp_stage: int | None = None) -> ModuleSpec | TransformerBlockSubmodules:
    """The spec of the decoder that `GPTModel` takes, for the layers of this pipeline stage (and virtual stage)."""
    if config.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layers = [_local_layer_spec(config)] * get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def get_prediction_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """The spec of a layer for multi-token prediction."""
    if config.transformer_impl == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        return get_mtp_layer_spec(layer, use_transformer_engine=True)
    spec = get_mtp_layer_spec(_local_layer_spec(config), use_transformer_engine=False)
    spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = RMSNorm
    return spec


def _local_layer_spec(config: TransformerConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    attention.q_layernorm = attention.k_layernorm = RMSNorm if config.qk_layernorm else IdentityOp
    return layer
