"""Discounted sums and generalised advantage estimation over padded batches [B, T]: by the definition, and in chunks.

Both estimators are the recurrence x_t = b_t + c·x_{t+1}, with x behind the end 0. In chunks: one product with a
triangular matrix of powers of c solves it inside all chunks at once, as if each stood alone. What a chunk lacks is
its successor's first x, times a power of c; those first values follow the same recurrence, with c to the power of the
width, and are solved alike.

Invariants
- Both forms accumulate in float64: they agree far below float32's rounding at any length, and no product is ever done
  in the reduced precision that a trainer may have allowed for float32.
- Padding belongs behind the last step, with rewards and values 0: it then adds nothing to what stands before it.
- Without gradient: advantages and returns are constants of the losses.
"""

from collections.abc import Iterator

import torch

# A product's cost grows with its width, that of the levels above falls: wider chunks than this are chunked once more.
WIDEST_PRODUCT = 32
# Float64 cells worked on at once: they stay in a processor's cache on their way through the steps of a scan, and torch
# does not wake other threads for so few.
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
    size = max(BLOCK_CELLS // max(length, 1), 1)
    return (slice(start, start + size) for start in range(0, rows, size))


def _require_equal_shapes(rewards: torch.Tensor, values: torch.Tensor) -> None:
    if rewards.shape != values.shape or rewards.dim() != 2:
        raise ValueError(f"rewards and values are both [B, T]: got {tuple(rewards.shape)} and {tuple(values.shape)}")


def _empty_result(rewards: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rewards, dtype=torch.promote_types(rewards.dtype, torch.float32))
