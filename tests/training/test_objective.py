"""Every estimator and every form of the loss, from advantages to the gradient at the logits, against loops in float64."""

import itertools
import math
import random

import pytest
import torch

from slime.training.advantages import compute_advantages_and_returns
from slime.training.loss import loss_function
from slime.training.packed_stream import pack_stream
from slime.utils.errors import UserError
from tests.support.grpo_batch import objective_args
from tests.support.plain_objective import PlainSample, policy_step, set_advantages, value_step

VOCABULARY = 9
# (prompt length, mask of the response, execution)
SHAPES = (
    (3, [1, 1, 1, 1, 1], 0),
    (2, [1], 1),  # one token
    (4, [1, 0, 0, 1, 1, 0], 2),  # tool tokens, also at the end
    (3, [1, 1, 1], 2),  # sibling of the same execution
    (5, [0, 0, 0], 3),  # fully masked
    (1, [0, 1, 1, 1, 0, 1, 1], 4),
)
ROLLOUTS = 5
DATA_COLUMNS = ("rollout_log_probs", "log_probs", "ref_log_probs", "teacher_log_probs", "values")
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
    "kl k1": {"kl_loss_type": "k1"},
    "kl k2": {"kl_loss_type": "k2"},
    "kl low_var_kl, importance weighted": {"kl_loss_type": "low_var_kl", "use_unbiased_kl": True},
    "gspo with importance weighted kl": {"advantage_estimator": "gspo", "use_unbiased_kl": True},
}  # fmt: skip


def case_args(**changes):
    return objective_args(**{"kl_loss_coef": 0.3, "entropy_coef": 0.02, **changes})


def make_samples(seed=0):
    generator = random.Random(seed)

    def column(length):
        return [-2.2 + 0.4 * generator.gauss(0, 1) for _ in range(length)]

    samples = []
    for prompt, mask, execution in SHAPES:
        tokens = [generator.randrange(VOCABULARY) for _ in range(prompt + len(mask))]
        old, ref, roll, teacher, values = (column(len(mask)) for _ in range(5))
        samples.append(PlainSample(tokens, mask, execution, generator.gauss(0, 1), old, ref, roll, teacher, values))
    return samples


def make_logits(samples, columns=VOCABULARY, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(s.tokens), columns, generator=generator, dtype=torch.float64) for s in samples]


def rollout_data(samples):
    """The samples as a rank's data, before advantages."""
    trained = {}
    for sample in samples:
        trained[sample.execution] = trained.get(sample.execution, 0) + sum(sample.mask)
    columns = {
        "rollout_log_probs": [s.roll for s in samples],
        "log_probs": [s.old for s in samples],
        "ref_log_probs": [s.ref for s in samples],
        "teacher_log_probs": [s.teacher for s in samples],
        "values": [s.values for s in samples],
    }
    return {
        "tokens": [torch.tensor(s.tokens) for s in samples],
        "total_lengths": [len(s.tokens) for s in samples],
        "response_lengths": [len(s.mask) for s in samples],
        "loss_masks": [torch.tensor(s.mask, dtype=torch.int32) for s in samples],
        "rewards": [s.reward for s in samples],
        "rollout_mask_sums": [float(trained[s.execution]) for s in samples],
        "sample_indices": list(range(len(samples))),
        **{name: [torch.tensor(row, dtype=torch.float32) for row in rows] for name, rows in columns.items()},
    }


def micro_batch(data, positions, multiple=4):
    batch = {name: [column[i] for i in positions] for name, column in data.items()}
    return {**batch, "stream": pack_stream(batch["tokens"], batch["response_lengths"], multiple)}


