"""Verdicts of dynamic filters."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    samples_to_judge,
    should_drop_dynamic_filter_output,
)
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.utils.errors import UserError
from slime.utils.types import Sample

ARGS = SimpleNamespace(reward_key=None)


def group(rewards):
    return [Sample(reward=reward) for reward in rewards]


@pytest.mark.parametrize("verdict", [True, False, np.True_, np.False_, torch.tensor(1.0) > 0, torch.tensor(False)])
def test_r7_bools_of_both_kinds_are_verdicts(verdict):
    output = call_dynamic_filter(lambda args, samples: verdict, ARGS, [])
    assert output == DynamicFilterOutput(keep=bool(verdict))
    assert type(output.keep) is bool


@pytest.mark.parametrize("verdict", [np.bool_(False), torch.tensor([0.5, 0.5]).std() > 0])
def test_r7_bools_of_others_inside_the_output_are_converted(verdict):
    output = call_dynamic_filter(lambda args, samples: DynamicFilterOutput(verdict, "x"), ARGS, [])
    assert output.keep is False and output.reason == "x"


@pytest.mark.parametrize("verdict", [None, 1, "yes", DynamicFilterOutput(keep="no"), torch.tensor([True])])
def test_r7_everything_else_is_an_error_that_names_flag_and_value(verdict):
    with pytest.raises(
        UserError,
        match=r"^--dynamic-sampling-filter-path tests.rollout.filter_hub.* returned .*expected DynamicFilterOutput",
    ):
        call_dynamic_filter(lambda args, samples: verdict, ARGS, [])


def test_no_filter_keeps():
    assert call_dynamic_filter(None, ARGS, []).keep


def test_no_filter_is_asked_about_samples_without_a_reward():
    samples = group([1.0, 0.0])
    assert samples_to_judge([samples[0], [samples[1]]]) == samples
    with pytest.raises(UserError, match="--dynamic-sampling-filter-path: .* reached the filter without a reward"):
        samples_to_judge([samples, group([None])])


def test_g5_what_failed_has_no_reward_that_differs():
    samples = group([1.0, 1.0, 0.0])
    assert check_reward_nonzero_std(ARGS, samples).keep
    samples[2].status, samples[2].remove_sample = Sample.Status.FAILED, True
    assert check_reward_nonzero_std(ARGS, samples) == DynamicFilterOutput(False, "zero_std_1.0")
    for sample in samples:
        sample.status, sample.remove_sample = Sample.Status.FAILED, True
    assert check_reward_nonzero_std(ARGS, samples) == DynamicFilterOutput(False, "all_failed")


def test_r8_equal_rewards_have_no_spread_whatever_the_rounding():
    assert not check_reward_nonzero_std(ARGS, group([0.1] * 8)).keep
    noisy = [0.3, 0.1 + 0.2, 0.3, 0.1 + 0.2]
    assert len(set(noisy)) == 2
    assert check_reward_nonzero_std(ARGS, group(noisy)) == DynamicFilterOutput(False, "zero_std_0.3")


def test_r8_small_real_differences_count():
    assert check_reward_nonzero_std(ARGS, group([0.0, 1e-5])).keep
    assert check_reward_nonzero_std(ARGS, group([1, 0, 0, 0])).keep


def test_one_sample_has_no_spread_and_reward_keys_are_followed():
    assert check_reward_nonzero_std(ARGS, group([1.0])) == DynamicFilterOutput(False, "zero_std_1.0")
    keyed = SimpleNamespace(reward_key="acc")
    assert check_reward_nonzero_std(keyed, group([{"acc": 1}, {"acc": 0}])).keep


def test_the_fallback_keeps_when_groups_would_be_missing():
    output = check_reward_nonzero_std_with_fallback(ARGS, group([1.0, 1.0]))
    assert not output.keep
    assert should_drop_dynamic_filter_output(output, remaining_batch_size=5, target_data_size=4)
    assert not should_drop_dynamic_filter_output(output, remaining_batch_size=4, target_data_size=4)
    strict = check_reward_nonzero_std(ARGS, group([1.0, 1.0]))
    assert should_drop_dynamic_filter_output(strict, remaining_batch_size=4, target_data_size=4)


def test_reasons_of_other_types_are_counted_as_texts():
    gatherer = MetricGatherer()
    for reason in (0.5, "a", ["b"], ["b"], 0, ""):
        gatherer.on_dynamic_filter_drop(reason)
    counts = {"0": 1, "0.5": 1, "['b']": 2, "a": 1, "unspecified": 1}
    assert gatherer.collect() == {f"rollout/dynamic_filter/drop_{reason}": n for reason, n in counts.items()}


def test_drops_are_counted_by_reason():
    gatherer = MetricGatherer()
    for reason in ("zero_std_0.0", "zero_std_1.0", "zero_std_0.0", None):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {
        "rollout/dynamic_filter/drop_unspecified": 1,
        "rollout/dynamic_filter/drop_zero_std_0.0": 2,
        "rollout/dynamic_filter/drop_zero_std_1.0": 1,
    }
