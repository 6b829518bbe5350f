"""The attention of transformers inside Megatron's layers; the module is used unchanged, with its own names and weights.

The module takes whole sequences, one at a time, and knows of no other rank. So every rank gathers the rows of all
tensor-parallel and context-parallel ranks, runs the module on one sequence of the stream after the other, and keeps its own
rows of the output. Everything around attention (norms, MLP, experts) is the family's own, in all layouts.

Tensor-parallel ranks do the same work on the same rows, forward and backward, so each has the whole gradient of every weight,
and Megatron takes the mean over these ranks. A context-parallel rank goes backward from its own rows alone. So weights get a
part of their gradient, which is summed over these ranks like that of all weights, and hidden states get the sum over all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from slime.backends.megatron_utils.attention import StreamParams, is_context_parallel
from slime.backends.megatron_utils.layer_spec import as_block, with_attention
from slime.backends.megatron_utils.model_provider import get_family_spec
from slime.models.family import ATTENTION_MODULES
from slime.training.context_parallel import gather_rows
from slime.utils.errors import UserError
from slime.utils.plugin_loader import accepted_keywords


def get_hf_attention_spec(
    args: Any, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The spec, for `--spec`, of the family's decoder layers, each with the attention of the same layer in transformers."""
    block = as_block(get_family_spec(args, config, vp_stage), config, vp_stage)
    attention = hf_attention(args)
    block.layer_specs = [with_attention(layer, config, attention) for layer in block.layer_specs]
    return block


def hf_attention(args: Any) -> ModuleSpec:
    """The spec of transformers' attention for the model of `--hf-checkpoint`, for `with_attention` of a layer's spec.

    Raises:
        UserError: transformers has no class for the model.
    """
    return ModuleSpec(module=HfAttention, params={"decoder": _decoder(args.hf_checkpoint)})


def _decoder(hf_checkpoint: str) -> torch.nn.Module:
    """The decoder in transformers, on the meta device, where it takes no memory; it tells which classes layers have."""
    from transformers import AutoConfig, AutoModel

    try:
        config = AutoConfig.from_pretrained(hf_checkpoint).get_text_config()
        # No dropout, because log-probs must not depend on chance.
        config.attention_dropout = 0.0
        with torch.device("meta"):
            return AutoModel.from_config(config)
    except (ValueError, OSError) as error:
        raise UserError(
            f"--spec with attention of transformers: it has no class for the model of --hf-checkpoint {hf_checkpoint} "
            f"({error}); leave --spec out"
        ) from error


class HfAttention(MegatronModule):
    """The attention of a layer of `decoder`, a model of transformers without its head.

    Every rank has all of its weights, as `self_attn.…` or `linear_attn.…`; they are exported under these names.

    Raises:
        UserError: the layer has attention of another name.
    """

    # Megatron need not rotate, because the module gets its own cosines and sines.
    rotates = False

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        decoder: torch.nn.Module,
        pg_collection: Any = None,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__(config)
        layer, number = decoder.layers[layer_number - 1], layer_number - 1
        names = [name for name in ATTENTION_MODULES if hasattr(layer, name)]
        if not names:
            raise UserError(
                f"--spec with attention of transformers: layer {number} of {type(decoder).__name__} has none of "
                f"{', '.join(ATTENTION_MODULES)}; leave --spec out"
            )
        self.name = names[0]
        attention = type(getattr(layer, self.name))(decoder.config, number)
        for module in attention.modules():
            decoder._init_weights(module)
        for parameter in attention.parameters():
            parameter.average_gradients_across_tp_domain = True
        setattr(self, self.name, attention.to(config.params_dtype))
        self._mask = _mask_function(decoder.config, number)
        # In a list, so that it is not a submodule: its frequencies must not be rounded with the weights.
        self._rotary = [type(decoder.rotary_emb)(decoder.config)] if hasattr(decoder, "rotary_emb") else []
        self._decoder_config = decoder.config

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Attend. Collective.

        Args:
            hidden_states: packed [T, 1, hidden], or [length, batch, hidden] without `packed_seq_params`; with sequence
                parallelism this rank's rows of them.
            attention_mask: unused; the mask is that of the layer in transformers, within each sequence.

        Returns:
            as `hidden_states`, and no bias.
        """
        sequence_parallel = self.config.sequence_parallel
        if sequence_parallel:
            # All ranks go backward through all rows, so each has the whole gradient, and keeps that of its own rows.
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        if packed_seq_params is None:
            output = self._attend(hidden_states.transpose(0, 1)).transpose(0, 1)
        else:
            output = self._attend_packed(hidden_states, packed_seq_params)
        if sequence_parallel:
            output = tensor_parallel.scatter_to_sequence_parallel_region(output)
        return output, None

    def _attend_packed(self, hidden: torch.Tensor, packed: PackedSeqParams) -> torch.Tensor:
        """hidden: [T, 1, hidden]"""
        stream = packed.stream if isinstance(packed, StreamParams) else None
        if is_context_parallel(packed):
            hidden = gather_rows(hidden, stream.cp, stream.gather_order)
        # If the description is not the trainer's, only the device knows the lengths.
        lengths = packed.cu_seqlens_q.diff().tolist() if stream is None else stream.sequence_lengths
        sequences = hidden.squeeze(1).split([length for length in lengths if length])
        output = torch.cat([self._attend(sequence[None])[0] for sequence in sequences])[:, None]
        return stream.rows_of_rank(output) if is_context_parallel(packed) else output

    def _attend(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [sequences, length, hidden], whole sequences; returns the same shape."""
        attention = getattr(self, self.name)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        options: dict[str, Any] = {"attention_mask": None, "position_ids": positions}
        if self._mask is not None:
            options["attention_mask"] = self._mask(self._decoder_config, hidden, None, past_key_values=None)
        for rotary in self._rotary:
            options["position_embeddings"] = rotary.to(hidden.device)(hidden, positions)
        output = attention(hidden, **accepted_keywords(attention.forward, options))
        return output[0] if isinstance(output, tuple) else output


def _mask_function(config: Any, layer: int) -> Any:
    """The function that makes the mask of a layer; None: a layer of linear attention needs no mask."""
    from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, create_causal_mask

    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] == "linear_attention":
        return None
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.get(kind if kinds is None else kinds[layer], create_causal_mask)
