"""Advantages and returns per response token, for every estimator.

    grpo (also gspo, cispo)       A = G = r' for every token (arXiv 2402.03300)
    ppo                           token rewards; A by GAE over them and the values, G = A + V (arXiv 1506.02438)
    reinforce_plus_plus           token rewards; A = G = their discounted sum (arXiv 2501.03262)
    reinforce_plus_plus_baseline  A = G = r' − kl_coef·kl_t

The reward of a token is −kl_coef·kl_t; the last trained token gets the reward of the sample on top.

Tokens of tools and environments (loss mask 0) are not actions. They get no reward and no KL, which would punish the
policy for what it did not write. So the sample's reward stands at the last *trained* token, which is not the last token
of a response that ends with a tool's answer. Nor do masked tokens take a time step (`slime.algorithms.reduction` says
why): they have A = 0 and G = V, or G = 0 without values. `count_masked_tokens=True` gives them a time step, as the
public helpers below do; rewards stay where they are. A sample without trained tokens has advantages 0.

The second half of this file computes discounted sums and generalised advantage estimation (GAE) over padded batches
[B, T], once by the definition and once in chunks. Both are the recurrence x_t = b_t + c·x_{t+1}, with x = 0 behind the
end. In chunks, one product with a triangular matrix of powers of c solves the recurrence inside all chunks at once, as
if each stood alone. A chunk then lacks the first x of its successor, times a power of c. These first values follow the
same recurrence, with c to the power of the chunk's width, and are found in the same way.

Invariants
- The functions that discount need whole responses: where a rank's part of a response ends, the response may go on. The
  caller gathers the parts first.
- No argument is modified, least of all the KL, which is logged afterwards.
- Both forms accumulate in float64: they agree far below float32's rounding at any length, and no product is ever done
  in the reduced precision that a trainer may have allowed for float32.
- Padding stands behind the last step, with rewards and values 0, so it adds nothing to what stands before it.
- Nothing has a gradient: advantages and returns are constants of the losses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from slime.algorithms.reduction import (
    flat,
    per_token,
    require_equal_lengths,
    scan_steps,
    step_masks,
    trained_tokens,
    true_until,
)

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class AdvantageInputs:
    """The inputs of an estimator, one row per sample: whole responses if it discounts, else any equal parts of them.

    values: None without a critic.
    """

    rewards: Sequence[float] | torch.Tensor
    kl: Tensors
    loss_masks: Tensors
    values: Tensors | None
    kl_coef: float
    gamma: float
    lambd: float
    count_masked_tokens: bool


Estimate = tuple[list[torch.Tensor], list[torch.Tensor]]


def grpo(inputs: AdvantageInputs) -> Estimate:
    """The sample's reward for every token."""
    advantages = get_grpo_returns(inputs.rewards, inputs.kl)
    return advantages, advantages


def reinforce_plus_plus(inputs: AdvantageInputs) -> Estimate:
    """Discounted sums of the token rewards."""
    options = {"kl_coef": inputs.kl_coef, "gamma": inputs.gamma, "count_masked_tokens": inputs.count_masked_tokens}
    returns = reinforce_plus_plus_returns(inputs.rewards, inputs.kl, inputs.loss_masks, **options)
    return returns, returns


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Estimate:
    """The sample's reward less the weighted KL of the token."""
    advantages = get_reinforce_plus_plus_baseline_advantages(
        inputs.rewards, inputs.kl, inputs.loss_masks, inputs.kl_coef
    )
    return advantages, advantages


def ppo(inputs: AdvantageInputs) -> Estimate:
    """Generalised advantage estimation over token rewards and values."""
    options = {"kl_coef": inputs.kl_coef, "gamma": inputs.gamma, "count_masked_tokens": inputs.count_masked_tokens}
    return ppo_advantages(inputs.rewards, inputs.kl, inputs.values, inputs.loss_masks, lambd=inputs.lambd, **options)


def grpo_advantages(
    rewards: Sequence[float] | torch.Tensor,
    response_lengths: Sequence[int],
    *,
    device: torch.device | str | None = None,
) -> list[torch.Tensor]:
    """One float32 tensor [response_lengths[i]] per sample, filled with rewards[i]; on `device` (default: that of rewards)."""
    if isinstance(rewards, torch.Tensor):
        device = rewards.device if device is None else device
    lengths = [int(length) for length in response_lengths]
    return _split(_rewards_per_token(rewards, lengths, device), lengths)


