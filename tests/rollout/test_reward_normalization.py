import logging
import math
import random

import numpy as np
import pytest
import torch

from slime.algorithms.reduction import rollout_mask_sums, sum_of_sample_mean
from slime.rollout.train_data import normalize_rewards
from slime.utils.errors import UserError


def normalize(rewards, groups, rollout_ids=None, center=True, scale=True, **kwargs):
    rollout_ids = [None] * len(rewards) if rollout_ids is None else rollout_ids
    return normalize_rewards(rewards, groups, rollout_ids, center=center, scale=scale, **kwargs)


def plain_normalize(rewards, groups, executions, scale):
    """Group-relative rewards by loops over dictionaries."""
    result = [0.0] * len(rewards)
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        units = {}
        for i in members:
            units.setdefault(("own", i) if executions[i] is None else executions[i], []).append(rewards[i])
        means = [sum(unit) / len(unit) for unit in units.values()]
        center = sum(means) / len(means)
        spread = 1.0
        if scale and len(means) > 1:
            spread = math.sqrt(sum((m - center) ** 2 for m in means) / (len(means) - 1)) + 1e-6
        for i in members:
            result[i] = (rewards[i] - center) / spread
    return result


@pytest.mark.parametrize("scale", [True, False])
def test_l1_random_groups_executions_and_orders_equal_the_plain_form(scale):
    numbers = random.Random(5)
    for _ in range(50):
        count = numbers.randint(1, 40)
        rewards = [numbers.choice([0, 1, 0.5, -2.25, 100.0]) for _ in range(count)]
        groups = [numbers.randint(0, 6) for _ in range(count)]
        executions = [numbers.choice([None, *(10 * group + k for k in range(3))]) for group in groups]
        np.testing.assert_allclose(
            normalize(rewards, groups, executions, scale=scale),
            plain_normalize(rewards, groups, executions, scale),
            rtol=1e-5, atol=1e-6,
        )  # fmt: skip


def test_two_groups_of_four_with_and_without_std():
    rewards = [1, 0, 0, 1, 0.2, 0.4, 0.6, 0.8]
    groups = [0] * 4 + [1] * 4
    expected = [0.866023904, -0.866023904, -0.866023904, 0.866023904]
    expected += [-1.161890504, -0.387296835, 0.387296835, 1.161890504]
    np.testing.assert_allclose(normalize(rewards, groups), expected, atol=1e-7)
    centered = normalize(rewards, groups, scale=False)
    np.testing.assert_allclose(centered, [0.5, -0.5, -0.5, 0.5, -0.3, -0.1, 0.1, 0.3], atol=1e-7)
    assert centered.dtype == np.float32


def test_l1_groups_are_found_by_index_when_interleaved():
    result = normalize([1, 0.2, 0, 0.4, 0, 0.6, 1, 0.8], [0, 1] * 4)
    expected = [0.866023904, -1.161890504, -0.866023904, -0.387296835]
    expected += [-0.866023904, 0.387296835, 0.866023904, 1.161890504]
    np.testing.assert_allclose(result, expected, atol=1e-7)


def test_l1_uneven_groups():
    result = normalize([1, 0, 0, 3, 5], [0, 0, 0, 1, 1])
    expected = [1.154698538, -0.577349269, -0.577349269, -0.707106281, 0.707106281]
    np.testing.assert_allclose(result, expected, atol=1e-7)


def test_l1_l3_siblings_of_an_execution_count_once_and_keep_the_full_reward():
    result = normalize([1, 1, 0, 0], [0] * 4, [10, 10, 11, 12])
    np.testing.assert_allclose(result, [1.154698538, 1.154698538, -0.577349269, -0.577349269], atol=1e-7)


def gradient_of_execution(lengths, reward_of_sibling, others):
    """Gradient of −A·lp, reduced, on the tokens of an execution that is split into siblings of these lengths."""
    siblings = len(lengths)
    rewards = normalize(
        [reward_of_sibling] * siblings + others, [0] * (siblings + len(others)), [7] * siblings + [None] * len(others)
    )
    log_probs = [torch.zeros(length, requires_grad=True) for length in lengths]
    loss = torch.cat([-reward * row for reward, row in zip(rewards.tolist(), log_probs, strict=False)])
    masks = [torch.ones(length) for length in lengths]
    sum_of_sample_mean(loss, masks, rollout_mask_sums(lengths, [7] * siblings)).backward()
    return torch.cat([row.grad for row in log_probs]).tolist()


@pytest.mark.parametrize("lengths", [[2, 4], [1, 1, 4], [3, 2, 1]])
def test_l3_the_gradient_of_siblings_is_that_of_one_sample(lengths):
    whole = gradient_of_execution([6], 1.0, [0.0, 0.25])
    assert gradient_of_execution(lengths, 1.0, [0.0, 0.25]) == pytest.approx(whole, rel=1e-6)
    assert whole[0] != 0


def test_the_reward_of_an_execution_is_the_mean_of_its_samples():
    # Units 2 and 0: mean 1, so the siblings with 1 and 3 are at 0 and 2.
    result = normalize([1, 3, 0], [7] * 3, [10, 10, 11], scale=False)
    np.testing.assert_allclose(result, [0, 2, -1], atol=1e-7)


def test_an_execution_id_used_in_two_groups_is_two_units():
    result = normalize([1, 0, 5, 3], [0, 0, 1, 1], [0, 1, 0, 1], scale=False)
    np.testing.assert_allclose(result, [0.5, -0.5, 1, -1], atol=1e-7)


def test_l2_group_of_one_gives_zero():
    np.testing.assert_array_equal(normalize([0.7], [0]), [0.0])
    np.testing.assert_array_equal(normalize([0.7, 0.7], [0, 0], [5, 5]), [0.0, 0.0])


@pytest.mark.parametrize("reward", [0.1, 0.7, 1e10 / 3, -123456.789])
def test_a_group_without_spread_gives_zeros_whatever_the_rounding(reward):
    np.testing.assert_array_equal(normalize([reward] * 7, [3] * 7), np.zeros(7))


def test_uncentered_rewards_come_back_as_they_are():
    np.testing.assert_array_equal(normalize([1.5, -2.0], [0, 0], center=False), np.float32([1.5, -2.0]))


def test_no_samples():
    assert normalize([], []).shape == (0,)


def test_without_group_indices_neighbours_form_groups_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        result = normalize([1, 0, 5, 3], [None] * 4, scale=False, group_size=2)
    np.testing.assert_allclose(result, [0.5, -0.5, 1, -1], atol=1e-7)
    assert "group_index" in caplog.text


@pytest.mark.parametrize("group_size", [None, 3])
def test_without_group_indices_and_a_fitting_size_all_samples_are_one_group(group_size, caplog):
    with caplog.at_level(logging.WARNING):
        result = normalize([1, 0, 5, 2], [None] * 4, scale=False, group_size=group_size)
    np.testing.assert_allclose(result, [-1, -2, 3, 0], atol=1e-7)
    assert "one group" in caplog.text


def test_group_indices_on_some_samples_only_are_an_error():
    with pytest.raises(UserError, match=r"1 of 3 samples have no group_index.*\[1\]"):
        normalize([1, 2, 3], [0, None, 0])


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, {"score": 1}, "1", [1.0], np.ones(1), 10**400])
@pytest.mark.parametrize("center", [True, False])
def test_w5_a_reward_that_is_no_finite_number_names_the_sample(reward, center):
    with pytest.raises(UserError, match=r"sample 2 \(group 4\)"):
        normalize([1, 0, reward], [3, 3, 4], center=center)


@pytest.mark.parametrize(
    "reward", [1, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), torch.tensor(1)]
)
def test_w4_numbers_of_any_kind_are_rewards(reward):
    np.testing.assert_allclose(normalize([reward, 0], [0, 0], scale=False), [0.5, -0.5])


def test_lengths_that_differ_are_an_error():
    with pytest.raises(ValueError, match="2, 1 and 2"):
        normalize_rewards([1, 2], [0], [0, 1], center=True, scale=True)
