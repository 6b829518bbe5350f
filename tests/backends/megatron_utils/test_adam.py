"""Our Adam against torch's, its state layout, and the same with narrow states and in host memory."""

import copy

import pytest
import torch

from slime.backends.megatron_utils import adam
from slime.backends.megatron_utils.adam import (
    MOMENTS,
    Adam,
    HostShare,
    PrecisionAwareAdam,
    main_parameter,
    set_main_parameter,
)


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


SETTINGS = {"lr": 0.03, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.1}
HOSTS = {
    "device": None,
    "host": HostShare(1.0),
    "half": HostShare(0.5, overlaps=True, pins_state=False, pins_gradients=False),
}


def _run_both(monkeypatch, dtype, steps=5, gradients_in=torch.float32, **changes):
    """(usual optimizer, its parameters, optimizer on the weights, its parameters) after the same gradients. Small blocks, so
    that tensors have several."""
    monkeypatch.setattr(adam, "BLOCK", 5)
    generator = torch.Generator().manual_seed(1)
    own = [torch.randn(shape, generator=generator).to(dtype) for shape in ((4, 6), (5,), (1,), (0,))]
    usual = [weight.float().clone() for weight in own]
    adam_w_mode = changes.pop("adam_w_mode", True)
    optimizers = (
        Adam(usual, adam_w_mode=adam_w_mode, **SETTINGS),
        PrecisionAwareAdam(own, adam_w_mode=adam_w_mode, **SETTINGS, **changes),
    )
    for _ in range(steps):
        for weight, main in zip(own, usual, strict=True):
            weight.decoupled_grad = (torch.randn(weight.shape, generator=generator) * 1e-3).to(gradients_in)
            main.grad = weight.decoupled_grad.float()
        for optimizer in optimizers:
            optimizer.step()
    return optimizers[0], usual[:3], optimizers[1], own[:3]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_with_float32_states_it_is_adam_on_float32_copies_bit_for_bit(monkeypatch, host, dtype, adam_w_mode):
    for remainders in (True, False):
        usual, copies, optimizer, weights = _run_both(
            monkeypatch, dtype, adam_w_mode=adam_w_mode, host=HOSTS[host], store_param_remainders=remainders
        )
        for copied, weight in zip(copies, weights, strict=True):
            assert torch.equal(main_parameter(optimizer, weight), copied.view(-1))
            assert torch.equal(weight, copied.to(dtype))
            for name in MOMENTS:
                assert torch.equal(optimizer.get_unscaled_state(weight, name), usual.state[copied][name].view(-1))
        assert optimizer.param_groups[0]["step"] == 5


def test_the_hosts_share_by_torchs_fused_adam_rounds_a_little_differently(monkeypatch):
    host = HostShare(1.0, by_torch=True)
    for adam_w_mode in (True, False):
        _, copies, optimizer, weights = _run_both(
            monkeypatch, torch.bfloat16, host=host, gradients_in=torch.bfloat16, adam_w_mode=adam_w_mode
        )
        for copied, weight in zip(copies, weights, strict=True):
            torch.testing.assert_close(main_parameter(optimizer, weight), copied.view(-1), rtol=1e-5, atol=1e-6)


def test_moments_in_bfloat16_by_hand():
    """beta1 .5, beta2 .75, lr 1/8, eps 0. Step 1: m = .5 * 1.01 = .505, rounded to bfloat16 .50390625 (steps of 2^-8);
    v = .25 * 1.0201 = .255025 → .255859375 (steps of 2^-9). The update has the unrounded ones: m / .5 = 1.01,
    sqrt(v / .25) = 1.01, so w = 1 - 1/8. Step 2, gradient 0: m = .251953125, m / .75 = .3359375; v = .19189453125,
    v / .4375 = .438616071, root .662280957; w = .875 - .3359375 / .662280957 / 8 = .811594615; stored m = .251953125 and
    v = .19189453125 → .19140625 (steps of 2^-10, halfway .19189453125 goes to the even one, .1923828125 or .19140625)."""
    weight = torch.tensor([1.0], dtype=torch.bfloat16)
    optimizer = PrecisionAwareAdam(
        [weight], lr=0.125, betas=(0.5, 0.75), eps=0.0, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16
    )
    weight.decoupled_grad = torch.tensor([1.01])
    optimizer.step()
    state = optimizer.state[weight]
    assert (state["exp_avg"].item(), state["exp_avg_sq"].item()) == (0.50390625, 0.255859375)
    assert main_parameter(optimizer, weight).item() == pytest.approx(0.875, abs=1e-7)
    weight.decoupled_grad = torch.zeros(1)
    optimizer.step()
    assert state["exp_avg"].item() == 0.251953125
    assert state["exp_avg_sq"].item() in (0.19140625, 0.1923828125)
    assert main_parameter(optimizer, weight).item() == pytest.approx(0.811594615, abs=1e-6)
    assert {name: tensor.dtype for name, tensor in state.items()} == {
        "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "master_param": torch.int16
    }  # fmt: skip


