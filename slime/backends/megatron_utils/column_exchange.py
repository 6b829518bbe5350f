"""Columns of a rollout's data that travel between the actor and the critic.

A part of a column is one data-parallel rank's samples, whole responses, with their positions in the rollout. So the two
models may deal the samples to their ranks differently and cut them over context-parallel ranks differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slime.training.context_parallel import ContextParallel, gather_responses, slice_responses
from slime.utils.misc import Box
from slime.utils.ragged import RaggedArray


@dataclass(frozen=True)
class ColumnPart:
    """One float32 row per sample, at `positions` in the rollout; the box holds a reference to a `RaggedArray`."""

    positions: tuple[int, ...]
    box: Box


def send_column(data: dict[str, Any], name: str, cp: ContextParallel) -> ColumnPart | None:
    """Put this data-parallel rank's `data[name]` where others can fetch it. Collective over the context-parallel group.

    Called on the last pipeline stage. One rank of those that hold the same samples returns the part, the others None.
    """
    import ray
    from megatron.core import parallel_state

    full = gather_responses(data[name], data["total_lengths"], data["response_lengths"], cp)
    if cp.rank or parallel_state.get_tensor_model_parallel_rank():
        return None
    rows = [tensor.detach().float().cpu().numpy() for tensor in full]
    return ColumnPart(tuple(data["partition"]), Box(ray.put(RaggedArray.from_rows(rows, np.float32))))


def fetch_column(
    parts: Sequence[ColumnPart], data: dict[str, Any], cp: ContextParallel, timeout: float
) -> list[torch.Tensor]:
    """The column of this rank's samples, cut to the response tokens that it owns, out of the parts of all senders.

    Args:
        timeout: seconds to wait for each part.

    Raises:
        KeyError: a sample is in no part.
    """
    import ray

    wanted = set(data["partition"])
    rows: dict[int, np.ndarray] = {}
    for part in parts:
        if wanted.isdisjoint(part.positions):
            continue
        column = ray.get(part.box.inner, timeout=timeout)
        rows.update({position: column[row] for row, position in enumerate(part.positions) if position in wanted})
    device = data["tokens"][0].device if data["tokens"] else None
    full = [torch.from_numpy(rows[position].copy()).to(device) for position in data["partition"]]
    return slice_responses(full, data["total_lengths"], data["response_lengths"], cp)
