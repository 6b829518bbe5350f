"""Our Adam against torch's, and its state layout."""

import copy

import pytest
import torch

from slime.backends.megatron_utils.optimizer import Adam


def _parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((4, 3), (5,), (0,))]


def _run(optimizer, parameters, steps, first=0):
    for step in range(first, first + steps):
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.sin(torch.arange(parameter.numel()) + step + index).view_as(parameter)
        optimizer.step()


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_equals_torch(adam_w_mode):
    ours, theirs = _parameters(), _parameters()
    options = {"lr": 0.03, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.1}
    torch_class = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    _run(Adam(ours, adam_w_mode=adam_w_mode, **options), ours, steps=5)
    _run(torch_class(theirs, **options), theirs, steps=5)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-6, atol=1e-7)


def test_first_step_by_hand():
    # m = .1 g, v = .001 g^2, both bias-corrected to g and g^2: the update is -lr * g / (|g| + eps), after the decay.
    parameter = torch.tensor([1.0])
    parameter.grad = torch.tensor([0.5])
    Adam([parameter], lr=0.1, weight_decay=0.01).step()
    assert parameter.item() == pytest.approx(0.899, abs=1e-6)


def test_state_has_the_fused_layout_and_resumes_bitwise():
    parameters = _parameters()
    optimizer = Adam(parameters, lr=0.03)
    _run(optimizer, parameters, steps=2)
    assert set(optimizer.state[parameters[0]]) == {"exp_avg", "exp_avg_sq"}
    assert optimizer.param_groups[0]["step"] == 2

    saved, weights = copy.deepcopy(optimizer.state_dict()), [parameter.clone() for parameter in parameters]
    _run(optimizer, parameters, steps=2, first=2)
    resumed = Adam(weights, lr=0.03)
    resumed.load_state_dict(saved)
    _run(resumed, weights, steps=2, first=2)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, parameters, strict=True))


def test_parameters_without_gradient_stay():
    parameter = torch.ones(2)
    optimizer = Adam([parameter], weight_decay=0.5)
    optimizer.step()
    assert torch.equal(parameter, torch.ones(2))
    assert "step" not in optimizer.param_groups[0]
