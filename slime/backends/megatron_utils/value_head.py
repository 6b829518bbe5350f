"""The critic's output: one float32 value per token instead of logits.

The head takes the place of the vocabulary projection on the last pipeline stage, whichever function built the model. It is
whole on every tensor-parallel rank. It starts at zeros, so a new critic predicts 0 and adds no noise to the first advantages;
random weights on normalised hidden states of width h would give values whose standard deviation is √h times that of the
weights. The first step changes the head alone, all others the whole network.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

# In checkpoints the head has a name of its own, so that loading does not take it for the vocabulary projection of an actor.
_STORED_PREFIX = "value_head."
_PLACE = "output_layer."


class ValueHead(torch.nn.Module):
    """A linear map from hidden states to one number, called as Megatron's models call their output layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.is_value_head = True
        # Settings for output layers, such as a learning rate of their own, apply to it.
        self.weight.is_embedding_or_output_parameter = True
        self.sequence_parallel = config.sequence_parallel
        if self.sequence_parallel:
            # Each rank sees its part of the tokens; Megatron then sums the gradient over the tensor-parallel ranks.
            self.weight.sequence_parallel = True

    def forward(
        self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Values [T, 1, 1] float32 of hidden states [T (with sequence parallelism: this rank's part of T), 1, hidden]."""
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # One number per token travels, not the hidden state; every rank then computes the same loss from all of them.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        # `keep_vars` gives the parameters themselves, by whose identity the optimizer finds the state of each.
        tensors = self.state_dict(keep_vars=True)
        state = make_sharded_tensors_for_checkpoint(tensors, _STORED_PREFIX, sharded_offsets=sharded_offsets)
        return {prefix + key.removeprefix(_STORED_PREFIX): tensor for key, tensor in state.items()}


def put_value_head(model: GPTModel) -> None:
    """Replace the output layer of a bare model chunk, if it has one, by a new value head.

    Raises:
        ValueError: embedding and output layer share their weights.
    """
    if not getattr(model, "post_process", True):
        return
    if model.share_embeddings_and_output_weights:
        raise ValueError("a value head needs a model whose embedding and output layer have weights of their own")
    model.output_layer = ValueHead(model.config)


def is_value_head(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter belongs to a value head."""
    return getattr(parameter, "is_value_head", False)


def has_stored_head(stored: Iterable[str]) -> bool:
    """Whether a checkpoint with these names has a value head."""
    return any(name.startswith(_STORED_PREFIX) for name in stored)


def leave_out_missing_head(state: dict[str, Any], stored: Container[str]) -> bool:
    """Take the value head out of the sharded state `state` of a model chunk if a checkpoint with the names `stored` has none.

    Returns:
        Whether it was taken out; it then keeps the weights that it has.
    """
    heads = [name for name in state if name.startswith(_PLACE) and state[name].key.startswith(_STORED_PREFIX)]
    if not heads or state[heads[0]].key in stored:
        return False
    for name in heads:
        del state[name]
    return True
