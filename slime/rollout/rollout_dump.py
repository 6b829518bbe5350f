"""Dumps of rollouts: written by `--save-debug-rollout-data`, trained on by `--load-debug-rollout-data`.

A `.pt` file holds plain types and tensors only, so it loads with `weights_only=True`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime.utils.errors import UserError
from slime.utils.filesystem import existing_files
from slime.utils.packed_sample import pack_sample
from slime.utils.sample_fields import TOKEN_FIELDS, held
from slime.utils.types import Sample

_INTEGER_FIELDS = ("tokens", "loss_mask")
_FLOAT_FIELDS = ("rollout_log_probs", "teacher_log_probs")
_SCALARS = frozenset({bool, int, float, str, type(None)})


def save_rollout(template: str, rollout_id: int | str, samples: Sequence[Sample]) -> Path:
    """Write `samples` (flat; `group_index` keeps their groups) to `template` with `{rollout_id}` filled in.

    Raises:
        UserError: a sample holds something that is neither plain nor an array; the message says which and where.
        OSError: the file cannot be written.
    """
    import torch

    plain_samples = [_to_plain(sample) for sample in samples]
    for name in (*_INTEGER_FIELDS, *_FLOAT_FIELDS):
        _share_storage(plain_samples, name)
    path = Path(template.format(rollout_id=rollout_id))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    # An open file, because torch reports a full disk as RuntimeError where it opens the file itself.
    with open(temporary, "wb") as file:
        torch.save({"rollout_id": rollout_id, "samples": plain_samples}, file)
    os.replace(temporary, path)
    return path


def load_rollout(template: str, rollout_id: int | str, subsample: float | None = None) -> list[Sample]:
    """The samples of a dump. With `subsample` f of n samples: the first and last halves of int(n·f) of them.

    Raises:
        UserError: no such file, or it is no readable dump.
    """
    import torch

    path = Path(template.format(rollout_id=rollout_id))
    if not path.is_file():
        known = [os.path.basename(name) for name in existing_files(template)]
        there = (
            f"there is {known[0]} … {known[-1]}; --num-rollout and --start-rollout-id say which are read"
            if known
            else ""
        )
        raise UserError(f"--load-debug-rollout-data: {path} does not exist{'; ' if there else ''}{there}")
    try:
        dump = torch.load(path, weights_only=True)
    except Exception as error:
        # torch's message goes on for a page about loading without `weights_only`, which runs code from the file.
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UserError(
            f"--load-debug-rollout-data: {path} is no readable rollout dump ({type(error).__name__}: {reason})"
        ) from error
    if not isinstance(dump, dict) or "samples" not in dump:
        raise UserError(f"--load-debug-rollout-data: {path} is no rollout dump (it has no `samples`)")
    samples = [_from_plain(entry) for entry in dump["samples"]]
    if subsample is not None:
        kept = int(len(samples) * subsample)
        samples = samples[: kept // 2] + samples[len(samples) - (kept - kept // 2) :]
    return samples


def _to_plain(sample: Sample) -> dict[str, Any]:
    arrays = {}
    if len(held(sample, "tokens")):
        packed = pack_sample(sample)
        for name in (*_INTEGER_FIELDS, *_FLOAT_FIELDS):
            array = getattr(packed, name)
            if held(sample, name) is not None and array is not None:
                arrays[name] = array
    # Without its long lists, which `to_dict` would copy for nothing.
    bare = copy.copy(sample)
    for name in arrays:
        setattr(bare, name, None)
    plain = {name: _plain(value, f"sample {sample.index}: {name}") for name, value in bare.to_dict().items()}
    return {**plain, **arrays}


def _share_storage(samples: list[dict[str, Any]], name: str) -> None:
    """Make tensors of the field's arrays, views of one: torch writes a storage once, and thousands of small ones slowly."""
    import torch

    holders = [sample for sample in samples if isinstance(sample.get(name), np.ndarray)]
    if holders:
        flat = torch.from_numpy(np.concatenate([sample[name] for sample in holders]))
        for sample, view in zip(holders, flat.split([len(sample[name]) for sample in holders]), strict=True):
            sample[name] = view


def _plain(value: Any, where: str) -> Any:
    import torch

    if isinstance(value, np.generic):
        value = value.item()
    # Exact types: an enum or another subclass would not load again.
    if type(value) in _SCALARS or torch.is_tensor(value):
        return value
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {_plain(key, f"{where}, key {key!r}"): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        if set(map(type, value)).issubset(_SCALARS):
            return list(value)
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise UserError(
        f"--save-debug-rollout-data: {where} is a {type(value).__name__}; keep plain values and arrays there, or leave "
        "the flag out"
    )


def _from_plain(entry: dict[str, Any]) -> Sample:
    import torch

    fields = {
        name: (value.numpy() if name in TOKEN_FIELDS else value.tolist()) if torch.is_tensor(value) else value
        for name, value in entry.items()
    }
    return Sample.from_dict(fields)