@pytest.mark.parametrize(("dtype", "near"), [(torch.float16, 2e-3), (torch.uint8, 0.13)])
def test_values_of_a_small_range_are_stored_beside_a_scale_and_are_read_as_they_were(monkeypatch, dtype, near):
    """Values down to 1e-30 in one block and up to 1e9 in another; relative to the largest of their block."""
    monkeypatch.setattr(adam, "BLOCK", 4)
    weight = torch.zeros(8, dtype=torch.bfloat16)
    optimizer = PrecisionAwareAdam([weight], exp_avg_sq_dtype=dtype, master_weight_dtype=torch.float16)
    optimizer.initialize_state(weight)
    # The largest of the second block is rounded up to a power of two.
    values = torch.tensor([1e-30, 5e-31, 2.7e-30, 0.0, 2.0**30 - 2.0**18, 3.3e8, 0.0, 7e7])
    for name in ("exp_avg_sq", "master_param"):
        optimizer.set_scaled_state(weight, name, values)
        read = optimizer.get_unscaled_state(weight, name)
        assert torch.isfinite(read).all() and optimizer.state[weight][name].dtype in (dtype, torch.float16)
        torch.testing.assert_close(read, values, rtol=near, atol=0)
        bits = optimizer.state[weight][name].clone()
        optimizer.set_scaled_state(weight, name, read)
        assert torch.equal(optimizer.get_unscaled_state(weight, name), read)
        assert torch.equal(optimizer.state[weight][name], bits)
    optimizer.set_scaled_state(weight, "exp_avg_sq", torch.zeros(8))
    assert not optimizer.get_unscaled_state(weight, "exp_avg_sq").any()


def test_a_weight_and_its_remainder_are_one_float32():
    bits = [
        0x3F800000,
        0x3F808000,
        0x3F818000,
        0x3F807FFF,
        0x3F808001,
        -0x407F8000,
        0,
        -0x80000000,
        0x7F800000,
        0x00012345,
    ]
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    weight = torch.zeros(len(bits), dtype=torch.bfloat16)
    optimizer = PrecisionAwareAdam([weight])
    optimizer.initialize_state(weight)
    set_main_parameter(optimizer, weight, values)
    assert torch.equal(main_parameter(optimizer, weight).view(torch.int32), values.view(torch.int32))
    # The nearest; of two as near, 1 + 2^-8 among them, the one further from 0.
    upper = [0x3F80, 0x3F81, 0x3F82, 0x3F80, 0x3F81, -0x407F, 0, -0x8000, 0x7F80, 0x0001]
    assert weight.view(torch.int16).tolist() == upper


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F808000])
def test_what_is_no_number_stays_none(bits):
    weight = torch.ones(1, dtype=torch.bfloat16)
    optimizer = PrecisionAwareAdam([weight])
    optimizer.initialize_state(weight)
    set_main_parameter(optimizer, weight, torch.tensor([bits], dtype=torch.int32).view(torch.float32))
    assert weight.isnan().all() and main_parameter(optimizer, weight).isnan().all()


def test_loaded_groups_make_states_and_keep_those_that_are_there():
    weights = [torch.ones(3, dtype=torch.bfloat16), torch.ones(2)]
    optimizer = PrecisionAwareAdam(weights, exp_avg_dtype=torch.bfloat16)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state[weights[0]]
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"exp_avg": torch.empty(3)}}})
    dtypes = [{name: tensor.dtype for name, tensor in optimizer.state[weight].items()} for weight in weights]
    moments = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32}
    assert dtypes == [{**moments, "master_param": torch.int16}, moments]
    optimizer.set_scaled_state(weights[1], "exp_avg_sq", torch.full((2,), 7.0))
    settings = optimizer.state_dict()
    settings["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(settings)
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.state[weights[1]]["exp_avg_sq"].tolist() == [7.0, 7.0]


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 0), (0.3, 30), (0.5, 50), (1.0, 100)])
def test_the_hosts_share_is_made_of_whole_tensors(fraction, expected):
    weights = [torch.ones(size, dtype=torch.bfloat16) for size in (20, 10, 20, 50)]
    optimizer = PrecisionAwareAdam(weights, host=HostShare(fraction))
    for weight in weights:
        optimizer.initialize_state(weight)
    # On the host main parameters are whole.
    hosted = [weight.numel() for weight in weights if optimizer.state[weight]["master_param"].dtype == torch.float32]
    assert sum(hosted) == expected


def test_it_takes_no_closure():
    with pytest.raises(TypeError, match="closure"):
        PrecisionAwareAdam([torch.ones(1)]).step(lambda: 0.0)
