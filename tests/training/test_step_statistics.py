"""What is known about an optimizer step before its first micro-batch, and when log-probs have a pass of their own."""

import argparse

import pytest
import torch
import torch.distributed as dist

from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel, slice_responses
from slime.training.rollout_data import RolloutData
from slime.training.step_statistics import compute_step_statistics, needs_log_prob_pass, wants_step_statistics
from slime.utils.errors import RunError, UserError
from tests.support.models.grpo_batch import objective_args
from tests.support.processes.distributed import run_distributed

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
    columns = {
        "log_probs": train, "rollout_log_probs": [2 * row for row in train], "loss_masks": masks, "total_lengths": totals,
        "response_lengths": lengths,
    }  # fmt: skip
    return RolloutData.of_rank(columns, cp)


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
        results.append(compute_step_statistics(make_function(sums), ARGS, data.take(positions), dist.group.WORLD))
    results.append(compute_step_statistics(make_function(lambda **_: {}), ARGS, data.take([]), dist.group.WORLD))
    named = {"first": torch.tensor(1.0 + rank), "second": torch.tensor(100.0)}
    in_this_order = dict(sorted(named.items(), reverse=rank % 2 == 1))
    results.append(
        compute_step_statistics(make_function(lambda **_: in_this_order), ARGS, data.take([]), dist.group.WORLD)
    )

    def fails_on_rank_2(**_):
        return {} if rank != 2 else {}["missing"]

    def another_shape(**_):
        return {"total": torch.zeros(2 if rank == 3 else 1)}

    errors = []
    for statistics in (fails_on_rank_2, another_shape, lambda **_: 5):
        try:
            compute_step_statistics(make_function(statistics), ARGS, data.take([]), dist.group.WORLD)
        except (RunError, UserError) as error:
            errors.append(str(error))
    return results, errors


def test_shares_of_data_and_context_ranks_are_added_up():
    ranks = run_distributed(four_ranks_worker, 4)
    for (first, second, nothing, named), errors in ranks:
        for found, indices in ((first, [0, 1, 2, 3]), (second, [0, 1])):
            total = expected_sum(indices)
            assert found["log_probs"].tolist() == [total, 2 * total]
            assert found["log_probs"].dtype == torch.float64
            assert found["large"].tolist() == [[2.0**25 + 2] * 2]
            assert found["lengths"].shape == ()
            # Context ranks have the same samples, so what each of them counts whole is counted twice.
            assert found["lengths"] == 2 * sum(RESPONSE_LENGTHS[i] for i in indices)
        assert nothing == {}
        assert named == {"first": 10.0, "second": 400.0}, "shares go by their names"
        assert "--custom-tis-function-path my.py:function raised KeyError for the statistics of a step" in errors[0]
        assert "same names and shapes on every rank" in errors[1]
        assert "rank 3 returned {'total': (2,)}" in errors[1]
        assert "step_statistics returned 5; expected {name: tensor}" in errors[2]


def test_masks_that_a_statistic_edits_are_its_own(alone):
    """Through memory that torch does not watch, too."""

    def edits(*, loss_masks, **_):
        loss_masks[0].numpy()[:] = False
        loss_masks[1].zero_()
        return {"trained": torch.stack([mask.sum() for mask in loss_masks]).sum()}

    data = make_data([0, 1, 2], NO_CONTEXT_PARALLEL)
    before = [mask.tolist() for mask in data["loss_masks"]]
    found = compute_step_statistics(make_function(edits), ARGS, data, None)
    assert found["trained"] == sum(before[2])
    assert [mask.tolist() for mask in data["loss_masks"]] == before


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


def skipping(**changes):
    """Arguments under which all conditions for skipping hold."""
    values = {
        "loss_type": "policy_loss", "kl_coef": 0.0, "use_rollout_logprobs": False,
        "get_mismatch_metrics": False, "use_critic": False, "keep_old_actor": False, "use_opd": False,
        "advantage_estimator": "grpo", "use_routing_replay": False, "use_rollout_routing_replay": False, "use_tis": False,
        "custom_tis_function_path": None, "custom_advantage_function_path": None, "rollout_data_postprocess_path": None,
        "use_rollout_entropy": False,
    }  # fmt: skip
    return objective_args(**{**values, **changes})


def plain_weighting(**kwargs):
    raise AssertionError("whether a pass is needed is told by what the function says of itself")


def normalised_weighting(**kwargs):
    plain_weighting()


normalised_weighting.step_statistics = lambda **kwargs: {}
normalised_weighting.needs_step_statistics = lambda args: args.normalise


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"advantage_estimator": "cispo"},
        {"use_kl_loss": True},
        {"use_opsm": True},
        {"use_tis": True},
        {"use_tis": True, "custom_tis_function_path": f"{__file__}:plain_weighting"},
        {"use_tis": True, "custom_tis_function_path": f"{__file__}:normalised_weighting", "normalise": False},
        {"use_routing_replay": True, "use_rollout_routing_replay": True},
    ],
)
def test_the_pass_is_skipped(changes):
    assert not needs_log_prob_pass(skipping(**changes), steps=1)


def test_several_steps_force_the_pass_whatever_the_flags_announced():
    assert needs_log_prob_pass(skipping(num_steps_per_rollout=1), steps=2)
    assert not needs_log_prob_pass(skipping(num_steps_per_rollout=2), steps=1)
    assert not needs_log_prob_pass(skipping(loss_type="sft_loss"), steps=2)


def test_imitation_needs_the_pass_for_the_returns_of_a_critic_alone():
    reads = {"get_mismatch_metrics": True, "use_opd": True, "kl_coef": 0.1, "custom_advantage_function_path": "m.f"}
    assert not needs_log_prob_pass(skipping(loss_type="sft_loss", **reads), steps=1)
    assert needs_log_prob_pass(skipping(loss_type="sft_loss", use_critic=True), steps=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "custom_loss"},
        {"kl_coef": 0.01},
        {"use_rollout_logprobs": True},
        {"get_mismatch_metrics": True},
        {"use_critic": True},
        {"keep_old_actor": True},
        {"use_opd": True},
        {"advantage_estimator": "gspo"},
        {"use_routing_replay": True},
        {"use_tis": True, "custom_tis_function_path": f"{__file__}:normalised_weighting", "normalise": True},
        # The function is called without --use-tis too.
        {"custom_tis_function_path": f"{__file__}:normalised_weighting", "normalise": True},
        {"custom_advantage_function_path": "mine.py:advantages"},
    ],
)
def test_each_condition_forces_the_pass(changes):
    assert needs_log_prob_pass(skipping(**changes), steps=1)


@pytest.mark.parametrize("loss_type", ["policy_loss", "sft_loss"])
def test_a_function_that_is_given_the_data_finds_log_probs(loss_type):
    args = skipping(rollout_data_postprocess_path="mine.py:masks", loss_type=loss_type)
    assert needs_log_prob_pass(args, steps=1)


@pytest.mark.parametrize("loss_type", ["policy_loss", "sft_loss"])
def test_l26_entropies_force_the_pass(loss_type):
    assert needs_log_prob_pass(skipping(use_rollout_entropy=True, loss_type=loss_type), steps=1)
