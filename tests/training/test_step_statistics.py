"""What is known about an optimizer step before its first micro-batch, and when log-probs have a pass of their own."""

import argparse
import math

import pytest
import torch
import torch.distributed as dist

from slime.training.context_parallel import ContextParallel, slice_responses
from slime.training.step_statistics import compute_step_statistics, needs_log_prob_pass, wants_step_statistics
from slime.utils.errors import RunError, UserError
from tests.support.distributed import run_distributed
from tests.support.grpo_batch import objective_args

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


# (tokens, prompt length, trainer, engine, mask, sample index)
SAMPLES = (
    ([5, 6, 7, 8, 9], 2, [-1.0, -1.2, -0.3], [-2.0, -1.0, -0.3], [1, 1, 1], 40),
    ([1, 2, 3, 4], 1, [-1.0, -9.0, -0.5], [-1.5, -0.1, -0.5], [1, 0, 1], 41),
    ([3, 3, 3], 1, [-2.0, -2.0], [-2.25, -2.125], [1, 1], 42),
)


def data_of(positions, cp):
    from slime.training.context_parallel import slice_responses

    rows = [SAMPLES[i] for i in positions]
    totals, responses = [len(row[0]) for row in rows], [len(row[2]) for row in rows]
    columns = {
        name: slice_responses([torch.tensor(row[place]) for row in rows], totals, responses, cp)
        for name, place in (("log_probs", 2), ("rollout_log_probs", 3))
    }
    return {
        "tokens": [torch.tensor(row[0]) for row in rows], "total_lengths": totals, "response_lengths": responses,
        "loss_masks": [torch.tensor(row[4]) for row in rows], "sample_indices": [row[5] for row in rows], **columns,
    }  # fmt: skip


def report():
    """(metrics, lines) of this rank: two data-parallel ranks with two context-parallel ones each."""
    import torch.distributed as dist

    from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel
    from slime.training.step_statistics import mismatch_of_step, worst_token_lines

    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    cp, positions = NO_CONTEXT_PARALLEL, [0, 1, 2]
    if world > 1:
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        cp, positions = ContextParallel(2, rank % 2, groups[rank // 2]), [[1], [2, 0]][rank // 2]
    data = data_of(positions, cp)
    metrics = mismatch_of_step(data, range(len(positions)), cp, dist.group.WORLD)
    nothing = mismatch_of_step(data, [], cp, dist.group.WORLD)
    lines = worst_token_lines(data, lambda ids: "".join(f"<{i}>" for i in ids), cp, dist.group.WORLD)
    return metrics, nothing, lines


def test_mismatch_of_all_layouts():
    alone = run_distributed(report, 1)[0]
    for metrics, nothing, lines in run_distributed(report, 4):
        assert metrics == pytest.approx(alone[0]) and nothing == alone[1] and lines == alone[2]
    metrics, nothing, lines = alone
    pairs = [(t, r) for _, _, train, roll, mask, _ in SAMPLES for t, r, m in zip(train, roll, mask, strict=True) if m]
    weights = [math.exp(t - r) for t, r in pairs]
    assert metrics == pytest.approx(
        {
            "mismatch_k1": sum(r - t for t, r in pairs) / len(pairs),
            "mismatch_k3": sum(w - 1 - math.log(w) for w in weights) / len(pairs),
            "mismatch_abs": sum(abs(t - r) for t, r in pairs) / len(pairs),
            "mismatch_ess": sum(weights) ** 2 / (len(pairs) * sum(w * w for w in weights)),
            "mismatch_max_abs": 1.0,
        }
    )
    assert nothing["mismatch_ess"] == 1
    assert lines[:4] == [
        "sample 40, response token 0, '<7>': trainer -1.0000, engine -2.0000, difference 1.0e+00",
        "sample 41, response token 0, '<2>': trainer -1.0000, engine -1.5000, difference 5.0e-01",
        "sample 42, response token 0, '<3>': trainer -2.0000, engine -2.2500, difference 2.5e-01",
        "sample 40, response token 1, '<8>': trainer -1.2000, engine -1.0000, difference 2.0e-01",
    ]
    assert len(lines) == 7, "masked tokens have no part in it"


def test_the_engines_log_probs_must_be_there():
    from slime.training.context_parallel import NO_CONTEXT_PARALLEL
    from slime.training.step_statistics import mismatch_of_step

    data = data_of([0], NO_CONTEXT_PARALLEL)
    del data["rollout_log_probs"]
    with pytest.raises(UserError, match="--get-mismatch-metrics needs `rollout_log_probs`"):
        mismatch_of_step(data, [0], NO_CONTEXT_PARALLEL, None)


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
        # Without --use-tis the function is not called.
        {"custom_tis_function_path": f"{__file__}:normalised_weighting", "normalise": True},
        {"use_routing_replay": True, "use_rollout_routing_replay": True},
    ],
)
def test_the_pass_is_skipped(changes):
    assert not needs_log_prob_pass(skipping(**changes), steps=1)


def test_several_steps_force_the_pass_whatever_the_flags_announced():
    assert needs_log_prob_pass(skipping(num_steps_per_rollout=1), steps=2)
    assert not needs_log_prob_pass(skipping(num_steps_per_rollout=2), steps=1)
    assert not needs_log_prob_pass(skipping(loss_type="sft_loss"), steps=2)


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
        {"custom_advantage_function_path": "mine.py:advantages"},
        {"rollout_data_postprocess_path": "mine.py:masks"},
    ],
)
def test_each_condition_forces_the_pass(changes):
    assert needs_log_prob_pass(skipping(**changes), steps=1)


@pytest.mark.parametrize("loss_type", ["policy_loss", "sft_loss"])
def test_l26_entropies_force_the_pass(loss_type):
    assert needs_log_prob_pass(skipping(use_rollout_entropy=True, loss_type=loss_type), steps=1)