@torch.no_grad()
def token_rewards(
    rewards: Sequence[float] | torch.Tensor, kl: Tensors, loss_masks: Tensors, kl_coef: float
) -> list[torch.Tensor]:
    """−kl_coef·kl_t at trained tokens, plus rewards[i] at the last of them; 0 at the others. float32 [R_i] per sample.

    `kl`, `loss_masks`: one tensor [R_i] per sample. Raises ValueError if counts or lengths differ.
    """
    penalty, trained, lengths = _penalties(rewards, kl, loss_masks, kl_coef)
    counts, until = true_until(trained, lengths)
    is_last = trained & (until == per_token(counts, lengths))
    rewarded = penalty + _rewards_per_token(rewards, lengths, trained.device) * is_last
    return _split(rewarded, lengths)


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
    """Advantages by GAE and returns, float32 [R_i] per sample. Tokens that take no step have A = 0 and G = V. A masked token
    whose value is not finite counts with the value 0.

    `rewards`: one number per sample. `kl`, `values`, `loss_masks`: one tensor [R_i] per sample. Raises ValueError if counts or
    lengths differ.
    """
    require_equal_lengths(values=values, kl=kl)
    trained, lengths = trained_tokens(loss_masks, values), [len(row) for row in values]
    # A masked token that takes a step enters with its value, and a NaN there would spoil all tokens before it.
    of_tokens = flat(values)
    values = _split(torch.where(flat(trained).bool() | of_tokens.isfinite(), of_tokens, 0.0), lengths)
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
    """Discounted sums of the token rewards, float32 [R_i] per sample, which are both advantages and returns. Tokens that take
    no step have 0.

    Arguments and errors are those of `ppo_advantages`.
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

    `rewards`: the group's mean is subtracted already. There is no recursion, so any equal parts of responses do.
    """
    penalty, trained, lengths = _penalties(rewards, kl, loss_masks, kl_coef)
    return _split(torch.where(trained, _rewards_per_token(rewards, lengths, trained.device) + penalty, 0.0), lengths)


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
    returns = torch.where(flat(steps), flat(returns), flat(values).float())
    return advantages, _split(returns, [len(step) for step in steps])


