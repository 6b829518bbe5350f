"""Memory of one GPU of an inference engine, from plain numbers: weights, and the key/value cache that the rest holds.

An engine takes `mem_fraction_static` of the GPU for weights and cache; what is left over is for activations and graphs.
"""

from dataclasses import dataclass, fields
from typing import Self

from slime.scheduling.model_shape import ModelShape
from slime.scheduling.parameters import LayerParameters, count_parameters
from slime.utils.errors import UserError


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of one element of a weight, scales included, by part; `rest`: vocabulary, norms and routers."""

    attention: float
    linear_attention: float
    dense_mlp: float
    shared_experts: float
    routed_experts: float
    rest: float

    @classmethod
    def everywhere(cls, size: float) -> Self:
        """The same in all parts."""
        return cls(**{field.name: size for field in fields(cls)})


@dataclass(frozen=True)
class ServingSetup:
    """Engines of one kind.

    tensor, pipeline: parallel sizes; their product is the number of GPUs of an engine.
    attention_data: groups that each keep the cache of their own requests (data-parallel attention); 1: none.
    sharded_head: the output head is shared by all ranks of a stage; otherwise by those of one such group.
    cache_bytes: of one element of the cache.
    static_fraction: share of the GPU for weights and cache; None: as many tokens as `max_total_tokens`.
    max_total_tokens: upper limit of the cache, in tokens; None: what fits.
    """

    tensor: int
    pipeline: int
    attention_data: int
    weight_bytes: WeightBytes
    cache_bytes: float
    gpu_memory: int
    static_fraction: float | None
    max_total_tokens: int | None = None
    sharded_head: bool = True


@dataclass(frozen=True)
class ServingMemory:
    """Bytes of one GPU of an engine.

    reserve: for activations, graphs and communication, left free beside weights and cache.
    cache_bytes_per_token: on this GPU. cache_tokens: of all groups of the engine; 0: the weights do not fit.
    """

    weights: int
    kv_cache: int
    reserve: int
    cache_bytes_per_token: float
    cache_tokens: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.reserve


def serving_memory(shape: ModelShape, setup: ServingSetup) -> ServingMemory:
    """Memory of a GPU of an engine that serves a model of this shape.

    Raises:
        UserError: the groups of data-parallel attention do not divide the engine.
    """
    require_whole_groups(setup.tensor, setup.attention_data)
    weights = _weights(shape, setup)
    per_token = _cache_bytes_per_token(shape, setup)
    if setup.static_fraction is None:
        tokens = setup.max_total_tokens or 0
        return ServingMemory(weights, round(tokens * per_token), 0, per_token, tokens * setup.attention_data)
    static = round(setup.gpu_memory * setup.static_fraction)
    tokens = int(max(static - weights, 0) / per_token) if per_token else 0
    if setup.max_total_tokens is not None:
        tokens = min(tokens, setup.max_total_tokens)
    return ServingMemory(
        weights=weights,
        kv_cache=round(tokens * per_token),
        reserve=setup.gpu_memory - static,
        cache_bytes_per_token=per_token,
        cache_tokens=tokens * setup.attention_data,
    )


def require_whole_groups(tensor: int, attention_data: int) -> None:
    """Every group of data-parallel attention has equally many of an engine's tensor-parallel ranks.

    Raises:
        UserError: it has not; names sizes that would do.
    """
    if tensor % attention_data:
        raise UserError(
            f"--sglang-dp-size {attention_data} does not divide the engine's tensor-parallel size {tensor}; give "
            f"--sglang-dp-size 1 or --sglang-dp-size {tensor}"
        )


def served_bytes(shape: ModelShape, weight_bytes: WeightBytes) -> int:
    """Bytes of all weights of a model as an engine receives them."""
    counts = count_parameters(shape)
    layers = sum(_layer_bytes(layer, weight_bytes, 1, 1) for layer in counts.layers)
    return round(layers + (counts.embedding + counts.output_head + counts.final_norm) * weight_bytes.rest)


def _weights(shape: ModelShape, setup: ServingSetup) -> int:
    """The first of the engine's pipeline stages, which has the embedding and, rounded up, its share of the layers."""
    counts = count_parameters(shape)
    attention_ranks = setup.tensor // setup.attention_data
    count = -(-shape.num_layers // setup.pipeline)
    # The costliest run of layers: experts usually come last.
    layers = sum(
        _layer_bytes(layer, setup.weight_bytes, setup.tensor, attention_ranks) for layer in counts.layers[-count:]
    )
    # A rank looks up the tokens of its own group.
    vocabulary = counts.embedding / attention_ranks
    if setup.pipeline == 1:
        vocabulary += counts.output_head / (setup.tensor if setup.sharded_head else attention_ranks)
    return round(layers + (vocabulary + counts.final_norm) * setup.weight_bytes.rest)


def _layer_bytes(layer: LayerParameters, size: WeightBytes, ranks: int, attention_ranks: int) -> float:
    attention = (layer.attention / attention_ranks + layer.attention_replicated) * size.attention
    linear = layer.linear_attention / attention_ranks * size.linear_attention
    experts = layer.shared_experts * size.shared_experts + layer.routed_experts * size.routed_experts
    mlp = (layer.dense_mlp * size.dense_mlp + experts) / ranks
    return attention + linear + mlp + (layer.router + layer.norms) * size.rest


def _cache_bytes_per_token(shape: ModelShape, setup: ServingSetup) -> float:
    """Keys and values of one token in the layers of one stage; latent attention keeps its latent vector on every rank."""
    layers = [not shape.has_linear_attention(layer) for layer in range(shape.num_layers)]
    count = sum(layers) / setup.pipeline
    if shape.mla is not None:
        elements = shape.mla.kv_lora_rank + shape.mla.qk_pos_emb_head_dim
        indexer = shape.mla.indexer.head_dim if shape.mla.indexer is not None else 0
        return count * (elements + indexer) * setup.cache_bytes
    ranks = setup.tensor // setup.attention_data
    groups = max(1, -(-shape.num_query_groups // ranks))
    return count * 2 * groups * shape.head_dim * setup.cache_bytes
