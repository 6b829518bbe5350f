"""Metrics of a step from what micro-batches on two ranks report."""

import torch

from slime.training.metric_reduction import fold_surplus_steps
from tests.support.distributed import run_distributed

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


def test_steps_beyond_the_announced_share_the_last_number():
    steps = [{"loss": 1.0, "lr": 0.5}, {"loss": 2.0, "lr": 0.25}, {"loss": 4.0, "lr": 0.25}, {"loss": 6.0, "mtp": 3.0}]
    assert fold_surplus_steps(steps, 4) == steps and fold_surplus_steps(steps, 9) == steps
    assert fold_surplus_steps(steps, 2) == [{"loss": 1.0, "lr": 0.5}, {"loss": 4.0, "lr": 0.25, "mtp": 3.0}]
    assert fold_surplus_steps([], 2) == []
