import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.estimates.flops import FlopsModel
from slime.scheduling.dp_schedule import BatchingRule, build_schedule, most_micro_batches
from slime.training.schedule import build_dp_schedule, schedule_from_args, train_parallel_config
from slime.utils.errors import UserError
from tests.support.models.tiny_shape import TINY_SHAPE

# Qwen3-4B: 8.1 GFLOPs per token, 0.29 MFLOPs per pair of tokens.
FLOPS = FlopsModel(per_token=8_044_085_248, per_token_pair=294_912)


def parallel(dp_size, cp_size=1, vpp_size=1, group_size=1):
    return {
        "dp_size": dp_size,
        "cp_size": cp_size,
        "vpp_size": vpp_size,
        "microbatch_group_size_per_vp_stage": group_size,
    }


def dynamic(max_tokens_per_gpu, **kwargs):
    return SimpleNamespace(use_dynamic_batch_size=True, max_tokens_per_gpu=max_tokens_per_gpu, **kwargs)


def log_normal_lengths(count, mean, seed, cap):
    generator = np.random.default_rng(seed)
    return np.clip(generator.lognormal(math.log(mean) - 0.5, 1.0, count), 1, cap).astype(int).tolist()


def samples_of(schedule, rank):
    partition = schedule.partitions[rank]
    return [[partition[item] for item in members] for members in schedule.micro_batch_indices[rank]]


def test_dynamic_first_fit_is_the_rule_of_a_namespace_without_packing():
    result = build_dp_schedule(
        dynamic(10), parallel(2), [5, 7, 4, 3, 6], global_batch_size=5, rollout_indices=[0, 1, 2, 3, 4]
    )
    assert result == ([[0, 2, 4], [1, 3]], [[[0, 1], [2]], [[0], [1]]], [2], [5])


def test_static_with_balanced_data():
    args = SimpleNamespace(use_dynamic_batch_size=False, micro_batch_size=1, balance_data=True, **TINY_SHAPE)
    result = build_dp_schedule(
        args, parallel(2), [6, 3, 11, 2, 8, 14, 5, 12], global_batch_size=8, rollout_indices=list(range(8))
    )
    one_by_one = [[0], [1], [2], [3]]
    assert result == ([[1, 2, 6, 7], [0, 3, 4, 5]], [one_by_one, one_by_one], [4], [8])


def test_executions_of_several_samples_over_two_steps():
    result = build_dp_schedule(
        dynamic(10, packing="first-fit"),
        parallel(2),
        [5, 7, 4, 3, 6, 2, 9],
        global_batch_size=2,
        rollout_indices=[0, 0, 1, 1, 2, 2, 3],
    )
    assert result == ([[0, 2, 4, 5], [1, 3, 6]], [[[0, 1], [2, 3]], [[0, 1], [2]]], [1, 1], [2, 2])


@pytest.mark.parametrize("kind", [np.array, torch.tensor, lambda numbers: [torch.tensor(number) for number in numbers]])
def test_numbers_may_be_arrays_and_tensors(kind):
    """As a batch on its way to the ranks has them."""
    lengths, executions = [5, 7, 4, 3, 6, 2, 9], [4, 4, 1, 1, 2, 2, 3]
    plain, others = (
        build_dp_schedule(dynamic(10), parallel(2), sizes, global_batch_size=2, rollout_indices=ids)
        for sizes, ids in ((lengths, executions), (kind(lengths), kind(executions)))
    )
    assert others == plain and others[0] == [[0, 2, 4, 5], [1, 3, 6]]


def test_micro_batches_of_nearly_equal_flops_on_demand():
    """FLOPs go nearly as lengths do here, so sums of 9, 7 and 9 come out: 4 goes to 5, and 3 to 6. First fit gives 3 to 7."""
    args = dynamic(10, packing="first-fit", balance_by_flops=True, **TINY_SHAPE)
    result = build_dp_schedule(args, parallel(1), [5, 7, 4, 3, 6], global_batch_size=5, rollout_indices=list(range(5)))
    (partition,), (micro_batches,) = result[:2]
    assert sorted([partition[item] for item in members] for members in micro_batches) == [[0, 2], [1], [3, 4]]


def test_best_fit_micro_batches_are_dealt_in_turn():
    schedule = build_schedule([5, 7, 4, 3, 6], range(5), BatchingRule("best-fit", 10), global_batch_size=5, dp_size=1)
    assert samples_of(schedule, 0) == [[0], [1, 3], [2, 4]]


def test_the_budget_grows_with_context_parallelism():
    result = build_dp_schedule(
        dynamic(5), parallel(1, cp_size=2), [5, 7, 4, 3, 6], global_batch_size=5, rollout_indices=list(range(5))
    )
    assert result[1] == [[[0, 1], [2, 3], [4]]]


