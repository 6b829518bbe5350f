"""Policy-gradient objectives, per token.

PPO clip (arXiv 1707.06347, equation 7) with separate bounds (arXiv 2503.14476, equation 10) and dual clip (arXiv 1912.09729,
equation 5): a token with a negative advantage never costs more than c·|A|, however likely the new policy makes it.
CISPO (arXiv 2506.13585, equations 4 and 5) clips the importance weight instead of the objective: every token keeps a gradient.
Both take the ratio by way of `ppo_kl` = old log-prob − new log-prob; for GSPO that is `compute_gspo_kl`'s, one per sequence.
"""

import torch

from slime.algorithms.ratios import importance_ratio
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