def run_step(args, data, logits, split, role="actor", step_statistics=None):
    """(loss, metrics, gradient per sample) of a step over the micro-batches `split`, divided as the trainer does."""
    leaves = [rows.float().requires_grad_() for rows in logits]
    loss, sums = 0.0, {}
    for positions in split:
        batch = {**micro_batch(data, positions), "step_statistics": step_statistics}
        padding = torch.zeros(len(batch["stream"].tokens) - sum(batch["total_lengths"]), logits[0].shape[1])
        part, metrics = loss_function(
            args, batch, torch.cat([*(leaves[i] for i in positions), padding]), None, role=role
        )
        part.backward()
        loss += float(part.detach())
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    trained = sum(int(mask.sum()) for mask in data["loss_masks"])
    denominator = trained if args.calculate_per_token_loss else ROLLOUTS
    gradients = [leaf.grad / denominator for leaf in leaves]
    return loss / denominator, {name: value / denominator for name, value in sums.items()}, gradients


def plain_gradients(step, leaves):
    step.loss.backward()
    return [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]


def assert_equal_gradients(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-7)


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


def veto_all(
    *, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs
):
    return pg_loss * 2, [torch.zeros_like(mask) for mask in loss_masks], {"vetoed": torch.ones_like(pg_loss)}


def keep_first_token(*, pg_loss, loss_masks, **kwargs):
    masks = [mask * (torch.arange(len(mask)) == 0) for mask in loss_masks]
    return pg_loss, masks, {}


@pytest.mark.parametrize("per_token", [False, True])
def test_l14_rejected_tokens_leave_the_loss_but_not_the_metrics(per_token):
    path = f"{__file__}:veto_all"
    args = case_args(use_tis=True, custom_tis_function_path=path, calculate_per_token_loss=per_token)
    data = rollout_data(make_samples())
    compute_advantages_and_returns(args, data)
    plain_args = case_args(calculate_per_token_loss=per_token)
    _, plain, _ = run_step(plain_args, data, make_logits(make_samples()), [range(6)])
    loss, metrics, gradients = run_step(args, data, make_logits(make_samples()), [range(6)])
    assert loss == 0 and metrics["pg_loss"] == 0
    assert all(not gradient.any() for gradient in gradients)
    # Four executions have a trained token.
    assert metrics["vetoed"] == pytest.approx(1.0 if per_token else 4 / ROLLOUTS)
    for name in ("entropy_loss", "kl_loss", "ppo_kl", "pg_clipfrac", "train_rollout_logprob_abs_diff"):
        assert metrics[name] == pytest.approx(plain[name])


def test_rejection_keeps_the_denominators():
    args = case_args(
        use_tis=True, custom_tis_function_path=f"{__file__}:keep_first_token", use_kl_loss=False, entropy_coef=0.0
    )
    data = rollout_data(make_samples()[:1])
    del data["log_probs"]
    data["advantages"] = [torch.full((5,), 2.0)]
    loss, _, _ = run_step(args, data, make_logits(make_samples()[:1]), [[0]])
    # One of five trained tokens is left, and the sum is still divided by five.
    assert loss == pytest.approx(-2.0 / 5 / ROLLOUTS)


def wrong_kind(**kwargs):
    return kwargs["pg_loss"]


def wrong_loss(*, pg_loss, loss_masks, **kwargs):
    return pg_loss.sum(), loss_masks, {}


def wrong_masks(*, pg_loss, loss_masks, **kwargs):
    return pg_loss, loss_masks[:1], {}


def wrong_metrics(*, pg_loss, loss_masks, **kwargs):
    return pg_loss, loss_masks, {"mine": pg_loss.mean()}


def raising(**kwargs):
    raise KeyError("nothing here")


@pytest.mark.parametrize(
    "function, message",
    [
        ("wrong_kind", r"wrong_kind returned Tensor \(25,\); expected \(pg_loss, modified_masks"),
        ("wrong_loss", r"wrong_loss returned Tensor \(\) as pg_loss; expected one of shape \(25,\)"),
        ("wrong_masks", r"wrong_masks returned masks of lengths \[5\]; expected one tensor per sample"),
        ("wrong_metrics", r"wrong_metrics returned dict as metrics, mine not of shape \(25,\)"),
        ("raising", r"--custom-tis-function-path .*raising raised KeyError for samples \[0, 1, 2, 3, 4, 5\]"),
    ],
)
def test_a_correction_is_checked(function, message):
    args = case_args(use_tis=True, custom_tis_function_path=f"{__file__}:{function}")
    data = rollout_data(make_samples())
    compute_advantages_and_returns(args, data)
    with pytest.raises(UserError, match=message):
        run_step(args, data, make_logits(make_samples()), [range(6)])


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


