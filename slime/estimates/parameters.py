"""The number of parameters, exact, from the shape alone: of a model by part, and of one training rank.

For every part it is known whether tensor-parallel ranks share it or each hold all of it, so the counts of a rank follow by
division. Only for the projections down to latent vectors do trainer and engines differ in this.
The score-correction bias of a router counts as a parameter, since checkpoints hold it.

A rank holds the layers of its pipeline stage, cut by tensor and expert parallelism. The embedding is on the first stage, the
output head on the last; with tied embeddings the last stage holds a copy of the embedding, unless it is the first one too.
Layers of multi-token prediction are on the last stage, unless a layout says otherwise. That stage holds no embedding of its own
for them, and borrows it for the steps that train them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from slime.estimates.layout import ParallelLayout, PipelineStage
from slime.estimates.shape import LinearAttentionShape, MlaShape, ModelShape


@dataclass(frozen=True)
class LayerParameters:
    """One transformer layer.

    attention: shared by tensor-parallel ranks.
    attention_replicated: whole on every tensor-parallel rank (norms of queries, keys, latent vectors and linear attention).
    dense_mlp: shared by tensor-parallel ranks.
    routed_experts: all experts of the layer; shared by expert-parallel and expert-tensor-parallel ranks.
    shared_experts: shared by tensor-parallel ranks.
    router: whole on every rank, with the expert bias and the gate of the shared expert.
    norms: whole on every rank, with the biases of row-parallel projections.
    linear_attention: shared by tensor-parallel ranks.
    latent_projections: down to the latent vectors; shared by tensor-parallel ranks of the trainer, whole on every rank of an
        engine.
    indexer: whole on every tensor-parallel rank.
    """

    attention: int
    attention_replicated: int
    dense_mlp: int
    routed_experts: int
    shared_experts: int
    router: int
    norms: int
    linear_attention: int = 0
    latent_projections: int = 0
    indexer: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class MtpLayerParameters:
    """One layer that predicts a further token: the projection of [hidden, embedding], its norms, a transformer layer."""

    projection: int
    norms: int
    layer: LayerParameters

    @property
    def total(self) -> int:
        return self.projection + self.norms + self.layer.total


@dataclass(frozen=True)
class ParameterCounts:
    """A whole model. `layers[i]` is decoder layer i. `output_head` is 0 if it is tied to the embedding; that of a critic has
    one row."""

    embedding: int
    output_head: int
    layers: tuple[LayerParameters, ...]
    final_norm: int
    mtp: tuple[MtpLayerParameters, ...] = ()

    @property
    def total(self) -> int:
        """The number of all parameters but those of multi-token prediction, which model cards do not count either."""
        return self.embedding + self.output_head + sum(layer.total for layer in self.layers) + self.final_norm

    @property
    def total_with_mtp(self) -> int:
        return self.total + sum(layer.total for layer in self.mtp)

    def trained(self, *, predictions: bool, indexers: bool) -> "ParameterCounts":
        """The parameters that a run trains: without indexers unless `indexers`, and without multi-token prediction unless
        `predictions`."""
        layers, mtp = self.layers, self.mtp if predictions else ()
        if not indexers:
            layers = tuple(replace(layer, indexer=0) for layer in layers)
            mtp = tuple(replace(layer, layer=replace(layer.layer, indexer=0)) for layer in mtp)
        return replace(self, layers=layers, mtp=mtp)


def count_parameters(shape: ModelShape, *, padded_vocabulary: bool = False) -> ParameterCounts:
    """The parameters of a model of this shape.

    Args:
        padded_vocabulary: count the rows of the embedding that are held in memory instead of those of the checkpoint.
    """
    rows = shape.padded_vocab_size if padded_vocabulary else shape.vocab_size
    embedding = rows * shape.hidden_size
    mtp_layer = MtpLayerParameters(
        projection=2 * shape.hidden_size**2,
        norms=3 * _norm(shape, shape.hidden_size),
        layer=_transformer_layer(shape, -1),
    )
    return ParameterCounts(
        embedding=embedding,
        output_head=shape.hidden_size if shape.value_head else 0 if shape.tied_embeddings else embedding,
        layers=tuple(_transformer_layer(shape, layer) for layer in range(shape.num_layers)),
        final_norm=_norm(shape, shape.hidden_size),
        mtp=(mtp_layer,) * shape.mtp_num_layers,
    )


def _transformer_layer(shape: ModelShape, layer: int) -> LayerParameters:
    """Of decoder layer `layer`; -1 means a layer of multi-token prediction."""
    experts, linear_attention = shape.has_experts(layer), shape.has_linear_attention(layer)
    down = 0
    if linear_attention:
        attention, replicated = 0, shape.linear_attention.value_head_dim
    elif shape.mla is not None:
        attention, replicated = _latent_attention(shape, shape.mla)
        down = shape.hidden_size * shape.mla.latent_width
    else:
        attention, replicated = _grouped_query_attention(shape)
    row_biases = shape.hidden_size * ((not linear_attention) + 1) if shape.linear_bias else 0
    moe = shape.moe if experts else None
    return LayerParameters(
        attention=attention,
        attention_replicated=replicated,
        dense_mlp=0 if experts else _mlp(shape, shape.ffn_hidden_size),
        routed_experts=moe.num_experts * _mlp(shape, moe.ffn_hidden_size) if moe else 0,
        shared_experts=_mlp(shape, moe.shared_ffn_hidden_size) if moe else 0,
        router=_router(shape) if experts else 0,
        norms=(2 + shape.num_extra_norms) * _norm(shape, shape.hidden_size) + row_biases,
        linear_attention=_linear_attention(shape.linear_attention, shape.hidden_size) if linear_attention else 0,
        latent_projections=down,
        indexer=_indexer(shape.mla, shape.hidden_size) if shape.has_indexer(layer) else 0,
    )


def _norm(shape: ModelShape, width: int) -> int:
    return width * (2 if shape.norm_bias else 1)


def _mlp(shape: ModelShape, ffn_width: int) -> int:
    inputs = 2 if shape.gated_mlp else 1
    bias = inputs * ffn_width if shape.linear_bias else 0
    return (inputs + 1) * shape.hidden_size * ffn_width + bias


def _router(shape: ModelShape) -> int:
    bias = shape.moe.num_experts if shape.moe.expert_bias else 0
    gate = shape.hidden_size if shape.moe.shared_gate else 0
    return shape.hidden_size * shape.moe.num_experts + bias + gate


def _grouped_query_attention(shape: ModelShape) -> tuple[int, int]:
    queries = shape.query_width * (2 if shape.attention_output_gate else 1)
    projected = queries + 2 * shape.key_width
    bias = projected if shape.qkv_bias or shape.linear_bias else 0
    norm_width = {
        None: 0,
        "head": 2 * shape.head_dim,
        "full": shape.query_width + shape.key_width,
    }[shape.qk_norm]
    weights = shape.hidden_size * (projected + shape.value_width)
    return weights + bias, _norm(shape, norm_width)


def _latent_attention(shape: ModelShape, mla: MlaShape) -> tuple[int, int]:
    """(shared parameters, replicated ones), without the down-projections and the indexer. Latent attention has no biases,
    whatever the flags say."""
    keys_and_values = shape.num_attention_heads * (mla.qk_head_dim + mla.v_head_dim)
    attention = mla.kv_lora_rank * keys_and_values + shape.value_width * shape.hidden_size
    replicated, norm_width = 0, mla.kv_lora_rank
    if mla.q_lora_rank is None:
        attention += shape.hidden_size * shape.query_width
    else:
        attention += mla.q_lora_rank * shape.query_width
        norm_width += mla.q_lora_rank
    if shape.qk_norm is not None:
        replicated += _norm(shape, norm_width)
    return attention, replicated


def _indexer(mla: MlaShape, hidden_size: int) -> int:
    indexer = mla.indexer
    queries = (mla.q_lora_rank or hidden_size) * indexer.num_heads * indexer.head_dim
    keys = hidden_size * indexer.head_dim
    key_norm = 2 * indexer.head_dim  # a LayerNorm with bias in every model
    return queries + keys + key_norm + hidden_size * indexer.num_heads


def _linear_attention(linear: LinearAttentionShape, hidden_size: int) -> int:
    """Projections to q, k, v and output gate, to beta and decay; convolution over q, k, v; decay weights; output projection."""
    inputs = hidden_size * (2 * linear.key_width + 2 * linear.value_width + 2 * linear.num_value_heads)
    convolution = linear.conv_kernel * (2 * linear.key_width + linear.value_width)
    decay = 2 * linear.num_value_heads
    return inputs + convolution + decay + linear.value_width * hidden_size


@dataclass(frozen=True)
class RankParameters:
    """How many parameters one rank has, by part. `routed_experts` are replicated and reduced separately from the rest."""

    embedding: int
    output_head: int
    attention: int
    dense_mlp: int
    shared_experts: int
    routed_experts: int
    router: int
    norms: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def dense(self) -> int:
        """All but the routed experts."""
        return self.total - self.routed_experts


def rank_parameters(
    shape: ModelShape, counts: ParameterCounts, layout: ParallelLayout, stage: PipelineStage
) -> RankParameters:
    """Parameters of a rank of `stage`.

    Args:
        counts: with the padded vocabulary; of the whole model, or only of what is trained.
    """
    layers = [counts.layers[index] for index in stage.layers]
    mtp = counts.mtp if stage.predicts else ()
    # A layout may name a stage for layers of multi-token prediction although the model has none, because it is a critic.
    has_norm = stage.predicts if shape.mtp_num_layers else stage.is_last
    layers += [prediction.layer for prediction in mtp]
    per_layer = [layer_of_rank(layer, layout) for layer in layers]
    vocabulary = counts.embedding // layout.tensor
    if shape.value_head:
        output = counts.output_head
    else:
        output = 0 if shape.tied_embeddings and stage.is_first else vocabulary
    sums = _sum(per_layer)
    return RankParameters(
        embedding=vocabulary if stage.is_first else 0,
        output_head=output if stage.is_last else 0,
        attention=(
            sums.attention + sums.attention_replicated + sums.linear_attention + sums.latent_projections + sums.indexer
        ),
        dense_mlp=sums.dense_mlp + sum(prediction.projection // layout.tensor for prediction in mtp),
        shared_experts=sums.shared_experts,
        routed_experts=sums.routed_experts,
        router=sums.router,
        norms=sums.norms + (counts.final_norm if has_norm else 0) + sum(prediction.norms for prediction in mtp),
    )


def layer_of_rank(layer: LayerParameters, layout: ParallelLayout) -> LayerParameters:
    """The part of a layer that one rank has."""
    return LayerParameters(
        attention=layer.attention // layout.tensor,
        attention_replicated=layer.attention_replicated,
        dense_mlp=layer.dense_mlp // layout.tensor,
        routed_experts=layer.routed_experts // (layout.expert * layout.expert_tensor),
        shared_experts=layer.shared_experts // layout.tensor,
        router=layer.router,
        norms=layer.norms,
        linear_attention=layer.linear_attention // layout.tensor,
        latent_projections=layer.latent_projections // layout.tensor,
        indexer=layer.indexer,
    )


def _sum(layers: Iterable[LayerParameters]) -> LayerParameters:
    layers = list(layers)
    names = [field.name for field in fields(LayerParameters)]
    return LayerParameters(**{name: sum(getattr(layer, name) for layer in layers) for name in names})
