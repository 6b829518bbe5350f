"""Replayed runs: step times by hand where all answers are equally long, and what must hold whatever the lengths are."""

import argparse
import dataclasses

import numpy as np
import pytest

from slime.arguments.rules.algorithm import unavoidable_staleness
from tools.simulation.arrangements import (
    ARRANGEMENTS,
    Replay,
    Speeds,
    Split,
    Work,
    best_replay,
    replay,
    splits,
)

BY_NAME = {each.name: each for each in ARRANGEMENTS}
SPEEDS = Speeds(
    decode_step_seconds=0.5,
    decode_request_seconds=0.25,
    prefill_token_seconds=0.01,
    rollout_fixed_seconds=1.0,
    log_probs_fixed_seconds=2.0,
    log_probs_token_seconds=0.02,
    train_fixed_seconds=3.0,
    train_token_seconds=0.1,
    push_seconds=4.0,
    switch_seconds=5.0,
    step_fixed_seconds=0.5,
    max_running_requests=100,
)
# Of 8 prompts with 2 answers of 10 tokens on 2 engines: 8 requests on each, 5 prompt tokens read for each of them.
GENERATION = 10 * (0.5 + 0.25 * 8) + 8 * 5 * 0.01
# 16 samples of 15 tokens on 2 devices.
LOG_PROBS, TRAIN = 2.0 + 0.02 * 120, 3.0 + 0.1 * 120


def equal(tokens: int = 10, answers: int = 2):
    return lambda generator, prompts: np.full((prompts, answers), tokens)


def long_tailed(median: float = 40.0, sigma: float = 1.0, answers: int = 4):
    """Quantiles of a log-normal distribution in a random order: every rollout has the same mean."""

    def draw(generator: np.random.Generator, prompts: int) -> np.ndarray:
        normal = np.sort(np.random.default_rng(5).standard_normal(prompts * answers))
        lengths = median * np.exp(sigma * normal)
        lengths *= 60.0 / lengths.mean()
        return generator.permutation(np.maximum(1, lengths.round())).astype(int).reshape(prompts, answers)

    return draw


WORK = Work(equal(), rollout_batch_size=8, prompt_tokens=5)
SPLIT = Split(devices=4, trainer_devices=2, engines=2)
TAILED = Work(long_tailed(), rollout_batch_size=16, over_sampling_batch_size=24)


def run(name: str, split: Split = SPLIT, speeds: Speeds = SPEEDS, work: Work = WORK, **changed) -> Replay:
    options = {"seed": 0, "rollouts": 10, "warm_up": 4, **changed}
    return replay(BY_NAME[name], split, speeds, work, **options)


def test_without_overlap_a_step_is_the_sum_of_its_phases():
    found = run("sync")
    assert found.step_seconds == pytest.approx(GENERATION + 1.0 + LOG_PROBS + TRAIN + 0.5 + 4.0)
    assert found.rollout_seconds == pytest.approx([GENERATION + 1.0] * 6)
    assert found.trainer_busy == pytest.approx((LOG_PROBS + TRAIN) / found.step_seconds)
    assert found.engines_busy == pytest.approx(GENERATION / found.step_seconds)
    assert found.tokens_per_second == pytest.approx(160 / found.step_seconds)
    assert set(found.staleness) == {0}


def test_colocated_steps_have_all_devices_in_both_phases_and_switch_between_them():
    split = Split(devices=4, trainer_devices=4, engines=4)
    generation = 10 * (0.5 + 0.25 * 4) + 4 * 5 * 0.01
    passes = 2.0 + 0.02 * 60 + 3.0 + 0.1 * 60
    assert run("colocated", split).step_seconds == pytest.approx(generation + 1.0 + 5.0 + passes + 0.5 + 4.0)