def test_static_runs_of_neighbours():
    args = SimpleNamespace(use_dynamic_batch_size=False, micro_batch_size=2)
    partitions, micro_batches, counts, _ = build_dp_schedule(
        args, parallel(2), [1] * 8, global_batch_size=4, rollout_indices=list(range(8))
    )
    assert partitions == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert micro_batches == [[[0, 1], [2, 3]]] * 2
    assert counts == [1, 1]


def test_executions_count_in_the_order_of_their_first_sample():
    rule = BatchingRule("static", micro_batch_size=1)
    schedule = build_schedule([1] * 6, [9, 4, 9, 2, 4, 7], rule, global_batch_size=2, dp_size=1)
    assert schedule.partitions == [[0, 1, 2, 4, 3, 5]]
    assert schedule.num_microbatches == [4, 2]


def test_o9_an_incomplete_last_step_is_dropped_and_counted():
    rule = BatchingRule("static", micro_batch_size=1)
    schedule = build_schedule([1] * 9, [0, 0, 1, 2, 3, 4, 5, 6, 6], rule, global_batch_size=3, dp_size=1)
    assert schedule.partitions == [[0, 1, 2, 3, 4, 5, 6]]
    assert schedule.global_batch_sizes == [3, 3]
    assert schedule.dropped == 1


def test_not_even_one_full_step_is_an_error():
    with pytest.raises(UserError, match="num_rollouts = 3 .*--global-batch-size 8"):
        build_dp_schedule(dynamic(10), parallel(1), [1] * 4, global_batch_size=8, rollout_indices=[0, 1, 1, 2])


def test_static_batches_that_do_not_fit_name_the_sizes_that_would():
    args = SimpleNamespace(use_dynamic_batch_size=False, micro_batch_size=4)
    with pytest.raises(UserError, match=r"--micro-batch-size 4 makes 3 .* multiple of 2 .*sizes that fit: 1, 2, 3, 6"):
        build_dp_schedule(args, parallel(2), [1] * 12, global_batch_size=12, rollout_indices=list(range(12)))


def test_static_batches_that_can_never_fit_say_so():
    args = SimpleNamespace(use_dynamic_batch_size=False, micro_batch_size=1)
    with pytest.raises(UserError, match="no size fits"):
        build_dp_schedule(args, parallel(4), [1] * 3, global_batch_size=3, rollout_indices=[0, 1, 2])


def test_a_step_with_fewer_samples_than_micro_batches_needed_is_an_error():
    with pytest.raises(UserError, match="3 samples cannot be cut into 4 micro-batches"):
        build_dp_schedule(dynamic(10), parallel(4), [1] * 3, global_batch_size=3, rollout_indices=[0, 1, 2])


