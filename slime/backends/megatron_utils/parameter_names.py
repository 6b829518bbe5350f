"""Names of parameters that do not depend on how the model is cut.

Megatron numbers the layers of every pipeline stage from 0, and the experts of every expert-parallel rank. A global name has
the numbers of the whole model, such as `decoder.layers.17.self_attention.linear_qkv.weight`, and no wrapper's prefix. A copy
of a tied embedding on the last stage has the embedding's name. Tensor-parallel parts of a parameter share its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from slime.models.family import next_expert
from slime.training.metric_reduction import all_reduce_sum

EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_EXPERT_BIAS = ".router.expert_bias"


def unwrap_model(chunk: torch.nn.Module) -> GPTModel:
    """The bare model inside data-parallel and mixed-precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def global_named_parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(global name, parameter) of a model chunk, wrapped or bare, in the order of the model."""
    yield from _with_global_names(chunk, unwrap_model(chunk).named_parameters())


def global_named_weights(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """`global_named_parameters`, then the biases by which routers choose experts: these are weights without gradients."""
    yield from global_named_parameters(chunk)
    yield from global_named_biases(chunk)


def global_named_biases(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(global name, float32 [experts]) of each router of the chunk, wrapped or bare, that has one."""
    buffers = unwrap_model(chunk).named_buffers()
    yield from _with_global_names(chunk, ((name, buffer) for name, buffer in buffers if name.endswith(_EXPERT_BIAS)))


def _with_global_names(
    chunk: torch.nn.Module, named: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    from megatron.core import parallel_state

    model = unwrap_model(chunk)
    layers = {
        name: layer.layer_number - 1
        for name, layer in model.named_modules()
        if name.rpartition(".")[2].isdigit() and isinstance(getattr(layer, "layer_number", None), int)
    }
    experts = getattr(model.config, "num_moe_experts", None) or 0
    first_expert = 0
    if experts:
        size = parallel_state.get_expert_model_parallel_world_size()
        first_expert = experts // size * parallel_state.get_expert_model_parallel_rank()
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    for name, tensor in named:
        yield global_name(name, layers, first_expert, tied), tensor


def parameters_with_bad_gradient(chunks: Iterable[torch.nn.Module]) -> list[str]:
    """Global names of the wrapped chunks' parameters whose accumulated gradient is not finite."""
    named = [pair for chunk in chunks for pair in global_named_parameters(chunk)]
    gradients = [(name, getattr(parameter, "main_grad", None)) for name, parameter in named]
    return [name for name, gradient in gradients if gradient is not None and not gradient.isfinite().all()]


def differing_weights(chunks: Iterable[torch.nn.Module]) -> dict[str, list[int]]:
    """Global name → ranks, for the wrapped chunks' weights that differ between ranks that should hold the same values: the
    ranks whose copy differs from the first one's. The result is the same on all ranks; collective over the world. Every weight
    is copied to the host.
    """
    from megatron.core import parallel_state

    digests = {True: {}, False: {}}
    for name, weight in (pair for chunk in chunks for pair in global_named_weights(chunk)):
        held = weight.detach().cpu().contiguous().view(torch.uint8).numpy()
        digests[getattr(weight, "allreduce", True)][name] = hashlib.blake2b(held).hexdigest()
    groups = {
        True: parallel_state.get_data_parallel_group(with_context_parallel=True),
        False: parallel_state.get_expert_data_parallel_group(),
    }
    differing = []
    for kind, own in digests.items():
        found = [own] * groups[kind].size()
        dist.all_gather_object(found, own, group=groups[kind])
        differing += [name for name, digest in own.items() if digest != found[0][name]]
    of_ranks = [differing] * dist.get_world_size()
    dist.all_gather_object(of_ranks, differing)
    names = sorted({name for names in of_ranks for name in names})
    return {name: [rank for rank, names in enumerate(of_ranks) if name in names] for name in names}


@torch.no_grad()
def norm_of_weights(chunks: Iterable[torch.nn.Module]) -> float:
    """√Σ w² over all parameters of the model, each counted once. Collective over the world.

    The norm of each parameter is computed in float32, without a copy of it; the squares are summed in float64.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.module import param_is_not_shared

    squares = []
    dense = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    expert = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_data_parallel_rank()
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        tensor_rank, replica = dense if getattr(parameter, "allreduce", True) else expert
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        if replica == 0 and (is_cut or tensor_rank == 0) and param_is_not_shared(parameter):
            squares.append(torch.linalg.vector_norm(parameter, dtype=torch.float32).double().square())
    # The host waits for the device once, and not for every parameter.
    total = torch.stack(squares).sum().cpu() if squares else torch.zeros((), dtype=torch.float64)
    return float(all_reduce_sum(total, dist.group.WORLD).sqrt())


def global_name(name: str, layers: Mapping[str, int], first_expert: int, tied: bool) -> str:
    """The global name of the parameter that a rank calls `name`.

    Args:
        layers: number in the whole model of every layer of the rank, by the layer's name there.
        first_expert: number in the whole model of the rank's first expert.
        tied: whether embedding and output layer are one parameter.
    """
    if tied and name == _OUTPUT:
        return EMBEDDING
    for local, number in layers.items():
        if name.startswith(local + "."):
            name = f"{local.rpartition('.')[0]}.{number}{name.removeprefix(local)}"
            break
    return next_expert(name, first_expert)