@pytest.mark.parametrize("train_token", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("name", ["async", "in_flight"])
def test_with_perfect_overlap_a_step_is_the_longer_phase(name, train_token):
    speeds = dataclasses.replace(SPEEDS, push_seconds=0.0, prefill_token_seconds=0.0, train_token_seconds=train_token)
    generation, training = 25.0 + 1.0, LOG_PROBS + 3.0 + train_token * 120 + 0.5
    found = run(name, speeds=speeds)
    assert found.step_seconds == pytest.approx(max(generation, training))


def test_samples_are_there_when_the_call_has_ended_not_when_its_engines_have():
    # The engines end while the trainer is busy, and the call after it.
    speeds = dataclasses.replace(SPEEDS, push_seconds=0.0, prefill_token_seconds=0.0, rollout_fixed_seconds=30.0)
    speeds = dataclasses.replace(speeds, train_fixed_seconds=20.0)
    assert run("async", speeds=speeds).step_seconds == pytest.approx(25.0 + 30.0)


def test_a_push_waits_for_the_running_rollout_and_adds_to_the_step():
    assert run("async").step_seconds == pytest.approx(GENERATION + 1.0 + 4.0)


def test_a_push_in_flight_adds_its_pause_and_what_is_read_again():
    found = run("in_flight")
    assert found.lost["push"] > 0
    assert found.engines.recomputed > 0
    assert found.step_seconds == pytest.approx(GENERATION + 1.0 + 4.0 + found.engines.recomputed / 2 / 6)


def bound_of(work: Work) -> int:
    """The least that a run with rollouts ahead can keep."""
    return unavoidable_staleness(argparse.Namespace(**vars(work), asynchronous=True))


def test_pushes_after_several_rollouts_cost_less_and_samples_get_no_older():
    every, third = (
        run("async", rollouts=16),
        run("async", work=dataclasses.replace(WORK, update_weights_interval=3), rollouts=16),
    )
    assert third.step_seconds == pytest.approx(every.step_seconds - 4.0 * 2 / 3)
    assert max(every.staleness) == max(third.staleness) == 1


@pytest.mark.parametrize("buffer", [1, 2, 4])
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("name", ["async", "in_flight"])
def test_no_sample_is_older_than_buffer_and_interval_say(name, buffer, interval):
    work = dataclasses.replace(TAILED, async_buffer_size=buffer, update_weights_interval=interval)
    for train_token in (0.001, 0.05):
        speeds = dataclasses.replace(SPEEDS, train_token_seconds=train_token)
        found = run(name, speeds=speeds, work=work, rollouts=14)
        assert max(found.staleness) <= bound_of(work)


def test_a_slow_trainer_meets_the_oldest_samples_that_there_can_be():
    work = dataclasses.replace(WORK, async_buffer_size=3)
    speeds = dataclasses.replace(SPEEDS, train_token_seconds=1.0)
    assert max(run("async", speeds=speeds, work=work).staleness) == bound_of(work) == 3


def test_a_buffer_evens_out_rollouts_that_differ():
    lengths = iter([10, 40] * 40)
    draw = lambda generator, prompts: np.full((prompts, 2), next(lengths))  # noqa: E731
    times = {}
    for buffer in (1, 2):
        speeds = dataclasses.replace(SPEEDS, push_seconds=0.0, train_token_seconds=0.0, train_fixed_seconds=55.0)
        work = Work(draw, rollout_batch_size=8, async_buffer_size=buffer, update_weights_interval=100)
        times[buffer] = run("async", speeds=speeds, work=work, rollouts=20).step_seconds
    assert times[2] < times[1]


def test_partial_rollouts_leave_stragglers_to_the_next_rollout_and_lose_no_token():
    found, sync = run("partial", work=TAILED, rollouts=40), run("sync", work=TAILED, rollouts=40)
    assert found.step_seconds < sync.step_seconds
    assert found.lost["stragglers"] < sync.lost["stragglers"]
    # Only groups that end in the very step that ends the rollout start again.
    assert found.wasted_share < 0.01
    assert max(found.staleness) > 0 and min(found.staleness) == 0
    # What the engines write is trained, but for what is still under way.
    assert found.engines.tokens == pytest.approx(found.trained_tokens, rel=0.05)


def test_partial_rollouts_keep_their_bound_by_starting_again():
    free, bound = (
        run("partial", work=TAILED, rollouts=40),
        run("partial", work=dataclasses.replace(TAILED, max_weight_staleness=1), rollouts=40),
    )
    assert max(free.staleness) > 1 >= max(bound.staleness)
    assert bound.wasted_tokens > 0


def test_groups_that_finish_at_once_beyond_the_batch_start_again():
    drawn = []

    def draw(generator: np.random.Generator, prompts: int) -> np.ndarray:
        drawn.append(prompts)
        return equal()(generator, prompts)

    found = run("partial", work=dataclasses.replace(WORK, draw=draw, over_sampling_batch_size=12))
    assert found.trained_tokens == 6 * 8 * 2 * 10
    assert drawn == [12] + [8] * 9, "no prompt is lost"
    assert set(found.staleness) <= {0, 1}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda each: each.name)
def test_every_rollout_trains_a_whole_batch_once(arrangement):
    found = replay(arrangement, SPLIT, SPEEDS, TAILED, seed=3, rollouts=12, warm_up=0)
    assert len(found.ends) == 12 and found.ends == sorted(found.ends)
    assert len(found.staleness) == 12 * 16 * 4
    if not arrangement.resumes:
        assert found.trained_tokens == sum(int(TAILED.draw(np.random.default_rng(0), 16).sum()) for _ in range(12))


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda each: each.name)
def test_what_is_lost_and_what_is_used_is_all_the_time_there_is(arrangement):
    speeds = dataclasses.replace(SPEEDS, push_seconds=40.0, step_fixed_seconds=20.0)
    found = replay(arrangement, SPLIT, speeds, TAILED, seed=1, rollouts=24, warm_up=4)
    lost, engines = found.lost, found.engines
    full = engines.tokens * speeds.engine.decode_seconds(found.peak) / found.peak + engines.read - engines.recomputed
    trainer = SPLIT.devices if arrangement.colocated else SPLIT.trainer_devices
    used = full * (SPLIT.devices / SPLIT.engines if arrangement.colocated else 1) / (found.seconds * SPLIT.devices)
    used += found.trainer_busy * trainer / SPLIT.devices
    assert used + sum(lost.values()) == pytest.approx(1.0, abs=2e-3)
    assert lost["push"] > 0.02 and lost["other"] > 0.01 and min(lost.values()) >= 0


