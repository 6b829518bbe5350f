"""Columns of a rollout's data that travel between the actor and the critic.

A part of a column is one data-parallel rank's samples, whole responses, with their positions in the rollout. So the two
models may deal the samples to their ranks differently and cut them over context-parallel ranks differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slime.training.backend import RankGroups
from slime.training.rollout_data import RolloutData
from slime.utils.misc import Box
from slime.utils.packed_sample import RaggedArray


@dataclass(frozen=True)
class ColumnPart:
    """One row per sample, at `positions` in the rollout, of each column; a box holds a reference to a `RaggedArray`."""

    positions: tuple[int, ...]
    boxes: dict[str, Box]


def send_columns(data: RolloutData, names: Sequence[str], groups: RankGroups) -> ColumnPart | None:
    """Put these columns of this data-parallel rank where others can fetch them. Collective over the context-parallel group.

    Called on the last pipeline stage. One rank of those that hold the same samples returns the part, the others None.
    """
    import ray

    columns = {name: data.whole(name) for name in names}
    if not groups.speaks_for_its_samples:
        return None
    return ColumnPart(tuple(data["partition"]), {name: Box(ray.put(_rows(rows))) for name, rows in columns.items()})


def fetch_column(parts: Sequence[ColumnPart], name: str, data: RolloutData, timeout: float) -> list[torch.Tensor]:
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
    own = [rows[position] for position in data["partition"]]
    if not own:
        return data.own_part(name, [])
    # One copy to the device for all samples.
    flat = torch.from_numpy(np.concatenate(own)).to(device)
    return data.own_part(name, list(flat.split([len(row) for row in own])))


def _rows(column: Sequence[torch.Tensor]) -> RaggedArray:
    """Numbers as float32; masks, which may be of integers or of truth values, as they are."""
    if not column:
        return RaggedArray.from_rows([], np.float32)
    flat = torch.cat([row.detach() for row in column])
    flat = flat.float() if column[0].is_floating_point() else flat.to(column[0].dtype)
    lengths = np.cumsum([0, *map(len, column)])
    return RaggedArray(flat.cpu().numpy(), lengths)
