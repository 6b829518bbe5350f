"""The layers of MiniMax-M2: queries and keys are normalised over the channels of all heads at once."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from slime.backends.megatron_utils.layer_spec import get_decoder_spec


def get_minimax_m2_layer_spec(
    args: Any, config: TransformerConfig, vp_stage: int | None = None
) -> ModuleSpec | TransformerBlockSubmodules:
    """The decoder's spec, with `NormOverHeads` for queries and keys if `--qk-layernorm` is given."""
    spec = get_decoder_spec(config, vp_stage)
    for layer in spec.layer_specs if isinstance(spec, TransformerBlockSubmodules) else [spec]:
        prediction_layer_spec(layer, args, config)
    return spec


def prediction_layer_spec(layer: ModuleSpec, args: Any, config: TransformerConfig) -> ModuleSpec:
    """Put these norms into the spec of a layer, of the decoder or of multi-token prediction, and return it. The backend finds
    this function by its name."""
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = ModuleSpec(NormOverHeads, params={"heads": config.num_attention_heads})
        attention.k_layernorm = ModuleSpec(NormOverHeads, params={"heads": config.num_query_groups})
    return layer


class NormOverHeads(torch.nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight, the mean over the channels of all heads, whichever tensor-parallel rank has them.

    Every rank holds the weight of all heads, and uses the part of its own heads. So its gradient has zeros for the other heads,
    and Megatron sums the gradients of norms of queries and keys over the ranks.

    The constructor takes what Megatron's layer specs pass to a norm: `config`, `hidden_size` (of one head), `eps`; and
    `heads`, the number of heads of the whole model.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, heads: int, eps: float, **_: object) -> None:
        super().__init__()
        self.heads = heads
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [..., heads of this rank, channels], any float dtype; same shape and dtype out. Collective."""
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        mean_square = hidden.float().square().mean(dim=(-2, -1), keepdim=True)
        if ranks > 1:
            # Each rank has equally many heads, so the mean of their means is the mean of all. Every rank uses it, so its
            # gradient is the sum over the ranks.
            mean_square = reduce_from_tensor_model_parallel_region(mean_square) / ranks
            mean_square = copy_to_tensor_model_parallel_region(mean_square)
        own = hidden.shape[-2]
        # If there are fewer heads than ranks, several ranks have the same head.
        first = parallel_state.get_tensor_model_parallel_rank() * self.heads // ranks
        weight = self.weight.unflatten(0, (self.heads, -1))[first : first + own]
        return (hidden.float() * torch.rsqrt(mean_square + self.eps)).to(hidden.dtype) * weight
