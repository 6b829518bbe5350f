"""Dumps of rollouts: written by `--save-debug-rollout-data`, trained on by `--load-debug-rollout-data`, and handed out in the
place of generation by `replay_rollout`.

A `.pt` file holds plain types and tensors only, so it loads with `weights_only=True`; one of another name is JSON, with its
tensors in a safetensors file beside it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.generation_call import current_call
from slime.utils.errors import UserError
from slime.utils.filesystem import existing_files
from slime.utils.packed_sample import SOURCE_NAME, get_source, pack_sample
from slime.utils.plain_files import is_plain_array, read_dump, type_name, write_dump
from slime.utils.processing_utils import encode_image_for_rollout_engine, is_image
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
    plain_samples = [_to_plain(sample) for sample in samples]
    for name in (*_INTEGER_FIELDS, *_FLOAT_FIELDS):
        _share_storage(plain_samples, name)
    path = dump_path(template, rollout_id)
    write_dump(path, {"rollout_id": rollout_id, "samples": plain_samples})
    return path


def save_evaluation(
    template: str, rollout_id: int, data: dict[str, dict[str, list[Any]]], *, before_training: bool
) -> Path:
    """Write the samples of all sets, each with the name of its set as its `source_name`, by which `replay_rollout` finds it.

    Raises: as `save_rollout`.
    """
    samples = [
        _of_set(name, sample)
        for name, result in data.items()
        for key in ("samples", "failed")
        for sample in result.get(key) or []
    ]
    return save_rollout(template, _evaluation_id(rollout_id, before_training), samples)


def _of_set(name: str, sample: Sample) -> Sample:
    named = copy.copy(sample)
    named.metadata = {**sample.metadata, SOURCE_NAME: name}
    return named


def _evaluation_id(rollout_id: int, before_training: bool) -> str:
    """What stands in the place of a rollout's number in the name of a dump."""
    return f"eval_before_{rollout_id}" if before_training else f"eval_{rollout_id}"


def load_rollout(
    template: str,
    rollout_id: int | str,
    subsample: float | None = None,
    flag: str = "--load-debug-rollout-data",
) -> list[Sample]:
    """The samples of a dump. With `subsample` f of n samples: the first and last halves of int(n·f) of them.

    Raises:
        UserError: no such file, or it is no readable dump.
    """
    path = dump_path(template, rollout_id)
    if not path.is_file():
        known = [os.path.basename(name) for name in existing_files(template)]
        there = (
            f"there is {known[0]} … {known[-1]}; --num-rollout and --start-rollout-id say which are read"
            if known
            else ""
        )
        raise UserError(f"{flag}: {path} does not exist{'; ' if there else ''}{there}")
    try:
        dump = read_dump(path)
    except Exception as error:
        # torch's message goes on for a page about loading without `weights_only`, which runs code from the file.
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UserError(f"{flag}: {path} is no readable rollout dump ({type(error).__name__}: {reason})") from error
    if not isinstance(dump, dict) or "samples" not in dump:
        raise UserError(f"{flag}: {path} is no rollout dump (it has no `samples`)")
    samples = [_from_plain(entry) for entry in dump["samples"]]
    if subsample is not None:
        kept = int(len(samples) * subsample)
        samples = samples[: kept // 2] + samples[len(samples) - (kept - kept // 2) :]
    return samples


def dump_path(template: str, rollout_id: int | str) -> Path:
    """Where the dump of a rollout lies."""
    return Path(template.format(rollout_id=rollout_id))


def replay_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """A rollout function whose samples are those of `--load-forge-rollout-data`: engines live, and nobody asks them.

    A path without `{rollout_id}` gives the same samples every time; where there is no dump of a rollout, that of rollout 0 is
    taken. An evaluation has to be there itself, in a place of its own: `eval_{rollout_id}`, or `eval_before_{rollout_id}` for
    one before training on this rollout.

    Raises:
        UserError: no path is given, or there is no dump.
    """
    template = args.load_forge_rollout_data
    if template is None:
        raise UserError("slime.rollout.forge_load replays a dump: give its path by --load-forge-rollout-data")
    if evaluation:
        name = _evaluation_id(rollout_id, current_call().before_training)
        if dump_path(template, "a") == dump_path(template, "b"):
            raise UserError(
                f"--load-forge-rollout-data {template}: an evaluation is no rollout, and a path without {{rollout_id}} has no "
                "place for one; give --eval-function-path slime.rollout.sglang_rollout.generate_rollout"
            )
        return RolloutFnEvalOutput(_sets(args, load_rollout(template, name, flag="--load-forge-rollout-data")))
    taken = rollout_id if dump_path(template, rollout_id).is_file() else 0
    groups: dict[Any, list[Sample]] = {}
    for position, sample in enumerate(load_rollout(template, taken, flag="--load-forge-rollout-data")):
        own = ("no group", position)
        groups.setdefault(own if sample.group_index is None else sample.group_index, []).append(sample)
    return RolloutFnTrainOutput(list(groups.values()))


def _sets(args: Any, samples: Sequence[Sample]) -> dict[str, dict[str, list[Any]]]:
    """Evaluated samples by the set that they name as their source, else under the name of the only set."""
    names, key = [config.name for config in args.eval_datasets], args.eval_reward_key or args.reward_key
    sets: dict[str, list[Sample]] = {}
    for sample in samples:
        sets.setdefault(get_source(sample) or (names[0] if len(names) == 1 else "replayed"), []).append(sample)
    return {
        name: {
            "rewards": [s.reward[key] if key and isinstance(s.reward, dict) else s.reward for s in own],
            "truncated": [sample.truncated for sample in own],
            "samples": own,
        }
        for name, own in sets.items()
    }


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
    if is_plain_array(value):
        return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=False))
    if isinstance(value, dict):
        # Without naming places where nothing can be wrong: a trace has many such entries.
        return {
            key if type(key) is str else _plain(key, f"{where}, key {key!r}"): item
            if type(item) in _SCALARS
            else _plain(item, f"{where}[{key!r}]")
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        if set(map(type, value)).issubset(_SCALARS):
            return list(value)
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if is_image(value):
        return encode_image_for_rollout_engine(value)
    raise UserError(
        f"--save-debug-rollout-data: {where} is a {type_name(value)}; keep plain values and arrays there, or leave "
        "the flag out"
    )


def _from_plain(entry: dict[str, Any]) -> Sample:
    import torch

    fields = {
        name: (value.numpy() if name in TOKEN_FIELDS else value.tolist()) if torch.is_tensor(value) else value
        for name, value in entry.items()
    }
    return Sample.from_dict(fields)
