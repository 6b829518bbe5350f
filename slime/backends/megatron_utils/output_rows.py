"""Computes logits only for rows that predict something.

The vocabulary projection is the widest matrix of a model, and its output the largest tensor of a step. Rows of a prompt are not
trained on, so they skip it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region

from slime.training.packed_stream import Rows


@contextlib.contextmanager
def logits_of(rows: Rows | None, output_layer: torch.nn.Module) -> Iterator[None]:
    """In the block `output_layer` returns logits [R, 1, V / tensor-parallel size] for the R `rows` of its input.

    It returns logits of all rows if `rows` is None, or if the layer is not Megatron's own but that of a critic or of a user's
    model.
    """
    if rows is None or not isinstance(output_layer, ColumnParallelLinear):
        yield
        return
    of_layer, own = output_layer.forward, vars(output_layer).get("forward")
    is_split, group = output_layer.sequence_parallel, output_layer.tp_group

    def chosen(hidden: torch.Tensor) -> torch.Tensor:
        if is_split:
            # `rows` index the rows of all ranks, so they are gathered here instead of in the layer. The layer sums the gradient
            # over ranks, so in the backward pass each rank takes its part of that.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
        return hidden.index_select(0, rows.index)

    def forward(hidden: torch.Tensor, *others: Any, **options: Any) -> Any:
        selected = chosen(hidden)
        logits, bias = of_layer(selected, *others, **options)
        if is_split:
            # For the backward pass a rank keeps its own part instead of the rows of all ranks. Only the saved rows get hooks,
            # not the weight: a hook returns another tensor, without the marks by which Megatron adds up the weight's gradient.
            part, node = hidden.detach(), logits.grad_fn
            for place, saved in enumerate(getattr(node, "saved_tensors", ())):
                if saved is not None and saved.shape == selected.shape:
                    node._raw_saved_tensors[place].register_hooks(lambda _: None, lambda _: chosen(part))
        return logits, bias

    output_layer.forward, output_layer.sequence_parallel = forward, False
    try:
        yield
    finally:
        output_layer.sequence_parallel = is_split
        if own is None:
            del output_layer.forward
        else:
            output_layer.forward = own
