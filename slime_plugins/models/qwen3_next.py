"""The layers of Qwen3-Next: most have linear attention by the gated delta rule, the others softmax attention with a gate.

`--linear-attention-freq` tells which layers are which. The rows of the input projection are grouped by key head, as [query,
key, its values, their output gates, their rates, their decays], so that tensor-parallel ranks hold whole key heads.

A context-parallel rank has a part of the stream, but a state depends on all rows before it. So the inputs of the rule are
gathered, every rank computes the whole stream, and each keeps its own rows.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

from slime.backends.megatron_utils.attention import is_context_parallel
from slime.backends.megatron_utils.layer_spec import as_block, get_decoder_spec, with_attention
from slime.estimates.shape import linear_attention_layers
from slime.training.context_parallel import gather_rows
from slime.utils.errors import UserError
from slime_plugins.models.qwen_gdn_backend import Rule, Sequences, causal_convolution, rule_of, sequences_of_stream


def get_qwen3_next_spec(
    args: Any, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The spec of the decoder layers of this pipeline stage.

    Raises:
        UserError: a size of linear attention is not known; its key heads have unequal numbers of value heads, or cannot be
            cut over the tensor-parallel ranks.
    """
    sizes = (
        args.linear_attention_freq, config.linear_num_key_heads, config.linear_key_head_dim, config.linear_num_value_heads,
        config.linear_value_head_dim, config.linear_conv_kernel_dim,
    )  # fmt: skip
    if None in sizes:
        raise UserError(
            "--spec with linear attention needs its sizes: give --hf-checkpoint, or --linear-attention-freq, "
            "--linear-num-key-heads, --linear-key-head-dim, --linear-num-value-heads, --linear-value-head-dim and "
            "--linear-conv-kernel-dim"
        )
    if config.linear_num_value_heads % config.linear_num_key_heads:
        raise UserError(
            f"--linear-num-key-heads {config.linear_num_key_heads} does not divide --linear-num-value-heads "
            f"{config.linear_num_value_heads}: every key head has as many value heads as the others"
        )
    if config.linear_num_key_heads % config.tensor_model_parallel_size:
        raise UserError(
            f"--tensor-model-parallel-size {config.tensor_model_parallel_size} does not divide --linear-num-key-heads "
            f"{config.linear_num_key_heads}: a rank holds whole heads of linear attention"
        )
    spec = as_block(get_decoder_spec(config, vp_stage), config, vp_stage)
    is_linear = linear_attention_layers(args.linear_attention_freq, args.num_layers)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    delta_net = ModuleSpec(module=GatedDeltaNet, params={"rule": rule_of(args)})
    spec.layer_specs = [
        with_attention(layer, config, delta_net) if is_linear[first + index] else _with_gated_attention(layer)
        for index, layer in enumerate(spec.layer_specs)
    ]
    return spec


def _with_gated_attention(layer: ModuleSpec) -> ModuleSpec:
    layer = copy.deepcopy(layer)
    layer.submodules.self_attention.module = GatedAttention
    return layer


def prediction_layer_spec(layer: ModuleSpec, args: Any, config: TransformerConfig) -> ModuleSpec:
    """The spec of a layer of multi-token prediction: all of these have softmax attention. The backend finds this function by
    its name."""
    return _with_gated_attention(layer)


