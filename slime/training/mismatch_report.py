"""`--get-mismatch-metrics`: the engine's log-probs against the trainer's, in numbers per step and in the ten worst tokens.

Both come from stored log-probs, before training, and change nothing. Collective over data- and context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms.mismatch import WorstToken, merge_worst_tokens, mismatch_metrics, mismatch_sums, worst_tokens
from slime.training.context_parallel import ContextParallel, slice_responses
from slime.training.metric_reduction import all_reduce_max, all_reduce_sum
from slime.utils.errors import UserError

WORST_TOKENS = 10


def mismatch_of_step(
    rollout_data: dict[str, Any], positions: Sequence[int], cp: ContextParallel, data_group: dist.ProcessGroup
) -> dict[str, float]:
    """`mismatch_*` over the trained tokens of an optimizer step, those of all ranks.

    Args:
        positions: the step's samples in this rank's data.

    Raises:
        UserError: the samples have no log-probs of the engine.
    """
    train, rollout, masks = (_flat(column, positions) for column in _columns(rollout_data, cp))
    sums, largest = mismatch_sums(train, rollout, masks)
    return mismatch_metrics(all_reduce_sum(sums, data_group), all_reduce_max(largest, data_group))


def worst_token_lines(
    rollout_data: dict[str, Any],
    decode: Callable[[list[int]], str],
    cp: ContextParallel,
    data_group: dist.ProcessGroup,
) -> list[str]:
    """A line about each of the ten trained tokens, over all ranks, whose two log-probs differ most; worst first.

    Args:
        decode: text of token ids.
    """
    train, rollout, masks = _columns(rollout_data, cp)
    lengths = (rollout_data["total_lengths"], rollout_data["response_lengths"])
    owned = slice_responses([torch.arange(response) for response in lengths[1]], *lengths, cp)
    rows = worst_tokens(train, rollout, masks, range(len(train)), WORST_TOKENS, owned)
    found = [(_renamed(row, rollout_data), _text(row, rollout_data, decode)) for row in rows]
    shards: list[Any] = [None] * dist.get_world_size(data_group)
    dist.all_gather_object(shards, found, group=data_group)
    texts = {token: text for shard in shards for token, text in shard}
    return [_line(token, texts[token]) for token in merge_worst_tokens([texts], WORST_TOKENS)]


def _columns(rollout_data: dict[str, Any], cp: ContextParallel) -> tuple[list[torch.Tensor], ...]:
    """Log-probs of trainer and engine, and masks, of the tokens that this rank owns."""
    if "rollout_log_probs" not in rollout_data:
        raise UserError("--get-mismatch-metrics needs `rollout_log_probs`, and the samples of this rollout have none")
    masks = slice_responses(
        rollout_data["loss_masks"], rollout_data["total_lengths"], rollout_data["response_lengths"], cp
    )
    return rollout_data["log_probs"], rollout_data["rollout_log_probs"], masks


def _flat(column: Sequence[torch.Tensor], positions: Sequence[int]) -> torch.Tensor:
    return torch.cat([column[position] for position in positions]) if len(positions) else torch.zeros(0)


def _renamed(token: WorstToken, rollout_data: dict[str, Any]) -> WorstToken:
    """With the sample's own number in place of its row."""
    sample = int(rollout_data["sample_indices"][token.sample])
    return WorstToken(sample, token.position, token.train_log_prob, token.rollout_log_prob)


def _text(token: WorstToken, rollout_data: dict[str, Any], decode: Callable[[list[int]], str]) -> str:
    prompt = rollout_data["total_lengths"][token.sample] - rollout_data["response_lengths"][token.sample]
    return decode([int(rollout_data["tokens"][token.sample][prompt + token.position])])


def _line(token: WorstToken, text: str) -> str:
    return (
        f"sample {token.sample}, response token {token.position}, {text!r}: trainer {token.train_log_prob:.4f}, "
        f"engine {token.rollout_log_prob:.4f}, difference {abs(token.train_log_prob - token.rollout_log_prob):.1e}"
    )
