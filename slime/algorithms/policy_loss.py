"""Losses of policy and values, the ratios that they clip, and the weights that correct them, all per token.

PPO clip (arXiv 1707.06347, equation 7) has separate bounds (arXiv 2503.14476, equation 10) and dual clip (arXiv 1912.09729,
equation 5): a token with a negative advantage never costs more than c·|A|, however likely the new policy makes it.
CISPO (arXiv 2506.13585, equations 4 and 5) clips the importance weight instead of the objective: every token keeps a gradient.
Both get the ratio as `ppo_kl` = old log-prob − new log-prob; for GSPO `compute_gspo_kl` makes it, with one value per sequence.

The log-ratio of a sequence is the mean over its trained tokens; tokens of tools or the environment have no part in it. It is a
property of the whole response, so under context parallelism these functions take gathered log-probs. They return values that
are laid out like this rank's part of the response.

The engine sampled the tokens, and its numerics are not the trainer's. Importance weights w = π_train/π_rollout, taken before
the policy moves, correct for that. Truncated importance sampling (E. Ionides, "Truncated Importance Sampling", 2008; here per
token and with a lower bound too) moves w into a range; icepop (arXiv 2510.18855) drops tokens whose w is outside of it. Weights
are constants: no gradient flows through them.
"""

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from slime.algorithms.reduction import flat, per_token, require_equal_lengths, sums_of_responses
from slime.utils.errors import UserError


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and clip indicator (0 or 1, without gradient) per token, both float32 in the shape of `ppo_kl`.

    With the ratio ρ = e^{−ppo_kl}: loss = max(−ρA, −clip(ρ, 1−ε, 1+ε_high)·A), and with `eps_clip_c` (c > 1), where A < 0,
    min(that, −cA). The indicator tells where the clipped term is the larger one.
    Raises UserError if c is 1 or less.
    """
    if eps_clip_c is not None and eps_clip_c <= 1.0:
        raise UserError(f"--eps-clip-c {eps_clip_c}: the dual-clip bound must be above 1")
    advantages = advantages.float()
    ratio = importance_ratio(ppo_kl)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, (clipped > unclipped).float()


def compute_cispo_loss(
    ppo_kl: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and clip indicator (0 or 1, without gradient) per token, both float32 in the shape of `log_probs`.

    loss = −clip(ρ, 1−ε, 1+ε_high)·A·log π with ρ = e^{−ppo_kl}; only `log_probs` carries a gradient, the clipped ratio is a
    constant weight. The indicator tells where clipping changed ρ. `eps_clip` of 1 or more leaves the lower side open.
    """
    ratio = importance_ratio(ppo_kl.detach())
    weight = ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    return -weight * advantages.float() * log_probs.float(), (weight != ratio).float()