def test_lost_time_of_a_synchronous_run_by_hand():
    lost = run("sync").lost
    total = GENERATION + 1.0 + LOG_PROBS + TRAIN + 0.5 + 4.0
    assert lost == pytest.approx(
        {
            "stragglers": 0.0,
            "samples": GENERATION / total / 2,
            "trainer": (LOG_PROBS + TRAIN) / total / 2,
            "push": 4.0 / total,
            "other": 1.5 / total,
        },
        abs=1e-9,
    )


def test_equal_answers_have_no_stragglers_and_a_long_tail_has_many():
    assert run("sync").lost["stragglers"] == pytest.approx(0.0, abs=1e-9)
    assert run("sync", work=TAILED).lost["stragglers"] > 0.1


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda each: each.name)
def test_twice_the_devices_are_never_slower(arrangement):
    last = float("inf")
    for power in range(5):
        factor = 2**power
        split = Split(4 * factor, 2 * factor, 2 * factor)
        found = replay(arrangement, split, SPEEDS, TAILED, seed=2, rollouts=10, warm_up=4)
        assert found.step_seconds <= last * (1 + 1e-9)
        last = found.step_seconds


@pytest.mark.parametrize("name", ["colocated", "sync", "async", "in_flight"])
def test_a_longer_tail_of_the_same_mean_is_never_faster(name):
    times = [
        run(name, work=dataclasses.replace(TAILED, draw=long_tailed(sigma=sigma))).step_seconds
        for sigma in (0.0, 0.5, 1.0, 1.5)
    ]
    assert times == sorted(times) and times[-1] > 1.2 * times[0]


def test_one_device_is_half_as_fast_as_two():
    speeds = Speeds(decode_step_seconds=0.0, decode_request_seconds=0.25, train_token_seconds=0.1)
    times = [run("colocated", Split(n, n, n), speeds).step_seconds for n in (1, 2)]
    assert times[0] == pytest.approx(2 * times[1])
    assert times[0] == pytest.approx(160 * 0.25 + 240 * 0.1)


def test_no_sample_is_cut_among_replicas():
    # 3 samples of 10, 20 and 90 tokens: at 2 replicas the longest one, at one replica all of them decide.
    speeds = Speeds(1.0, 0.0, train_token_seconds=1.0)
    assert speeds.trainer_seconds([10, 20, 90], 1) == (0.0, 120.0)
    assert speeds.trainer_seconds([10, 20, 90], 2) == (0.0, 90.0)
    wide = dataclasses.replace(speeds, replica_devices=2)
    assert wide.trainer_seconds([10, 20, 90], 4) == (0.0, 45.0)


def test_splits_are_whole_replicas_and_whole_engines():
    speeds = dataclasses.replace(SPEEDS, engine_devices=8, replica_devices=16)
    found = splits(128, BY_NAME["sync"], speeds)
    assert [(split.trainer_devices, split.engines) for split in found] == [
        (16, 14), (32, 12), (48, 10), (64, 8), (80, 6), (96, 4), (112, 2),
    ]  # fmt: skip
    assert splits(128, BY_NAME["colocated"], speeds) == [Split(128, 128, 16)]
    assert splits(16, BY_NAME["sync"], speeds) == []
    assert splits(128, BY_NAME["sync"], speeds, trainer_devices=32) == [Split(128, 32, 12)]


def test_the_best_split_is_found():
    for train_token in (0.001, 0.05, 1.0):
        speeds = dataclasses.replace(SPEEDS, train_token_seconds=train_token, log_probs_token_seconds=0.0)
        candidates = splits(16, BY_NAME["async"], speeds)
        each = [replay(BY_NAME["async"], split, speeds, WORK, seed=0, rollouts=10, warm_up=4) for split in candidates]
        found = best_replay(BY_NAME["async"], candidates, speeds, WORK, seed=0, rollouts=10, warm_up=4)
        assert found.step_seconds == pytest.approx(min(one.step_seconds for one in each), rel=0.02)


def test_nothing_to_count_is_refused():
    with pytest.raises(ValueError, match="at least one must be left"):
        run("sync", rollouts=4, warm_up=4)
