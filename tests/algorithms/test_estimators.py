"""The rows of the estimators: the functions they name are there, and a row with its function is all that one takes."""

import pytest
import torch

from slime.algorithms import advantages, policy_loss
from slime.algorithms.estimators import ESTIMATORS, Estimator, estimator, names_of_estimators
from slime.training.advantages import compute_advantages_and_returns
from slime.training.rollout_data import RolloutData
from slime.utils.errors import UserError
from tests.support.models.grpo_batch import objective_args


@pytest.mark.parametrize("row", ESTIMATORS.values(), ids=ESTIMATORS)
def test_functions_of_a_row_exist(row):
    assert callable(getattr(advantages, row.advantages))
    assert callable(getattr(policy_loss, row.objective))


def test_who_divides_by_the_deviation_centres_too():
    assert [row.name for row in ESTIMATORS.values() if row.scales and not row.centers] == []


def test_what_the_published_estimators_do():
    facts = ("centers", "scales", "discounts", "counts_kl", "needs_critic", "needs_whitening", "ratio_of_sequence")
    assert {name: tuple(fact for fact in facts if getattr(row, fact)) for name, row in ESTIMATORS.items()} == {
        "grpo": ("centers", "scales"),
        "gspo": ("centers", "scales", "ratio_of_sequence"),
        "cispo": ("centers", "scales"),
        "reinforce_plus_plus": ("discounts", "counts_kl", "needs_whitening"),
        "reinforce_plus_plus_baseline": ("centers", "counts_kl", "needs_whitening"),
        "ppo": ("discounts", "counts_kl", "needs_critic"),
    }


def test_names_make_words_of_a_sentence():
    assert names_of_estimators("needs_critic") == "ppo"
    assert names_of_estimators("discounts", joined_by="and") == "reinforce_plus_plus and ppo"
    assert names_of_estimators("counts_kl", without=True) == "grpo, gspo or cispo"


def test_an_unknown_name_is_told_which_there_are():
    with pytest.raises(UserError, match="--advantage-estimator gpro: unknown; there are grpo, gspo, cispo, reinf"):
        estimator("gpro")


def test_a_row_and_a_function_are_a_new_estimator(monkeypatch):
    def halved(inputs):
        whole = [torch.full_like(mask, reward) for mask, reward in zip(inputs.loss_masks, inputs.rewards, strict=True)]
        return [reward / 2 for reward in whole], whole

    monkeypatch.setattr(advantages, "halved", halved, raising=False)
    monkeypatch.setitem(ESTIMATORS, "half", Estimator("half", "halved"))
    data = RolloutData({
        "tokens": [torch.arange(4), torch.arange(5)], "total_lengths": [4, 5], "response_lengths": [2, 3],
        "loss_masks": [torch.ones(2), torch.ones(3)], "rewards": [0.5, -1.5],
    })  # fmt: skip
    compute_advantages_and_returns(objective_args(advantage_estimator="half"), data)
    assert [tokens.tolist() for tokens in data["advantages"]] == [[0.25] * 2, [-0.75] * 3]
    assert [tokens.tolist() for tokens in data["returns"]] == [[0.5] * 2, [-1.5] * 3]
