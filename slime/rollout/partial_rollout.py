"""What goes back to the data source when a step ends before all of its groups: prompts, or partial groups.

Invariants: no prompt is lost; a returned group has as many entries as it was given; finished siblings stay finished.
"""

import copy
from typing import Any

import numpy as np

from slime.rollout.base_types import leaves
from slime.utils.sample_fields import read_only, token_array
from slime.utils.types import Sample

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


def fresh_prompt(sample: Sample) -> Sample:
    """A copy of `sample` as it came from the data source. The original is left as it is: hooks may still look at it."""
    fresh = copy.copy(sample)
    fresh.reset_for_retry()
    return fresh


def as_prompts(original: list[Any]) -> list[Sample]:
    """The group that was taken from the data source, as fresh prompts. An execution that fanned out counts once."""
    return [fresh_prompt(leaves(entry)[0]) for entry in original]


def as_continuable_group(original: list[Any], group: list[Any]) -> list[Any]:
    """`group` with the prompt of `original` in the place of every entry that must not be gone on with.

    A failed sample starts again: what it holds is what went wrong. So does an execution that fanned out, unless all of
    it is finished. The entries themselves are left as they are.
    """
    return [
        after if _can_be_continued(after) else fresh_prompt(leaves(before)[0])
        for before, after in zip(original, group, strict=True)
    ]


def as_partial_group(original: list[Any], group: list[Any], rollout_id: int) -> list[Any]:
    """The unfinished `group` with what its samples have so far, to be continued in a later step.

    `metadata["start_rollout_id"]` keeps the rollout in which a sample was returned first.
    """
    returned = as_continuable_group(original, group)
    for sample in leaves(returned):
        sample.metadata.setdefault("start_rollout_id", rollout_id)
    return returned


def _can_be_continued(entry: Any) -> bool:
    if isinstance(entry, Sample):
        return entry.status is not Sample.Status.FAILED
    return all(sample.status in FINISHED for sample in leaves(entry))


def mask_finished_earlier(args: Any, sample: Sample) -> None:
    """With `--mask-offpolicy-in-partial-rollout`: a sibling that was finished before its group came back trains nothing."""
    if _masking(args) and "start_rollout_id" in sample.metadata:
        sample.loss_mask = np.zeros(sample.response_length, np.int32)


def mask_tokens_before_resumption(args: Any, entry: Any, tokens_before: np.ndarray) -> None:
    """With `--mask-offpolicy-in-partial-rollout`: train only what was written after the resumption.

    In each leaf of `entry` the response tokens that it shares with `tokens_before` (prompt and response so far) get
    mask 0. The mask has `response_length` entries afterwards.
    """
    if not _masking(args):
        return
    for sample in leaves(entry):
        tokens, mask = token_array(sample, "tokens"), token_array(sample, "loss_mask")
        prompt_length = len(tokens) - sample.response_length
        stale = max(0, _common_prefix_length(tokens, tokens_before) - prompt_length)
        mask = np.ones(sample.response_length, np.int32) if mask is None else mask.copy()
        mask[:stale] = 0
        sample.loss_mask = read_only(mask)


def _masking(args: Any) -> bool:
    return bool(args.partial_rollout and args.mask_offpolicy_in_partial_rollout)


def _common_prefix_length(left: np.ndarray, right: np.ndarray) -> int:
    shorter = min(len(left), len(right))
    different = left[:shorter] != right[:shorter]
    return int(different.argmax()) if different.any() else shorter