def _penalties(
    rewards: Sequence[float] | torch.Tensor, kl: Tensors, loss_masks: Tensors, kl_coef: float
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(−kl_coef·kl at trained tokens and 0 at the others, float32 [N]; which tokens are trained, boolean [N]; the length of
    each response). N counts the tokens of all responses."""
    _require_a_reward_each(rewards, kl)
    trained = flat(trained_tokens(loss_masks, kl)).bool()
    # A coefficient of 0 switches the KL off, even an infinite one, which 0 · KL would turn into NaN.
    weighted = torch.where(trained, -kl_coef * flat(kl).float(), 0.0) if kl_coef else torch.zeros_like(trained).float()
    return weighted, trained, [len(tokens) for tokens in kl]


def _rewards_per_token(
    rewards: Sequence[float] | torch.Tensor, lengths: list[int], device: torch.device | str | None
) -> torch.Tensor:
    """The reward of its response at every token, float32 [sum of the lengths]."""
    _require_a_reward_each(rewards, lengths)
    if not isinstance(rewards, torch.Tensor):
        rewards = torch.tensor([float(reward) for reward in rewards], dtype=torch.float32)
    return per_token(rewards.detach().to(device, torch.float32, non_blocking=True), lengths)


def _require_a_reward_each(rewards: Sequence[float] | torch.Tensor, samples: Sequence) -> None:
    if len(rewards) != len(samples):
        raise ValueError(f"one reward per response: got {len(rewards)} rewards and {len(samples)} responses")


def _split(per_token: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return list(per_token.split(lengths)) if lengths else []


def _require_lengths(name: str, columns: Tensors, response_lengths: Sequence[int]) -> None:
    found = [len(tokens) for tokens in columns]
    if found != [int(length) for length in response_lengths]:
        raise ValueError(
            f"{name}: one tensor of the response's length per sample; expected {list(response_lengths)[:8]}, "
            f"got {found[:8]} (under context parallelism, gather the full responses first)"
        )


# Width of a chunk at most. The cost of a product grows with the width, while that of the levels above it falls.
WIDEST_PRODUCT = 32
# How many float64 cells a scan works on at once: so few stay in a processor's cache through all its steps, and torch does
# not wake other threads for them.
BLOCK_CELLS = 2**15


@torch.no_grad()
def vanilla_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns [B, T] of rewards and values [B, T], step by step (arXiv 1506.02438, equation 16).

    δ_t = r_t + γ·V_{t+1} − V_t, A_t = δ_t + γλ·A_{t+1}, G_t = A_t + V_t; V and A behind the end are 0. The result has the dtype
    of the rewards, float32 at least. Slow: this is the definition that `chunked_gae` is held against.
    """
    _require_equal_shapes(rewards, values)
    advantages, returns = _empty_result(rewards), _empty_result(rewards)
    next_advantage = next_value = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    for step in reversed(range(rewards.shape[1])):
        reward, value = rewards[:, step].double(), values[:, step].double()
        delta = reward + gamma * next_value - value
        next_advantage = delta + gamma * lambd * next_advantage
        next_value = value
        advantages[:, step] = next_advantage
        returns[:, step] = next_advantage + value
    return advantages, returns


@torch.no_grad()
def chunked_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `vanilla_gae`, up to `chunk_size` steps at a time. Raises ValueError if `chunk_size` is below 1."""
    _require_equal_shapes(rewards, values)
    advantages, returns = _empty_result(rewards), _empty_result(rewards)
    levels = _scan_levels(rewards, gamma * lambd, chunk_size)
    for rows in _row_blocks(rewards):
        deltas = rewards[rows].double().sub_(values[rows])
        deltas[:, :-1].add_(values[rows, 1:], alpha=gamma)
        scanned = _scan(deltas, levels)
        advantages[rows] = scanned
        returns[rows] = scanned.add_(values[rows])
    return advantages, returns


@torch.no_grad()
def vanilla_discounted_returns(rewards: torch.Tensor, discount: float) -> torch.Tensor:
    """G_t = r_t + discount·G_{t+1} of rewards [B, T], step by step; dtype as in `vanilla_gae`."""
    returns = _empty_result(rewards)
    next_return = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    for step in reversed(range(rewards.shape[1])):
        next_return = rewards[:, step].double() + discount * next_return
        returns[:, step] = next_return
    return returns


@torch.no_grad()
def chunked_discounted_returns(rewards: torch.Tensor, discount: float, chunk_size: int = 128) -> torch.Tensor:
    """As `vanilla_discounted_returns`, up to `chunk_size` steps at a time. Raises ValueError if `chunk_size` is below 1."""
    returns = _empty_result(rewards)
    levels = _scan_levels(rewards, discount, chunk_size)
    for rows in _row_blocks(rewards):
        returns[rows] = _scan(rewards[rows].double(), levels)
    return returns


def _scan_levels(like: torch.Tensor, decay: float, chunk_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per level of the scan, float64: weights [width, width] inside a chunk, and those [width] of the next chunk's first x."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size}: a chunk has at least one step, for example 128")
    # Chunks of one step would leave as many first values as there were steps.
    width = min(max(chunk_size, 2), WIDEST_PRODUCT)
    position = torch.arange(width, dtype=torch.float64, device=like.device)
    levels = []
    length = like.shape[1]
    while length > 0:
        # Entry [j, i], j ≥ i: the weight of term j in x_i. The others are negative powers, which may be infinite.
        levels.append(((decay ** (position[:, None] - position)).tril(), decay ** (width - position)))
        length = -(-length // width) if length > width else 0
        decay = decay**width
    return levels


def _scan(terms: torch.Tensor, levels: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """x_t = terms_t + c·x_{t+1} for float64 terms [rows, T]; `levels` as `_scan_levels` makes them for c and T."""
    rows, length = terms.shape
    if length == 0:
        return terms
    (weights, weights_of_next), *levels_above = levels
    width = len(weights)
    if length <= width:
        return terms @ weights[:length, :length]
    chunks = -(-length // width)
    padded = torch.nn.functional.pad(terms, (0, chunks * width - length))
    alone = (padded.view(rows * chunks, width) @ weights).view(rows, chunks, width)
    first = _scan(alone[:, :, 0], levels_above)
    alone[:, :-1].addcmul_(first[:, 1:, None], weights_of_next)
    return alone.view(rows, chunks * width)[:, :length]


def _row_blocks(batch: torch.Tensor) -> Iterator[slice]:
    rows, length = batch.shape
    # On an accelerator each block would cost kernel launches, and no cache gains by blocks: all rows are one.
    size = max(BLOCK_CELLS // max(length, 1), 1) if batch.device.type == "cpu" else max(rows, 1)
    return (slice(start, start + size) for start in range(0, rows, size))


def _require_equal_shapes(rewards: torch.Tensor, values: torch.Tensor) -> None:
    if rewards.shape != values.shape or rewards.dim() != 2:
        raise ValueError(f"rewards and values are both [B, T]: got {tuple(rewards.shape)} and {tuple(values.shape)}")


def _empty_result(rewards: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rewards, dtype=torch.promote_types(rewards.dtype, torch.float32))
