import inspect
import math
from types import SimpleNamespace

import pytest
import torch

from slime.algorithms.reduction import sum_of_sample_mean
from slime.training.custom_functions import icepop_function, vanilla_tis_function

TRAIN = [torch.tensor([-1.0, -1.2]), torch.tensor([-0.3])]
ROLLOUT = [torch.tensor([-2.0, -1.0]), torch.tensor([-0.3])]
MASKS = [torch.tensor([1, 1]), torch.tensor([1])]


def correct(function, low=0.0, high=2.0, pg_loss=(1.0, -2.0, 3.0), **changes):
    leaf = torch.tensor(pg_loss, requires_grad=True)
    keywords = {
        "args": SimpleNamespace(tis_clip_low=low, tis_clip=high), "pg_loss": leaf, "train_log_probs": TRAIN,
        "rollout_log_probs": ROLLOUT, "loss_masks": MASKS, "total_lengths": [4, 3], "response_lengths": [2, 1],
        "of_a_later_version": 1, **changes,
    }  # fmt: skip
    loss, masks, metrics = function(**keywords)
    loss.sum().backward()
    return loss.tolist(), masks, metrics, leaf.grad.tolist()


def test_truncated_importance_sampling():
    loss, masks, metrics, gradient = correct(vanilla_tis_function)
    assert loss == pytest.approx([2.0, -2 * 0.818730753, 3.0], rel=1e-6)
    assert gradient == pytest.approx([2.0, 0.818730753, 1.0], rel=1e-6)
    assert all(ours is theirs for ours, theirs in zip(masks, MASKS, strict=True))
    assert {name: values.tolist() for name, values in metrics.items()} == {
        "tis": pytest.approx([2.718281828, 0.818730753, 1.0], rel=1e-6),
        "tis_clipfrac": [1, 0, 0],
        "tis_abs": pytest.approx([1.718281828, 0.181269247, 0.0], rel=1e-6),
    }


def test_icepop():
    loss, _, metrics, gradient = correct(icepop_function, low=0.5)
    assert loss == pytest.approx([0.0, -2 * 0.818730753, 3.0], rel=1e-6)
    assert gradient == pytest.approx([0.0, 0.818730753, 1.0], rel=1e-6)
    assert metrics["tis_clipfrac"].tolist() == [1, 0, 0]


@pytest.mark.parametrize("function", [vanilla_tis_function, icepop_function])
def test_no_gradient_reaches_the_weights(function):
    train = [row.clone().requires_grad_() for row in TRAIN]
    correct(function, train_log_probs=train)
    assert all(row.grad is None for row in train)


def test_l14_metrics_see_the_tokens_that_were_rejected():
    loss, masks, metrics, _ = correct(icepop_function, low=5.0, high=6.0)
    assert loss == [0.0, 0.0, 0.0]
    fraction = sum_of_sample_mean(metrics["tis_clipfrac"], masks, [2.0, 1.0]) / 2
    assert fraction.item() == 1.0
    mean_weight = sum_of_sample_mean(metrics["tis"], masks, [2.0, 1.0]) / 2
    assert mean_weight.item() == pytest.approx(((math.e + math.exp(-0.2)) / 2 + 1) / 2, rel=1e-6)


def test_a_rejected_token_may_have_an_infinite_loss():
    loss, _, _, gradient = correct(icepop_function, low=0.5, pg_loss=(math.inf, 1.0, 1.0))
    assert loss[0] == 0.0 and gradient[0] == 0.0


def test_a_shard_without_tokens():
    loss, masks, metrics, _ = correct(
        vanilla_tis_function, pg_loss=(), train_log_probs=[], rollout_log_probs=[], loss_masks=[]
    )
    assert loss == [] and masks == [] and metrics["tis"].tolist() == []


def test_log_probs_of_other_tokens_than_the_loss_are_an_error():
    with pytest.raises(ValueError, match=r"\(3,\) losses for \(2,\) .*trainer and \(3,\) of the engine"):
        correct(vanilla_tis_function, train_log_probs=TRAIN[:1])


@pytest.mark.parametrize("function", [vanilla_tis_function, icepop_function])
def test_the_signature_is_that_of_the_plug_in(function):
    parameters = inspect.signature(function).parameters.values()
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == [
        "args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths"
    ]  # fmt: skip
    assert not [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
