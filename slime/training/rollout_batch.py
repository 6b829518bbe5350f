"""The train batch: from packed samples to columns, to one shard per data-parallel rank, to tensors per sample.

Per-token columns are the arrays that the samples already hold, one per row. They are concatenated once, into the flat
`RaggedArray`s of a shard; no list of Python integers appears on the way.

Invariants:
- Row i of every per-sample column belongs to sample i.
- `rollout_mask_sums` is computed here, before anything is split, so that the loss cannot depend on the split.
"""

from __future__ import annotations

import argparse
import operator
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.algorithms.reduction import rollout_mask_sums
from slime.scheduling.dp_schedule import DPSchedule
from slime.training.batch_transport import fetch_shard
from slime.training.columns import COLUMNS, IMAGES, Kind, column_of, names_of
from slime.utils.errors import UserError
from slime.utils.finite_number import finite_number
from slime.utils.misc import Box
from slime.utils.packed_sample import PackedSample, RaggedArray, as_loss_mask, get_source, pack_sample
from slime.utils.processing_utils import sees_images
from slime.utils.sample_fields import first_not_finite, held
from slime.utils.types import Sample, failed_and_masked, turns_of

if TYPE_CHECKING:
    import torch

    from slime.training.rollout_data import RolloutData

TrainBatch = dict[str, Any]

_OF_TOKENS = names_of(Kind.RESPONSE_PART)
# Columns of a plug-in with one number per sample, all of which must be finite: they count in means and lengths.
_OF_NUMBERS = ("rewards", "raw_reward", "response_lengths", "truncated", "rollout_mask_sums")


def build_train_batch(samples: Sequence[Sample], raw_rewards: Sequence[float], rewards: Sequence[float]) -> TrainBatch:
    """Columns of `samples`; keys and dtypes as users' plug-ins see them.

    Args:
        raw_rewards: reward per sample before post-processing.
        rewards: reward per sample after it.

    Raises:
        UserError: of the samples that train, some have an optional per-token field and others have none; or one of its numbers
            at a trained token is not finite; or a sample has images, and nothing that a processor made of them.
    """
    packed = [_pack(sample) for sample in samples]
    response_lengths = np.array([p.response_length for p in packed], dtype=np.int64)
    total_lengths = np.array([p.total_length for p in packed], dtype=np.int64)
    _require_prompts(samples, total_lengths, response_lengths)
    masks = [
        np.zeros_like(p.loss_mask) if s.remove_sample else p.loss_mask for s, p in zip(samples, packed, strict=True)
    ]
    mask_sums = _mask_sums(masks)
    trained = [mask_sum > 0 for mask_sum in mask_sums]
    execution_of_sample = execution_ids([s.rollout_id for s in samples])
    batch: TrainBatch = {
        "tokens": [p.tokens for p in packed],
        "loss_masks": masks,
        "response_lengths": response_lengths,
        "total_lengths": total_lengths,
        "rewards": np.asarray(rewards, dtype=np.float32),
        "raw_reward": np.asarray(raw_rewards, dtype=np.float64),
        "truncated": np.array([s.status == Sample.Status.TRUNCATED for s in samples], dtype=np.int64),
        "sample_indices": np.array([-1 if s.index is None else s.index for s in samples], dtype=np.int64),
        "rollout_ids": execution_of_sample,
        "rollout_mask_sums": rollout_mask_sums(mask_sums, execution_of_sample.tolist()),
    }
    optional: dict[str, list[np.ndarray | None]] = {
        "rollout_log_probs": [p.rollout_log_probs for p in packed],
        "teacher_log_probs": [p.teacher_log_probs for p in packed],
        "rollout_top_p_token_ids": _as_int32([s.rollout_top_p_token_ids for s in samples]),
        "rollout_top_p_token_offsets": _as_int32([s.rollout_top_p_token_offsets for s in samples]),
    }
    _drop_halves_of_kept_sets(optional, trained)
    for name, rows in optional.items():
        column = _optional_rows(samples, masks, trained, rows, name)
        if column is not None:
            batch[name] = column
    images = _images_column(samples, trained)
    if any(images):
        batch[IMAGES] = images
    if any(s.train_metadata is not None for s in samples):
        batch["metadata"] = [s.train_metadata or {} for s in samples]
    if any("round_number" in s.metadata for s in samples):
        batch["round_number"] = np.array([turns_of(s) for s in samples], dtype=np.int64)
    failed = [failed_and_masked(s) for s in samples]
    if any(failed):
        batch["failed"] = np.array(failed)
    sources = [get_source(s) for s in samples]
    if any(source is not None for source in sources):
        batch["source_names"] = sources
    return batch


