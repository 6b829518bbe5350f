"""Core attention by a flash kernel: on CUDA in 16 bits it is that of flash-attn if it is installed, else PyTorch's.

Everything else is as in `PackedAttention`: sequences of a packed stream do not see each other, tensor-parallel ranks have their
own heads, and context-parallel ranks gather keys and values. On CPU, and in float32, for which there are no kernels, PyTorch
attends to one sequence after the other.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from slime.backends.megatron_utils.attention import Kernel, PackedAttention
from slime.backends.megatron_utils.layer_spec import as_block, with_core_attention
from slime.backends.megatron_utils.model_provider import get_family_spec

_PACKAGE = "flash_attn"
logger = logging.getLogger(__name__)


class FlashDotProductAttention(PackedAttention):
    """`PackedAttention` with the kernel of flash-attn from version 2.1 on; earlier ones aligned masks at the first key."""

    def kernel(self) -> Kernel:
        attend = _flash_attention()
        if attend is None:
            return super().kernel()

        def kernel(*stream: torch.Tensor | int, scale: float) -> torch.Tensor:
            return attend(*stream, softmax_scale=scale, causal=True, deterministic=self.config.deterministic_mode)

        return kernel


@functools.cache
def _flash_attention() -> Any:
    """The function of flash-attn for streams; None, with a line in the log, if it cannot be imported."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        if importlib.util.find_spec(_PACKAGE) is None:
            logger.info("flash-attn is not installed: PyTorch's flash kernel computes attention")
        else:
            logger.warning("flash-attn does not import (%s): PyTorch's flash kernel computes attention", error)
        return None
    return flash_attn_varlen_func


def prediction_layer_spec(layer: ModuleSpec, args: Any, config: TransformerConfig) -> ModuleSpec:
    """The spec of a layer of multi-token prediction. The backend finds this function by its name."""
    return with_core_attention(layer, FlashDotProductAttention)


def get_flash_attention_spec(
    args: Any, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The spec of the family's decoder layers with flash attention, for `--spec`."""
    block = as_block(get_family_spec(args, config, vp_stage), config, vp_stage)
    block.layer_specs = [with_core_attention(layer, FlashDotProductAttention) for layer in block.layer_specs]
    return block
