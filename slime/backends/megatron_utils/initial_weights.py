"""Random weights that depend on the seed and on the parameter's global name alone.

Megatron draws one weight after the other from a single generator, so what a layer gets depends on which layers came before
it on the same rank: every pipeline stage would start like the first one. Here every matrix is drawn whole from a seed of its
own, and each tensor-parallel rank keeps its part. The whole matrix is made on the host: for models that are trained on CPU.
"""

from __future__ import annotations

import hashlib
import re

import torch
from megatron.core import parallel_state

from slime.backends.megatron_utils.parameter_names import EMBEDDING, global_named_parameters

# Layers that write into the residual stream start smaller, by the depth of the model.
_OUTPUT_OF_A_BLOCK = re.compile(r"\.linear_(proj|fc2)\.weight$")


@torch.no_grad()
def draw_initial_weights(chunk: torch.nn.Module, seed: int) -> None:
    """Draw the matrices of `chunk` again, in place. Vectors (norms, biases) start at constants and keep them.

    The state of the default generator is not kept; enclose the call in `fork_rng`.
    """
    dense = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size())
    expert = (parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size())
    for name, parameter in global_named_parameters(chunk):
        if parameter.ndim < 2:
            continue
        torch.default_generator.manual_seed(_seed_of(seed, name))
        rank, size = expert if ".experts." in name else dense
        dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        whole = torch.empty([length * size if i == dim else length for i, length in enumerate(parameter.shape)])
        _init_method(chunk.config, name)(whole)
        parameter.copy_(whole if dim is None else _part(whole, dim, parameter.partition_stride, rank, size))


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _init_method(config, name: str):
    if name == EMBEDDING:
        return config.embedding_init_method
    return config.output_layer_init_method if _OUTPUT_OF_A_BLOCK.search(name) else config.init_method


def _part(whole: torch.Tensor, dim: int, stride: int, rank: int, size: int) -> torch.Tensor:
    """One rank's part: of each of the `stride` matrices that are stacked along `dim`, its share."""
    return torch.cat([block.chunk(size, dim)[rank] for block in whole.chunk(stride, dim)], dim)
