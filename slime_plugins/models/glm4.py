"""The layers of GLM-4, in which the outputs of attention and MLP are normalised before they are added to the hidden states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from slime.backends.megatron_utils.layer_spec import get_decoder_spec, norm_class

Output = tuple[torch.Tensor, torch.Tensor | None]


def get_glm_spec(
    args: Any, config: TransformerConfig, vp_stage: int | None = None
) -> ModuleSpec | TransformerBlockSubmodules:
    """The decoder's spec with the norms that `--post-self-attn-layernorm` and `--post-mlp-layernorm` ask for."""
    spec = get_decoder_spec(config, vp_stage)
    for layer in spec.layer_specs if isinstance(spec, TransformerBlockSubmodules) else [spec]:
        prediction_layer_spec(layer, args, config)
    return spec


def prediction_layer_spec(layer: ModuleSpec, args: Any, config: TransformerConfig) -> ModuleSpec:
    """Put the norms into the spec of a layer, of the decoder or of multi-token prediction, and return it. The backend finds
    this function by its name."""
    layer.module = NormedOutputsLayer
    layer.params = {
        **layer.params,
        "norms_attention": args.post_self_attn_layernorm,
        "norms_mlp": args.post_mlp_layernorm,
    }
    return layer


class NormedOutputsLayer(TransformerLayer):
    """A transformer layer of Megatron that normalises the output of attention, of its MLP, or both, where they are added.

    The norms are called `post_self_attn_layernorm` and `post_mlp_layernorm`, as in Hugging Face checkpoints.
    """

    def __init__(
        self, config: TransformerConfig, *args: Any, norms_attention: bool, norms_mlp: bool, **options: Any
    ) -> None:
        super().__init__(config, *args, **options)
        if norms_attention:
            self.post_self_attn_layernorm = _norm(config)
            self.self_attn_bda = functools.partial(self._add_normed, "post_self_attn_layernorm", self.self_attn_bda)
        if norms_mlp:
            self.post_mlp_layernorm = _norm(config)
            self.mlp_bda = functools.partial(self._add_normed, "post_mlp_layernorm", self.mlp_bda)

    def _add_normed(
        self, norm: str, bias_dropout_add: Callable[[bool, bool], Callable], training: bool, fused: bool
    ) -> Callable[[Output, torch.Tensor, float], torch.Tensor]:
        """In the place of Megatron's bias-dropout-add: a function of (output, bias), residual and dropout probability."""
        add = bias_dropout_add(training, fused)

        def add_normed(output_with_bias: Output, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            output, bias = output_with_bias
            return add((getattr(self, norm)(output if bias is None else output + bias), None), residual, dropout)

        return add_normed


def _norm(config: TransformerConfig) -> torch.nn.Module:
    return norm_class(config)(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
