"""What stands at masked tokens reaches no loss, no gradient and no metric: not even what is no number."""

import copy
import math

import numpy as np
import pytest
import torch

from slime.training.rollout_data import RolloutData
from tests.support.models.objective_step import (
    SHAPES,
    VOCABULARY,
    case_args,
    make_logits,
    make_samples,
    rollout_data,
    run_step,
)
from tests.support.processes.distributed import run_distributed
from tests.support.processes.objective_grid import CRITIC_OBJECTIVES, OBJECTIVES

HELD = ("log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "values")
# Infinite, too large for an exponential, too large for a square.
FILLINGS = (math.nan, math.inf, -math.inf, 1e3, -1e30)
POSITIONS = range(len(SHAPES))
OWN = {
    "surrogate of the user": {
        "loss_type": "custom_loss", "custom_loss_function_path": "tests.training.test_masked_tokens.surrogate"
    },
    "correction of the user": {
        "use_tis": True, "custom_tis_function_path": "tests.training.test_masked_tokens.untruncated"
    },
    "importance weighted k2": {"kl_loss_type": "k2", "use_unbiased_kl": True},
    "advantages of the user": {"custom_advantage_function_path": "tests.training.test_masked_tokens.penalised"},
    "ppo without whitening": {
        "advantage_estimator": "ppo", "gamma": 0.97, "lambd": 0.9, "kl_coef": 0.1, "discount_masked_tokens": True
    },
}  # fmt: skip
CASES = {**OBJECTIVES, **CRITIC_OBJECTIVES, **OWN}


def surrogate(args, batch, logits, sum_of_sample_mean):
    """A loss as a user writes one: from the columns of the batch and the public helpers."""
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

    result = get_log_probs_and_entropy(
        logits, args=args, unconcat_tokens=batch["tokens"], total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )  # fmt: skip
    new = torch.cat(result["log_probs"])
    ratios = {name: torch.exp(new - torch.cat(batch[name])) for name in HELD}
    loss = sum_of_sample_mean(-sum(ratios.values()) * torch.cat(batch["advantages"]))
    return loss, {name: sum_of_sample_mean(ratio) for name, ratio in ratios.items()}


def untruncated(*, pg_loss, train_log_probs, rollout_log_probs, loss_masks, step_statistics, **kwargs):
    weights = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    return pg_loss * weights / step_statistics["mean"].float(), loss_masks, {"weight": weights}


def total_weight(*, train_log_probs, rollout_log_probs, **kwargs):
    differences = [train - rollout for train, rollout in zip(train_log_probs, rollout_log_probs, strict=True)]
    return {"mean": sum(difference.exp().sum() for difference in differences)}


untruncated.step_statistics = total_weight


def penalised(args, rollout_data):
    columns = (rollout_data[name] for name in ("rewards", "kl", "log_probs", "rollout_log_probs"))
    rollout_data["advantages"] = [
        reward - kl.sum() - (new - old) for reward, kl, new, old in zip(*columns, strict=True)
    ]
    rollout_data["returns"] = rollout_data["advantages"]


def filled(data, value):
    """The data with `value` in the place of everything that masked tokens hold."""
    result = RolloutData(copy.deepcopy(data))
    for name in HELD:
        for row, mask in zip(result.get(name, ()), result["loss_masks"], strict=False):
            row[mask == 0] = value
    return result


def logits_of(samples, columns, lowered=0.0):
    """Logits in which every masked token stands lower by `lowered`."""
    logits = make_logits(samples, columns=columns)
    for sample, rows in zip(samples, logits, strict=True):
        prompt = len(sample.tokens) - len(sample.mask)
        for position, trained in enumerate(sample.mask, start=prompt):
            if not trained and columns > 1:
                rows[position - 1, sample.tokens[position]] -= lowered
    return logits


def step(name, value, lowered=0.0):
    """Loss, metrics and gradients of a step on data in which masked tokens hold `value`, and have logits lower by `lowered`."""
    import torch.distributed as dist

    from slime.training.advantages import compute_advantages_and_returns
    from slime.training.reports import mismatch_of_step
    from slime.training.step_statistics import statistics_for_correction

    args = case_args(**CASES[name])
    is_critic = name in CRITIC_OBJECTIVES
    data = rollout_data(make_samples())
    if name == "first step":
        del data["log_probs"]
    data = filled(data, value)
    compute_advantages_and_returns(args, data)
    mismatch = mismatch_of_step(data, dist.group.WORLD) if args.get_mismatch_metrics else {}
    loss, metrics, gradients = run_step(
        args, data, logits_of(make_samples(), 1 if is_critic else VOCABULARY, lowered), [POSITIONS],
        role="critic" if is_critic else "actor", step_statistics=statistics_for_correction(args, data, dist.group.WORLD),
    )  # fmt: skip
    return loss, {**metrics, **mismatch}, [gradient.numpy().tobytes() for gradient in gradients]


def steps():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    unexpected = {(name, "unexpected"): step(name, 0.0, lowered=math.inf) for name in CASES}
    return {(name, value): step(name, value) for name in CASES for value in (0.0, *FILLINGS)} | unexpected


@pytest.fixture(scope="module")
def results():
    (rank,) = run_distributed(steps, 1, timeout=180)
    return {(name, str(value)): result for (name, value), result in rank.items()}


@pytest.mark.parametrize("name", CASES)
def test_masked_tokens_change_neither_loss_nor_gradient_nor_metrics(results, name):
    loss, metrics, gradients = results[name, "0.0"]
    assert all(math.isfinite(number) for number in (loss, *metrics.values()))
    for value in FILLINGS:
        if abs(value) < math.inf and CASES[name].get("discount_masked_tokens"):
            continue  # the finite values of tokens that pass time do count
        assert results[name, str(value)] == (loss, metrics, gradients), value


@pytest.mark.parametrize("name", [name for name in CASES if name not in CRITIC_OBJECTIVES])
def test_a_masked_token_that_the_model_holds_for_impossible_changes_nothing(results, name):
    """The answer of a tool, say: the ratio of its probabilities is beyond all numbers."""
    loss, metrics, gradients = results[name, "0.0"]
    unexpected, its_metrics, its_gradients = results[name, "unexpected"]
    assert (unexpected, its_metrics) == (loss, metrics)
    for found, expected in zip(its_gradients, gradients, strict=True):
        np.testing.assert_array_equal(np.frombuffer(found, np.float32), np.frombuffer(expected, np.float32))
