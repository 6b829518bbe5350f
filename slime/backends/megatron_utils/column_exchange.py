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

from slime.training.context_parallel import ContextParallel, slice_responses
from slime.training.rollout_batch import PER_RESPONSE_TOKEN, with_full_responses
from slime.utils.misc import Box
from slime.utils.packed_sample import RaggedArray


@dataclass(frozen=True)
class ColumnPart:
    """One row per sample, at `positions` in the rollout, of each column; a box holds a reference to a `RaggedArray`."""

    positions: tuple[int, ...]
    boxes: dict[str, Box]


def send_columns(data: dict[str, Any], names: Sequence[str], cp: ContextParallel) -> ColumnPart | None:
    """Put these columns of this data-parallel rank where others can fetch them. Collective over the context-parallel group.

    Called on the last pipeline stage. One rank of those that hold the same samples returns the part, the others None.
    """
    import ray
    from megatron.core import parallel_state

    columns = with_full_responses({name: data[name] for name in (*names, "total_lengths", "response_lengths")}, cp)
    if cp.rank or parallel_state.get_tensor_model_parallel_rank():
        return None
    return ColumnPart(tuple(data["partition"]), {name: Box(ray.put(_rows(columns[name]))) for name in names})


def fetch_column(
    parts: Sequence[ColumnPart], name: str, data: dict[str, Any], cp: ContextParallel, timeout: float
) -> list[torch.Tensor]:
    """The column `name` of this rank's samples out of the parts of all senders, cut to the response tokens that it owns.

    Masks are whole on every rank.

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
        column = ray.get(part.boxes[name].inner, timeout=timeout)
        rows.update({position: column[row] for row, position in enumerate(part.positions) if position in wanted})
    device = data["tokens"][0].device if data["tokens"] else None
    full = [torch.from_numpy(rows[position].copy()).to(device) for position in data["partition"]]
    if name not in PER_RESPONSE_TOKEN:
        return full
    return slice_responses(full, data["total_lengths"], data["response_lengths"], cp)


def _rows(column: Sequence[torch.Tensor]) -> RaggedArray:
    """Numbers as float32; masks, which may be of integers or of truth values, as they are."""
    rows = [(row.detach().float() if row.is_floating_point() else row).cpu().numpy() for row in column]
    return RaggedArray.from_rows(rows, rows[0].dtype if rows else np.float32)
