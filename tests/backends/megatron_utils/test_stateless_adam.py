"""Adam without memory: the first step of Adam, again and again."""

import pytest
import torch

from slime.backends.megatron_utils.adam import Adam
from slime.backends.megatron_utils.stateless_adam import StatelessAdam


def test_step_by_hand():
    # 1 · (1 − .1 · .01) − .1 · .5 / (.5 + 1e-8)
    parameter = torch.tensor([1.0], dtype=torch.float64)
    parameter.grad = torch.tensor([0.5], dtype=torch.float64)
    StatelessAdam([parameter], lr=0.1, weight_decay=0.01).step()
    assert parameter.item() == pytest.approx(0.899000002, abs=1e-12)


def test_every_step_is_the_first_step_of_adam():
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(shape, generator=generator) for shape in ((4, 3), (5,), (0,))]
    options = {"lr": 0.03, "betas": (0.9, 0.98), "eps": 1e-3, "weight_decay": 0.1}
    optimizer = StatelessAdam(ours, **options)
    for _ in range(4):
        expected = [parameter.clone() for parameter in ours]
        for our, their in zip(ours, expected, strict=True):
            our.grad = their.grad = torch.randn(our.shape, generator=generator) * 1e-3
        optimizer.step()
        Adam(expected, **options).step()
        for our, their in zip(ours, expected, strict=True):
            torch.testing.assert_close(our, their, rtol=1e-6, atol=1e-7)
    assert not optimizer.state and all("step" not in group for group in optimizer.param_groups)


def test_a_zero_gradient_only_decays_and_none_does_nothing():
    decayed, untouched = torch.ones(3), torch.ones(3)
    decayed.grad = torch.zeros(3)
    StatelessAdam([decayed, untouched], lr=0.5, weight_decay=0.5).step()
    assert decayed.tolist() == [0.75] * 3 and untouched.tolist() == [1.0] * 3


def test_settings_that_are_not_given_are_those_of_torchs_adam():
    ours = StatelessAdam([torch.ones(1)]).defaults
    assert ours.keys() == {"lr", "betas", "eps", "weight_decay"}
    assert ours.items() <= torch.optim.Adam([torch.ones(1)]).defaults.items()


def test_coupled_decay_is_refused():
    with pytest.raises(ValueError, match="decouples"):
        StatelessAdam([torch.ones(1)], adam_w_mode=False)
