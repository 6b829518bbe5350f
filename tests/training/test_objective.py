"""Every estimator and every form of the loss, from advantages to the gradient at the logits, against loops in float64."""

import itertools
import math

import pytest
import torch

from slime.training.advantages import compute_advantages_and_returns
from slime.training.loss import loss_function
from slime.training.rollout_data import RolloutData
from slime.utils.errors import UserError
from tests.support.models.objective_step import (
    ROLLOUTS,
    SHAPES,
    VOCABULARY,
    assert_equal_gradients,
    case_args,
    make_logits,
    make_samples,
    plain_gradients,
    rollout_data,
    run_step,
)
from tests.support.oracles.plain_objective import PlainSample, policy_step, set_advantages, value_step

REINFORCE = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "gamma": 0.9, "kl_coef": 0.1}
PPO = {"advantage_estimator": "ppo", "gamma": 0.97, "lambd": 0.9, "kl_coef": 0.1, "kl_loss_type": "k1"}
CASES = {
    "grpo": {},
    "grpo per token": {"calculate_per_token_loss": True},
    "dual clip": {"eps_clip_c": 1.05, "eps_clip": 0.1},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.003, "eps_clip_high": 0.004},
    "gspo per token": {"advantage_estimator": "gspo", "calculate_per_token_loss": True},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0},
    "ppo": PPO,
    "ppo, masked tokens pass time": {**PPO, "discount_masked_tokens": True},
    "ppo whitened": {**PPO, "normalize_advantages": True, "kl_loss_type": "k3"},
    "reinforce_plus_plus": REINFORCE,
    "reinforce_plus_plus, masked tokens pass time": {**REINFORCE, "discount_masked_tokens": True},
    "reinforce_plus_plus_baseline": {**REINFORCE, "advantage_estimator": "reinforce_plus_plus_baseline"},
    "distillation": {"use_opd": True, "opd_kl_coef": 0.5},
    "distillation of whitened ppo": {**PPO, "use_opd": True, "normalize_advantages": True},
    "off-policy sequence mask": {"use_opsm": True, "opsm_delta": 0.02},
    "gspo with the mask": {"advantage_estimator": "gspo", "use_opsm": True, "opsm_delta": 0.02},
    "truncated importance sampling": {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.9},
    "icepop": {
        "use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.9,
        "custom_tis_function_path": "slime.backends.megatron_utils.loss.icepop_function",
    },
    "engine log-probs as old ones": {"use_rollout_logprobs": True},
    "engine log-probs as old ones, importance weighted kl": {"use_rollout_logprobs": True, "use_unbiased_kl": True},
    "kl k1": {"kl_loss_type": "k1"},
    "kl k2": {"kl_loss_type": "k2"},
    "kl low_var_kl, importance weighted": {"kl_loss_type": "low_var_kl", "use_unbiased_kl": True},
    "gspo with importance weighted kl": {"advantage_estimator": "gspo", "use_unbiased_kl": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_loops(name):
    args = case_args(**CASES[name])
    samples = make_samples()
    set_advantages(args, samples)
    leaves = [rows.clone().requires_grad_() for rows in make_logits(samples)]
    weighting = ("icepop" if args.custom_tis_function_path else "truncate") if args.use_tis else None
    plain = policy_step(args, samples, leaves, ROLLOUTS, weighting)
    expected = plain_gradients(plain, leaves)

    data = rollout_data(samples)
    compute_advantages_and_returns(args, data)
    for i, sample in enumerate(samples):
        assert data["advantages"][i].tolist() == pytest.approx(sample.advantages, rel=1e-5, abs=1e-6)
        assert data["returns"][i].tolist() == pytest.approx(sample.returns, rel=1e-5, abs=1e-6)
    positions = range(len(samples))
    # Any split into micro-batches gives the same loss and gradient.
    for split in ([list(positions)], [[i] for i in positions], [[4], [2, 0], [5, 1, 3]]):
        loss, metrics, gradients = run_step(args, data, make_logits(samples), split)
        assert loss == pytest.approx(float(plain.loss), rel=1e-5, abs=1e-6)
        assert {k: v for k, v in metrics.items() if k != "loss"} == pytest.approx(plain.metrics, rel=2e-5, abs=2e-6)
        assert metrics["loss"] == pytest.approx(loss)
        assert_equal_gradients(gradients, expected)


def test_the_cases_reach_every_branch():
    """A case in which nothing is clipped, masked or weighted would prove little."""
    fractions = {}
    for name in CASES:
        args = case_args(**CASES[name])
        data = rollout_data(make_samples())
        compute_advantages_and_returns(args, data)
        _, metrics, _ = run_step(args, data, make_logits(make_samples()), [range(len(SHAPES))])
        fractions[name] = metrics
    assert all(metrics["pg_clipfrac"] > 0 for metrics in fractions.values())
    assert fractions["off-policy sequence mask"]["opsm_clipfrac"] > 0
    assert fractions["icepop"]["tis_clipfrac"] > 0
    losses = {name: metrics["loss"] for name, metrics in fractions.items()}
    same = [pair for pair in itertools.combinations(losses, 2) if math.isclose(losses[pair[0]], losses[pair[1]])]
    assert same == [], "flags without an effect"


@pytest.mark.parametrize("per_token", [False, True])
def test_value_loss(per_token):
    """The critic's loss is that of its values, whatever `--loss-type` is; no temperature divides them."""
    args = case_args(**PPO, calculate_per_token_loss=per_token, value_clip=0.4, loss_type="sft_loss")
    samples = make_samples()
    set_advantages(args, samples)
    outputs = make_logits(samples, columns=1)
    leaves = [rows[:, 0].clone().requires_grad_() for rows in outputs]
    plain = value_step(args, samples, leaves, ROLLOUTS)
    expected = plain_gradients(plain, leaves)
    data = rollout_data(samples)
    compute_advantages_and_returns(args, data)
    for split in ([[0, 1, 2, 3, 4, 5]], [[5, 2], [0], [1, 3, 4]]):
        loss, metrics, gradients = run_step(args, data, outputs, split, role="critic")
        assert loss == pytest.approx(float(plain.loss), rel=1e-5)
        assert metrics == pytest.approx({"loss": float(plain.loss), **plain.metrics}, rel=1e-5)
        assert_equal_gradients([gradient[:, 0] for gradient in gradients], expected)
    assert 0 < plain.metrics["value_clipfrac"] < 1


def test_l3_siblings_of_an_execution_have_the_full_reward():
    """An execution in two samples gives the gradient of the same tokens in one: the loss averages them already."""
    args = case_args(use_kl_loss=False, entropy_coef=0.0)
    whole = PlainSample([1, 2, 3, 4, 5, 6], [1, 1, 1, 1], 0, 0.7, [-2.0] * 4, [], [-2.0] * 4, [], [])
    first = PlainSample([1, 2, 3, 4, 5, 6], [1, 1, 0, 0], 0, 0.7, [-2.0] * 4, [], [-2.0] * 4, [], [])
    second = PlainSample([1, 2, 3, 4, 5, 6], [0, 0, 1, 1], 0, 0.7, [-2.0] * 4, [], [-2.0] * 4, [], [])
    logits = make_logits([whole])
    results = []
    for samples in ([whole], [first, second]):
        data = rollout_data(samples)
        compute_advantages_and_returns(args, data)
        results.append(run_step(args, data, logits * len(samples), [range(len(samples))]))
    (loss, _, (gradient,)), (split_loss, _, parts) = results
    assert split_loss == pytest.approx(loss)
    torch.testing.assert_close(sum(parts), gradient)


def test_l8_the_critic_learns_the_returns_that_hold_the_kl_penalty():
    args = case_args(**{**PPO, "gamma": 1.0, "lambd": 1.0, "kl_coef": 0.1})
    sample = PlainSample(
        [1, 2, 3, 4], [1, 1, 1], 0, 1.0, [-1.0, -1.0, -1.0], [-1.1, -1.2, -1.3], [0.0] * 3, [], [0.0] * 3
    )
    data = rollout_data([sample])
    compute_advantages_and_returns(args, data)
    # Rewards per token −.01, −.02 and 1 − .03; what is still to come is summed.
    assert data["returns"][0].tolist() == pytest.approx([0.94, 0.95, 0.97])
    _, metrics, _ = run_step(args, data, [torch.zeros(4, 1)], [[0]], role="critic")
    expected = (0.94**2 + 0.95**2 + 0.97**2) / 3
    assert metrics["value_loss"] == pytest.approx(expected / ROLLOUTS)


def test_l16_the_fraction_of_masked_sequences_is_that_of_trained_tokens():
    args = case_args(use_opsm=True, opsm_delta=1e-4, calculate_per_token_loss=True, rollout_temperature=1.0)
    samples = make_samples()[:2]
    data = rollout_data(samples)
    data["advantages"] = [torch.full((5,), -1.0), torch.ones(1)]
    # The policy has left the first sample: old log-probs far above what any logits give.
    data["log_probs"] = [torch.zeros(5), torch.zeros(1)]
    _, metrics, _ = run_step(args, data, make_logits(samples), [[0, 1]])
    assert metrics["opsm_clipfrac"] == pytest.approx(5 / 6)
    data["loss_masks"][0][3:] = 0
    _, metrics, _ = run_step(args, data, make_logits(samples), [[0], [1]])
    assert metrics["opsm_clipfrac"] == pytest.approx(3 / 4)


@pytest.mark.parametrize(
    "changes, missing, message",
    [
        ({"use_tis": True}, "rollout_log_probs", "--use-tis needs `rollout_log_probs`"),
        ({"use_rollout_logprobs": True}, "rollout_log_probs", "--use-rollout-logprobs needs `rollout_log_probs`"),
        ({"use_kl_loss": True}, "ref_log_probs", "--use-kl-loss needs `ref_log_probs`"),
        ({}, "advantages", "--loss-type policy_loss needs `advantages`"),
    ],
)
def test_a_missing_column_is_named(changes, missing, message):
    data = rollout_data(make_samples())
    compute_advantages_and_returns(case_args(), data)
    del data[missing]
    with pytest.raises(UserError, match=message):
        run_step(case_args(**changes), data, make_logits(make_samples()), [range(6)])


def test_l24_the_reverse_kl_of_distillation_is_a_metric_of_training():
    args = case_args(use_opd=True, calculate_per_token_loss=True)
    samples = make_samples()
    data = rollout_data(samples)
    compute_advantages_and_returns(args, data)
    _, metrics, _ = run_step(args, data, make_logits(samples), [range(6)])
    differences = [s.old[t] - s.teacher[t] for s in samples for t in range(len(s.mask)) if s.mask[t]]
    assert metrics["opd_reverse_kl"] == pytest.approx(sum(differences) / len(differences), rel=1e-5)


def test_a_batch_without_response_tokens_still_reaches_the_logits():
    """All ranks run their backward pass; and what is not read cannot spoil the gradient."""
    tokens = [torch.tensor([1, 2, 3])]
    data = RolloutData({
        "tokens": tokens, "total_lengths": [3], "response_lengths": [0], "rollout_mask_sums": [4.0],
        "loss_masks": [torch.zeros(0, dtype=torch.int32)], "advantages": [torch.zeros(0)],
    })  # fmt: skip
    batch = data.micro_batch([0], pad_multiple=4)
    logits = torch.full((4, VOCABULARY), -torch.inf).requires_grad_()
    args = case_args(use_kl_loss=False, loss_type="custom_loss", custom_loss_function_path=f"{__file__}:no_loss")
    loss, _ = loss_function(args, batch, logits, None)
    loss.backward()
    assert float(loss.detach()) == 0 and logits.grad.tolist() == torch.zeros(4, VOCABULARY).tolist()
    leaf = torch.randn(4, VOCABULARY).requires_grad_()
    loss, metrics = loss_function(case_args(use_kl_loss=False), batch, leaf, None)
    loss.backward()
    assert float(loss.detach()) == 0 and not leaf.grad.any()
    assert all(float(value) == 0 for value in metrics.values())


def no_loss(args, batch, logits, sum_of_sample_mean):
    return torch.zeros(()), {}
