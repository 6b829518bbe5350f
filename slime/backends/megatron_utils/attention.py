"""Core attention of the local layer spec: causal, grouped-query, over packed sequences.

Megatron-Core's own `DotProductAttention` refuses packed input. Here a packed stream holds many sequences end to end. Each
attends to itself only, even if context-parallel ranks hold parts of it: see `slime.training.stream_attention`.

Multi-head latent attention computes queries, keys and values of all heads from one small vector per token. Then it is the same
attention, with keys that are wider than values.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import YarnRotaryEmbedding, apply_rotary_pos_emb, rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.module import MegatronModule
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from slime.training.packed_stream import PackedStream
from slime.training.rollout_data import MicroBatch
from slime.training.stream_attention import (
    Kernel,
    as_wide_as,
    attend_over_context,
    attend_to_each_sequence,
    causal_attention,
    causal_varlen_attention,
)
from slime.utils.device import fused, get_accelerator
from slime.utils.errors import UserError


class PackedAttention(MegatronModule):
    """softmax(Q K^T * scale + causal mask) V, in Megatron's core-attention interface.

    A subclass may use another kernel for streams on CUDA (`kernel`).

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
        k_channels: int | None = None,
        v_channels: int | None = None,
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
            query: packed [tokens, heads, dim] (in another format than "thd" [tokens, 1, heads, dim]), or
                [length, batch, heads, dim] without `packed_seq_params`.
            key, value: as query, with the number of query groups in place of heads; values may have another width.
            attention_mask: unused; the mask is causal within each sequence.
            packed_seq_params: cumulative lengths of the packed sequences.

        Returns:
            packed [tokens, heads * dim of a value], with the dimension of 1 if the query has it, or
            [length, batch, heads * dim of a value].
        """
        if packed_seq_params is None:
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            return self._causal_attention(query, key, value).permute(2, 0, 1, 3).flatten(2)
        rows = [tensor if tensor.dim() == 3 else tensor.squeeze(1) for tensor in (query, key, value)]
        output = self._attend_packed(*rows, packed_seq_params)
        return output if query.dim() == 3 else output.unsqueeze(1)

    def kernel(self) -> Kernel:
        """The kernel for streams of 16-bit types on CUDA."""
        return causal_varlen_attention()

    def _attend_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        chosen = getattr(packed, "chosen", None)
        if is_context_parallel(packed) or chosen is not None:
            given = query, key, value, packed.stream, self.softmax_scale, chosen
            return attend_over_context(*given, kernel=self.kernel)
        if query.is_cuda:
            return self._attend_packed_cuda(query, key, value, packed)
        return self._attend_each_sequence(query, key, value, packed)

    def _attend_each_sequence(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        stream = getattr(packed, "stream", None)
        # A description that is not ours has the lengths only on the device.
        boundaries = [] if stream is not None else packed.cu_seqlens_q.tolist()
        lengths = (
            [end - start for start, end in itertools.pairwise(boundaries)]
            if stream is None
            else stream.sequence_lengths
        )
        return attend_to_each_sequence(query, key, value, lengths, self.softmax_scale)

    def _attend_packed_cuda(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        if query.dtype == torch.float32:
            # The variable-length kernel exists for 16-bit types only.
            return self._attend_each_sequence(query, key, value, packed)
        width = value.shape[-1]
        output = self.kernel()(
            query.contiguous(),
            key.contiguous(),
            as_wide_as(key, value).contiguous(),
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            int(packed.max_seqlen_q),
            int(packed.max_seqlen_kv),
            scale=self.softmax_scale,
        )
        return output[..., :width].flatten(1)

    def _causal_attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return causal_attention(query, key, value, self.softmax_scale)


@dataclass
class StreamParams(PackedSeqParams):
    """Megatron's description of a packed stream, with the stream itself for our own attention and rotary embedding.

    chosen: in the current layer, the keys that each row attends to, int32 [T, k], as positions in its sequence, −1 for none;
        None: all keys that it sees.
    choices: choices of keys that later layers reuse, by the number of the layer that made them.
    batch: the samples of the stream, for models whose input is more than tokens.
    added: for such models, by the number of a layer: rows of its hidden states, int64, and the values that are added to them,
        [rows, hidden].
    """

    stream: PackedStream | None = None
    batch: MicroBatch | None = None
    chosen: torch.Tensor | None = None
    choices: dict[int, torch.Tensor] = field(default_factory=dict)
    added: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


def packed_seq_params(batch: MicroBatch, *, by_position: bool) -> StreamParams:
    """The description of `batch` and its stream that the model gets.

    In its own format for packed sequences ("thd") Megatron's rotary embedding derives positions from the lengths of whole
    sequences. With any other format name it rotates row by row, by frequencies that `layer_spec.rotate_by_position` provides.

    Args:
        by_position: whether the model's rotary embedding is the one of `rotate_by_position`.
    """
    stream = batch.stream
    longest = max(stream.sequence_lengths)
    return StreamParams(
        qkv_format="by position" if by_position else "thd",
        cu_seqlens_q=stream.cu_seqlens,
        cu_seqlens_kv=stream.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        stream=stream,
        batch=batch,
    )


def is_context_parallel(packed: PackedSeqParams | None) -> bool:
    """Whether the rank holds only a part of the stream."""
    stream = getattr(packed, "stream", None)
    return stream is not None and stream.cp.size > 1


class _Rotation(torch.autograd.Function):
    """(a, b) → (a cos − b sin, b cos + a sin) for the halves a, b of the channels that are rotated; the others stay.

    Rotary embedding (Su et al. 2021, arXiv 2104.09864, equation 34), with channel i paired with i + dim / 2. Backward is the
    rotation by the negative angle: nothing but cosines and sines is kept, and no half of a tensor is copied to be negated.
    """

    @staticmethod
    def forward(ctx, channels: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(channels, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _rotated(gradient, *ctx.saved_tensors, -1), None, None


def _rotated(channels: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    compiled = fused(rotation, get_accelerator())
    output = None if compiled is None else compiled(channels, cos, sin if direction > 0 else -sin)
    if output is not None:
        return output
    width = cos.shape[-1]
    output = torch.empty_like(channels, memory_format=torch.contiguous_format)
    torch.mul(channels[..., :width], cos, out=output[..., :width])
    first, second = channels[..., :width].chunk(2, dim=-1)
    sin_of_first, sin_of_second = sin.chunk(2, dim=-1)
    if direction < 0:
        sin_of_first, sin_of_second = sin_of_second, sin_of_first
    output[..., : width // 2].addcmul_(second, sin_of_first, value=-direction)
    output[..., width // 2 : width].addcmul_(first, sin_of_second, value=direction)
    output[..., width:] = channels[..., width:]
    return output


def rotation(channels: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """What `_Rotation` computes, as one expression."""
    first, second, others = channels.tensor_split((cos.shape[-1] // 2, cos.shape[-1]), dim=-1)
    (cos_of_first, cos_of_second), (sin_of_first, sin_of_second) = (part.chunk(2, dim=-1) for part in (cos, sin))
    rotated = first * cos_of_first - second * sin_of_first, second * cos_of_second + first * sin_of_second
    return torch.cat([*rotated, others], dim=-1)


_megatrons_rotation = rope_utils._apply_rotary_pos_emb_bshd
# Cosines and sines of frequencies, by dtype and factor, while the frequencies exist: so queries and keys of all layers share
# them.
_ANGLES = WeakTensorKeyDictionary()


def rotate(
    channels: torch.Tensor,
    frequencies: torch.Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
) -> torch.Tensor:
    """Megatron's rotation with fewer passes over memory. It replaces Megatron's own if no fused kernel is asked for.

    Args:
        channels: [T, …, dim].
        frequencies: [T, …, width], float32; width ≤ dim, and the halves are equal.
        mscale: a factor on cosine and sine.

    Returns:
        As `channels`.
    """
    if rotary_interleaved or multi_latent_attention:
        return _megatrons_rotation(channels, frequencies, rotary_interleaved, multi_latent_attention, mscale)
    of_frequencies = _ANGLES.setdefault(frequencies, {})
    kind = channels.dtype, mscale
    if kind not in of_frequencies:
        of_frequencies[kind] = [(part * mscale).to(channels.dtype) for part in (frequencies.cos(), frequencies.sin())]
    return _Rotation.apply(channels, *of_frequencies[kind])


rope_utils._apply_rotary_pos_emb_bshd = rotate


# Megatron-Core believes that Transformer Engine is installed if its own stand-ins can be imported. It then checks whether a
# layer is an instance of a stand-in, which is no type.
multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)


class _Yarn(YarnRotaryEmbedding):
    """Megatron's own, without its cache of cosines and sines for a fused kernel, which it would cut for context-parallel
    ranks."""

    def _set_cos_sin_cache(self, *_: object, **__: object) -> None:
        return


multi_latent_attention.YarnRotaryEmbedding = _Yarn


class LatentAttention(multi_latent_attention.MLASelfAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) of packed streams.

    Megatron's own layer derives positions from the lengths of sequences. And if tensor-parallel ranks share the projection down
    to the latent vector, it gives the rotated part of the keys, which the heads of all ranks use, only the gradient of one
    rank's heads.

    Raises:
        UserError: `--apply-rope-fusion`.
    """

    def __init__(self, config, *args: object, **options: object) -> None:
        if config.apply_rope_fusion:
            raise UserError(
                "--apply-rope-fusion: no fused kernel rotates for latent attention here; give --no-rope-fusion"
            )
        super().__init__(config, *args, **options)
        if config.q_lora_rank is not None:
            # Weights are sent in the order of the modules, and engines load both down-projections together: so they must be
            # neighbours.
            self.linear_q_up_proj = self._modules.pop("linear_q_up_proj")
        if config.q_lora_rank is not None and not config.sequence_parallel:
            # Megatron sums the gradients of norms of this name over tensor-parallel ranks, which is right for norms of single
            # heads. The gradients of this norm are the same on all ranks, so they are averaged.
            for parameter in self.q_layernorm.parameters():
                parameter.average_gradients_across_tp_domain = True

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value, and the latent vectors that they are made of.

        Args:
            hidden_states: [T, 1, hidden]; with sequence parallelism this rank's rows of them.

        Returns:
            query and key [T, 1, heads, qk_head_dim + qk_pos_emb_head_dim], value [T, 1, heads, v_head_dim], all of this
            rank's heads; latent vectors of queries (without a rank of their own the hidden states) and of keys and values.
        """
        config = self.config
        latent, key_rotated = self._project_down(self.linear_kv_down_proj, hidden_states).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
        )
        key_rotated = tensor_parallel.copy_to_tensor_model_parallel_region(key_rotated)
        latent = self.kv_layernorm(self._rows_of_rank(latent))
        query_latent = hidden_states
        if config.q_lora_rank is not None:
            query_latent = self._project_down(self.linear_q_down_proj, hidden_states)
            query_latent = self.q_layernorm(self._rows_of_rank(query_latent))
        frequencies, concentration = self._rotation(len(key_rotated), packed_seq_params)

        def heads(query_latent: torch.Tensor, latent: torch.Tensor, key_rotated: torch.Tensor):
            return self._heads(query_latent, latent, key_rotated, frequencies, concentration)

        if self.recompute_up_proj:
            self.qkv_up_checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=config.fp8)
            made = self.qkv_up_checkpoint.checkpoint(heads, query_latent, latent, key_rotated)
        else:
            made = heads(query_latent, latent, key_rotated)
        return (*made, query_latent, latent)

    def _heads(
        self,
        query_latent: torch.Tensor,
        latent: torch.Tensor,
        key_rotated: torch.Tensor,
        frequencies: torch.Tensor,
        concentration: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        project = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = project(query_latent)[0].unflatten(-1, (-1, self.q_head_dim))
        key_value = self.linear_kv_up_proj(latent)[0].unflatten(-1, (-1, config.qk_head_dim + config.v_head_dim))
        query, query_rotated = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        key, value = key_value.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        query_rotated, key_rotated = (
            apply_rotary_pos_emb(rotated, frequencies, config, mscale=concentration, cp_group=self.pg_collection.cp)
            for rotated in (query_rotated, key_rotated.unsqueeze(-2))
        )
        key_rotated = key_rotated.expand(-1, -1, key.shape[-2], -1)
        return torch.cat([query, query_rotated], -1), torch.cat([key, key_rotated], -1), value.contiguous()

    def _project_down(self, layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Whole latent vectors of all rows: each tensor-parallel rank has some of their channels."""
        return tensor_parallel.gather_from_tensor_model_parallel_region(layer(hidden)[0])

    def _rows_of_rank(self, latent: torch.Tensor) -> torch.Tensor:
        if not self.config.sequence_parallel:
            return latent
        return tensor_parallel.scatter_to_sequence_parallel_region(latent)

    def _rotation(self, rows: int, packed: PackedSeqParams | None) -> tuple[torch.Tensor, float]:
        """The frequencies [T, 1, 1, dim] of the rows' positions, and a factor on their cosine and sine (1 but for YaRN).

        Nothing is cached from the forward pass: when a layer is recomputed, the model may have seen other streams since.
        """
        longest = rows if packed is None else int(packed.max_seqlen_q)
        found = self.rotary_pos_emb.get_emb(longest)
        frequencies, concentration = found if isinstance(found, tuple) else (found, 1.0)
        if packed is None:
            return frequencies, concentration
        return frequencies.index_select(0, _positions(packed, rows)), concentration


def _positions(packed: PackedSeqParams, rows: int) -> torch.Tensor:
    stream = getattr(packed, "stream", None)
    if stream is not None:
        return stream.position_ids
    lengths = packed.cu_seqlens_q.diff()
    starts = packed.cu_seqlens_q[:-1].repeat_interleave(lengths, output_size=rows)
    return torch.arange(rows, device=starts.device) - starts