@pytest.mark.parametrize("packing", ["first-fit", "best-fit", "flops"])
@pytest.mark.parametrize("seed", range(8))
def test_no_step_has_more_micro_batches_than_lengths_allow(packing, seed):
    """So a step of a number of samples above that, rounded down to what ranks divide, can always be dealt out."""
    generator = random.Random(f"{packing}{seed}")
    for _ in range(60):
        count, longest, budget = generator.randint(1, 40), generator.randint(1, 60), generator.randint(1, 240)
        least = generator.choice([1, longest // 2 + 1, longest])
        lengths = [generator.randint(least, longest) for _ in range(count)]
        rule = BatchingRule(packing, token_budget=budget, flops_model=FLOPS if packing == "flops" else None)
        (found,) = build_schedule(lengths, range(count), rule, global_batch_size=count, dp_size=1).num_microbatches
        assert found <= most_micro_batches(packing, budget, count, longest)


def test_the_most_micro_batches_are_those_of_the_longest_samples():
    assert [most_micro_batches("best-fit", 100, 12, longest) for longest in (100, 51, 50, 34, 25, 8, 1)] == [
        12, 12, 6, 6, 3, 1, 1,
    ]  # fmt: skip
    assert most_micro_batches("flops", 100, 12, 8) == 1 + 2 and most_micro_batches("flops", 100, 12, 50) == 12


def test_contradicting_flags_are_errors():
    static_by_flops = SimpleNamespace(
        use_dynamic_batch_size=False, micro_batch_size=1, balance_by_flops=True, **TINY_SHAPE
    )
    for args, message in [
        (static_by_flops, "--use-dynamic-batch-size"),
        (dynamic(None), "--max-tokens-per-gpu"),
        (dynamic(10, packing="worst-fit"), "--packing worst-fit"),
    ]:
        with pytest.raises(UserError, match=message):
            build_dp_schedule(args, parallel(1), [1, 2], global_batch_size=2, rollout_indices=[0, 1])


def test_the_virtual_pipeline_gets_whole_groups():
    args = dynamic(10, packing="best-fit", balance_data=False, balance_by_flops=False)
    lengths = [5, 7, 4, 3, 6, 2, 9, 8, 1, 1, 3, 5]
    config = parallel(2, vpp_size=2, group_size=3)
    schedule = schedule_from_args(args, config, lengths, global_batch_size=12, execution_ids=list(range(12)))
    assert schedule.num_microbatches == [3]
    without = schedule_from_args(
        args, parallel(1, group_size=4), lengths, global_batch_size=12, execution_ids=range(12)
    )
    assert without.num_microbatches == [6]


@pytest.mark.parametrize("packing", ["static", "first-fit", "best-fit", "flops"])
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_guarantees(packing, balanced, seed):
    generator = random.Random(f"{packing}{balanced}{seed}")
    dp_size, group_size, budget = generator.choice([1, 2, 4]), generator.choice([1, 2]), 64
    global_batch_size, num_rollouts = 16, generator.randint(16, 60)
    siblings = 1 if packing == "static" else 3
    rollouts = [rollout for rollout in range(num_rollouts) for _ in range(generator.randint(1, siblings))]
    if siblings > 1:
        generator.shuffle(rollouts)
    lengths = [generator.randint(1, 90 if generator.random() < 0.1 else 30) for _ in rollouts]
    rule = BatchingRule(packing, budget, 1, FLOPS if balanced or packing == "flops" else None)
    schedule = build_schedule(
        lengths,
        rollouts,
        rule,
        global_batch_size=global_batch_size,
        dp_size=dp_size,
        microbatch_group_size=group_size,
    )

    num_steps = num_rollouts // global_batch_size
    kept = list(dict.fromkeys(rollouts))[: num_steps * global_batch_size]
    assert schedule.global_batch_sizes == [global_batch_size] * num_steps
    assert schedule.dropped == num_rollouts - len(kept)
    expected = [sample for sample, rollout in enumerate(rollouts) if rollout in set(kept)]
    assert sorted(itertools.chain(*schedule.partitions)) == expected
    assert all(count % group_size == 0 for count in schedule.num_microbatches)
    for rank in range(dp_size):
        micro_batches = schedule.micro_batch_indices[rank]
        assert len(micro_batches) == sum(schedule.num_microbatches)
        assert list(itertools.chain(*micro_batches)) == list(range(len(schedule.partitions[rank])))
        assert all(micro_batches)
        by_step = iter(samples_of(schedule, rank))
        for step, count in enumerate(schedule.num_microbatches):
            of_step = set(kept[step * global_batch_size : (step + 1) * global_batch_size])
            for members in itertools.islice(by_step, count):
                assert {rollouts[sample] for sample in members} <= of_step
                assert len(members) == 1 or sum(lengths[sample] for sample in members) <= budget


@pytest.mark.parametrize(("dp_size", "count", "budget"), [(64, 512, 16384), (64, 512, 32768), (8, 512, 32768)])
@pytest.mark.parametrize("seed", range(3))
def test_log_normal_lengths_fill_micro_batches_and_balance_ranks(dp_size, count, budget, seed):
    lengths = log_normal_lengths(count, 2000, seed, 32768)
    rule = BatchingRule("best-fit", budget, flops_model=FLOPS)
    schedule = build_schedule(lengths, range(count), rule, global_batch_size=count, dp_size=dp_size)

    over_long = [length for length in lengths if length > budget]
    fewest = len(over_long) + math.ceil((sum(lengths) - sum(over_long)) / budget)
    assert schedule.num_microbatches[0] == math.ceil(fewest / dp_size)

    flops = [FLOPS.forward_flops(length) for length in lengths]
    per_rank = [sum(flops[sample] for sample in partition) for partition in schedule.partitions]
    per_micro_batch = sorted(
        sum(flops[sample] for sample in members) for rank in range(dp_size) for members in samples_of(schedule, rank)
    )
    mean = sum(per_rank) / dp_size
    with_the_longest = max(flops) + sum(per_micro_batch[: schedule.num_microbatches[0] - 1])
    assert max(per_rank) <= 1.02 * max(mean, with_the_longest)


@pytest.mark.parametrize(("virtual", "group", "expected"), [(None, None, (1, 4)), (2, None, (2, 4)), (2, 6, (2, 6))])
def test_groups_of_virtual_stages_are_as_large_as_the_pipeline_unless_said(virtual, group, expected):
    args = SimpleNamespace(
        data_parallel_size=3, context_parallel_size=2, pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=virtual, microbatch_group_size_per_vp_stage=group,
    )  # fmt: skip
    config = train_parallel_config(args)
    assert config == parallel(3, cp_size=2, vpp_size=expected[0], group_size=expected[1])
