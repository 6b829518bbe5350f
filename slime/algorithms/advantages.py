"""Advantages per response token.

GRPO (arXiv 2402.03300) gives every token of a response the normalised reward of its sample; returns are the same numbers.
"""

from collections.abc import Sequence

import torch


def grpo_advantages(
    rewards: Sequence[float] | torch.Tensor,
    response_lengths: Sequence[int],
    *,
    device: torch.device | str | None = None,
) -> list[torch.Tensor]:
    """One float32 tensor [response_lengths[i]] per sample, filled with rewards[i]; on `device` (default: that of rewards)."""
    if len(rewards) != len(response_lengths):
        raise ValueError(f"one reward per response: got {len(rewards)} rewards and {len(response_lengths)} lengths")
    if isinstance(rewards, torch.Tensor):
        device = rewards.device if device is None else device
        rewards = rewards.tolist()
    return [
        torch.full((int(length),), float(reward), dtype=torch.float32, device=device)
        for reward, length in zip(rewards, response_lengths, strict=True)
    ]


def get_grpo_returns(rewards: Sequence[float] | torch.Tensor, kl: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As `grpo_advantages`; `kl`, one tensor [R_i] per sample, only says how long the responses are and on which device."""
    return grpo_advantages(rewards, [len(tokens) for tokens in kl], device=kl[0].device if kl else None)