def constant_length(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: (values * torch.cat(list(loss_masks))).sum() / 10


def vector(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: values


def test_the_constant_length_reducer():
    """Dr. GRPO: a token weighs the same in a response of any length; and only the policy-gradient term is touched."""
    args = case_args(custom_pg_loss_reducer_function_path=f"{__file__}:constant_length")
    samples = make_samples()
    data = rollout_data(samples)
    compute_advantages_and_returns(args, data)
    del data["log_probs"]
    expected = -sum(s.reward * sum(s.mask) for s in samples) / 10 / ROLLOUTS
    _, default, _ = run_step(case_args(), data, make_logits(samples), [range(6)])
    for split in ([range(6)], [[1, 4], [0, 5], [3, 2]]):
        _, metrics, _ = run_step(args, data, make_logits(samples), split)
        assert metrics["pg_loss"] == pytest.approx(expected, rel=1e-5)
        assert metrics["kl_loss"] == pytest.approx(default["kl_loss"])
    args = case_args(custom_pg_loss_reducer_function_path=f"{__file__}:vector")
    with pytest.raises(UserError, match=r"its reducer returned \(25,\) for 25 tokens; expected a scalar tensor"):
        run_step(args, data, make_logits(samples), [range(6)])


def test_a_batch_without_response_tokens_still_reaches_the_logits():
    """All ranks run their backward pass; and what is not read cannot spoil the gradient."""
    tokens = [torch.tensor([1, 2, 3])]
    batch = {
        "tokens": tokens, "total_lengths": [3], "response_lengths": [0], "rollout_mask_sums": [4.0],
        "loss_masks": [torch.zeros(0, dtype=torch.int32)], "advantages": [torch.zeros(0)],
        "stream": pack_stream(tokens, [0], 4),
    }  # fmt: skip
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


@pytest.mark.parametrize("level", ["token", "geometric"])
def test_l15_weights_of_mean_1_do_not_depend_on_the_packing(level):
    """Masked importance sampling as shipped, with sums over the whole step."""
    from examples.train_infer_mismatch_helper.mis import mis_step_statistics
    from slime.training.context_parallel import NO_CONTEXT_PARALLEL

    path = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
    args = case_args(
        use_tis=True, custom_tis_function_path=path, use_rs=True, tis_level=level, rs_level=level, tis_mode="clip",
        tis_batch_normalize=True, rs_lower_bound=0.7, rs_upper_bound=1.6, calculate_per_token_loss=True,
    )  # fmt: skip
    data = rollout_data(make_samples())
    compute_advantages_and_returns(args, data)
    columns = {"train_log_probs": "log_probs", "rollout_log_probs": "rollout_log_probs", "loss_masks": "loss_masks",
               "total_lengths": "total_lengths", "response_lengths": "response_lengths"}  # fmt: skip
    given = {name: data[column] for name, column in columns.items()}
    sums = mis_step_statistics(args=args, cp=NO_CONTEXT_PARALLEL, **given)
    results = []
    for split in ([range(6)], [[0], [1], [2], [3], [4], [5]], [[5, 1], [0, 2, 3, 4]]):
        loss, metrics, gradients = run_step(args, data, make_logits(make_samples()), split, step_statistics=sums)
        results.append((loss, metrics, gradients))
    for loss, metrics, gradients in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        assert metrics == pytest.approx(results[0][1], rel=1e-5, abs=1e-7)
        assert_equal_gradients(gradients, [gradient.double() for gradient in results[0][2]])
    _, metrics, _ = results[0]
    rejected = metrics["mis_rs_mask_fraction_low"] + metrics["mis_rs_mask_fraction_high"]
    assert 0 < rejected < 1
    # Over the tokens that are left, the mean is 1.
    assert metrics["mis_is_ratio_mean_final"] == pytest.approx(1 - rejected, rel=1e-5)
