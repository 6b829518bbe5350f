import argparse

import pytest
import torch
import torch.distributed as dist

from slime.training.context_parallel import ContextParallel, slice_responses
from slime.training.step_statistics import compute_step_statistics, wants_step_statistics
from slime.utils.errors import RunError, UserError
from tests.support.distributed import run_distributed

ARGS = argparse.Namespace(custom_tis_function_path="my.py:function")
# Four samples of one step: two data-parallel ranks with three and one, or three and none in the second step.
TOTAL_LENGTHS, RESPONSE_LENGTHS = [9, 14, 5, 30], [4, 9, 1, 17]


def make_function(statistics, needs=None):
    def function():
        raise AssertionError("statistics are made without calling the function")

    function.step_statistics = statistics
    if needs is not None:
        function.needs_step_statistics = needs
    return function


def sums(*, args, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, cp):
    """Masked sums of both log-probs over local tokens, and of one number per sample that every context rank knows."""
    masks = slice_responses(loss_masks, total_lengths, response_lengths, cp)
    both = [
        sum([(row * mask).sum() for row, mask in zip(column, masks, strict=True)], torch.zeros(()))
        for column in (train_log_probs, rollout_log_probs)
    ]
    # float32 cannot hold both addends' sum; the trainer adds in float64.
    large = torch.full((1, 2), 2.0**24 if cp.rank == 0 else 1.0)
    return {"log_probs": torch.stack(both), "large": large, "lengths": torch.tensor(sum(response_lengths))}


def make_data(indices, cp):
    masks = [torch.arange(RESPONSE_LENGTHS[i]) % 3 != 0 for i in indices]
    train = [torch.arange(RESPONSE_LENGTHS[i]) + 100.0 * i for i in indices]
    totals, lengths = [TOTAL_LENGTHS[i] for i in indices], [RESPONSE_LENGTHS[i] for i in indices]
    return {
        "log_probs": slice_responses(train, totals, lengths, cp),
        "rollout_log_probs": slice_responses([2 * row for row in train], totals, lengths, cp),
        "loss_masks": masks, "total_lengths": totals, "response_lengths": lengths,
    }  # fmt: skip


def expected_sum(indices):
    return sum(100.0 * i + t for i in indices for t in range(RESPONSE_LENGTHS[i]) if t % 3 != 0)


def four_ranks_worker():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    cp = ContextParallel(2, rank % 2, cp_groups[rank // 2])
    data = make_data([0, 1, 2] if rank < 2 else [3], cp)
    results = []
    for positions in ([0, 1, 2] if rank < 2 else [0], [1, 0] if rank < 2 else []):
        results.append(compute_step_statistics(make_function(sums), ARGS, data, positions, cp, dist.group.WORLD))
    results.append(compute_step_statistics(make_function(lambda **_: {}), ARGS, data, [], cp, dist.group.WORLD))

    def fails_on_rank_2(**_):
        return {} if rank != 2 else {}["missing"]

    def another_shape(**_):
        return {"total": torch.zeros(2 if rank == 3 else 1)}

    errors = []
    for statistics in (fails_on_rank_2, another_shape, lambda **_: 5):
        try:
            compute_step_statistics(make_function(statistics), ARGS, data, [], cp, dist.group.WORLD)
        except (RunError, UserError) as error:
            errors.append(str(error))
    return results, errors


def test_shares_of_data_and_context_ranks_are_added_up():
    ranks = run_distributed(four_ranks_worker, 4)
    for (first, second, nothing), errors in ranks:
        for found, indices in ((first, [0, 1, 2, 3]), (second, [0, 1])):
            total = expected_sum(indices)
            assert found["log_probs"].tolist() == [total, 2 * total]
            assert found["log_probs"].dtype == torch.float64
            assert found["large"].tolist() == [[2.0**25 + 2] * 2]
            assert found["lengths"].shape == ()
            # Context ranks have the same samples, so what each of them counts whole is counted twice.
            assert found["lengths"] == 2 * sum(RESPONSE_LENGTHS[i] for i in indices)
        assert nothing == {}
        assert "--custom-tis-function-path my.py:function raised KeyError for the statistics of a step" in errors[0]
        assert "same names and shapes on every rank" in errors[1]
        assert "rank 3 returned {'total': (2,)}" in errors[1]
        assert "step_statistics returned 5; expected {name: tensor}" in errors[2]


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (make_function(None), False),
        (make_function(sums), True),
        (make_function(sums, needs=lambda args: args.custom_tis_function_path is None), False),
        (make_function(sums, needs=lambda args: True), True),
        (len, False),
    ],
)
def test_who_asks_for_statistics(function, wanted):
    assert wants_step_statistics(function, ARGS) is wanted
