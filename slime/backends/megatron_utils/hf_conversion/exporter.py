"""The model's Megatron parameters -> tensors under their Hugging Face names.

All ranks walk through the parameters of the whole model in the same order: each comes from the pipeline stage that holds it,
one at a time, and is then gathered over tensor-parallel ranks. Every rank gets every tensor, and a rank that has no use for
it drops it. Tied embeddings are one parameter, however many stages hold a copy, and are therefore sent once. Layers for
multi-token prediction are left out where the family's checkpoints have none.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.hf_conversion.families import Family, family_of_args, family_of_name, strip_wrappers
from slime.backends.megatron_utils.hf_conversion.layouts import Layout, ModelShape
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

NamedTensor = tuple[str, torch.Tensor]


@torch.no_grad()
def iter_hf_named_tensors(args: Any, model_chunks: Iterable[torch.nn.Module]) -> Iterator[NamedTensor]:
    """Yield (HF name, tensor) for every parameter, in the order of the model. Collective over the tensor-parallel and
    pipeline groups.

    Tensors are whole, contiguous, detached, on the parameters' device and in their dtype, without vocabulary padding.
    They may share memory with the model: use or copy them before the next optimizer step.
    """
    family = family_of_args(args)
    shape = ModelShape.from_args(args)
    for name, local in _parameters_of_all_stages(model_chunks, family):
        layout = family.find(name)[0].layout
        yield from _to_hf(family, shape, name, _gather(layout, local))


def iter_hf_buckets(
    args: Any, model_chunks: Iterable[torch.nn.Module], buffer_size: int
) -> Iterator[list[NamedTensor]]:
    """The tensors of `iter_hf_named_tensors` in lists of at most `buffer_size` bytes; a larger tensor is a list of its
    own.

    The lists are the same on every rank. Collective over the tensor-parallel and pipeline groups.
    """
    bucket: list[NamedTensor] = []
    held = 0
    for name, tensor in iter_hf_named_tensors(args, model_chunks):
        if bucket and held + tensor.nbytes > buffer_size:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket


def convert_to_hf(
    args: Any, model_name: str, name: str, param: torch.Tensor, quantization_config: dict[str, Any] | None = None
) -> list[NamedTensor]:
    """Translate one whole Megatron parameter (gathered over tensor-parallel ranks, vocabulary padding or not).

    Args:
        model_name: decides the family ("qwen3", "Qwen3ForCausalLM", ...).
        name: the parameter's global name; `module.` prefixes are allowed.

    Raises:
        UserError: unknown family, or a `quantization_config` (conversion to quantised checkpoints does not exist).
        KeyError: the family has no such parameter.
    """
    if quantization_config:
        raise UserError(
            f"export to a quantised checkpoint ({quantization_config.get('quant_method')}) is not supported"
        )
    return list(_to_hf(family_of_name(model_name), ModelShape.from_args(args), name, param))


def remove_padding(name: str, param: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The parameter without the padding rows of the vocabulary, if `name` is the embedding or the output layer."""
    if strip_wrappers(name) in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return param[:vocab_size]
    return param


def _to_hf(family: Family, shape: ModelShape, name: str, whole: torch.Tensor) -> Iterator[NamedTensor]:
    rule, hf_names = family.find(name)
    for hf_name, tensor in zip(hf_names, rule.layout.split(whole, shape), strict=True):
        yield hf_name, tensor.contiguous()


def _parameters_of_all_stages(model_chunks: Iterable[torch.nn.Module], family: Family) -> Iterator[NamedTensor]:
    """(global name, this tensor-parallel rank's part) of every parameter that `family` has, in the model's order, each once."""
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.parameter_names import global_named_parameters
    from slime.backends.megatron_utils.pipeline_stages import broadcast_tensor, gather_from_stages

    chunks = [dict(global_named_parameters(chunk)) for chunk in model_chunks]
    own_stage = parallel_state.get_pipeline_model_parallel_rank()
    contents = gather_from_stages([{name: p.detach().to("meta") for name, p in chunk.items()} for chunk in chunks])
    sent = {name for of_stage in contents for chunk in of_stage for name in chunk if family.leaves_out(name)}
    if sent and dist.get_rank() == 0:
        _tell_what_stays(family.model_types)
    # Of interleaved stages the first chunks of all come before the second chunks.
    for index, own in enumerate(chunks):
        for stage, of_stage in enumerate(contents):
            for name, like in of_stage[index].items():
                if name not in sent:
                    sent.add(name)
                    yield name, broadcast_tensor(stage, own[name].detach() if stage == own_stage else None, like)


@functools.cache
def _tell_what_stays(model_types: tuple[str, ...]) -> None:
    logger.info(
        "Hugging Face checkpoints of %s have no layers for multi-token prediction: exports and engines do not get them",
        " and ".join(model_types),
    )


def _gather(layout: Layout, local: torch.Tensor) -> torch.Tensor:
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1 or not layout.sharded:
        return local
    shards = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(shards, local.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return layout.gather(shards)
