from types import SimpleNamespace

import numpy as np
import pytest

from slime.scheduling.dp_schedule import DPSchedule
from slime.training.rollout_batch import build_train_batch, split_for_data_parallel, to_tensors
from slime.training.routing_replay import check_routed_experts, routed_experts_column
from slime.utils.errors import UserError
from slime.utils.types import Sample

# The first of three layers is dense.
ARGS = SimpleNamespace(num_layers=3, moe_layer_freq=[0, 1, 1], moe_router_topk=2, num_experts=4)


def a_sample(index=0, tokens=4, **fields):
    generator = np.random.default_rng(index)
    experts = np.argsort(generator.random((tokens - 1, 3, 4)), axis=-1)[..., :2].astype(np.int32)
    experts[:, 0] = 0
    values = {"tokens": list(range(tokens)), "response_length": 2, "rollout_routed_experts": experts, **fields}
    return Sample(index=index, reward=0.0, **values)


def checked_batch(samples, args=ARGS):
    batch = build_train_batch(samples, [0.0] * len(samples), [0.0] * len(samples))
    batch["rollout_routed_experts"] = routed_experts_column(args, samples)
    check_routed_experts(args, batch)
    return batch


def test_rows_reach_the_rank_that_trains_the_sample():
    samples = [a_sample(0, 4), a_sample(1, 6), a_sample(2, 3)]
    schedule = DPSchedule([[2, 0], [1]], [[[0, 1]], [[0]]], [1], [3], 0)
    shards = split_for_data_parallel(checked_batch(samples), schedule)
    for shard, of_rank in zip(shards, ([2, 0], [1]), strict=True):
        column = to_tensors(shard, "cpu")["rollout_routed_experts"]
        for tensor, index in zip(column, of_rank, strict=True):
            np.testing.assert_array_equal(tensor, samples[index].rollout_routed_experts)


@pytest.mark.parametrize("fields", [{"remove_sample": True}, {"response_length": 0}, {"loss_mask": [0, 0]}])
def test_a_sample_that_trains_nothing_needs_no_choices(fields):
    column = checked_batch([a_sample(0), a_sample(1, rollout_routed_experts=None, **fields)])["rollout_routed_experts"]
    assert column[1].shape == (0, 3, 2)


def test_a_sample_that_trains_needs_choices():
    samples = [a_sample(0), a_sample(5, rollout_routed_experts=None)]
    with pytest.raises(UserError, match=r"1 of 2 samples have no `rollout_routed_experts` \(sample indices \[5\]\)"):
        checked_batch(samples)


def test_a_batch_without_the_column_is_refused():
    with pytest.raises(UserError, match="has no `rollout_routed_experts`"):
        check_routed_experts(ARGS, build_train_batch([a_sample()], [0.0], [0.0]))


@pytest.mark.parametrize("shape", [(4, 3, 2), (3, 2, 2), (3, 3, 1), (3, 6), (0, 3, 2)])
def test_wrong_shapes_are_refused(shape):
    samples = [a_sample(7)]
    batch = checked_batch(samples)
    batch["rollout_routed_experts"] = [np.ones(shape, np.int32)]
    with pytest.raises(UserError, match=r"sample 7 has shape .* \[3, 3, 2\]"):
        check_routed_experts(ARGS, batch)


def test_a_layer_that_was_not_captured_is_refused():
    sample = a_sample(7)
    sample.rollout_routed_experts[:, 2] = 0
    with pytest.raises(UserError, match="sample 7 is all zero in layer 3, which has experts"):
        checked_batch([a_sample(0), sample])


def test_one_expert_per_token_may_be_expert_0_for_a_whole_sample_and_not_for_all():
    args = SimpleNamespace(**{**vars(ARGS), "moe_router_topk": 1})
    zero, other = np.zeros((3, 3, 1), np.int32), np.ones((3, 3, 1), np.int32)
    checked_batch([a_sample(0, rollout_routed_experts=zero), a_sample(1, rollout_routed_experts=other)], args)
    with pytest.raises(UserError, match="of every sample is all zero in layer 2"):
        checked_batch([a_sample(0, rollout_routed_experts=zero)], args)


@pytest.mark.parametrize("expert", [-1, 4])
def test_ids_that_no_expert_has_are_refused(expert):
    sample = a_sample(7)
    sample.rollout_routed_experts[1, 1, 1] = expert
    with pytest.raises(UserError, match=f"sample 7 has the id {expert}; --num-experts 4 has 0 to 3"):
        checked_batch([sample])
