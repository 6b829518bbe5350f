"""Terms of the loss that the numeric test of the whole step does not reach."""

from types import SimpleNamespace

import pytest
import torch

from slime.training.loss import loss_function, response_log_probs
from slime.training.rollout_data import RolloutData
from slime.utils.errors import UserError
from tests.support.models.grpo_batch import objective_args

VOCABULARY = 7


def micro_batch(**columns):
    tokens = [torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 0])]
    data = RolloutData({
        "tokens": tokens, "total_lengths": [4, 3], "response_lengths": [2, 1], "rollout_mask_sums": [2.0, 1.0],
        "loss_masks": [torch.tensor([1, 1]), torch.tensor([1])],
        "advantages": [torch.tensor([1.0, 1.0]), torch.tensor([-1.0])],
        "ref_log_probs": [torch.zeros(2), torch.zeros(1)], **columns,
    })  # fmt: skip
    return data.micro_batch([0, 1], pad_multiple=4)


def logits(seed=0):
    return torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def expected_log_probs(values, temperature):
    log_probs = torch.log_softmax(values / temperature, -1)
    return torch.stack([log_probs[1, 3], log_probs[2, 4], log_probs[5, 0]])


def test_without_old_log_probs_the_ratio_is_one():
    args = objective_args(entropy_coef=0.0, use_kl_loss=False)
    loss, metrics = loss_function(args, micro_batch(), logits(), None)
    assert float(loss) == pytest.approx(-1.0 + 1.0)
    assert float(metrics["ppo_kl"]) == 0 and float(metrics["pg_clipfrac"]) == 0


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_without_old_log_probs_the_gradient_is_that_of_the_weighted_log_probs(estimator):
    """A ratio of a log-prob to itself, with the gradient of both, would be 1 like this one, and teach nothing."""
    args = objective_args(entropy_coef=0.0, use_kl_loss=False, advantage_estimator=estimator)
    values, plain = logits(), logits()
    loss_function(args, micro_batch(), values, None)[0].backward()
    log_probs = expected_log_probs(plain, 0.7)
    (-log_probs[:2].mean() + log_probs[2]).backward()
    torch.testing.assert_close(values.grad, plain.grad)


def test_engine_log_probs_are_the_old_ones_on_demand():
    args = objective_args(use_rollout_logprobs=True, entropy_coef=0.0, use_kl_loss=False)
    values = logits()
    rollout = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]
    _, metrics = loss_function(args, micro_batch(rollout_log_probs=rollout), values, None)
    difference = expected_log_probs(values, 0.7) - torch.cat(rollout)
    assert float(metrics["ppo_kl"]) == pytest.approx(float(-(difference[:2].mean() + difference[2])), abs=1e-5)
    total = difference.abs()
    assert float(metrics["train_rollout_logprob_abs_diff"]) == pytest.approx(
        float(total[:2].mean() + total[2]), abs=1e-5
    )


def test_the_tie_to_logits_that_the_loss_leaves_out_takes_no_second_gradient(monkeypatch):
    from slime.training import log_probs

    written, write = [], log_probs._chunked_gradient

    def noted(*arguments):
        gradient = write(*arguments)
        written.append(gradient.data_ptr())
        return gradient

    monkeypatch.setattr(log_probs, "_chunked_gradient", noted)
    values, arrived = logits() * 1.0, []
    values.register_hook(lambda gradient: arrived.append((gradient.data_ptr(), gradient.clone())))
    reference = logits()
    loss_function(objective_args(), micro_batch(), reference, None)[0].backward()
    args = objective_args(loss_type="custom_loss", custom_loss_function_path=f"{__file__}:the_policy_loss")
    loss_function(args, micro_batch(), values, None)[0].backward()
    assert arrived[0][0] == written[-1]
    torch.testing.assert_close(arrived[0][1], reference.grad, rtol=0, atol=0)


def the_policy_loss(args, batch, values, reduce):
    from slime.training.loss import policy_loss_function

    return policy_loss_function(args, batch, values, None, reduce)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sft_is_the_negative_log_likelihood_per_token(temperature):
    """Of the data, which nobody sampled: at no temperature."""
    args = objective_args(loss_type="sft_loss", calculate_per_token_loss=True, rollout_temperature=temperature)
    values = logits()
    loss, _ = loss_function(args, micro_batch(), values, None)
    assert float(loss) == pytest.approx(float(-expected_log_probs(values, 1.0).sum()), abs=1e-5)


