"""From scored samples to the train batch: rewards are post-processed, then columns are built.

Most estimators want rewards relative to the prompt group: each sample is compared with the other executions of its prompt.

Invariants
- A group is what shares a `group_index`; order and count of the samples play no part.
- The unit of a group's statistics is the execution: siblings of one execution count once, with their mean.
- Every sibling gets the full reward of its own; the loss averages siblings, so nothing is divided here.
- A group of one unit has no spread to divide by: its rewards are only centred. No input gives NaN.
- Equal rewards are exactly 0 afterwards, whatever their size: rounding noise of a mean is not a spread to be scaled up.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.algorithms.estimators import estimator
from slime.arguments.config_files.role_config import critic_args
from slime.rollout.generate_state import samples_among_some
from slime.rollout.user_functions import call_for_step, naming_makers
from slime.training.keep_set import OFFSETS
from slime.training.rollout_batch import TrainBatch, build_train_batch, refuse_images, train_batch_from_columns
from slime.training.routing_replay import ROUTED_EXPERTS, check_routed_experts, routed_experts_column
from slime.utils.errors import UserError
from slime.utils.finite_number import finite_number
from slime.utils.types import Sample, failed_and_masked

logger = logging.getLogger(__name__)

STD_EPSILON = 1e-6
# Above this, a scaled reward is worth a warning: without fan-outs, n executions give at most (n − 1)/√n.
_STEEP_ADVANTAGE = 100.0


def convert_samples_to_train_batch(args: argparse.Namespace, samples: Sequence[Sample]) -> TrainBatch:
    """The columns of `samples` (flat, in order).

    Raises:
        UserError: a reward is missing or no finite number; a plug-in raised, did not return, or returned something unusable;
            the experts to replay, or the sets that sampling kept, are missing or impossible; samples have images, which the
            model does not take; or a token is none of the model's, or none of the critic's.
    """
    path = args.custom_convert_samples_to_train_data_path
    if path is not None:
        flag = "--custom-convert-samples-to-train-data-path"
        columns = call_for_step(args, flag, path, f"{len(samples)} samples", args, samples)
        batch = train_batch_from_columns(columns, f"{flag} {path}", samples)
    else:
        raw_rewards, rewards = post_process_rewards(args, samples)
        with naming_makers(args):
            batch = build_train_batch(samples, raw_rewards, rewards)
        if args.use_rollout_routing_replay:
            batch[ROUTED_EXPERTS] = routed_experts_column(args, samples)
        if args.true_on_policy_mode:
            batch["weight_version_spans"] = [list(sample.weight_version_spans) for sample in samples]
    refuse_images(args, batch)
    _require_tokens_of_models(args, batch)
    if args.use_rollout_routing_replay:
        check_routed_experts(args, batch)
    if args.loss_type != "sft_loss" and samples_among_some(args):
        _require_kept_sets(batch)
    return batch


def _require_tokens_of_models(args: argparse.Namespace, batch: TrainBatch) -> None:
    """Raise UserError if a token is none of the model's, or none of the critic's, which reads the same ones. One of another
    tokenizer would train a row that pads the embedding or, where ranks share the vocabulary, be zeros; else it ends the ranks.
    """
    if args.vocab_size is None:
        return
    size = args.vocab_size
    model = "model (--vocab-size, or config.json of --hf-checkpoint); make tokens with its tokenizer"
    if args.use_critic and (of_critic := critic_args(args).vocab_size) < size:
        size, place = of_critic, f"{args.megatron_config_path}, role critic: vocab_size or hf_checkpoint"
        model = f"critic ({place}); give it one that has the tokens of --hf-checkpoint"
    for index, tokens in zip(batch["sample_indices"], batch["tokens"], strict=True):
        # Those below zero are large numbers without their sign.
        if np.maximum.reduce(tokens.astype(np.int64, copy=False).view(np.uint64), initial=0) >= size:
            [position, *_] = np.flatnonzero((tokens < 0) | (tokens >= size))
            found = f"sample {index}: token id {tokens[position]} at position {position}"
            raise UserError(f"{found} is none of the {size} tokens of the {model}")


def _require_kept_sets(batch: TrainBatch) -> None:
    """Raise UserError if a batch that trains something lacks the sets of tokens that sampling kept: the trainer's log-probs
    would be those of the whole vocabulary, from which nothing was sampled."""
    if OFFSETS not in batch and any(mask.any() for mask in batch["loss_masks"]):
        raise UserError(
            f"--rollout-top-p, --rollout-top-k: no sample has `{OFFSETS}`, the tokens that sampling kept; a generate function "
            "of yours gets them by slime.rollout.sglang_rollout.generate, or hands the `meta_info` of the engine to "
            "append_response_tokens. Without: give --rollout-top-p 1 --rollout-top-k -1"
        )


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
        result = call_for_step(args, flag, path, f"{len(samples)} samples", args, samples)
        return _checked(result, samples, f"{flag} {path}")
    values = [_reward_of(args, sample) for sample in samples]
    raw = [_raw_reward(sample, value) for sample, value in zip(samples, values, strict=True)]
    return raw, relative_rewards(args, samples, values)


def relative_rewards(args: argparse.Namespace, samples: Sequence[Sample], values: Sequence[float]) -> Sequence[float]:
    """`values`, one reward per sample, relative to the prompt group, where the estimator wants them so.

    `slime.algorithms.estimators` says which estimators centre and scale; for the others, for SFT and with
    `--disable-rewards-normalization` rewards stay as they are. A sample that trains nothing counts in its group all the same. A
    sample that failed does not, since nobody judged it, and its own reward becomes 0.
    """
    row = estimator(args.advantage_estimator)
    if not args.rewards_normalization or args.loss_type == "sft_loss" or not row.centers:
        return values
    groups = _complete_group_indices([sample.group_index for sample in samples], args.n_samples_per_prompt)
    graded = [position for position, sample in enumerate(samples) if not failed_and_masked(sample)]
    relative = np.zeros(len(samples), dtype=np.float32)
    relative[graded] = normalize_rewards(
        [values[position] for position in graded],
        [groups[position] for position in graded],
        [samples[position].rollout_id for position in graded],
        center=True,
        scale=args.grpo_std_normalization and row.scales,
    )
    steep = int(np.count_nonzero(np.abs(relative) > _STEEP_ADVANTAGE))
    if steep:
        logger.warning(
            "%d of %d rewards are up to %.0f standard deviations of their group: executions that fanned out have nearly the "
            "same mean reward, and their siblings others; give --disable-grpo-std-normalization",
            steep, len(relative), np.abs(relative).max(),
        )  # fmt: skip
    return relative


def normalize_rewards(
    rewards: Sequence[float],
    group_indices: Sequence[int | None],
    execution_ids: Sequence[int | None],
    *,
    center: bool,
    scale: bool,
    group_size: int | None = None,
) -> np.ndarray:
    """Rewards relative to their prompt group, float32 [number of samples]; statistics in float64.

    r' = r − μ, and with `scale` r' = (r − μ) / (σ + 1e-6), where μ and the unbiased σ run over the units of the group
    (GRPO, arXiv 2402.03300, section 4.1.2). Without `center` the rewards come back as they are, whatever `scale` says.

    `execution_ids[i] is None`: the sample is an execution of its own. If no sample has a group index, groups are runs of
    `group_size` neighbours when that divides the number of samples, else the whole list is one group.

    Raises UserError for a reward that is not a finite number and for group indices that only some samples have.
    """
    _require_equal_lengths(rewards, group_indices, execution_ids)
    values = _finite_rewards(rewards, group_indices)
    if not center or values.size == 0:
        return values.astype(np.float32)

    group_of_sample = _dense_ids(_complete_group_indices(group_indices, group_size))
    unit_of_sample = _dense_ids(_unit_keys(group_of_sample, execution_ids))
    values -= _first_of_each(group_of_sample, values)[group_of_sample]
    unit_rewards = np.bincount(unit_of_sample, values) / np.bincount(unit_of_sample)
    group_of_unit = np.empty(len(unit_rewards), dtype=np.int64)
    group_of_unit[unit_of_sample] = group_of_sample

    units_per_group = np.bincount(group_of_unit)
    means = np.bincount(group_of_unit, unit_rewards) / units_per_group
    centered = values - means[group_of_sample]
    if scale:
        square_sums = np.bincount(group_of_unit, (unit_rewards - means[group_of_unit]) ** 2)
        deviations = np.sqrt(square_sums / np.maximum(units_per_group - 1, 1))
        divisors = np.where(units_per_group > 1, deviations + STD_EPSILON, 1.0)
        centered /= divisors[group_of_sample]
    return centered.astype(np.float32)


def _reward_of(args: argparse.Namespace, sample: Sample) -> float:
    if sample.reward is None and failed_and_masked(sample):
        # Nothing of the sample is trained, and its group is judged without it.
        return 0.0
    value = sample.get_reward_value(args)
    number = finite_number(value)
    if number is None:
        raise UserError(
            f"the reward of sample {sample.index} is {value!r}; expected a finite number"
            + (" (rewards are dictionaries: give --reward-key)" if isinstance(value, dict) else "")
            + ("; the function of --rollout-function-path has to set it" if value is None else "")
        )
    return number


def _raw_reward(sample: Sample, value: float) -> float:
    """What is reported as the sample's reward: `metadata["raw_reward"]`, else `value`."""
    if "raw_reward" not in sample.metadata:
        return value
    raw = sample.metadata["raw_reward"]
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


