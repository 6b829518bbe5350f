"""The norm of the local layer spec against its formula in float64, differentiated by autograd."""

from types import SimpleNamespace

import pytest
import torch

from slime.utils.device import Accelerator, CompiledFunction, fused
from tests.support.processes.distributed import run_distributed

EPS = 1e-6


def _by_hand(hidden, weight, around_zero):
    hidden, weight = hidden.double(), weight.double() + around_zero
    return hidden / (hidden.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


class Compiling(Accelerator):
    """The CPU with what CUDA has: a compiler."""

    def fused(self, function):
        return CompiledFunction(function)


def _norm_worker(cases, is_compiled):
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.backends.megatron_utils import layer_spec
    from slime.backends.megatron_utils.layer_spec import RMSNorm

    if is_compiled:
        accelerator = Compiling()
        layer_spec.get_accelerator = lambda: accelerator

    found = {}
    for name, (dtype, around_zero, scale, transposed) in cases.items():
        generator = torch.Generator().manual_seed(0)
        config = SimpleNamespace(
            normalization="RMSNorm", layernorm_zero_centered_gamma=around_zero, params_dtype=dtype,
            sequence_parallel=False, fp32_residual_connection=False,
        )  # fmt: skip
        norm = RMSNorm(config, 24, EPS)
        with torch.no_grad():
            norm.weight.copy_(torch.randn(24, generator=generator))
        hidden = (torch.randn(37, 3, 24, generator=generator) * scale).to(dtype)
        hidden[5] = 0
        hidden = (hidden.transpose(0, 1) if transposed else hidden).requires_grad_()
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, kept=kept: kept.append(tensor) or tensor, lambda tensor: tensor
        ):
            output = norm(hidden)
        kept = sum(tensor.numel() for tensor in kept if tensor is not norm.weight)
        slope = torch.randn(output.shape, generator=generator).to(dtype)
        ours = [output, *torch.autograd.grad(output, (hidden, norm.weight), slope)]
        hand = _by_hand(hidden, norm.weight, around_zero)
        hand = [hand, *torch.autograd.grad(hand, (hidden, norm.weight), slope.double())]
        part = hidden.detach()[1:2].requires_grad_()
        alone = norm(part)
        alone = [alone, *torch.autograd.grad(alone, part, slope[1:2])]
        alike = all(torch.equal(small, whole[1:2]) for small, whole in zip(alone, ours, strict=False))
        found[name] = [tensor.detach() for tensor in ours], [tensor.detach() for tensor in hand], kept, alike
    if is_compiled:
        for function in (layer_spec.norm_of_rows, layer_spec.gradients_of_norm):
            compiled = fused(function, accelerator)
            assert compiled.works and compiled._compiled is not None
    return found


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_norm_is_its_formula_and_keeps_its_input_and_a_number_per_row(is_compiled):
    cases = {
        "float32": (torch.float32, False, 1.0, False),
        "around zero": (torch.float32, True, 1.0, False),
        "small": (torch.float32, False, 1e-3, False),
        "large": (torch.float32, False, 1e6, False),
        "transposed": (torch.float32, False, 1.0, True),
        "float64": (torch.float64, False, 1.0, False),
        "bfloat16": (torch.bfloat16, False, 1.0, False),
        "bfloat16 around zero": (torch.bfloat16, True, 1.0, False),
    }
    if is_compiled:
        cases = {name: cases[name] for name in ("float32", "transposed", "bfloat16")}
    ((found),) = run_distributed(_norm_worker, 1, (cases, is_compiled))
    for name, (ours, hand, kept, alike) in found.items():
        dtype = cases[name][0]
        tolerance = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 2**-8}[dtype]
        for tensor, expected in zip(ours, hand, strict=True):
            assert tensor.dtype == dtype, name
            # Of the largest number of each tensor; for 16 bits that is what they round by.
            error = (tensor.double() - expected).abs().max() / expected.abs().max()
            assert error < tolerance, (name, error)
        if "around" not in name:
            assert kept == 37 * 3 * (24 + 1), name
        # A compiled row is made of no other one either, but one alone is made by another kernel.
        assert alike or is_compiled, f"{name}: a row depends on its neighbours"