class GatedAttention(SelfAttention):
    """Softmax attention whose output is multiplied by the sigmoid of a gate that is projected beside the queries."""

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        query, key, value, gate = super().get_query_key_value_tensors(*args, **options)
        heads = query.shape[2]
        if gate.shape[2] > heads:
            # Ranks that share a group have all of its gates, and each some of its queries.
            part = self.pg_collection.tp.rank() % (gate.shape[2] // heads)
            gate = gate[:, :, part * heads : (part + 1) * heads]
        return query, key, value, gate

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Megatron's own is compiled at its first call."""
        return (x * torch.sigmoid(gate.reshape(x.shape).float())).to(x.dtype)


class GatedDeltaNet(MegatronModule):
    """Linear attention with the gated delta rule (Gated DeltaNet, arXiv 2412.06464, section 3), and a gate on its output."""

    # The order of tokens is in the recurrence; nothing is rotated by position.
    rotates = False

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        rule: Rule,
        pg_collection: Any = None,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__(config)
        self.rule = rule
        self.tensor_parallel_group = parallel_state.get_tensor_model_parallel_group()
        ranks = self.tensor_parallel_group.size()
        self.key_heads = config.linear_num_key_heads // ranks
        values = config.linear_num_value_heads // config.linear_num_key_heads
        # Of one key head: the query or key, its values, and a number for each of these.
        self.key_width, self.value_width = config.linear_key_head_dim, values * config.linear_value_head_dim
        self.values = values
        column, row = _linear_layers(config)
        rows = config.linear_num_key_heads * (2 * self.key_width + 2 * self.value_width + 2 * values)
        self.in_proj = build_module(
            column, config.hidden_size, rows, config=config, init_method=config.init_method, gather_output=False, bias=False,
            skip_bias_add=False, is_expert=False, tp_comm_buffer_name="qkv",
        )  # fmt: skip
        channels = self.key_heads * (2 * self.key_width + self.value_width)
        self.conv1d = torch.nn.Conv1d(
            channels, channels, config.linear_conv_kernel_dim, groups=channels, bias=False, dtype=config.params_dtype
        )
        heads = self.key_heads * values
        first = self.tensor_parallel_group.rank() * heads
        # From 1 to 16 over the heads of all ranks, and 1, as these models start.
        decays = torch.linspace(1, 16, config.linear_num_value_heads)[first : first + heads].log()
        self.A_log = torch.nn.Parameter(decays.to(config.params_dtype))
        self.dt_bias = torch.nn.Parameter(torch.ones(heads, dtype=config.params_dtype))
        for parameter in (self.conv1d.weight, self.A_log, self.dt_bias):
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        self.norm = torch.nn.Module()
        self.norm.weight = torch.nn.Parameter(torch.ones(config.linear_value_head_dim, dtype=config.params_dtype))
        self.out_proj = build_module(
            row, config.linear_num_value_heads * config.linear_value_head_dim, config.hidden_size, config=config,
            init_method=config.output_layer_init_method, bias=False, input_is_parallel=True, skip_bias_add=True,
            is_expert=False, tp_comm_buffer_name="proj",
        )  # fmt: skip

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Attend.

        Args:
            hidden_states: packed [T, 1, hidden], or [length, batch, hidden] without `packed_seq_params`; with sequence
                parallelism this rank's rows of them.
            attention_mask: unused; a token sees what is before it in its sequence.

        Returns:
            as `hidden_states`, and no bias.
        """
        projected, _ = self.in_proj(hidden_states)
        length, batch, _ = projected.shape
        heads = projected.transpose(0, 1).flatten(0, 1).unflatten(-1, (self.key_heads, -1))
        widths = [2 * self.key_width + self.value_width, self.value_width, 2 * self.values]
        mixed, gate, rates = heads.split(widths, dim=-1)
        if is_context_parallel(packed_seq_params):
            stream = packed_seq_params.stream
            gathered = gather_rows(torch.cat([mixed, rates], dim=-1), stream.cp, stream.gather_order)
            mixed, rates = gathered.split([widths[0], widths[2]], dim=-1)
            output = stream.rows_of_rank(self._attend(mixed, rates, sequences_of_stream(stream)))
        else:
            output = self._attend(mixed, rates, _sequences(packed_seq_params, length, batch, projected.device))
        output = self._gated_norm(output, gate.unflatten(-1, (self.values, -1)).flatten(1, 2))
        return self.out_proj(output.flatten(1).unflatten(0, (batch, length)).transpose(0, 1))

    def _attend(self, mixed: torch.Tensor, rates: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """The output of the rule, [T, value heads, width].

        Args:
            mixed: queries, keys and values before their convolution, [T, key heads, …].
            rates: the values of which rates and decays are made, [T, key heads, …].
        """
        mixed = F.silu(causal_convolution(mixed.flatten(1), self.conv1d.weight, sequences))
        query, key, value = mixed.unflatten(-1, (self.key_heads, -1)).split(
            [self.key_width, self.key_width, self.value_width], dim=-1
        )
        rate, decay = (part.flatten(1).float() for part in rates.split(self.values, dim=-1))
        decay = -self.A_log.float().exp() * F.softplus(decay + self.dt_bias.float())
        return self.rule(
            query, key, value.unflatten(-1, (self.values, -1)).flatten(1, 2), decay, rate.sigmoid(), sequences
        )

    def _gated_norm(self, output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """norm(output) · weight · silu(gate) per head. The weight is around one, even if other norms of the model add one."""
        # All heads share the weight and each rank has some of the heads, so its gradient is summed over the ranks.
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.norm.weight)
        normed = F.rms_norm(output.float(), weight.shape, eps=self.config.layernorm_epsilon).to(output.dtype)
        return (weight * normed * F.silu(gate.float())).to(output.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None, **_: object
    ) -> dict[str, Any]:
        """The parameters for a checkpoint that fits any layout."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        projections = ("in_proj", "out_proj")
        own = {name: p for name, p in self.named_parameters() if name.partition(".")[0] not in projections}
        cut = {name: p.partition_dim for name, p in own.items() if getattr(p, "tensor_model_parallel", False)}
        group = self.tensor_parallel_group
        found = make_sharded_tensors_for_checkpoint(
            own, prefix, cut, sharded_offsets, tp_group=group, dp_cp_group=metadata["dp_cp_group"]
        )
        for name in projections:
            place = (f"{prefix}{name}.", sharded_offsets, metadata)
            found.update(sharded_state_dict_default(getattr(self, name), *place, tp_group=group))
        return found


def _linear_layers(config: TransformerConfig) -> tuple[type[torch.nn.Module], type[torch.nn.Module]]:
    if config.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        return TEColumnParallelLinear, TERowParallelLinear
    return tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear


def _sequences(packed: PackedSeqParams | None, length: int, batch: int, device: torch.device) -> Sequences:
    if packed is None:
        return Sequences((length,) * batch, device)
    stream = getattr(packed, "stream", None)
    if stream is not None:
        return sequences_of_stream(stream)
    # If the description is not the trainer's, only the device knows the lengths.
    return Sequences(tuple(packed.cu_seqlens_q.diff().tolist()), device)
