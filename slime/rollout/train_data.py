"""From scored samples to the train batch: rewards are post-processed, then columns are built."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from slime.algorithms.estimators import estimator
from slime.algorithms.reward_normalization import normalize_rewards
from slime.training.rollout_batch import TrainBatch, build_train_batch, train_batch_from_columns
from slime.training.routing_replay import ROUTED_EXPERTS, check_routed_experts, routed_experts_column
from slime.utils.errors import UserError
from slime.utils.finite_number import finite_number
from slime.utils.plugin_loader import calling_user_code, load_function
from slime.utils.types import Sample


def convert_samples_to_train_batch(args: argparse.Namespace, samples: Sequence[Sample]) -> TrainBatch:
    """The columns of `samples` (flat, in order).

    Raises:
        UserError: a reward is missing or no finite number, or a plug-in returned something unusable; or the experts to be
            replayed are missing or cannot be.
    """
    path = args.custom_convert_samples_to_train_data_path
    if path is not None:
        flag = "--custom-convert-samples-to-train-data-path"
        convert = load_function(path, flag=flag)
        with calling_user_code(flag, path, f"{len(samples)} samples"):
            columns = convert(args, samples)
        batch = train_batch_from_columns(columns)
    else:
        raw_rewards, rewards = post_process_rewards(args, samples)
        batch = build_train_batch(samples, raw_rewards, rewards)
        if args.use_rollout_routing_replay:
            batch[ROUTED_EXPERTS] = routed_experts_column(args, samples)
    if args.use_rollout_routing_replay:
        check_routed_experts(args, batch)
    return batch


def post_process_rewards(
    args: argparse.Namespace, samples: Sequence[Sample]
) -> tuple[Sequence[float], Sequence[float]]:
    """(raw, post-processed) reward per sample: the user's function, else relative to the prompt group.

    Raises:
        UserError: a reward is missing or no finite number, or the function returned something unusable.
    """
    path = args.custom_reward_post_process_path
    if path is not None:
        flag = "--custom-reward-post-process-path"
        post_process = load_function(path, flag=flag)
        with calling_user_code(flag, path, f"{len(samples)} samples"):
            result = post_process(args, samples)
        return _checked(result, samples, f"{flag} {path}")
    values = [_reward_of(args, sample) for sample in samples]
    raw = [_raw_reward(sample, value) for sample, value in zip(samples, values, strict=True)]
    return raw, relative_rewards(args, samples, values)


def relative_rewards(args: argparse.Namespace, samples: Sequence[Sample], values: Sequence[float]) -> Sequence[float]:
    """`values`, one reward per sample, relative to the prompt group, where the estimator wants them so.

    Which estimators centre and scale is told by `slime.algorithms.estimators`; for the others, for SFT and with
    `--disable-rewards-normalization` rewards stay as they are. Samples that train nothing take part all the same.
    """
    row = estimator(args.advantage_estimator)
    if not args.rewards_normalization or args.loss_type == "sft_loss" or not row.centers:
        return values
    return normalize_rewards(
        values,
        [sample.group_index for sample in samples],
        [sample.rollout_id for sample in samples],
        center=True,
        scale=args.grpo_std_normalization and row.scales,
        group_size=args.n_samples_per_prompt,
    )


def _reward_of(args: argparse.Namespace, sample: Sample) -> float:
    if sample.reward is None and sample.remove_sample:
        # Nothing of the sample is trained; it takes part in its group's statistics as a failure.
        return 0.0
    value = sample.get_reward_value(args)
    number = finite_number(value)
    if number is None:
        raise UserError(
            f"the reward of sample {sample.index} is {value!r}; expected a finite number"
            + (" (rewards are dictionaries: give --reward-key)" if isinstance(value, dict) else "")
        )
    return number


def _raw_reward(sample: Sample, value: float) -> float:
    """What is reported as the sample's reward: `metadata["raw_reward"]`, else `value`."""
    raw = sample.metadata.get("raw_reward", value)
    number = finite_number(raw)
    if number is None:
        raise UserError(f'metadata["raw_reward"] of sample {sample.index} is {raw!r}; expected a finite number')
    return number


def _checked(result: Any, samples: Sequence[Sample], where: str) -> tuple[list[float], list[float]]:
    """(raw rewards, rewards) as floats, from two lists, tuples, or one-dimensional arrays or tensors."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    columns = [_as_list(column) for column in result] if is_pair else []
    if not is_pair or any(column is None or len(column) != len(samples) for column in columns):
        found = f"{len(columns)} columns of {[c if c is None else len(c) for c in columns]}" if is_pair else "no pair"
        raise UserError(
            f"{where} must return (raw_rewards, rewards), each with {len(samples)} numbers; "
            f"got {type(result).__name__}, {found}"
        )
    for name, column in zip(("raw_rewards", "rewards"), columns, strict=True):
        for position, value in enumerate(column):
            column[position] = finite_number(value)
            if column[position] is None:
                raise UserError(
                    f"{where} returned {value!r} in `{name}` for sample {samples[position].index} (position {position}); "
                    "expected a finite number"
                )
    return columns[0], columns[1]


def _as_list(column: Any) -> list[Any] | None:
    """A copy of `column` as a list; None if it is no sequence of values."""
    if hasattr(column, "tolist"):
        column = column.tolist()
    return list(column) if isinstance(column, list | tuple) else None
