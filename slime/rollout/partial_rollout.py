"""What goes back to the data source when a step ends before all of its groups: prompts, or partial groups.

Invariants: no prompt is lost; a returned group has as many entries as it was given; finished siblings stay finished.
"""

import copy
from typing import Any

from slime.rollout.base_types import leaves
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
        sample.loss_mask = [0] * sample.response_length


def mask_tokens_before_resumption(args: Any, entry: Any, tokens_before: list[int]) -> None:
    """With `--mask-offpolicy-in-partial-rollout`: train only what was written after the resumption.

    In each leaf of `entry` the response tokens that it shares with `tokens_before` (prompt and response so far) get
    mask 0. The mask has `response_length` entries afterwards.
    """
    if not _masking(args):
        return
    for sample in leaves(entry):
        prompt_length = len(sample.tokens) - sample.response_length
        stale = max(0, _common_prefix_length(sample.tokens, tokens_before) - prompt_length)
        mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
        sample.loss_mask = [0] * stale + mask[stale:]


def _masking(args: Any) -> bool:
    return bool(args.partial_rollout and args.mask_offpolicy_in_partial_rollout)


def _common_prefix_length(left: list[int], right: list[int]) -> int:
    if left[: len(right)] == right:
        return len(right)
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
