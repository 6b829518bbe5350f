"""Probability ratios from differences of log-probs, without infinities where float32 ends.

A ratio that overflows need not matter: its token may be clipped, or masked. But zero times infinity is NaN, so one such token
would spoil the gradient of the whole batch. Here the exponent stops at 80, in the value only: ratio and gradient of a token
that does matter are finite and absurdly large, so that its loss or gradient norm is noticed instead of vanishing.
"""

import torch
from torch.autograd.function import once_differentiable

# e^80 ≈ 5.5e34: room for a factor of a thousand below the end of float32.
MAX_EXPONENT = 80.0


def saturated(exponent: torch.Tensor) -> torch.Tensor:
    """min(exponent, 80), with the gradient of the identity; NaN stays NaN."""
    return _Saturated.apply(exponent)


def importance_ratio(ppo_kl: torch.Tensor) -> torch.Tensor:
    """π/π_old = e^{−ppo_kl} per token, float32 with gradient; `ppo_kl` = old log-prob − new log-prob."""
    return torch.exp(saturated(-ppo_kl.float()))


class _Saturated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exponent):
        return exponent.clamp(max=MAX_EXPONENT)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient
