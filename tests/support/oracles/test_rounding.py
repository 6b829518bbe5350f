"""The bounds for comparing layouts are wide enough for another order of the terms and too narrow for another term."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.models.grpo_batch import TRAINED_TOKENS, bounds_of_batch, objective_args
from tests.support.oracles.rounding import (
    RELATIVE,
    ROUNDING_UNIT,
    assert_equal_gradients,
    assert_equal_metrics,
    assert_equal_rows,
    assert_equal_weights,
    bound,
    bound_of_weights,
    bounds_of_step,
    terms_of_value,
)


def test_a_bound_is_rounding_unit_times_number_times_mean_of_the_terms():
    assert bound([1.0, -3.0]) == 2.0**-23 * 2 * 2.0
    assert bound([]) == 0.0


def test_a_sum_that_cancels_is_compared_on_the_scale_of_its_terms():
    """Numbers of two processors for one step differ by 1e-5 of themselves, and by one rounding of the log-probs."""
    found, expected = {"ppo_kl": -0.0134687610}, {"ppo_kl": -0.0134688988}
    assert found != pytest.approx(expected, rel=RELATIVE, abs=1e-7)
    assert_equal_metrics(found, expected, bounds_of_batch())


@pytest.mark.parametrize("per_token", [False, True])
def test_no_bound_hides_a_token(per_token):
    """A trained token of typical size that is missing or counted twice makes a difference of at least a hundred bounds."""
    bounds = bounds_of_batch(calculate_per_token_loss=per_token)
    typical = {"ppo_kl": 0.01, "kl_loss": 0.1, "loss": 0.1, "pg_loss": 0.5, "advantages": 0.5}
    for name, term in typical.items():
        assert 0 < 100 * bounds[name] < term / TRAINED_TOKENS, name


def test_another_name_or_a_number_beyond_both_bounds_fails():
    expected = {"loss": 1.0, "count": 3.0}
    assert_equal_metrics({"loss": 1.0 + 9e-6, "count": 3.0}, expected, {})
    for found in ({"loss": 1.0}, {"loss": 1.0 + 2e-5, "count": 3.0}, {**expected, "more": 0.0}):
        with pytest.raises(AssertionError, match="count: None, not 3|loss: 1.00002, not 1.0 |more: 0.0, not None"):
            assert_equal_metrics(found, expected, {"loss": 1e-6})


def test_rows_and_gradients_are_bounded_by_their_own_sizes():
    rows = {("kl", 0): [1e-4, 2e-4], ("log_probs", 0): [-2.0, -3.0], ("ref_log_probs", 0): [-2.0, -3.0]}
    assert_equal_rows({**rows, ("kl", 0): [1e-4 + 5e-7, 2e-4]}, rows)
    for wrong in ({("kl", 0): [1e-4 + 5e-6, 2e-4]}, {("log_probs", 0): [-2.0, -3.0001]}):
        with pytest.raises(AssertionError):
            assert_equal_rows({**rows, **wrong}, rows)
    # A value near zero is the rest of a sum over the hidden units, which are themselves sums over the layers.
    assert terms_of_value(hidden=32, layers=4) == 32 * 9
    values = {("values", 0): [5e-3], ("values", 1): [0.5]}
    other = {**values, ("values", 0): [5e-3 + 1.5e-7]}
    assert_equal_rows(other, values, terms_of_value=64)
    with pytest.raises(AssertionError):
        assert_equal_rows(other, values)
    with pytest.raises(AssertionError):
        assert_equal_rows({**values, ("values", 0): [5e-3 + 1e-6]}, values, terms_of_value=64)
    # An advantage near zero is the difference of two values, and a column without values has no such terms.
    advantages = {("advantages", 0): [1e-4], ("advantages", 1): [0.5]}
    near = {**advantages, ("advantages", 0): [1e-4 + 2e-7]}
    assert_equal_rows({**near, **values}, {**advantages, **values}, terms_of_value=64)
    for columns, change in (({}, 2e-7), (values, 1e-6)):
        with pytest.raises(AssertionError):
            apart = {**advantages, ("advantages", 0): [1e-4 + change]}
            assert_equal_rows({**apart, **columns}, {**advantages, **columns}, terms_of_value=64)
    gradient = np.array([1e-9, 1e-2])
    assert_equal_gradients({"w": gradient + 1e-8}, {"w": gradient}, tokens=33)
    with pytest.raises(AssertionError):
        assert_equal_gradients({"w": gradient + 1e-7}, {"w": gradient}, tokens=33)


@pytest.mark.parametrize(
    "found, expected",
    [
        ({}, {}), ({}, {"w": [1.0]}), ({"w": [1.0], "more": [1.0]}, {"w": [1.0]}), ({"w": [np.nan]}, {"w": [np.nan]}),
        ({"w": 1.0}, {"w": [1.0]}),
    ],
)  # fmt: skip
def test_nothing_something_else_and_nan_are_not_equal(found, expected):
    for equal in (
        lambda: assert_equal_gradients(found, expected, tokens=3),
        lambda: assert_equal_weights(found, expected, 1e-6),
        lambda: assert_equal_metrics(found, expected, {}),
    ):
        with pytest.raises((AssertionError, TypeError)):
            equal()


def test_no_bound_is_made_of_numbers_that_allow_everything():
    args = SimpleNamespace(lr=1e-3, adam_eps=1e-4)
    assert 0 < bound_of_weights(args, [1e-2] * 3, 33) < 1e-5
    for gradients in ([np.nan], [np.inf], [1e6], [0.0]):
        with pytest.raises(AssertionError):
            bound_of_weights(args, gradients, 33)
    with pytest.raises(AssertionError):
        assert_equal_metrics({"loss": 1.0}, {"loss": 2.0}, {"loss": np.inf})


@pytest.mark.parametrize("name", ["ppo_kl", ("ppo_kl", 1)])
def test_a_difference_of_log_probs_that_have_moved_far_has_no_bound(name):
    """Old log-probs are -4.9 on average. New ones are half as large again at a `ppo_kl` of 2.45, and half as large at -2.45."""
    bounds = {name: bound([4.9, 4.9]), "loss": 1e-6}
    for value in (2.4, -2.4):
        assert_equal_metrics({name: value}, {name: value}, bounds)
    for value in (2.5, -2.5):
        with pytest.raises(AssertionError, match="have left the old ones"):
            assert_equal_metrics({name: value}, {name: value}, bounds)
    # Log-probs normalised over the tokens that top-p kept are closer to 0, never farther from it.
    assert_equal_metrics({name: -2.5}, {name: -2.5}, bounds, masked=True)
    with pytest.raises(AssertionError, match="have left the old ones"):
        assert_equal_metrics({name: 2.5}, {name: 2.5}, bounds, masked=True)


def test_the_bound_of_a_step_is_made_of_its_own_samples():
    """Two steps have two samples each. The bound of the first does not depend on the second, with ten times its log-probs."""
    data = {
        "num_microbatches": [1, 2], "micro_batch_indices": [[0, 1], [2], [3]], "global_batch_sizes": [2, 2],
        "loss_masks": [[1], [1, 1], [1], [1, 0]], "rollout_mask_sums": [1, 2, 1, 1],
        "log_probs": [[-1.0], [-1.0, -3.0], [-15.0], [-15.0, -99.0]],
    }  # fmt: skip
    for flags, mean_of_first in (({}, 1.5), ({"calculate_per_token_loss": True}, 5 / 3)):
        args = objective_args(padded_vocab_size=144, **flags)
        means = [bounds_of_step(args, data, step)["ppo_kl"] / ROUNDING_UNIT / 2 for step in range(2)]
        assert means == pytest.approx([mean_of_first, 15.0])


def test_the_old_log_probs_are_those_that_the_run_has_for_old():
    data = {
        "num_microbatches": [1], "micro_batch_indices": [[0]], "global_batch_sizes": [1], "loss_masks": [[1]],
        "rollout_mask_sums": [1], "log_probs": [[-1.0]], "rollout_log_probs": [[-2.0]],
    }  # fmt: skip
    bounds = [bounds_of_step(objective_args(use_rollout_logprobs=flag), data, 0)["ppo_kl"] for flag in (False, True)]
    assert bounds == [bound([1.0, 1.0]), bound([2.0, 2.0])]
