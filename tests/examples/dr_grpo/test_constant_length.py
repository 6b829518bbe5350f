"""The example through the plug-in loader and the loss: every token weighs the same, whatever response it stands in."""

from pathlib import Path

import pytest
import torch

from slime.utils.plugin_loader import load_function

PATH = f"{Path(__file__).parents[3]}/examples/dr_grpo/constant_length.py:constant_length_reducer"


@pytest.fixture
def make_reducer():
    return load_function(PATH, flag="--custom-pg-loss-reducer-function-path")


def test_sum_of_trained_tokens_by_a_constant(make_reducer):
    masks = [torch.tensor([1, 0, 1]), torch.tensor([1, 1]), torch.tensor([0])]
    reduce = make_reducer([5, 4, 2], [3, 2, 1], masks, False)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, float("nan")])
    assert reduce(values).item() == pytest.approx((1 + 3 + 4 + 5) / 32)


def test_the_gradient_of_a_token_does_not_depend_on_its_response(make_reducer):
    masks = [torch.ones(2), torch.ones(20)]
    values = torch.zeros(22, requires_grad=True)
    make_reducer([3, 30], [2, 20], masks, False)(values).backward()
    assert values.grad.tolist() == pytest.approx([1 / 32] * 22)


def test_nothing_to_train_gives_zero(make_reducer):
    assert make_reducer([], [], [], False)(torch.zeros(0)).item() == 0


def test_per_token_loss_is_refused(make_reducer):
    with pytest.raises(ValueError, match="--calculate-per-token-loss"):
        make_reducer([3], [2], [torch.ones(2)], True)
