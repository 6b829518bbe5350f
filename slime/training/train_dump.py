"""Dump of the data that a rollout is trained on, as it is after log-probs and advantages: `--save-debug-train-data`.

One file for all ranks, with plain types and tensors only, so that it loads with `weights_only=True`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.training.rollout_batch import NOT_PER_SAMPLE, SCHEDULE

FORMAT_VERSION = 2


def save_train_data(
    template: str, rollout_id: int, rollout_data: dict[str, Any], data_group: dist.ProcessGroup, data_rank: int
) -> None:
    """Gather the shards of all data-parallel ranks and write them, from data rank 0. Collective over `data_group`.

    The file holds `samples`, one dict each, sorted by sample index; `dp_shards`, the schedule of every rank;
    `raw_reward` of all samples.

    Raises:
        ValueError: a field does not have one tensor per sample.
    """
    shard = {
        "rank": dist.get_rank(),
        "data_parallel_rank": data_rank,
        "sample_indices": rollout_data["sample_indices"],
        **{name: rollout_data[name] for name in SCHEDULE},
    }
    payload = {"shard": shard, "samples": _samples(rollout_data)}
    gathered: list[Any] = [None] * dist.get_world_size(data_group)
    dist.all_gather_object(gathered, payload, group=data_group)
    if data_rank != 0:
        return
    samples = [sample for part in gathered for sample in part["samples"]]
    dump = {
        "format_version": FORMAT_VERSION,
        "rollout_id": rollout_id,
        "rank": dist.get_rank(),
        "samples": sorted(samples, key=lambda sample: sample["sample_indices"]),
        "dp_shards": [part["shard"] for part in gathered],
        "raw_reward": list(rollout_data["raw_reward"]),
    }
    path = Path(template.format(rollout_id=rollout_id, rank=dist.get_rank()))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    torch.save(dump, temporary)
    os.replace(temporary, path)


def _samples(rollout_data: dict[str, Any]) -> list[dict[str, Any]]:
    count = len(rollout_data["tokens"])
    columns = {name: column for name, column in rollout_data.items() if name not in NOT_PER_SAMPLE}
    for name, column in columns.items():
        if len(column) != count:
            raise ValueError(
                f"train dump: `{name}` has {len(column)} entries for {count} samples; one tensor per sample"
            )
    return [{name: _plain(column[i]) for name, column in columns.items()} for i in range(count)]


def _plain(value: Any) -> Any:
    # A clone, because a view would be saved with the storage of its whole column.
    return value.detach().cpu().clone() if torch.is_tensor(value) else value
