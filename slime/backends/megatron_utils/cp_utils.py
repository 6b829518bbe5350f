"""Context-parallel helpers for users' plug-ins: the rank's place comes from Megatron's parallel state.

If Megatron's groups do not exist (or Megatron was never imported), another backend may have set the place; if none did, there
is one rank, which owns everything. Per-token tensors are in the zigzag layout, even with `--allgather-cp`. The framework itself
uses `slime.training.context_parallel`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slime.algorithms.reduction import masked_sum, sums_of_responses, token_weights
from slime.scheduling.zigzag import Range, logits_and_tokens_offsets
from slime.training import context_parallel
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel, told_place

_PARALLEL_STATE = "megatron.core.parallel_state"


def __getattr__(name: str) -> Any:
    if name != "mpu":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron.core import parallel_state

    return parallel_state


def get_logits_and_tokens_offset_with_cp(
    total_length: int, response_length: int
) -> tuple[int, tuple[Range, Range], tuple[Range, Range], tuple[Range, Range]]:
    """Chunk size; this rank's two chunks; in each the logits that predict response tokens; and those tokens.

    All as (start, end) positions from the start of the prompt, end exclusive, (0, 0) where there are none.
    """
    cp = _context_parallel()
    return logits_and_tokens_offsets(total_length, response_length, cp.size, cp.rank)


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[float] | torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from this rank's per-token values (concatenated over samples) to this rank's share of the reduced sum.

    Args:
        loss_masks: full responses, one tensor per sample; read when the function is called.
        sample_denoms: trained tokens that each sample is averaged over (`rollout_mask_sums` of a batch); None: its own.
        calculate_per_token_loss: the plain masked sum instead of a sum of means.
    """
    cp = _context_parallel()
    if sample_denoms is None:
        lengths = [len(mask) for mask in loss_masks]
        sample_denoms = sums_of_responses(torch.cat(list(loss_masks)), lengths) if lengths else []

    def reduce(values: torch.Tensor) -> torch.Tensor:
        # Sliced only here, because the caller may edit the masks before, and a part of a mask is a copy.
        masks = context_parallel.slice_responses(loss_masks, total_lengths, response_lengths, cp)
        return masked_sum(values, token_weights(masks, None if calculate_per_token_loss else sample_denoms))

    return reduce


def all_gather_with_cp(tensor: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    """The full response [response length, …] from every rank's part; differentiable. All ranks of the group must call it."""
    cp = _context_parallel()
    if cp.size > 1 and cp.group is None:
        parallel_state = sys.modules[__name__].mpu
        cp = dataclasses.replace(cp, group=parallel_state.get_context_parallel_group())
    return context_parallel.gather_response(tensor, total_length, response_length, cp)


def slice_with_cp(tokens: torch.Tensor, pad_value: float) -> torch.Tensor:
    """This rank's two chunks of a whole sequence [T, …], padded behind its end with `pad_value`."""
    return context_parallel.slice_with_cp(tokens, pad_value, _context_parallel())


def slice_log_prob_with_cp(
    log_prob: torch.Tensor | list[float], total_length: int, response_length: int
) -> torch.Tensor | list[float]:
    """This rank's part of a full response's values, one per token; a list stays a list.

    Raises:
        ValueError: there is not one value per response token.
    """
    return context_parallel.slice_response(log_prob, total_length, response_length, _context_parallel())


def _context_parallel() -> ContextParallel:
    """The rank's place; Megatron's without the group: only a gather needs that."""
    parallel_state = globals().get("mpu") or sys.modules.get(_PARALLEL_STATE)
    if parallel_state is None or not _is_laid_out(parallel_state):
        return told_place()
    size = parallel_state.get_context_parallel_world_size()
    # 0 without a process group
    return ContextParallel(size, parallel_state.get_context_parallel_rank(), None) if size > 1 else NO_CONTEXT_PARALLEL


def _is_laid_out(parallel_state: Any) -> bool:
    # In a process group without Megatron's layout its getters do not answer 1 but fail.
    in_process_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not in_process_group or parallel_state.model_parallel_is_initialized()
