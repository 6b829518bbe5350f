"""What two ranks report: metrics of a step by micro-batch.

Whitening alone, and over real process groups in which the tokens are dealt out in every way.
"""

import pytest
import torch
import torch.distributed as dist

from slime.training.metric_reduction import (
    distributed_masked_whiten,
    joined,
    mean_of_steps,
    step_denominator,
    whiten,
)
from slime.utils import distributed_utils
from tests.support.oracles.device_waits import counted_waits
from tests.support.processes.distributed import run_distributed

# Per rank, per micro-batch. Nobody has to report everything, or in one order.
REPORTED = (
    ({"loss": 1.0, "kl": 2.0}, {"kl": 3.0, "loss": 4.0, "rare": 10.0}),
    ({"kl": 5.0, "loss": 6.0}, {"loss": 0.5, "kl": 0.25}),
)


def reduced():
    import torch.distributed as dist

    from slime.training.metric_reduction import reduce_metrics

    dist.init_process_group("gloo")
    sums = [{name: torch.tensor(value) for name, value in batch.items()} for batch in REPORTED[dist.get_rank()]]
    return reduce_metrics(sums, 4.0, dist.group.WORLD)


def test_metrics_are_added_by_name():
    expected = {"loss": 11.5 / 4, "kl": 10.25 / 4, "rare": 10.0 / 4}
    assert run_distributed(reduced, 2) == [expected, expected]


def test_tensors_that_are_joined_keep_counts_that_float32_does_not_hold():
    shares = joined([torch.tensor([2**24 + 1]), torch.tensor([[0.5], [2.0]], requires_grad=True)])
    assert shares.tolist() == [2.0**24 + 1, 0.5, 2.0] and not shares.requires_grad
    assert joined([]).shape == (0,)


def test_steps_beyond_the_announced_share_the_last_number():
    steps = [{"loss": 1.0, "lr": 0.5}, {"loss": 2.0, "lr": 0.25}, {"loss": 4.0, "lr": 0.25}, {"loss": 6.0, "mtp": 3.0}]
    assert mean_of_steps(steps[1:]) == {"loss": 4.0, "lr": 0.25, "mtp": 3.0}
    assert mean_of_steps(steps[:1]) == steps[0]


def test_trained_tokens_of_a_step_are_counted_with_as_many_waits_for_any_number_of_samples(alone):
    def waits(samples):
        with counted_waits() as counted:
            assert step_denominator([torch.tensor([1, 0])] * samples, 6, True, None) == samples
        return counted

    assert waits(2) == waits(40)


def denominators():
    import torch.distributed as dist

    from slime.training.metric_reduction import step_denominator

    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    for masks in ([[1, 0, 1]], [[0, 0]], []):
        tensors = [torch.tensor(mask[rank:]) for mask in masks]
        found.append([step_denominator(tensors, 6, per_token, dist.group.WORLD) for per_token in (False, True)])
    return found


def test_a_step_is_divided_by_its_rollouts_or_by_its_trained_tokens_but_never_by_none():
    assert run_distributed(denominators, 2) == [[[6.0, 3.0], [6.0, 1.0], [6.0, 1.0]]] * 2


def plain_whiten(values, mask):
    """Lists of Python floats; the statistics of the masked-in values, applied to all."""
    counted = [v for v, m in zip(values, mask, strict=True) if m]
    mean = sum(counted) / len(counted)
    variance = sum((v - mean) ** 2 for v in counted) / max(len(counted) - 1, 1)
    return [(v - mean) / (variance + 1e-8) ** 0.5 for v in values]


def test_by_hand():
    values, mask = torch.tensor([1.0, 2, 3, 4]), torch.tensor([1, 1, 0, 1])
    expected = torch.tensor([-0.872871559, -0.21821789, 0.43643578, 1.091089449])
    torch.testing.assert_close(distributed_masked_whiten(values, mask), expected)
    torch.testing.assert_close(distributed_masked_whiten(values, mask, None, False), expected + 7 / 3)
    torch.testing.assert_close(
        distributed_masked_whiten(values, mask, epsilon=1.0), (values - 7 / 3) / (7 / 3 + 1) ** 0.5
    )


@pytest.mark.parametrize("value", [0.7, -1e6, 0.0])
def test_l10_constant_batch_gives_zeros(value):
    values = torch.full((7777,), value)
    assert (distributed_masked_whiten(values, torch.ones(7777)) == 0).all()
    torch.testing.assert_close(distributed_masked_whiten(values, torch.ones(7777), shift_mean=False), values)


def test_one_value_gives_zero():
    assert distributed_masked_whiten(torch.tensor([3.0, 9.0]), torch.tensor([1, 0])).tolist() == [0, 0]


def test_a_small_spread_around_a_large_mean_is_kept():
    values = 1e4 + torch.arange(1000) % 2
    torch.testing.assert_close(
        distributed_masked_whiten(values, torch.ones(1000)), (values - 10000.5) / (0.25 * 1000 / 999) ** 0.5
    )


def test_the_variance_has_one_in_a_hundred_million_added_to_it():
    """A spread that is smaller than that is not scaled up to 1."""
    values, mask = torch.tensor([0.0, 1e-4]), torch.ones(2)
    expected = torch.tensor([-5e-5, 5e-5]) / (5e-9 + 1e-8) ** 0.5
    torch.testing.assert_close(distributed_masked_whiten(values, mask), expected)
    torch.testing.assert_close(whiten([values], [mask]).values, [expected])


@pytest.mark.parametrize("shift_mean", [True, False])
def test_nothing_trained_gives_zeros_and_says_so(shift_mean):
    result = whiten([torch.ones(2), torch.ones(1)], [torch.zeros(2), torch.zeros(1)], shift_mean=shift_mean)
    assert [tokens.tolist() for tokens in result.values] == [[0, 0], [0]] and result.is_empty
    assert distributed_masked_whiten(torch.ones(2), torch.zeros(2), None, shift_mean).tolist() == [0, 0]
    assert whiten([], []).is_empty and whiten([], []).values == []


