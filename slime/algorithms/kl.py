"""Estimators of KL(policy ‖ base) per token from sampled log-probs (J. Schulman, "Approximating KL Divergence", 2020).

With d = log π − log π_base of the sampled token: k1 = d, k2 = d²/2, k3 = e^{−d} − 1 + d. `low_var_kl` is k3 within ±10.

On-policy distillation rests on k1: token by token, the student is rewarded for those of its own samples that the teacher finds
likely. The log-ratio log π(token) − log π_teacher(token) is the one-sample estimate of the reverse KL (arXiv 2306.13649,
arXiv 2306.08543). Where it is subtracted from the advantages of any estimator, its expected gradient is that of the reverse KL.
"""

from collections.abc import Sequence

import torch

from slime.algorithms.policy_loss import saturated
from slime.algorithms.reduction import require_equal_lengths
from slime.utils.errors import UserError

KL_LOSS_TYPES = ("k1", "k2", "k3", "low_var_kl")
LOW_VAR_KL_BOUND = 10.0


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
    elif kl_loss_type in ("k3", "low_var_kl"):
        kl = torch.expm1(saturated(-difference)) + difference
    else:
        raise UserError(f"--kl-loss-type {kl_loss_type}: unknown; choose one of {', '.join(KL_LOSS_TYPES)}")

    if importance_ratio is not None:
        kl = importance_ratio * kl
    if kl_loss_type == "low_var_kl":
        kl = kl.clamp(-LOW_VAR_KL_BOUND, LOW_VAR_KL_BOUND)
    return kl


def approx_kl_of_responses(
    log_probs: Sequence[torch.Tensor] | None,
    log_probs_base: Sequence[torch.Tensor] | None,
    response_lengths: Sequence[int],
    kl_loss_type: str,
    *,
    device: torch.device | str | None = None,
) -> list[torch.Tensor]:
    """Estimated KL of every response for use in rewards: float32 [response_lengths[i]] each, without gradient.

    Zeros, on `device`, where there is nothing to compare because either side is None (no KL penalty, or no log-prob pass).
    Lengths are those of the local parts if the log-probs are.
    """
    if log_probs is None or log_probs_base is None:
        lengths = [int(length) for length in response_lengths]
        return list(torch.zeros(sum(lengths), dtype=torch.float32, device=device).split(lengths)) if lengths else []
    if [len(tokens) for tokens in log_probs] != [int(length) for length in response_lengths]:
        raise ValueError(
            f"log-probs of lengths {[len(t) for t in log_probs]} for responses of {list(response_lengths)}"
        )
    require_equal_lengths(log_probs=log_probs, log_probs_base=log_probs_base)
    if not len(log_probs):
        return []
    with torch.no_grad():
        kl = compute_approx_kl(torch.cat(list(log_probs)), torch.cat(list(log_probs_base)), kl_loss_type)
    return list(kl.split([len(tokens) for tokens in log_probs]))


@torch.no_grad()
def distilled_advantages(
    advantages: Sequence[torch.Tensor],
    log_probs: Sequence[torch.Tensor],
    teacher_log_probs: Sequence[torch.Tensor | None] | None,
    loss_masks: Sequence[torch.Tensor],
    coefficient: float,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(A − coefficient·(log_probs − teacher_log_probs), that difference), float32 [R_i] per sample; no argument is modified.

    All lists hold one tensor [R_i] per sample, of whole responses or of equal parts of them. A masked token is no action of
    the student: its advantage stays as it was, and its difference is 0.

    Raises ValueError if the teacher's log-probs, or those of a sample, are missing or of another length.
    """
    if teacher_log_probs is None:
        raise ValueError(
            "distillation needs teacher_log_probs, and the batch has none: does the teacher answer at all?"
        )
    missing = [sample for sample, teacher in enumerate(teacher_log_probs) if teacher is None]
    if missing:
        raise ValueError(f"teacher_log_probs are missing for {len(missing)} samples, the first ones {missing[:8]}")
    require_equal_lengths(
        advantages=advantages, log_probs=log_probs, teacher_log_probs=teacher_log_probs, loss_masks=loss_masks
    )
    if not len(advantages):
        return [], []
    lengths = [len(tokens) for tokens in advantages]
    student = torch.cat(list(log_probs)).float()
    teacher = torch.cat(list(teacher_log_probs)).to(student.device, torch.float32)
    trained = torch.cat(list(loss_masks)).to(student.device) != 0
    reverse_kl = torch.where(trained, student - teacher, 0.0)
    distilled = torch.cat(list(advantages)).float() - coefficient * reverse_kl
    return list(distilled.split(lengths)), list(reverse_kl.split(lengths))
