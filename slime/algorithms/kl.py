"""Estimators of KL(policy ‖ base) per token from sampled log-probs (J. Schulman, "Approximating KL Divergence", 2020).

With d = log π − log π_base of the sampled token: k1 = d, k2 = d²/2, k3 = e^{−d} − 1 + d. `low_var_kl` is k3 within ±10.
"""

import torch

from slime.utils.errors import UserError

KL_LOSS_TYPES = ("k1", "k2", "k3", "low_var_kl")
LOW_VAR_KL_BOUND = 10.0
# Largest exponent that float32 can hold with room to spare: an infinity inside a clamped value would make its gradient NaN.
MAX_EXPONENT = 80.0


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    kl_loss_type: str,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Estimated KL per token, float32, in the shape of `log_probs`.

    `importance_ratio` π/π_old (with its gradient) makes estimator and gradient unbiased when the tokens were sampled from
    π_old; it multiplies before `low_var_kl` is clamped. Raises UserError for an unknown `kl_loss_type`.
    """
    difference = log_probs.float() - log_probs_base.float()
    if kl_loss_type == "k1":
        kl = difference
    elif kl_loss_type == "k2":
        kl = difference.square() / 2
    elif kl_loss_type == "k3":
        kl = torch.expm1(-difference) + difference
    elif kl_loss_type == "low_var_kl":
        kl = torch.expm1((-difference).clamp(max=MAX_EXPONENT)) + difference
    else:
        raise UserError(f"--kl-loss-type {kl_loss_type}: unknown; choose one of {', '.join(KL_LOSS_TYPES)}")

    if importance_ratio is not None:
        kl = importance_ratio * kl
    if kl_loss_type == "low_var_kl":
        kl = kl.clamp(-LOW_VAR_KL_BOUND, LOW_VAR_KL_BOUND)
    return kl
