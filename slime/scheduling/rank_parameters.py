"""Parameters that one training rank holds, exact: the layers of its pipeline stage, cut by tensor and expert parallelism.

The embedding lies on the first stage, the output head on the last; with tied embeddings the last stage holds a copy of its
own, unless it is the first one too. Layers of multi-token prediction lie on the last stage, which then needs the embedding.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from slime.scheduling.model_shape import ModelShape
from slime.scheduling.parallel_layout import ParallelLayout
from slime.scheduling.parameters import LayerParameters, ParameterCounts
from slime.scheduling.pipeline_split import PipelineStage


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters of one rank by part. `routed_experts` are replicated and reduced apart from the rest."""

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
    """Parameters of a rank of `stage`; `counts` are those of the padded vocabulary."""
    layers = [counts.layers[index] for index in stage.layers]
    mtp = counts.mtp if stage.is_last else ()
    layers += [prediction.layer for prediction in mtp]
    per_layer = [_of_layer(layer, layout) for layer in layers]
    vocabulary = counts.embedding // layout.tensor
    holds_embedding = stage.is_first or bool(mtp)
    output = vocabulary if stage.is_last and not (shape.tied_embeddings and holds_embedding) else 0
    sums = _sum(per_layer)
    return RankParameters(
        embedding=vocabulary if holds_embedding else 0,
        output_head=output,
        attention=sums.attention + sums.attention_replicated + sums.linear_attention,
        dense_mlp=sums.dense_mlp + sum(prediction.projection // layout.tensor for prediction in mtp),
        shared_experts=sums.shared_experts,
        routed_experts=sums.routed_experts,
        router=sums.router,
        norms=sums.norms + (counts.final_norm if stage.is_last else 0) + sum(prediction.norms for prediction in mtp),
    )


def _of_layer(layer: LayerParameters, layout: ParallelLayout) -> LayerParameters:
    return LayerParameters(
        attention=layer.attention // layout.tensor,
        attention_replicated=layer.attention_replicated,
        dense_mlp=layer.dense_mlp // layout.tensor,
        routed_experts=layer.routed_experts // (layout.expert * layout.expert_tensor),
        shared_experts=layer.shared_experts // layout.tensor,
        router=layer.router,
        norms=layer.norms,
        linear_attention=layer.linear_attention,
    )


def _sum(layers: Iterable[LayerParameters]) -> LayerParameters:
    layers = list(layers)
    names = [field.name for field in fields(LayerParameters)]
    return LayerParameters(**{name: sum(getattr(layer, name) for layer in layers) for name in names})