def train_batch_from_columns(columns: dict[str, Any], source: str, samples: Sequence[Sample] = ()) -> TrainBatch:
    """A batch from a plug-in's dict of per-sample lists.

    As in `build_train_batch`, samples that are to be left out get masks of zeros. `failed` tells which samples failed, and
    `rollout_ids` which execution each came from, unless the plug-in has such a column itself.

    Args:
        source: flag and path of the plug-in, for messages.
        samples: what the plug-in was given; the column `sample_indices` tells which of them a row belongs to.

    Raises:
        UserError: it is no dict, a required column is missing or has another number of rows, a mask holds something else than 1
            and 0, a reward or what belongs to a trained token is no finite number, or the rows of a sample do not fit together.
    """
    if not isinstance(columns, dict):
        raise UserError(f"{source} returned {type(columns).__name__}; expected a dict of columns")
    required = [name for name, known in COLUMNS.items() if known.required]
    missing = [name for name in required if name not in columns]
    if missing:
        raise UserError(f"{source}: the returned dict lacks {', '.join(missing)}; required are {', '.join(required)}")
    if no_columns := [f"`{name}` is {column!r:.40}" for name, column in columns.items() if not _has_rows(column)]:
        raise UserError(f"{source}: {', '.join(no_columns)}; expected columns, lists with one entry per sample")
    rows = len(columns["tokens"])
    if not rows:
        raise UserError(f"{source}: the columns are empty")
    wrong = {name: len(column) for name, column in columns.items() if len(column) != rows}
    if wrong:
        raise UserError(
            f"{source}: `tokens` has {rows} rows, but "
            + ", ".join(f"`{name}` has {count}" for name, count in wrong.items())
        )
    batch = {**columns, "sample_indices": [_sample_index(index, source) for index in columns["sample_indices"]]}
    of_samples = [f"{source}: sample {index}:" for index in batch["sample_indices"]]
    for name in filter(columns.__contains__, _OF_NUMBERS):
        for value, where in zip(columns[name], of_samples, strict=True):
            if finite_number(value) is None:
                raise UserError(f"{where} `{name}` is {value!r}; expected a finite number")
    masks = [(mask, f"{where} `loss_masks`") for mask, where in zip(batch["loss_masks"], of_samples, strict=True)]
    batch["loss_masks"] = [as_loss_mask(_as_array(mask, None, name), name) for mask, name in masks]
    rollout_ids = list(batch.get("rollout_ids", [None] * rows))
    for position, sample in _samples_of_rows(samples, batch["sample_indices"]):
        if "rollout_ids" not in columns:
            rollout_ids[position] = sample.rollout_id
        if sample.remove_sample:
            batch["loss_masks"][position] = np.zeros_like(batch["loss_masks"][position])
        if failed_and_masked(sample) and "failed" not in columns:
            batch.setdefault("failed", np.zeros(rows, np.bool_))[position] = True
    try:
        batch["rollout_ids"] = execution_ids(rollout_ids)
    except (TypeError, ValueError) as error:
        raise UserError(f"{source}: `rollout_ids` has other entries than whole numbers and None: {error}") from None
    for name in columns:
        known = column_of(name)
        if known.is_ragged:
            pairs = zip(batch[name], of_samples, strict=True)
            batch[name] = [_as_array(row, known.dtype, f"{where} `{name}`") for row, where in pairs]
        elif known.dtype is not None:
            batch[name] = _as_array(batch[name], known.dtype, f"{source}: `{name}`")
    for position, where in enumerate(of_samples):
        _require_fitting_rows({name: batch[name][position] for name in columns}, where)
    batch["total_lengths"] = np.array([len(row) for row in batch["tokens"]], dtype=np.int64)
    if "rollout_mask_sums" not in batch:
        batch["rollout_mask_sums"] = rollout_mask_sums(_mask_sums(batch["loss_masks"]), batch["rollout_ids"].tolist())
    return batch


def _sample_index(index: Any, source: str) -> int:
    try:
        return -1 if index is None else operator.index(index)
    except TypeError:
        raise UserError(f"{source}: `sample_indices` has {index!r:.40}; expected whole numbers, or None") from None


