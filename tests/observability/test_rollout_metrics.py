"""Rollout and evaluation metrics against numbers worked out by hand."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from slime.observability.rollout_metrics import (
    compute_eval_metrics,
    compute_rollout_metrics,
    compute_rollout_perf_metrics,
    compute_statistics,
    has_repetition,
    merge_extra_metrics,
    pass_at_k,
    pass_rates,
    request_metrics,
    zero_std_counts,
)
from slime.observability.trace_utils import trace_engine_answer, trace_span
from slime.utils.types import Sample

ARGS = SimpleNamespace(
    reward_key=None,
    use_critic=False,
    log_correct_samples=False,
    log_multi_turn=False,
    log_passrate=False,
    log_reward_category=None,
    rollout_num_gpus=2,
)


def with_args(**overrides):
    return SimpleNamespace(**{**vars(ARGS), **overrides})


def groups(*rewards_of_groups):
    return [Sample(group_index=g, reward=r) for g, rewards in enumerate(rewards_of_groups) for r in rewards]


def rates(samples):
    return pass_rates(samples, [sample.reward for sample in samples])


def test_answers_that_a_reward_found_nothing_in_are_counted():
    samples = groups([1, 0, 0])
    assert "rollout/unjudged_samples" not in compute_rollout_metrics(ARGS, samples)
    samples[1].metadata["fail_reason"] = "no </think>"
    samples[2].metadata["fail_reason"], samples[2].status = "the tool is gone", Sample.Status.FAILED
    assert compute_rollout_metrics(ARGS, samples)["rollout/unjudged_samples"] == 1
    data = {"aime": {"rewards": [1, 0, 0], "samples": samples}}
    assert compute_eval_metrics(ARGS, data)["eval/aime/unjudged_samples"] == 1


def test_statistics():
    assert compute_statistics([1, 2, 6, 3]) == {"mean": 3.0, "median": 2.5, "max": 6.0, "min": 1.0}
    assert compute_statistics([]) == {}


@pytest.mark.parametrize(
    ("n", "c", "expected"),
    [(8, 3, [0.375, 0.642857143, 0.928571429, 1.0]), (4, 1, [0.25, 0.5, 1.0]), (4, 0, [0, 0, 0]), (2, 2, [1, 1])],
)
def test_pass_at_k_vectors(n, c, expected):
    assert [pass_at_k(n, c, 2**i) for i in range(len(expected))] == pytest.approx(expected)
    samples = groups([1.0] * c + [0.0] * (n - c))
    assert list(rates(samples).values()) == pytest.approx(expected)


def test_m2_each_group_counts_with_its_own_n():
    samples = groups([1] + [0] * 15, [1, 0])
    result = rates(samples)
    assert list(result) == ["pass@1", "pass@2", "pass@4", "pass@8", "pass@16"]
    assert result["pass@1"] == pytest.approx((1 / 16 + 1 / 2) / 2)
    assert result["pass@2"] == pytest.approx((2 / 16 + 1) / 2)
    assert result["pass@4"] == pytest.approx(4 / 16), "only the group of sixteen has four"
    assert result["pass@16"] == 1.0


def test_m2_a_fan_out_is_one_execution_that_is_correct_if_its_samples_average_one():
    samples = [
        Sample(group_index=0, rollout_id=5, reward=1.0),
        Sample(group_index=0, rollout_id=5, reward=1.0),
        Sample(group_index=0, rollout_id=6, reward=1.0),
        Sample(group_index=0, rollout_id=6, reward=0.0),
    ]
    assert rates(samples) == pytest.approx({"pass@1": 0.5, "pass@2": 1.0})


def test_only_an_average_of_one_is_correct_and_float_noise_is_none():
    """A reward of 2 is not; nor is a sample that names no execution part of the one whose number is its position."""
    assert rates(groups([2.0, 0.7 + 0.1 + 0.1 + 0.1])) == {"pass@1": 0.5, "pass@2": 1.0}
    own = [Sample(group_index=0, reward=1.0), Sample(group_index=0, rollout_id=0, reward=0.0)]
    assert rates(own) == {"pass@1": 0.5, "pass@2": 1.0}


def test_m2_evaluation_uses_the_number_of_samples_of_each_set():
    def result(samples):
        return {"rewards": [s.reward for s in samples], "truncated": [s.truncated for s in samples], "samples": samples}

    data = {"many": result(groups([1, 0, 0, 0], [1, 1, 0, 0])), "few": result(groups([0], [1]))}
    metrics = compute_eval_metrics(with_args(log_passrate=True), data)
    assert metrics["eval/many"] == pytest.approx(3 / 8)
    assert [k for k in metrics if "pass@" in k] == [
        "eval/many-pass@1", "eval/many-pass@2", "eval/many-pass@4", "eval/few-pass@1",
    ]  # fmt: skip
    assert metrics["eval/many-pass@2"] == pytest.approx((0.5 + (1 - 1 / 6)) / 2)
    assert metrics["eval/few-pass@1"] == 0.5
    assert metrics["eval/few-truncated_ratio"] == 0.0
    assert metrics["eval/few/response_len/max"] == 0.0


def test_evaluation_counts_failed_samples_and_leaves_them_out():
    lost = Sample(group_index=0, reward=0.0, status=Sample.Status.FAILED, remove_sample=True, response_length=90)
    # One that the user's function marked keeps its reward.
    marked = Sample(group_index=1, reward=1.0, status=Sample.Status.FAILED)
    samples = [*groups([1]), lost, marked]
    data = {"among": {"rewards": [s.reward for s in samples], "truncated": [False, True, False], "samples": samples}}
    metrics = compute_eval_metrics(with_args(log_passrate=True), data)
    assert (metrics["eval/among"], metrics["eval/among-pass@1"], metrics["eval/among-failed_samples"]) == (
        1.0,
        1.0,
        1.0,
    )
    assert (metrics["eval/among-truncated_ratio"], metrics["eval/among/response_len/max"]) == (0.0, 0.0)
    data = {"apart": {"rewards": [1.0], "samples": [marked], "failed": [lost]}}
    metrics = compute_eval_metrics(with_args(), data)
    assert (metrics["eval/apart"], metrics["eval/apart-failed_samples"]) == (1.0, 1.0)
    assert "eval/none" not in compute_eval_metrics(
        with_args(), {"none": {"rewards": [], "samples": [], "failed": [lost]}}
    )
    data = {"both": {"rewards": [1.0, 0.0], "samples": [marked, lost], "failed": [lost]}}
    assert compute_eval_metrics(with_args(), data)["eval/both-failed_samples"] == 2.0


def test_an_evaluation_function_of_a_users_may_give_arrays_and_no_samples():
    data = {"own": {"rewards": np.array([1.0, 0.0, 0.0, 0.0]), "truncated": np.array([True, False, False, False])}}
    metrics = compute_eval_metrics(with_args(log_passrate=True), data)
    assert metrics == {"eval/own": 0.25, "eval/own-truncated_ratio": 0.25, "eval/own-failed_samples": 0.0}


def test_a_rollout_leaves_failed_samples_out():
    """Neither wrong answers nor short ones; a group of which one is left is none of equal rewards."""
    lost = [
        Sample(group_index=g, reward=0.0, status=Sample.Status.FAILED, remove_sample=True, loss_mask=[])
        for g in (0, 1, 2)
    ]
    samples = [*groups([1, 1], [0], [1, 0]), *lost]
    for sample in samples[:5]:
        sample.response_length = 7
    metrics = compute_rollout_metrics(with_args(log_passrate=True, log_multi_turn=True), samples)
    assert {name: value for name, value in metrics.items() if "zero_std" in name} == {"rollout/zero_std/count_1.0": 1}
    assert metrics["passrate/pass@1"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert metrics["rollout/response_len/min"] == metrics["multi_turn/raw_response_length/response_length_min"] == 7
    assert compute_rollout_metrics(with_args(log_passrate=True, log_multi_turn=True), lost) == {}


def test_zero_std_groups_are_counted_by_reward_and_groups_of_one_are_not():
    samples = groups([0.1] * 8, [0, 0], [0.0, 1e-9], [1, 0], [1, 1], [1])
    assert zero_std_counts(samples, [s.reward for s in samples]) == {0.0: 2, 0.1: 1, 1.0: 1}
    metrics = compute_rollout_metrics(ARGS, samples)
    assert metrics["rollout/zero_std/count_0.0"] == 2
    assert not any("zero_std" in k for k in compute_rollout_metrics(with_args(use_critic=True), samples))


def test_rewards_of_groups_are_rounded_to_one_digit_and_there_is_no_negative_zero():
    metrics = compute_rollout_metrics(ARGS, groups([-0.04] * 2, [0.12] * 2, [0.04] * 2))
    counts = {name: value for name, value in metrics.items() if "zero_std" in name}
    assert counts == {"rollout/zero_std/count_0.0": 2, "rollout/zero_std/count_0.1": 1}


def test_a_sample_without_a_group_shares_none():
    samples = [Sample(reward=1.0), Sample(reward=1.0), Sample(group_index=0, reward=1.0)]
    assert zero_std_counts(samples, [1.0] * 3) == {}


def test_rollout_metrics_use_trained_tokens_and_reward_keys():
    args = with_args(reward_key="acc", log_correct_samples=True, log_passrate=True, log_reward_category="error")
    samples = [
        Sample(group_index=0, response_length=4, loss_mask=[1, 1, 0, 0], reward={"acc": 1, "error": "none"}),
        Sample(group_index=0, response_length=6, reward={"acc": 0, "error": "format"}, status=Sample.Status.TRUNCATED),
    ]
    samples[0].prefix_cache_info.cached_tokens, samples[0].prefix_cache_info.total_prompt_tokens = 3, 4
    metrics = compute_rollout_metrics(args, samples)
    assert metrics["rollout/response_len/mean"] == 4.0
    assert metrics["rollout/response_len/min"] == 2.0
    assert metrics["rollout/truncated_ratio"] == 0.5
    assert metrics["rollout/correct_len/mean"] == 2.0
    assert metrics["rollout/error_cat/format"] == 0.5
    assert metrics["rollout/prefix_cache_hit_rate"] == 0.75
    assert metrics["rollout/avg_cached_tokens_per_sample"] == 1.5
    assert metrics["passrate/pass@1"] == 0.5
    assert metrics["passrate/pass@2"] == 1.0


def test_what_engines_kept_and_guessed_is_summed_over_the_samples():
    samples = [Sample(group_index=0, reward=0) for _ in range(2)]
    for sample, factor in zip(samples, (1, 3), strict=True):
        sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.total_prompt_tokens = 2 * factor, 8
        sample.spec_info.spec_accept_token_num, sample.spec_info.spec_draft_token_num = 3 * factor, 10
        sample.spec_info.spec_verify_ct, sample.spec_info.completion_token_num = 4, 7 * factor
    metrics = compute_rollout_metrics(ARGS, samples)
    assert metrics["rollout/prefix_cache_hit_rate"] == 8 / 16 and metrics["rollout/avg_cached_tokens_per_sample"] == 4
    assert metrics["rollout/spec_accept_rate"] == 12 / 20 and metrics["rollout/spec_accept_length"] == 28 / 8


def test_a_category_of_rewards_may_be_any_value():
    samples = [
        Sample(group_index=0, reward={"why": why}) for why in (["format", "length"], ["format", "length"], None, 2)
    ]
    metrics = compute_rollout_metrics(with_args(reward_key="why", log_reward_category="why"), samples)
    found = {name.removeprefix("rollout/error_cat/"): value for name, value in metrics.items() if "error_cat" in name}
    assert found == {"['format', 'length']": 0.5, "None": 0.25, "2": 0.25}
    # Of all samples, also of those whose reward has no such entry.
    samples = [Sample(group_index=0, reward={"score": 0}) for _ in range(5)]
    samples[0].reward["why"] = 2
    metrics = compute_rollout_metrics(with_args(reward_key="score", log_reward_category="why"), samples)
    assert metrics["rollout/error_cat/2"] == 0.2


def test_m3_the_length_of_correct_answers_is_logged():
    samples = [
        Sample(group_index=0, response_length=n, reward=reward)
        for n, reward in ((3, 1), (5, 1.0), (9, 0), (7, 0.5), (8, 2))
    ]
    metrics = compute_rollout_metrics(with_args(log_correct_samples=True), samples)
    assert metrics["rollout/correct_len/mean"] == 4.0 and metrics["rollout/correct_len/max"] == 5.0
    nothing = compute_rollout_metrics(with_args(log_correct_samples=True), samples[2:])
    assert not any("correct" in name for name in nothing)


def test_rewards_that_only_a_users_post_processing_understands_count_as_nothing():
    samples = groups([{"text": "yes"}, {"text": "yes"}], [1, 1], [None, None])
    metrics = compute_rollout_metrics(with_args(log_correct_samples=True, log_passrate=True), samples)
    assert metrics["rollout/zero_std/count_1.0"] == 1
    assert [name for name in metrics if "zero_std" in name] == ["rollout/zero_std/count_1.0"]
    assert metrics["passrate/pass@1"] == pytest.approx(1 / 3)


def test_repetition_needs_length_and_repetition():
    assert has_repetition("start " + "again and " * 1200)
    assert not has_repetition("a" * 10000)
    rng = random.Random(0)
    assert not has_repetition("".join(rng.choice("abcdefghijklmnop") for _ in range(12000)))
    assert has_repetition("".join(rng.choice("abcdefghijklmnop") for _ in range(5000)) + "no " * 5000)
    # Half a byte of news in each character of a block.
    for length, expected in ((2100, False), (1500, True)):
        block = "".join(rng.choice("abcdefghijklmnop") for _ in range(length))
        assert has_repetition((block * 8)[:10001]) is expected
    text = "\ud800" * 10001  # no character that can be written, but an engine may say it
    assert has_repetition(text)
    samples = [Sample(group_index=0, reward=0, response=response) for response in (text, "", "", "")]
    assert compute_rollout_metrics(ARGS, samples)["rollout/repetition_frac"] == 0.25


def test_perf_metrics():
    samples = [
        Sample(response_length=30, loss_mask=[1] * 10 + [0] * 20, non_generation_time=1.0),
        Sample(response_length=10),
    ]
    removed = compute_rollout_perf_metrics(
        ARGS, [*samples, Sample(response_length=8, remove_sample=True)], rollout_time=2.0
    )
    assert removed["perf/tokens_per_gpu_per_sec"] == 12.0 and removed["perf/effective_tokens_per_gpu_per_sec"] == 5.0
    metrics = compute_rollout_perf_metrics(ARGS, samples, rollout_time=2.0)
    assert metrics["perf/rollout_time"] == 2.0
    assert metrics["perf/tokens_per_gpu_per_sec"] == 10.0
    assert metrics["perf/effective_tokens_per_gpu_per_sec"] == 5.0
    assert metrics["perf/longest_sample_tokens_per_sec"] == 15.0
    assert metrics["perf/non_generation_time/mean"] == 0.5
    # Both are the longest of what is trained.
    assert [metrics[f"perf/longest_{prefix}sample_non_generation_time"] for prefix in ("", "effective_")] == [1.0, 0.5]
    ending = "sample_tokens_per_sec_without_non_generation"
    assert metrics[f"perf/longest_{ending}"] == 30.0
    assert metrics[f"perf/longest_effective_{ending}"] == pytest.approx(10 / 1.5)
    assert not any("request/" in name for name in metrics)


def test_without_tools_nothing_is_told_of_them():
    metrics = compute_rollout_perf_metrics(ARGS, [Sample(response_length=30)], rollout_time=2.0)
    assert metrics["perf/longest_sample_tokens_per_sec"] == 15.0
    assert not any("non_generation" in name for name in metrics)


def test_a_sample_that_was_begun_earlier_has_no_speed_without_its_tools():
    """It spent more time with them than this step took, or all of it."""
    samples = [Sample(response_length=30, non_generation_time=5.0)]
    for seconds in (2.0, 5.0):
        metrics = compute_rollout_perf_metrics(ARGS, samples, rollout_time=seconds)
        assert metrics["perf/longest_sample_non_generation_time"] == 5.0
        assert not any("without_non_generation" in name for name in metrics)


@pytest.mark.parametrize(("samples", "seconds"), [([], 2.0), ([Sample(response_length=3)], 0.0)])
def test_without_time_or_samples_there_is_no_speed(samples, seconds):
    assert compute_rollout_perf_metrics(ARGS, samples, seconds) == {"perf/rollout_time": seconds}


def test_without_gpus_of_the_run_there_is_no_speed_of_each():
    metrics = compute_rollout_perf_metrics(with_args(rollout_num_gpus=None), [Sample(response_length=3)], 2.0)
    assert metrics["perf/longest_sample_tokens_per_sec"] == 1.5 and not any("per_gpu" in name for name in metrics)


def answered(samples, **meta_info):
    with trace_span(samples, "sglang_generate") as span:
        trace_engine_answer(span, {"meta_info": meta_info})


def test_what_engines_say_of_requests_is_told_once_for_each():
    first, second = Sample(index=0), Sample(index=1)
    # Two turns; a request that both samples came of; and one of which nothing was said.
    answered(first, e2e_latency=1.0, queue_time=0.25, decode_throughput=40.0)
    answered(first, e2e_latency=2.0)
    answered([first, second], e2e_latency=6.0, queue_time=0.75)
    answered(second)
    metrics = request_metrics([first, second, Sample(index=2)])
    assert {name: value for name, value in metrics.items() if name.endswith(("mean", "max"))} == {
        "perf/request/e2e_latency/mean": 3.0, "perf/request/e2e_latency/max": 6.0,
        "perf/request/queue_time/mean": 0.5, "perf/request/queue_time/max": 0.75,
        "perf/decode/throughput/mean": 40.0, "perf/decode/throughput/max": 40.0,
    }  # fmt: skip
    told = compute_rollout_perf_metrics(ARGS, [first, second], rollout_time=2.0)
    assert metrics.items() <= told.items()


def test_what_two_engines_say_of_a_request_is_told_by_its_parts():
    sample = Sample(index=0)
    answered(
        sample, pd_prefill_forward_duration=0.5, pd_prefill_retry_count=1, pd_transfer_total_mb=12.0,
        pd_decode_prealloc_duration=0.125, pd_decode_forward_duration=2.0,
    )  # fmt: skip
    metrics = request_metrics([sample])
    assert {name.removesuffix("/median"): value for name, value in metrics.items() if name.endswith("/median")} == {
        "perf/prefill/forward_duration": 0.5, "perf/prefill/retry_count": 1.0, "perf/prefill/transfer_total_mb": 12.0,
        "perf/decode/prealloc_duration": 0.125, "perf/decode/forward_duration": 2.0,
    }  # fmt: skip


def test_the_kept_vocabulary_is_that_of_trained_tokens():
    kept = [
        Sample(response_length=4, rollout_top_p_token_offsets=[0, 3, 8, 10, 20], loss_mask=[1, 0, 1, 0]),
        Sample(response_length=2, rollout_top_p_token_offsets=[0, 4, 9]),
    ]
    unknown = Sample(response_length=3)
    assert compute_rollout_metrics(ARGS, [*kept, unknown])["rollout/top_p_kept_vocab_per_token"] == 3.5
    masked = Sample(response_length=1, rollout_top_p_token_offsets=[0, 3], loss_mask=[0])
    for samples in ([unknown], [masked]):
        assert "rollout/top_p_kept_vocab_per_token" not in compute_rollout_metrics(ARGS, samples)


def test_extra_metrics_get_their_prefix_once():
    merged = merge_extra_metrics({"rollout/a": 1}, {"b": 2, "rollout/c": 3}, "rollout/")
    assert merged == {"rollout/a": 1, "rollout/b": 2, "rollout/c": 3}
    assert merge_extra_metrics({"x": 1}, None, "rollout/") == {"x": 1}


def test_turns_and_lengths_with_and_without_what_tools_said():
    samples = [
        Sample(
            tokens=[1] * 9,
            response_length=8,
            loss_mask=[1, 1, 0, 0, 0, 0, 1, 1],
            metadata={"round_number": 2},
            reward=0,
        ),
        Sample(tokens=[1] * 4, response_length=2, status=Sample.Status.TRUNCATED, reward=0),
    ]
    metrics = compute_rollout_metrics(with_args(log_multi_turn=True), samples)
    assert {name: value for name, value in metrics.items() if name.startswith("multi_turn/")} == {
        "multi_turn/raw_response_length/response_length_mean": 5.0,
        "multi_turn/raw_response_length/response_length_max": 8.0,
        "multi_turn/raw_response_length/response_length_min": 2.0,
        "multi_turn/raw_response_length/response_length_clip_ratio": 0.5,
        "multi_turn/wo_obs_response_length/response_length_mean": 3.0,
        "multi_turn/wo_obs_response_length/response_length_max": 4.0,
        "multi_turn/wo_obs_response_length/response_length_min": 2.0,
        "multi_turn/multi_turn_metric/round_number_mean": 1.5,
        "multi_turn/multi_turn_metric/round_number_max": 2.0,
        "multi_turn/multi_turn_metric/round_number_min": 1.0,
    }
