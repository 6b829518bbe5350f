"""Computes one micro-batch while tokens of another travel to their experts (`--overlap-moe-expert-parallel-comm`).

Megatron's schedule for that gets a plan from a model chunk in place of its output: the forward pass in parts, each with its
backward pass. A layer has four: attention with routing; tokens on their way to the experts; experts; tokens on their way back.
The schedule takes the parts of a micro-batch in turn with those of another one's backward pass, travels on one stream and the
rest on another.

Megatron's plan runs what a layer of its own contains, and none of what stands around the parts. `ChunkPlan` completes it: it
tells routers what they are told in a whole pass, leaves padding out of their counts, gives ranks of sequence parallelism random
numbers of their own, applies the final norm behind a layer without experts, and computes logits in 16 bits, for the rows that
predict something. Layers that do more than Megatron's are refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.model_chunk_schedule_plan import (
    TransformerLayerSchedulePlan,
    TransformerModelChunkSchedulePlan,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer

from slime.utils.errors import UserError

_FLAG = "--overlap-moe-expert-parallel-comm"
# Makes the context of one part of a pass.
Around = Callable[[], contextlib.AbstractContextManager[None]]


def run_in_parts(model: GPTModel) -> None:
    """Prepare a bare model chunk for `planning`.

    Raises:
        UserError: its passes do something that the parts of Megatron's layers do not.
    """
    found = None if type(model).forward is GPTModel.forward and "forward" not in vars(model) else type(model)
    if model.decoder._forward_hooks:
        found = "layers for multi-token prediction on an earlier stage"
    for layer in model.decoder.layers:
        is_plain = isinstance(layer, TransformerLayer) and all(
            getattr(type(layer), name) is getattr(TransformerLayer, name) for name in ("forward", "_forward_mlp")
        )
        if not is_plain or layer._forward_hooks:
            found = f"layer {layer.layer_number} ({type(layer).__name__}, {len(layer._forward_hooks)} hooks)"
            break
        # Gradients of weights are not delayed, so nobody asks for the functions that would compute them, which attention of
        # a family's own lacks.
        layer.backward_dw_wrapper, layer.init_backward_dw_wrapper = None, lambda: None
    if found is not None:
        raise UserError(
            f"{_FLAG}: a forward pass in parts would leave out what this model adds to Megatron's, found at {found}; leave the "
            "flag out"
        )


@contextlib.contextmanager
def planning(model: GPTModel, routing: Sequence[Around], selecting: Around) -> Iterator[None]:
    """In the block a call of the bare `model`, or of its wrappers, returns the plan of the forward pass in place of its output.

    Args:
        routing: entered around the part of each layer that has its router.
        selecting: entered around the computation of logits.
    """
    model.forward = functools.partial(ChunkPlan, model, routing=routing, selecting=selecting)
    try:
        yield
    finally:
        del model.forward


class ChunkPlan(TransformerModelChunkSchedulePlan):
    """Megatron's plan of a micro-batch's pass through a model chunk, completed. `inputs` are those of the model."""

    def __init__(self, model: GPTModel, *, routing: Sequence[Around], selecting: Around, **inputs: Any) -> None:
        self._decoder = model.decoder
        super().__init__(model, **inputs)
        for number in range(self.num_layers()):
            self._complete(self.get_layer(number), routing)
        if self.post_process is not None:
            ends_with_norm = self.num_layers() > 0 and self.get_layer(self.num_layers() - 1).layer.is_moe_layer
            logits = functools.partial(_logits, model, ends_with_norm)
            self.post_process.forward_func = _within([selecting], logits)

    def _build_layer_schedule_plan(self, module: torch.nn.Module | None, *streams: Any) -> None:
        # Layers for multi-token prediction are only kept here; training them goes without plans.
        if module is self._decoder:
            super()._build_layer_schedule_plan(module, *streams)

    def _complete(self, plan: TransformerLayerSchedulePlan, routing: Sequence[Around]) -> None:
        layer, state = plan.layer, self.state
        # Without a fork, ranks that hold different rows would draw the same numbers for them.
        forked = [tensor_parallel.get_cuda_rng_tracker().fork] if layer.config.sequence_parallel else []
        plan.mlp.forward_func = _within(forked, plan.mlp.forward_func)
        if not layer.is_moe_layer:
            plan.attn.forward_func = _within(forked, plan.attn.forward_func)
            return
        around = [*forked, *routing, functools.partial(_leaving_out_padding, layer.mlp, state)]
        plan.attn.forward_func = _within(around, plan.attn.forward_func)
        plan.moe_combine.forward_func = _within(forked, plan.moe_combine.forward_func)
        # Megatron frees what the experts take, since it is sorted into other memory. A lone expert takes it as it came.
        plan.mlp.free_input = plan.mlp.free_input and layer.mlp.num_local_experts > 1


def _within(contexts: Sequence[Around], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called in these contexts."""

    def call(*inputs: torch.Tensor) -> Any:
        with contextlib.ExitStack() as entered:
            for context in contexts:
                entered.enter_context(context())
            return function(*inputs)

    return call


@contextlib.contextmanager
def _leaving_out_padding(experts: torch.nn.Module, state: Any) -> Iterator[None]:
    """In the block the router of `experts` is told which rows are padding: Megatron's part of a layer does not tell it."""
    mask = state.padding_mask.transpose(0, 1).bool()
    experts.route = functools.partial(experts.route, padding_mask=mask)
    try:
        yield
    finally:
        del experts.route


def _logits(model: GPTModel, is_normed: bool, hidden: torch.Tensor) -> torch.Tensor:
    """The logits of the last layer's output, in the dtype of the model. Megatron's own part would copy them to float32; and it
    has the final norm in a last layer with experts, or for a chunk without layers, and else nowhere."""
    norm = model.decoder.final_layernorm
    if not is_normed and norm is not None:
        hidden = norm(hidden)
    return model._postprocess(hidden, *[None] * 6)