def _samples_of_rows(samples: Sequence[Sample], sample_indices: Sequence[Any]) -> Iterator[tuple[int, Sample]]:
    """(Row, the sample that it belongs to), for all rows that belong to one of the samples. Siblings share an index, so their
    rows are taken to be in the order of `samples`."""
    waiting: dict[Any, deque[Sample]] = defaultdict(deque)
    for sample in samples:
        waiting[-1 if sample.index is None else sample.index].append(sample)
    for position, index in enumerate(sample_indices):
        if own := waiting[index]:
            yield position, own.popleft()


def _has_rows(column: Any) -> bool:
    try:
        return len(column) >= 0
    except TypeError:
        return False


def _as_array(row: Any, dtype: Any, name: str) -> np.ndarray:
    try:
        # Of tensors the values: numpy knows neither all of their types nor devices other than the host.
        given = np.asarray(row.tolist() if hasattr(row, "tolist") and not isinstance(row, np.ndarray) else row)
        array = given.astype(dtype or given.dtype, copy=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} is no row of numbers: {error}") from None
    if not array.ndim:
        raise UserError(f"{name} is {row!r}; expected a row of numbers")
    if array.dtype.kind in "iu" and given.dtype.kind == "f" and len(wrong := np.flatnonzero(array != given)):
        raise UserError(f"{name} is {given[wrong[0]]} at {wrong[0]}; expected whole numbers")
    return array


def _require_fitting_rows(sample: dict[str, Any], where: str) -> None:
    """Raise UserError, with column and both numbers, if the rows of a sample do not fit together; `where` names the sample.

    Log-probs, advantages and the like must be finite numbers at trained tokens. Those of other tokens do not matter: nobody
    reads them.
    """
    total, response = len(sample["tokens"]), int(sample["response_lengths"])
    if not 0 <= response < total:
        raise UserError(
            f"{where} `response_lengths` is {response} of {total} `tokens`; the first token cannot be predicted, so a sample "
            "needs at least one prompt token"
        )
    expected = dict.fromkeys(("loss_masks", *_OF_TOKENS), response)
    expected["rollout_top_p_token_offsets"] = response + 1
    for name, length in expected.items():
        if name not in sample:
            continue
        if sample[name].ndim != 1:
            raise UserError(
                f"{where} `{name}` has the shape {list(sample[name].shape)}; expected a number for each token"
            )
        if len(sample[name]) != length:
            raise UserError(
                f"{where} `{name}` has {len(sample[name])} entries, expected {length}: `response_lengths` is {response}"
            )
        if name in _OF_TOKENS:
            _require_finite(sample[name], sample["loss_masks"], f"{where} `{name}`")
    offsets = sample.get("rollout_top_p_token_offsets")
    kept = len(sample.get("rollout_top_p_token_ids", ()))
    if offsets is not None and offsets[-1] != kept:
        raise UserError(
            f"{where} `rollout_top_p_token_offsets` ends at {offsets[-1]}, and `rollout_top_p_token_ids` has {kept} entries"
        )
    if offsets is not None and (offsets[0] != 0 or (np.diff(offsets) < 0).any()):
        raise UserError(f"{where} `rollout_top_p_token_offsets` must ascend from 0")


def _require_finite(row: np.ndarray, mask: np.ndarray, where: str) -> None:
    """Raise UserError if one of `row`'s numbers at a trained token is not finite; `where` names the sample and its field."""
    wrong = first_not_finite(row)
    if wrong is not None and not mask[wrong]:
        wrong = first_not_finite(np.where(mask != 0, row, 0.0))
    if wrong is not None:
        raise UserError(f"{where} is {row[wrong]} at response token {wrong}, which is trained")


def correction_flag(args: argparse.Namespace) -> str | None:
    """The flag that has the policy loss corrected by the engine's log-probs; None if none does.

    A user's function is called whether or not `--use-tis` is given: the function may read that flag as a setting of its own,
    for instance to apply its weights or only to measure them.
    """
    if args.use_tis:
        return "--use-tis"
    return None if args.custom_tis_function_path is None else "--custom-tis-function-path"


def takes_images(args: argparse.Namespace) -> bool:
    """Whether the model of the run may take images: the provider that builds it knows."""
    return args.train_backend == "megatron" and args.custom_model_provider_path is not None


