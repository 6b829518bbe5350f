"""Group-relative rewards: each sample is compared with the other executions of its prompt.

Invariants
- A group is what shares a `group_index`; order and count of the samples play no part.
- The unit of a group's statistics is the execution: siblings of one execution count once, with their mean.
- Every sibling gets the full reward of its own; the loss averages siblings, so nothing is divided here.
- A group of one unit has no spread to divide by: its rewards are only centred. No input gives NaN.
- Equal rewards are exactly 0 afterwards, whatever their size: rounding noise of a mean is not a spread to be scaled up.
"""

import logging
from collections.abc import Sequence

import numpy as np

from slime.utils.errors import UserError
from slime.utils.finite_number import finite_number

logger = logging.getLogger(__name__)

STD_EPSILON = 1e-6


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
    numbers: dict = {}
    return np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), dtype=np.int64, count=len(keys))
