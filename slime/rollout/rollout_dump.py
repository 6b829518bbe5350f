"""Dumps of rollouts: written by `--save-debug-rollout-data`, trained on by `--load-debug-rollout-data`.

A `.pt` file holds plain types and tensors only, so it loads with `weights_only=True`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime.utils.errors import UserError
from slime.utils.packed_sample import pack_sample
from slime.utils.types import Sample

_INTEGER_FIELDS = ("tokens", "loss_mask")
_FLOAT_FIELDS = ("rollout_log_probs", "teacher_log_probs")


def save_rollout(template: str, rollout_id: int | str, samples: Sequence[Sample]) -> Path:
    """Write `samples` (flat; `group_index` keeps their groups) to `template` with `{rollout_id}` filled in."""
    import torch

    path = Path(template.format(rollout_id=rollout_id))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    torch.save({"rollout_id": rollout_id, "samples": [_to_plain(sample) for sample in samples]}, temporary)
    os.replace(temporary, path)
    return path


def load_rollout(template: str, rollout_id: int | str, subsample: float | None = None) -> list[Sample]:
    """The samples of a dump. With `subsample` f of n samples: the first and last halves of int(n·f) of them.

    Raises:
        UserError: no such file, or it is no dump.
    """
    import torch

    path = Path(template.format(rollout_id=rollout_id))
    if not path.is_file():
        raise UserError(f"--load-debug-rollout-data: {path} does not exist")
    dump = torch.load(path, weights_only=True)
    if not isinstance(dump, dict) or "samples" not in dump:
        raise UserError(f"--load-debug-rollout-data: {path} is no rollout dump (it has no `samples`)")
    samples = [_from_plain(entry) for entry in dump["samples"]]
    if subsample is not None:
        kept = int(len(samples) * subsample)
        samples = samples[: kept // 2] + samples[len(samples) - (kept - kept // 2) :]
    return samples


def _to_plain(sample: Sample) -> dict[str, Any]:
    import torch

    plain = sample.to_dict()
    if plain.get("tokens"):
        packed = pack_sample(sample)
        for name in (*_INTEGER_FIELDS, *_FLOAT_FIELDS):
            array = getattr(packed, name)
            if plain.get(name) is not None and array is not None:
                plain[name] = torch.from_numpy(array)
    return {name: _plain(value) for name, value in plain.items()}


def _plain(value: Any) -> Any:
    import torch

    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _from_plain(entry: dict[str, Any]) -> Sample:
    import torch

    fields = {name: value.tolist() if torch.is_tensor(value) else value for name, value in entry.items()}
    return Sample.from_dict(fields)
