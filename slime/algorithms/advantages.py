"""Advantages and returns per response token, for the estimators without a group and for those with one.

    grpo (also gspo, cispo)       A = G = r' for every token (arXiv 2402.03300)
    ppo                           token rewards; A by GAE over them and the values, G = A + V (arXiv 1506.02438)
    reinforce_plus_plus           token rewards; A = G = their discounted sum (arXiv 2501.03262)
    reinforce_plus_plus_baseline  A = G = r' − kl_coef·kl_t

Token rewards are −kl_coef·kl_t, and the reward of the sample on top at the end.

Tokens of tools and environments (loss mask 0) are not actions. They get no reward and no KL: their KL would punish
the policy for what it did not write. The sample's reward therefore stands at the last *trained* token, which for a
response that ends with a tool's answer is not the last one. And they take no time step
(`slime.algorithms.action_steps` says why): A = 0 and G = V, or 0 without values. `count_masked_tokens=True` gives
them a time step, as the public helpers below do; rewards stay where they are. A sample without trained tokens has
advantages 0.

Invariants
- Everything here works on full responses: the end of a response is not the end of any rank's part of it. Parts are
  gathered first.
- No argument is modified, least of all the KL, which is logged afterwards.
"""

from collections.abc import Sequence
from functools import partial

import torch

from slime.algorithms.action_steps import require_equal_lengths, scan_steps, step_masks, trained_tokens
from slime.algorithms.returns import chunked_discounted_returns, chunked_gae, vanilla_gae

Tensors = Sequence[torch.Tensor]


def grpo_advantages(
    rewards: Sequence[float] | torch.Tensor,
    response_lengths: Sequence[int],
    *,
    device: torch.device | str | None = None,
) -> list[torch.Tensor]:
    """One float32 tensor [response_lengths[i]] per sample, filled with rewards[i]; on `device` (default: that of rewards)."""
    if isinstance(rewards, torch.Tensor):
        device = rewards.device if device is None else device
    return [
        torch.full((int(length),), reward, dtype=torch.float32, device=device)
        for reward, length in zip(_reward_numbers(rewards, response_lengths), response_lengths, strict=True)
    ]


@torch.no_grad()
def token_rewards(
    rewards: Sequence[float] | torch.Tensor, kl: Tensors, loss_masks: Tensors, kl_coef: float
) -> list[torch.Tensor]:
    """−kl_coef·kl_t at trained tokens, plus rewards[i] at the last of them; 0 at the others. float32 [R_i] per sample.

    `kl`, `loss_masks`: one tensor [R_i] per sample. Raises ValueError if counts or lengths differ.
    """
    return [
        torch.where(trained, _penalty(sample_kl, kl_coef), 0.0) + reward * _is_last(trained)
        for reward, sample_kl, trained in zip(
            _reward_numbers(rewards, kl), kl, trained_tokens(loss_masks, kl), strict=True
        )
    ]


