"""Ratios of whole sequences: GSPO's objective and the off-policy sequence mask.

The log-ratio of a sequence is the mean over its trained tokens; tokens of tools or the environment have no part in it. It is a
property of the full response, so under context parallelism the log-probs come in gathered; what is returned is laid out like
this rank's part of the response.
"""

from collections.abc import Sequence

import torch


def sequence_kl(
    log_probs: Sequence[torch.Tensor], old_log_probs: Sequence[torch.Tensor], loss_masks: Sequence[torch.Tensor]
) -> torch.Tensor:
    """k̄ = Σ (old − new)·m / max(Σ m, 1) of every sequence, float32 [number of sequences], with gradient.

    Each argument: one tensor [R_i] per sequence. What masked tokens hold, also NaN, changes neither value nor gradient.
    """
    means = [
        _masked_mean(old.float() - new.float(), mask)
        for new, old, mask in zip(log_probs, old_log_probs, loss_masks, strict=True)
    ]
    return torch.stack(means) if means else torch.zeros(0)


def compute_gspo_kl(
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    local_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The sequence's old − new log-prob per token, for every local token: `ppo_kl` of GSPO (arXiv 2507.18071, equation 7).

    Args:
        full_log_probs, full_old_log_probs, loss_masks: one tensor [R_i] per sequence, the whole response.
        local_log_probs: one tensor per sequence, as long as this rank's part of the response; only its lengths count.

    Returns:
        float32 [sum of local lengths], with gradient through `full_log_probs`.
    """
    kl = sequence_kl(full_log_probs, full_old_log_probs, loss_masks)
    return _per_token(kl, local_log_probs)


def off_policy_sequence_mask(
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    advantages: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    delta: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What to multiply the loss of each token by, and where that is zero (arXiv 2512.02556, section 3.1).

    A token is rejected if its advantage is negative and its sequence's mean of old − new over trained tokens is above `delta`.

    Args:
        full_log_probs, full_old_log_probs, loss_masks: one tensor [R_i] per sequence, the whole response.
        advantages: one tensor per sequence, this rank's part of the response.

    Returns:
        Two float32 tensors [sum of local lengths] without gradient, 1 or 0: kept, and rejected. The second, reduced like any
        other metric, is the fraction of trained tokens that were rejected.
    """
    with torch.no_grad():
        kl = _per_token(sequence_kl(full_log_probs, full_old_log_probs, loss_masks), advantages)
        negative = torch.cat(list(advantages)) < 0 if len(advantages) else torch.zeros(0, dtype=torch.bool)
        rejected = (negative & (kl > delta)).float()
    return 1.0 - rejected, rejected


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if values.shape != mask.shape:
        raise ValueError(f"{tuple(values.shape)} log-probs for {tuple(mask.shape)} mask entries of one response")
    mask = mask.to(values.device, torch.float32)
    return (values.masked_fill(mask == 0, 0.0) * mask).sum() / mask.sum().clamp(min=1.0)


def _per_token(per_sequence: torch.Tensor, local: Sequence[torch.Tensor]) -> torch.Tensor:
    lengths = torch.tensor([len(tokens) for tokens in local], dtype=torch.int64)
    return per_sequence.repeat_interleave(lengths.to(per_sequence.device), output_size=int(lengths.sum()))