def test_lists_keep_their_cut():
    values, masks = [torch.tensor([1.0, 2]), torch.zeros(0), torch.tensor([3.0, 4])], [[1, 1], [], [0, 1]]
    result = whiten(values, [torch.tensor(mask) for mask in masks])
    assert not result.is_empty
    assert [len(tokens) for tokens in result.values] == [2, 0, 2]
    torch.testing.assert_close(
        torch.cat(result.values), distributed_masked_whiten(torch.tensor([1.0, 2, 3, 4]), torch.tensor([1, 1, 0, 1]))
    )


def test_any_shape_and_what_masked_values_are_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    values, mask = torch.randn(5, 40, generator=generator), torch.rand(5, 40, generator=generator) < 0.6
    expected = torch.tensor(plain_whiten(values.double().flatten().tolist(), mask.flatten().tolist())).view(5, 40)
    torch.testing.assert_close(distributed_masked_whiten(values, mask), expected)
    poisoned = values.masked_fill(~mask, float("nan"))
    torch.testing.assert_close(distributed_masked_whiten(poisoned, mask)[mask], expected[mask])


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"got \(3,\) for \(2,\)"):
        distributed_masked_whiten(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match=r"lengths \[2\] with masks of lengths \[3\]"):
        whiten([torch.zeros(2)], [torch.zeros(3)])


def test_public_import_path():
    assert distributed_utils.distributed_masked_whiten is distributed_masked_whiten


RESPONSES = (9, 1, 30, 16, 2, 41)


def responses():
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(length, generator=generator) * 3 + 10 for length in RESPONSES]
    return values, [torch.rand(length, generator=generator) < 0.7 for length in RESPONSES]


def part_of(sample, data_size, context_size, rank):
    """Positions of a response that a rank of the grid holds: whole responses dealt to data ranks, zigzag within them."""
    data_rank, context_rank = divmod(rank, context_size)
    if sample % data_size != data_rank:
        return None
    chunks = torch.arange(RESPONSES[sample]).tensor_split(2 * context_size)
    return torch.cat([chunks[context_rank], chunks[2 * context_size - 1 - context_rank]])


def whiten_on_grids(grids):
    """Per grid the whitened parts of this rank; then what ranks get when shards are uneven, empty, or all empty."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    values, masks = responses()
    results = []
    for data_size, context_size in grids:
        parts = {i: part_of(i, data_size, context_size, rank) for i in range(len(RESPONSES))}
        held = {i: positions for i, positions in parts.items() if positions is not None}
        whitened = whiten([values[i][p] for i, p in held.items()], [masks[i][p] for i, p in held.items()])
        results.append(dict(zip(held, whitened.values, strict=True)))

    # The group is given by name once, and rank 0 alone has tokens.
    group = dist.new_group(timeout=torch.distributed.constants.default_pg_timeout)
    lonely = whiten(values[:1], masks[:1], group) if rank == 0 else whiten([], [], group)
    masked = whiten(values[:1], [masks[0] & (rank == 0)], group)
    empty = whiten(values[:1], [masks[0] & False], group)
    constant = distributed_masked_whiten(torch.full((7777 + rank,), 0.7), torch.ones(7777 + rank), group)
    # Constant on each rank, but not over all.
    steps = distributed_masked_whiten(torch.full((2,), float(rank)), torch.ones(2), group)
    return results, lonely, masked, empty, constant, steps


def check_grids(ranks, grids):
    values, masks = responses()
    flat = plain_whiten(torch.cat(values).double().tolist(), torch.cat(masks).tolist())
    expected = torch.tensor(flat).split(list(RESPONSES))
    for number, (data_size, context_size) in enumerate(grids):
        seen = 0
        for rank, (results, *_) in enumerate(ranks):
            for sample, tokens in results[number].items():
                positions = part_of(sample, data_size, context_size, rank)
                torch.testing.assert_close(tokens, expected[sample][positions], rtol=1e-5, atol=1e-6)
                seen += len(tokens)
        assert seen == sum(RESPONSES)


TWO_RANKS = [(2, 1), (1, 2)]


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(whiten_on_grids, 2, (TWO_RANKS,))


def test_l9_two_ranks_equal_one(two_ranks):
    check_grids(two_ranks, TWO_RANKS)


def test_l10_a_constant_batch_of_all_ranks_gives_zeros(two_ranks):
    for rank, (*_, constant, steps) in enumerate(two_ranks):
        assert len(constant) == 7777 + rank and (constant == 0).all()
        torch.testing.assert_close(steps, torch.full((2,), (rank - 0.5) / (1 / 3) ** 0.5))


def test_l11_a_rank_without_tokens_joins_both_collectives(two_ranks):
    """Without samples, with a sample that is masked, and with nothing trained on any rank."""
    values, masks = responses()
    alone = torch.tensor(plain_whiten(values[0].double().tolist(), masks[0].tolist()))
    for rank, (_, lonely, masked, empty, _, _) in enumerate(two_ranks):
        assert len(lonely.values) == (1 if rank == 0 else 0) and not lonely.is_empty
        torch.testing.assert_close(masked.values[0], alone, rtol=1e-5, atol=1e-6)
        assert empty.is_empty and (empty.values[0] == 0).all()
    torch.testing.assert_close(two_ranks[0][1].values[0], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_l9_data_times_context_ranks_equal_one():
    grids = [(2, 2), (4, 1), (1, 4)]
    check_grids(run_distributed(whiten_on_grids, 4, (grids,)), grids)