def ppo_advantages(
    rewards: Sequence[float] | torch.Tensor,
    kl: Tensors,
    values: Tensors,
    loss_masks: Tensors,
    *,
    kl_coef: float,
    gamma: float,
    lambd: float,
    count_masked_tokens: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Advantages by GAE and returns, float32 [R_i] per sample; tokens that take no step: A = 0, G = V. The value of a masked
    token counts as 0 where it is not finite.

    `rewards`: one number per sample. `kl`, `values`, `loss_masks`: one tensor [R_i] per sample. Raises ValueError if counts or
    lengths differ.
    """
    require_equal_lengths(values=values, kl=kl)
    trained = trained_tokens(loss_masks, values)
    # A masked token that takes a step brings its value along, and one that is no number would spoil all that came before.
    values = [torch.where(mask | row.isfinite(), row, 0.0) for mask, row in zip(trained, values, strict=True)]
    steps = step_masks(trained, count_masked_tokens)
    shaped = token_rewards(rewards, kl, loss_masks, kl_coef)
    return _gae(shaped, values, steps, partial(chunked_gae, gamma=gamma, lambd=lambd))


def reinforce_plus_plus_returns(
    rewards: Sequence[float] | torch.Tensor,
    kl: Tensors,
    loss_masks: Tensors,
    *,
    kl_coef: float,
    gamma: float,
    count_masked_tokens: bool = False,
) -> list[torch.Tensor]:
    """Discounted sums of the token rewards, float32 [R_i] per sample: advantages and returns in one; 0 without a step.

    Arguments and errors as in `ppo_advantages`.
    """
    steps = step_masks(trained_tokens(loss_masks, kl), count_masked_tokens)
    shaped = token_rewards(rewards, kl, loss_masks, kl_coef)
    if not shaped:
        return []
    (returns,) = scan_steps(lambda padded: (chunked_discounted_returns(padded, gamma),), [shaped], steps)
    return returns


@torch.no_grad()
def get_reinforce_plus_plus_baseline_advantages(
    rewards: Sequence[float] | torch.Tensor, kl: Tensors, loss_masks: Tensors, kl_coef: float
) -> list[torch.Tensor]:
    """rewards[i] − kl_coef·kl_t at trained tokens, 0 at the others, float32 [R_i] per sample.

    `rewards`: less their group's mean already. There is no recursion, so any equal parts of responses do.
    """
    return [
        torch.where(trained, reward + _penalty(sample_kl, kl_coef), 0.0)
        for reward, sample_kl, trained in zip(
            _reward_numbers(rewards, kl), kl, trained_tokens(loss_masks, kl), strict=True
        )
    ]


def get_grpo_returns(rewards: Sequence[float] | torch.Tensor, kl: Tensors) -> list[torch.Tensor]:
    """As `grpo_advantages`; `kl`, one tensor [R_i] per sample, only says how long the responses are and on which device."""
    return grpo_advantages(rewards, [len(tokens) for tokens in kl], device=kl[0].device if kl else None)


def get_reinforce_plus_plus_returns(
    rewards: Sequence[float] | torch.Tensor,
    kl: Tensors,
    loss_masks: Tensors,
    response_lengths: Sequence[int],
    total_lengths: Sequence[int],
    kl_coef: float,
    gamma: float,
) -> list[torch.Tensor]:
    """`reinforce_plus_plus_returns` with masked tokens counted as time steps. `total_lengths` plays no part.

    Raises ValueError if `kl` is not of the `response_lengths`.
    """
    _require_lengths("kl", kl, response_lengths)
    return reinforce_plus_plus_returns(rewards, kl, loss_masks, kl_coef=kl_coef, gamma=gamma, count_masked_tokens=True)


def get_advantages_and_returns_batch(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    values_list: Tensors,
    rewards_list: Tensors,
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """GAE advantages and returns, float32 [R_i] per sample, of values and token rewards [R_i]; every token is a time step.

    `chunked=False` takes the slow recurrence. `total_lengths` plays no part. Raises ValueError if values or rewards are not of
    the `response_lengths`.
    """
    _require_lengths("values_list", values_list, response_lengths)
    _require_lengths("rewards_list", rewards_list, response_lengths)
    steps = [torch.ones_like(values, dtype=torch.bool) for values in values_list]
    return _gae(
        rewards_list, values_list, steps, partial(chunked_gae if chunked else vanilla_gae, gamma=gamma, lambd=lambd)
    )


@torch.no_grad()
def _gae(
    shaped: Tensors, values: Tensors, steps: Tensors, gae: partial
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    if not shaped:
        return [], []
    advantages, returns = scan_steps(gae, [shaped, values], steps)
    return advantages, [
        torch.where(step, tokens, sample_values.float())
        for step, tokens, sample_values in zip(steps, returns, values, strict=True)
    ]


def _penalty(kl: torch.Tensor, kl_coef: float) -> torch.Tensor:
    # Without weight not even an infinite KL counts.
    return torch.zeros_like(kl, dtype=torch.float32) if kl_coef == 0 else -kl_coef * kl.float()


def _is_last(trained: torch.Tensor) -> torch.Tensor:
    """Float 1 at the last True of a mask [R], else 0."""
    trained_from_here = trained.flip(0).cumsum(0).flip(0)
    return (trained & (trained_from_here == 1)).float()


def _reward_numbers(rewards: Sequence[float] | torch.Tensor, samples: Sequence) -> list[float]:
    if len(rewards) != len(samples):
        raise ValueError(f"one reward per response: got {len(rewards)} rewards and {len(samples)} responses")
    return [float(reward) for reward in (rewards.tolist() if isinstance(rewards, torch.Tensor) else rewards)]


def _require_lengths(name: str, columns: Tensors, response_lengths: Sequence[int]) -> None:
    found = [len(tokens) for tokens in columns]
    if found != [int(length) for length in response_lengths]:
        raise ValueError(
            f"{name}: one tensor of the response's length per sample; expected {list(response_lengths)[:8]}, "
            f"got {found[:8]} (under context parallelism, gather the full responses first)"
        )