def clipped_objective(
    ppo_kl: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, eps: tuple[float, float, float | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`compute_policy_loss` as an objective of `slime.algorithms.estimators`; `eps`: `--eps-clip`, `-high` and `-c`."""
    return compute_policy_loss(ppo_kl, advantages, *eps)


def cispo_objective(
    ppo_kl: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, eps: tuple[float, float, float | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`compute_cispo_loss` as an objective of `slime.algorithms.estimators`; it has no dual clip."""
    return compute_cispo_loss(ppo_kl, log_probs, advantages, *eps[:2])


def compute_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and clip indicator (0 or 1, without gradient) per token, both float32 in the shape of `values`.

    loss = max((clip(V, V_old − c, V_old + c) − G)², (V − G)²), without a factor ½ (arXiv 2005.12729, section 3, "value function
    clipping"); gradient through `values` only. Clipping can only make the loss larger: a value that moved more than c away from
    the old one gets no gradient for moving on, unless it is further from the return than the edge of the range is. The
    indicator tells where |V − V_old| > c.
    """
    values, old_values, returns = values.float(), old_values.detach().float(), returns.detach().float()
    change = values - old_values
    clipped = old_values + change.clamp(-value_clip, value_clip)
    loss = torch.maximum((clipped - returns).square(), (values - returns).square())
    return loss, (change.detach().abs() > value_clip).float()


# e^80 ≈ 5.5e34: room for a factor of a thousand below the end of float32.
MAX_EXPONENT = 80.0


def saturated(exponent: torch.Tensor) -> torch.Tensor:
    """min(exponent, 80), with the gradient of the identity; NaN stays NaN.

    A ratio that overflows may belong to a token that is clipped or masked, and would not matter. But zero times infinity is
    NaN, so that one such token would spoil the gradient of the whole batch. Only the value is bounded, not the gradient: a
    token that does matter gets a ratio and a gradient that are finite and absurdly large, which loss and gradient norm show.
    """
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


PerToken = torch.Tensor | Sequence[torch.Tensor]


def sequence_kl(log_probs: PerToken, old_log_probs: PerToken, loss_masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """k̄ = Σ (old − new)·m / max(Σ m, 1) of every sequence, float32 [number of sequences], with gradient.

    Each argument has one tensor [R_i] per sequence; the log-probs may come concatenated. The values at masked tokens, even NaN,
    change neither result nor gradient. Raises ValueError if lengths differ.
    """
    columns = {"log_probs": log_probs, "old_log_probs": old_log_probs}
    require_equal_lengths(
        loss_masks=loss_masks, **{name: rows for name, rows in columns.items() if not torch.is_tensor(rows)}
    )
    lengths = [len(mask) for mask in loss_masks]
    for name, rows in columns.items():
        if torch.is_tensor(rows) and rows.shape != (sum(lengths),):
            raise ValueError(f"{tuple(rows.shape)} {name} for {sum(lengths)} mask entries")
    if not len(loss_masks):
        return torch.zeros(0)
    difference = flat(old_log_probs).float() - flat(log_probs).float()
    mask = flat(loss_masks).to(difference.device, torch.float32)
    sums = sums_of_responses(difference.masked_fill(mask == 0, 0.0) * mask, lengths)
    return (sums / sums_of_responses(mask, lengths).clamp(min=1.0)).float()


def compute_gspo_kl(
    full_log_probs: PerToken,
    full_old_log_probs: PerToken,
    local_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> torch.Tensor:
    """`ppo_kl` of GSPO (arXiv 2507.18071, equation 7): at every local token, its sequence's mean of old − new log-prob.

    Args:
        full_log_probs, full_old_log_probs, loss_masks: as for `sequence_kl`, of whole responses.
        local_log_probs: one tensor per sequence, as long as this rank's part of the response; only its lengths count.

    Returns:
        float32 [sum of local lengths], with gradient through `full_log_probs`.
    """
    kl = sequence_kl(full_log_probs, full_old_log_probs, loss_masks)
    return per_token(kl, [len(tokens) for tokens in local_log_probs])


def off_policy_sequence_mask(
    full_log_probs: PerToken,
    full_old_log_probs: PerToken,
    advantages: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    delta: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens are kept and which are rejected, as factors of the loss (arXiv 2512.02556, section 3.1).

    A token is rejected if its advantage is negative and its sequence's mean of old − new over trained tokens is above `delta`.

    Args:
        full_log_probs, full_old_log_probs, loss_masks: as for `sequence_kl`, of whole responses.
        advantages: one tensor per sequence, this rank's part of the response.

    Returns:
        Two float32 tensors [sum of local lengths] without gradient, 1 or 0: kept, and rejected. The second, reduced like any
        other metric, is the fraction of trained tokens that were rejected.
    """
    with torch.no_grad():
        kl = compute_gspo_kl(full_log_probs, full_old_log_probs, advantages, loss_masks)
        negative = torch.cat(list(advantages)) < 0 if len(advantages) else torch.zeros(0, dtype=torch.bool)
        rejected = (negative & (kl > delta)).float()
    return 1.0 - rejected, rejected


def importance_weights(train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor) -> torch.Tensor:
    """w = e^{train − rollout} per token, float32 without gradient, in the shape of the arguments."""
    return torch.exp(saturated(train_log_probs.detach().float() - rollout_log_probs.detach().float()))


def truncated_weights(weights: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """`weights`, moved into [low, high]."""
    return weights.clamp(low, high)


def icepop_weights(weights: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """`weights` where they lie in [low, high], else 0."""
    return weights.masked_fill((weights < low) | (weights > high), 0.0)


def weighting_metrics(weights: torch.Tensor, applied: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per token, to be reduced: `tis` is w, `tis_clipfrac` tells where another weight is applied, `tis_abs` is |w − 1|."""
    return {"tis": weights, "tis_clipfrac": (applied != weights).float(), "tis_abs": (weights - 1.0).abs()}
