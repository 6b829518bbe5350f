"""The train batch's column of expert choices that the engine made: per sample `[len(tokens) − 1, layers, k]`.

Rows are positions of the sample; the engine never runs the last token through the model, so it has none. Layers are all layers
of the model, those without experts included; what stands there is not read.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.estimates.shape import expert_layers
from slime.utils.errors import UserError
from slime.utils.types import Sample

COLUMN = "rollout_routed_experts"


def routed_experts_column(args: argparse.Namespace, samples: Sequence[Sample]) -> list[np.ndarray]:
    """The rows of `samples`; none for one without any that trains nothing, where padding does as well.

    Raises:
        UserError: a sample that trains has none.
    """
    lacking = [s.index for s in samples if s.rollout_routed_experts is None and _trains(s)]
    if lacking:
        raise UserError(
            f"--use-rollout-routing-replay: {len(lacking)} of {len(samples)} samples have no `{COLUMN}` (sample indices "
            f"{lacking[:5]}); the function that generates must keep the engine's `routed_experts`"
        )
    nothing = np.empty((0, args.num_layers, args.moe_router_topk), np.int32)
    return [
        nothing if s.rollout_routed_experts is None else np.asarray(s.rollout_routed_experts, np.int32) for s in samples
    ]


def _trains(sample: Sample) -> bool:
    return not sample.remove_sample and sample.effective_response_length > 0


def check_routed_experts(args: argparse.Namespace, batch: dict[str, Any]) -> None:
    """Whether the column is there and can be replayed: shape, ids, and that every MoE layer was captured.

    A sample that trains nothing may have no rows.

    Args:
        batch: the train batch, before it is split.

    Raises:
        UserError: naming the sample, and the layer where one is to blame.
    """
    if COLUMN not in batch:
        raise UserError(
            f"--use-rollout-routing-replay: the train batch of --custom-convert-samples-to-train-data-path has no `{COLUMN}`"
        )
    layers = [i for i, has in enumerate(expert_layers(args.moe_layer_freq, args.num_layers)) if has]
    seen = np.zeros(len(layers), dtype=bool)
    for position, experts in enumerate(batch[COLUMN]):
        where = f"`{COLUMN}` of sample {batch['sample_indices'][position]}"
        if len(experts) == 0 and not batch["loss_masks"][position].any():
            continue
        expected = (len(batch["tokens"][position]) - 1, args.num_layers, args.moe_router_topk)
        if experts.shape != expected:
            raise UserError(
                f"{where} has shape {list(experts.shape)}, but tokens - 1, --num-layers and --moe-router-topk make "
                f"{list(expected)}"
            )
        captured = _captured_layers(experts[:, layers], args.num_experts, where)
        if args.moe_router_topk > 1:
            _require_captured(captured, layers, where)
        seen |= captured
    # With one expert per token, all of a short sample can have gone to expert 0.
    _require_captured(seen, layers, f"`{COLUMN}` of every sample")


def _captured_layers(experts: np.ndarray, num_experts: int, where: str) -> np.ndarray:
    """Per layer, whether any id is not 0."""
    low, high = int(experts.min(initial=0)), int(experts.max(initial=0))
    if low < 0 or high >= num_experts:
        raise UserError(
            f"{where} has the id {low if low < 0 else high}; --num-experts {num_experts} has 0 to {num_experts - 1}"
        )
    return experts.any(axis=(0, 2))


def _require_captured(captured: np.ndarray, layers: Sequence[int], where: str) -> None:
    if not captured.all():
        raise UserError(
            f"{where} is all zero in layer {layers[int(np.argmin(captured))] + 1}, which has experts: the engine did not "
            "capture it (a pipeline stage of the engine may have kept its part to itself)"
        )