def test_sft_in_a_loss_of_the_users_is_at_no_temperature_either():
    from slime.backends.megatron_utils.loss import sft_loss_function

    args = objective_args(loss_type="custom_loss", calculate_per_token_loss=True)
    loss, _ = sft_loss_function(args, micro_batch(), logits(), torch.sum)
    assert float(loss) == pytest.approx(float(-expected_log_probs(logits(), 1.0).sum()), abs=1e-5)


@pytest.mark.parametrize(("loss_type", "temperature"), [("sft_loss", 1.0), ("policy_loss", 0.7)])
def test_log_probs_and_entropy_are_those_of_the_loss(loss_type, temperature):
    args, values = objective_args(loss_type=loss_type), logits()
    log_probs, entropy = response_log_probs(args, micro_batch(), values, None, with_entropy=True)
    torch.testing.assert_close(log_probs, expected_log_probs(values, temperature))
    rows = (values.detach() / temperature).log_softmax(-1)
    torch.testing.assert_close(entropy, micro_batch()["stream"].responses(-(rows.exp() * rows).sum(-1)))


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_the_entropy_is_always_reported_and_has_a_gradient_only_where_it_has_a_weight(monkeypatch, coefficient):
    """Its gradient costs a pass over all logits."""
    from slime.training import loss

    entropies, compute = [], loss.calculate_log_probs_and_entropy

    def noted(*arguments, **options):
        log_probs, entropy = compute(*arguments, **options)
        entropies.append(entropy)
        return log_probs, entropy

    monkeypatch.setattr(loss, "calculate_log_probs_and_entropy", noted)
    args, values = objective_args(entropy_coef=coefficient), logits()
    _, metrics = loss_function(args, micro_batch(), values, None)
    rows = (values.detach() / 0.7).log_softmax(-1)
    first, second, third = (-(rows.exp() * rows).sum(-1))[[1, 2, 5]].tolist()
    assert float(metrics["entropy_loss"]) == pytest.approx((first + second) / 2 + third, rel=1e-5)
    assert [entropy.requires_grad for entropy in entropies] == [coefficient != 0]


def test_unbiased_kl_weights_by_the_ratio():
    old = [torch.tensor([-1.2, -1.2]), torch.tensor([-1.2])]
    values = logits()
    _, metrics = loss_function(objective_args(use_unbiased_kl=True), micro_batch(log_probs=old), values, None)
    log_probs = expected_log_probs(values, 0.7)
    kl = torch.exp(log_probs + 1.2) * (torch.exp(-log_probs) - 1 + log_probs)
    assert float(metrics["kl_loss"]) == pytest.approx(float(kl[:2].mean() + kl[2]), rel=1e-4)


def constant_length_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: values.sum() / 100


def test_custom_reducer_acts_on_the_policy_gradient_only():
    args = objective_args(custom_pg_loss_reducer_function_path=f"{__file__}:constant_length_reducer")
    default = loss_function(objective_args(), micro_batch(), logits(), None)[1]
    custom = loss_function(args, micro_batch(), logits(), None)[1]
    assert float(custom["pg_loss"]) == pytest.approx(-0.01)
    assert float(custom["kl_loss"]) == float(default["kl_loss"])


def squared_logits(args, batch, values, sum_of_sample_mean):
    rows = batch["stream"].responses((values**2).mean(-1))
    return sum_of_sample_mean(rows), {"mine": rows.sum()}


def no_logits(args, batch, values, sum_of_sample_mean):
    return torch.zeros(()), {}


def test_a_loss_of_the_users_that_reads_no_logits_still_has_a_backward_pass():
    """Other ranks wait in theirs."""
    args = objective_args(loss_type="custom_loss", custom_loss_function_path=f"{__file__}:no_logits")
    values = logits()
    loss, _ = loss_function(args, micro_batch(), values, None)
    loss.backward()
    assert values.grad.shape == values.shape and not values.grad.any()


def no_tuple(args, batch, values, sum_of_sample_mean):
    return values.sum()


def test_custom_loss():
    args = objective_args(loss_type="custom_loss", custom_loss_function_path=f"{__file__}:squared_logits")
    values = logits()
    loss, metrics = loss_function(args, micro_batch(), values, None)
    rows = (values**2).mean(-1)
    assert float(loss) == pytest.approx(float((rows[1] + rows[2]) / 2 + rows[5]), rel=1e-5)
    assert set(metrics) == {"loss", "mine"}
    args = SimpleNamespace(**{**vars(args), "custom_loss_function_path": f"{__file__}:no_tuple"})
    with pytest.raises(UserError, match="--custom-loss-function-path .* returned Tensor"):
        loss_function(args, micro_batch(), logits(), None)
