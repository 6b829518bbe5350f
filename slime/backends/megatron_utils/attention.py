"""Core attention of the local layer spec: causal, grouped-query, over packed sequences.

Megatron-Core's own `DotProductAttention` refuses packed input. Here a packed stream holds many sequences end to end;
each attends to itself only. On CPU every sequence is one call of PyTorch's fused attention: its result depends on
nothing else in the stream, to the last bit, and no score matrix of the whole stream is ever made. On CUDA one
variable-length kernel does the stream. A rank that holds part of the stream only is `context_attention`'s matter.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from slime.backends.megatron_utils.context_attention import attend_over_context, is_context_parallel
from slime.utils.errors import UserError


class PackedAttention(MegatronModule):
    """softmax(Q K^T * scale + causal mask) V, in Megatron's core-attention interface.

    Raises:
        UserError: attention dropout is not 0; or, in forward, the stream is no causal self attention.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise UserError(f"--attention-dropout {dropout} needs Transformer Engine; set --attention-dropout 0")
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type=None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: packed [tokens, heads, dim] (with a contiguous part of a stream [tokens, 1, heads, dim]), or
                [length, batch, heads, dim] without `packed_seq_params`.
            key, value: as query, with the number of query groups in place of heads.
            attention_mask: unused; the mask is causal within each sequence.
            packed_seq_params: cumulative lengths of the packed sequences (qkv_format "thd").

        Returns:
            packed [tokens, heads * dim], or [length, batch, heads * dim].
        """
        if packed_seq_params is None:
            return self._attend_batch(query, key, value)
        if is_context_parallel(packed_seq_params):
            return self._attend_part(query, key, value, packed_seq_params)
        if query.is_cuda:
            return self._attend_packed_cuda(query, key, value, packed_seq_params)
        return self._attend_each_sequence(query, key, value, packed_seq_params)

    def _attend_batch(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        return self._causal_attention(query, key, value).permute(2, 0, 1, 3).flatten(2)

    def _attend_part(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        rows = [tensor if tensor.dim() == 3 else tensor.squeeze(1) for tensor in (query, key, value)]
        output = attend_over_context(*rows, packed.stream, self.softmax_scale)
        return output if query.dim() == 3 else output.unsqueeze(1)

    def _attend_each_sequence(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        boundaries = packed.cu_seqlens_q.tolist()
        lengths = [end - start for start, end in itertools.pairwise(boundaries) if end > start]
        # One split for the whole stream: the gradient of a slice is as long as the stream, so slicing per sequence
        # would make the backward pass quadratic in the number of sequences.
        pieces = (tensor.transpose(0, 1).split(lengths, dim=1) for tensor in (query, key, value))
        outputs = [
            self._causal_attention(*(piece.unsqueeze(0) for piece in sequence)).squeeze(0).transpose(0, 1)
            for sequence in zip(*pieces, strict=True)
        ]
        return torch.cat(outputs).flatten(1)

    def _attend_packed_cuda(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if query.dtype == torch.float32:
            # The variable-length kernel exists for 16-bit types only.
            return self._attend_each_sequence(query, key, value, packed)
        output = varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            int(packed.max_seqlen_q),
            int(packed.max_seqlen_kv),
            scale=self.softmax_scale,
            window_size=(-1, 0),
            enable_gqa=True,
        )
        return output.flatten(1)

    def _causal_attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True, scale=self.softmax_scale
        )
