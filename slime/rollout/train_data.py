"""From scored samples to the train batch: rewards are post-processed, then columns are built."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from slime.algorithms.reward_normalization import normalize_rewards
from slime.training.rollout_batch import TrainBatch, build_train_batch, train_batch_from_columns
from slime.utils.errors import UserError
from slime.utils.misc import load_function
from slime.utils.types import Sample
from slime.utils.user_code import calling_user_code


def convert_samples_to_train_batch(args: argparse.Namespace, samples: Sequence[Sample]) -> TrainBatch:
    """The columns of `samples` (flat, in order).

    Raises:
        UserError: a reward is missing or no finite number, or a plug-in returned something unusable.
    """
    path = args.custom_convert_samples_to_train_data_path
    if path is not None:
        flag = "--custom-convert-samples-to-train-data-path"
        convert = load_function(path, flag=flag)
        with calling_user_code(flag, path, f"{len(samples)} samples"):
            columns = convert(args, samples)
        return train_batch_from_columns(columns)
    raw_rewards, rewards = post_process_rewards(args, samples)
    return build_train_batch(samples, raw_rewards, rewards)


def post_process_rewards(
    args: argparse.Namespace, samples: Sequence[Sample]
) -> tuple[Sequence[float], Sequence[float]]:
    """(raw, post-processed) reward per sample: the user's function, else normalisation within prompt groups."""
    path = args.custom_reward_post_process_path
    if path is not None:
        flag = "--custom-reward-post-process-path"
        post_process = load_function(path, flag=flag)
        with calling_user_code(flag, path, f"{len(samples)} samples"):
            result = post_process(args, samples)
        return _checked(result, len(samples), f"{flag} {path}")
    values = [_reward_of(args, sample) for sample in samples]
    raw = [sample.metadata.get("raw_reward", value) for sample, value in zip(samples, values, strict=True)]
    if not args.rewards_normalization or args.loss_type == "sft_loss":
        return raw, values
    rewards = normalize_rewards(
        values,
        [sample.group_index for sample in samples],
        [sample.rollout_id for sample in samples],
        center=True,
        scale=args.grpo_std_normalization,
        group_size=args.n_samples_per_prompt,
    )
    return raw, rewards


def _reward_of(args: argparse.Namespace, sample: Sample) -> float:
    if sample.reward is None and sample.remove_sample:
        # Nothing of the sample is trained; it takes part in its group's statistics as a failure.
        return 0.0
    value = sample.get_reward_value(args) if sample.reward is not None else None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(
            f"the reward of sample {sample.index} is {value!r}; expected a finite number"
            + (" (rewards are dictionaries: give --reward-key)" if isinstance(value, dict) else "")
        )
    return number


def _checked(result: Any, count: int, where: str) -> tuple[Sequence[float], Sequence[float]]:
    fits = isinstance(result, tuple) and len(result) == 2 and all(len(rewards) == count for rewards in result)
    if not fits:
        raise UserError(
            f"{where} must return (raw_rewards, rewards), each with {count} numbers; got {type(result).__name__}"
        )
    if not all(math.isfinite(float(reward)) for rewards in result for reward in rewards):
        raise UserError(f"{where} returned a reward that is not finite")
    return result
