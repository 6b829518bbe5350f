"""Core attention with learnable sinks: every head has a logit s that takes part in the softmax but has no value (gpt-oss,
arXiv 2508.10925).

    o_i = Σ_j exp(q_i·k_j · scale) v_j / (exp(s) + Σ_j exp(q_i·k_j · scale)),        j ≤ i in the sequence of i

A sink is computed as one more key before those of every sequence, with a value of 0. Queries and keys get some further
channels: a head's queries have s / scale there, the sink's key has 1, and all other keys have zeros. So any kernel that attends
to keys attends to sinks too, and gives gradients for them, without knowing of them.

The parameter has Megatron's name, `softmax_offset` in the core attention, and is `self_attn.sinks` in Hugging Face checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from slime.backends.megatron_utils.attention import PackedAttention, StreamParams
from slime.backends.megatron_utils.layer_spec import as_block, with_core_attention
from slime.backends.megatron_utils.model_provider import get_family_spec
from slime.training.stream_attention import attend_over_context
from slime.utils.errors import UserError

# How many channels are added; kernels want widths that are multiples of this.
_CHANNELS = 8
# How many of them hold a sink: 16 bits have few digits, so a second channel holds the rounding error of the first.
_DIGITS = 2


class LearnableSoftmaxAttention(PackedAttention):
    """`PackedAttention` with a sink for each head. Sinks are divided over tensor-parallel ranks as heads are, and begin at 0.

    Raises:
        UserError: in forward, the stream is not a packed one of the trainer, or rows choose their keys.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.tensor_parallel_group = parallel_state.get_tensor_model_parallel_group()
        heads = config.num_attention_heads // self.tensor_parallel_group.size()
        self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
        tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def _attend_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: StreamParams
    ) -> torch.Tensor:
        stream = getattr(packed, "stream", None)
        if stream is None:
            raise UserError("attention with learnable sinks takes the trainer's packed streams alone")
        if packed.chosen is not None:
            raise UserError("attention with learnable sinks does not go with keys that an indexer chooses; drop --spec")
        width = key.shape[-1]
        sinks = self._channels(query.dtype).expand(len(query), -1, -1)
        first_key = key.new_zeros(*key.shape[1:-1], width + _CHANNELS)
        first_key[..., width : width + _DIGITS] = 1
        return attend_over_context(
            torch.cat([query, sinks], dim=-1),
            key,
            value,
            stream,
            self.softmax_scale,
            first=(first_key, value.new_zeros(value.shape[1:])),
            kernel=self.kernel,
        )

    def _channels(self, dtype: torch.dtype) -> torch.Tensor:
        """The queries' values in the further channels, [heads of this rank, channels]."""
        logits = self.softmax_offset.float() / self.softmax_scale
        rounded = logits.to(dtype)
        lost = (logits - rounded.float()).detach().to(dtype)
        digits = torch.stack([rounded, lost], dim=-1)
        return torch.nn.functional.pad(digits, (0, _CHANNELS - _DIGITS))

    def _causal_attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        raise UserError("attention with learnable sinks takes the trainer's packed streams alone")

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The sinks for a checkpoint that fits any layout."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            {"softmax_offset": self.softmax_offset}, prefix, {"softmax_offset": 0}, sharded_offsets,
            tp_group=self.tensor_parallel_group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip


def prediction_layer_spec(layer: ModuleSpec, args: Any, config: TransformerConfig) -> ModuleSpec:
    """The spec of a layer of multi-token prediction. The backend finds this function by its name."""
    return with_core_attention(layer, LearnableSoftmaxAttention)


def get_learnable_softmax_spec(
    args: Any, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The spec of the family's decoder layers with sinks, for `--spec`."""
    block = as_block(get_family_spec(args, config, vp_stage), config, vp_stage)
    block.layer_specs = [with_core_attention(layer, LearnableSoftmaxAttention) for layer in block.layer_specs]
    return block