def _require_equal_lengths(rewards: Sequence, group_indices: Sequence, execution_ids: Sequence) -> None:
    if not len(rewards) == len(group_indices) == len(execution_ids):
        raise ValueError(
            f"one reward, group index and execution id per sample: "
            f"got {len(rewards)}, {len(group_indices)} and {len(execution_ids)}"
        )


def _finite_rewards(rewards: Sequence[float], group_indices: Sequence[int | None]) -> np.ndarray:
    values = np.empty(len(rewards), dtype=np.float64)
    for position, reward in enumerate(rewards):
        number = finite_number(reward)
        if number is None:
            raise UserError(
                f"the reward of sample {position} (group {group_indices[position]}) is {reward!r}, not a finite number; "
                "mend the reward function, or name the number with --reward-key if it returns a dict"
            )
        values[position] = number
    return values


def _first_of_each(numbers_of: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value at the first occurrence of each of the numbers 0, 1, …"""
    return values[np.unique(numbers_of, return_index=True)[1]]


def _complete_group_indices(group_indices: Sequence[int | None], group_size: int | None) -> Sequence[int]:
    missing = [position for position, group in enumerate(group_indices) if group is None]
    if not missing:
        return group_indices
    count = len(group_indices)
    if len(missing) < count:
        raise UserError(
            f"{len(missing)} of {count} samples have no group_index (positions {missing[:8]}…): "
            "set it on every sample or on none"
        )
    if group_size and count % group_size == 0:
        logger.warning("no sample has a group_index: rewards are normalised in runs of %d neighbours", group_size)
        return [position // group_size for position in range(count)]
    logger.warning("no sample has a group_index: rewards of all %d samples are normalised as one group", count)
    return [0] * count


def _unit_keys(group_of_sample: np.ndarray, execution_ids: Sequence[int | None]) -> list[tuple]:
    return [
        (group, "alone", position) if execution_id is None else (group, "execution", execution_id)
        for position, (group, execution_id) in enumerate(zip(group_of_sample.tolist(), execution_ids, strict=True))
    ]


def _dense_ids(keys: Sequence) -> np.ndarray:
    """Number the distinct keys 0, 1, … in order of first occurrence."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys], dtype=np.int64)