def refuse_images(args: argparse.Namespace, batch: TrainBatch) -> None:
    """Raise UserError if the batch has images and the model takes none: it would learn to answer without seeing them."""
    seeing = [index for index, one in zip(batch["sample_indices"], batch.get(IMAGES, ()), strict=False) if one]
    if seeing and not takes_images(args):
        raise UserError(
            f"{len(seeing)} of {len(batch[IMAGES])} samples have images (sample indices {[int(i) for i in seeing[:5]]}), and "
            "the model of this run is trained on text: the images would be left out; of Qwen3.5 give "
            "--custom-model-provider-path slime_plugins.models.qwen3_5_vl.get_qwen3_5_vl_model_provider, of Qwen3-VL "
            "slime_plugins.models.qwen3_vl.get_qwen3_vl_model_provider, of other models "
            "generate with --debug-rollout-only, or make a batch without `multimodal_train_inputs` by "
            "--custom-convert-samples-to-train-data-path"
        )


def execution_ids(rollout_ids: Sequence[int | None]) -> np.ndarray:
    """The id of each sample's execution, int64; a sample without one gets a new id that no other has."""
    fresh = max((int(i) for i in rollout_ids if i is not None), default=-1) + 1
    filled = []
    for rollout_id in rollout_ids:
        filled.append(fresh if rollout_id is None else int(rollout_id))
        fresh += rollout_id is None
    return np.array(filled, dtype=np.int64)


def split_for_data_parallel(batch: TrainBatch, schedule: DPSchedule) -> list[TrainBatch]:
    """One shard per data-parallel rank: its rows of every column, plus its part of the schedule."""
    return [_shard(batch, schedule, rank) for rank in range(len(schedule.partitions))]


def to_tensors(shard: TrainBatch, device: torch.device | str) -> RolloutData:
    """A shard as the trainer and its plug-ins see it: per-token columns, still whole responses, as lists with one tensor per
    sample.

    `total_lengths` is cut to the shard's samples; `raw_reward` stays whole and `local_raw_reward` is added.
    """
    import torch

    from slime.training.rollout_data import RolloutData

    partition = shard["partition"]
    data = RolloutData()
    for name, rows in shard.items():
        if isinstance(rows, RaggedArray):
            flat = torch.from_numpy(rows.values.copy()).to("cpu" if column_of(name).on_host else device)
            data[name] = list(flat.split(rows.lengths.tolist()))
        elif isinstance(rows, np.ndarray):
            data[name] = rows.tolist()
        else:
            data[name] = rows
    data["total_lengths"] = [data["total_lengths"][i] for i in partition]
    data["local_raw_reward"] = [data["raw_reward"][i] for i in partition]
    return data


def process_rollout_data(
    args: argparse.Namespace, refs: Sequence[Box], dp_rank: int, dp_size: int, device: torch.device | str = "cpu"
) -> RolloutData:
    """This data-parallel rank's shard as `to_tensors` gives it.

    Args:
        refs: boxed references to the shards of all data-parallel ranks.

    Raises:
        ValueError: the number of shards is not `dp_size`.
        RunError: the shard did not come.
    """
    if len(refs) != dp_size:
        raise ValueError(f"the rollout is cut into {len(refs)} shards, and there are {dp_size} data-parallel ranks")
    return to_tensors(fetch_shard(refs[dp_rank], args.http_control_timeout), device)


def _mask_sums(masks: Sequence[np.ndarray]) -> list[int]:
    """How many tokens each of these masks of ones and zeros trains."""
    return [int(np.add.reduce(mask)) for mask in masks]


def _pack(sample: Sample) -> PackedSample:
    """The sample's arrays. A sample that failed before it had any token gets two masked ones, to keep its place in the
    batch."""
    if sample.remove_sample and not len(held(sample, "tokens")):
        nothing = np.zeros(1, np.int32)
        return PackedSample(np.zeros(2, np.int64), nothing, np.zeros(1, np.float32), np.zeros(1, np.float32))
    return pack_sample(sample)


