"""What two ranks report: metrics of a step by micro-batch, and masks by which trained tokens are counted again."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slime.training.metric_reduction import mean_of_steps, refresh_mask_sums, step_denominator
from tests.support.device_waits import counted_waits
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
    assert mean_of_steps(steps[1:]) == {"loss": 4.0, "lr": 0.25, "mtp": 3.0}
    assert mean_of_steps(steps[:1]) == steps[0]


def refreshed(masks):
    """Trained tokens per execution, or the error, from edited masks of samples that two ranks share."""
    import torch.distributed as dist

    from slime.training.metric_reduction import refresh_mask_sums
    from slime.utils.errors import UserError

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = []
    for of_ranks in masks:
        data = {
            "rollout_ids": [5, rank], "sample_indices": [10 + rank, 20 + rank],
            "loss_masks": of_ranks[rank], "response_lengths": [3 - rank, 1],
            "tokens": [torch.zeros(4), torch.zeros(2)],
        }  # fmt: skip
        try:
            refresh_mask_sums(data, dist.group.WORLD)
            results.append(data["rollout_mask_sums"])
        except UserError as error:
            results.append(str(error))
    return results


GOOD = [[1, 0, 1], [1]]
BAD = {
    "sample 11: `loss_masks` is 0.5 at response token 1": (GOOD, [[1.0, 0.5], [0.0]]),
    "sample 11: `loss_masks` has the shape [3]; the response has 2 tokens": (GOOD, [[1, 0, 1], [1]]),
    "sample 21: `loss_masks` has the shape []; the response has 1 tokens": (GOOD, [[1, 1], 1]),
    "sample 11: `loss_masks` is no row of numbers": (GOOD, [["one", None], [1]]),
    "must be a list of one mask per sample, 2 here, not 1 masks": (GOOD, [[1, 1]]),
    "must be a list of one mask per sample, 2 here, not NoneType": (GOOD, None),
}


def test_edited_masks_are_counted_and_those_that_weigh_are_refused_on_all_ranks():
    good = ([torch.tensor([1, 0, 1]), torch.tensor([1])], [torch.tensor([1.0, 1.0]), torch.tensor([False])])
    plain = ([[1, 0, 1], np.array([1])], [[True, True], np.zeros(1)])
    found = run_distributed(refreshed, 2, ([good, plain, *BAD.values()],))
    assert [rank[:2] for rank in found] == [[[4.0, 1.0]] * 2, [[4.0, 0.0]] * 2]
    for rank in found:
        for told, message in zip(BAD, rank[2:], strict=True):
            assert told in message and "--rollout-data-postprocess-path" in message


@pytest.fixture
def alone(monkeypatch):
    """A group of one rank, without processes."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(dist, "all_reduce", lambda values, operation, group: None)
    monkeypatch.setattr(dist, "all_gather_object", lambda gathered, value, group: gathered.__setitem__(0, value))


def edited(samples, masks, device="cpu"):
    return {
        "rollout_ids": [0] * samples, "sample_indices": list(range(samples)), "response_lengths": [2] * samples,
        "loss_masks": masks, "tokens": [torch.zeros(3, device=device)] * samples,
    }  # fmt: skip


def test_masks_of_any_kind_become_whole_numbers_on_the_device_of_the_tokens(alone):
    kinds = [
        [1, 0], np.array([True, True]), torch.tensor([1, 0], dtype=torch.bfloat16), torch.tensor([0, 1]),
        torch.tensor([1.0, 1.0], requires_grad=True), torch.tensor([False, True]),
    ]  # fmt: skip
    data = edited(len(kinds), kinds)
    refresh_mask_sums(data, None)
    assert [mask.tolist() for mask in data["loss_masks"]] == [[1, 0], [1, 1], [1, 0], [0, 1], [1, 1], [0, 1]]
    assert data["rollout_mask_sums"] == [8.0] * len(kinds)
    # In the place of a GPU: tensors are there, without entries.
    data = edited(len(kinds), kinds, device="meta")
    refresh_mask_sums(data, None)
    assert {(mask.device.type, mask.dtype, len(mask)) for mask in data["loss_masks"]} == {("meta", torch.int32, 2)}
    nothing = edited(0, [])
    refresh_mask_sums(nothing, None)
    assert nothing["loss_masks"] == nothing["rollout_mask_sums"] == []


def test_masks_are_checked_and_counted_with_one_wait_for_all_samples(alone):
    def waits(samples):
        masks = [torch.tensor([1, 0], dtype=torch.int32) for _ in range(samples)]
        with counted_waits() as counted:
            refresh_mask_sums(edited(samples, masks), None)
        # What is on the host already may be looked at as arrays.
        return counted.total() - counted["numpy"]

    assert waits(2) == waits(40) == 1


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