def _images_column(samples: Sequence[Sample], trained: Sequence[bool]) -> list[dict[str, Any] | None]:
    """What the processor made of each sample's images, its tensors as arrays; None where there are none, or nothing is trained.

    Samples that share a tensor share the array.
    """
    without = [
        sample.index
        for sample, trains in zip(samples, trained, strict=True)
        if trains and not sample.multimodal_train_inputs and sees_images(sample)
    ]
    if without:
        raise UserError(
            f"{len(without)} of {len(samples)} samples have images and no `multimodal_train_inputs` (sample indices "
            f"{without[:5]}): the images would be left out; a generate function of your own must set there what the "
            "processor made of them"
        )
    arrays: dict[int, np.ndarray] = {}

    def as_array(value: Any) -> Any:
        return arrays.setdefault(id(value), np.asarray(value)) if hasattr(value, "__array__") else value

    inputs = [
        sample.multimodal_train_inputs if trains else None for sample, trains in zip(samples, trained, strict=True)
    ]
    return [one and {name: as_array(value) for name, value in one.items()} for one in inputs]


def _as_int32(rows: list[Any]) -> list[np.ndarray | None]:
    return [None if row is None else np.asarray(row, np.int32) for row in rows]


def _require_prompts(samples: Sequence[Sample], total_lengths: np.ndarray, response_lengths: np.ndarray) -> None:
    wrong = np.flatnonzero(response_lengths >= total_lengths)
    if len(wrong):
        raise UserError(
            f"sample {samples[wrong[0]].index} has {total_lengths[wrong[0]]} tokens, all of them in the response; its first "
            "token cannot be predicted, so a sample needs at least one prompt token"
        )


def _drop_halves_of_kept_sets(optional: dict[str, list[np.ndarray | None]], trained: Sequence[bool]) -> None:
    """Of a sample that trains nothing, drop ids of kept tokens without offsets, and offsets without ids: neither can be read
    without the other."""
    halves = optional["rollout_top_p_token_ids"], optional["rollout_top_p_token_offsets"]
    for row, trains in enumerate(trained):
        if not trains and any(half[row] is None for half in halves):
            for half in halves:
                half[row] = None


def _optional_rows(
    samples: Sequence[Sample],
    masks: Sequence[np.ndarray],
    trained: Sequence[bool],
    rows: list[np.ndarray | None],
    field: str,
) -> list[np.ndarray] | None:
    """A row for every sample, or None when no sample has one that counts.

    A sample whose mask is all zero may have none. It gets zeros of the length that the trainer expects (for kept tokens, empty
    sets), which nobody reads.

    Raises:
        UserError: some of the samples that train have a row and others have none, or a number at a trained token is not finite.
    """
    # If no sample trains anything, the column may still be reported.
    counts = trained if any(trained) else [s.response_length > 0 for s in samples]
    present = [row is not None for row, counted in zip(rows, counts, strict=True) if counted]
    if not any(present):
        return None
    missing = [s.index for s, row, trains in zip(samples, rows, trained, strict=True) if row is None and trains]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(samples)} samples have no `{field}` (sample indices {missing[:5]}); "
            "the function that sets it, of generation or of rewards, must do so for all samples of a step that train, or "
            "for none"
        )
    if field in _OF_TOKENS:
        for sample, row, mask in zip(samples, rows, masks, strict=True):
            if row is not None:
                _require_finite(row, mask, f"sample {sample.index}: `{field}`")
    return [_neutral_row(field, len(mask)) if row is None else row for row, mask in zip(rows, masks, strict=True)]


def _neutral_row(field: str, response_length: int) -> np.ndarray:
    lengths = {"rollout_top_p_token_ids": 0, "rollout_top_p_token_offsets": response_length + 1}
    return np.zeros(lengths.get(field, response_length), COLUMNS[field].dtype)


def _shard(batch: TrainBatch, schedule: DPSchedule, rank: int) -> TrainBatch:
    partition = schedule.partitions[rank]
    shard: TrainBatch = {
        name: rows if column_of(name).sent_whole else _take(name, rows, partition) for name, rows in batch.items()
    }
    shard["partition"] = partition
    shard["micro_batch_indices"] = schedule.micro_batch_indices[rank]
    shard["num_microbatches"] = schedule.num_microbatches
    shard["global_batch_sizes"] = schedule.global_batch_sizes
    return shard


def _take(name: str, rows: Any, positions: list[int]) -> Any:
    if column_of(name).is_ragged:
        return RaggedArray.from_rows([rows[position] for position in positions], column_of(name).dtype)
    return rows[positions] if isinstance(rows, np.ndarray) else [rows[position] for position in positions]
