"""The shape of what a rollout function returned, checked and flattened.

Leaf rule: a list that holds samples directly, at depth 2 or deeper and more than one of them, is one execution; its
samples share one `rollout_id`. Depth 0 is the list of groups, depth 1 a group.
"""

from collections.abc import Iterator
from typing import Any

from slime.utils.errors import UserError
from slime.utils.types import Sample

_EXECUTION_DEPTH = 2


def flatten_rollout_output(groups: list[Any]) -> list[Sample]:
    """All samples in order, with all nesting removed.

    Raises:
        UserError: something that is neither a list nor a Sample, an empty output, or an execution whose samples do not
            share a `rollout_id`.
    """
    if not isinstance(groups, list | tuple):
        raise UserError(
            f"--rollout-function-path returned {type(groups).__name__} as samples; expected a list of groups of Samples"
        )
    samples = list(_flatten(groups, "samples", 0))
    if not samples:
        raise UserError("--rollout-function-path returned no samples")
    return samples


def validate_rollout_id_of_execution(siblings: list[Sample], place: str) -> None:
    """Raise UserError, naming the ids and the place, unless all samples share one `rollout_id` that is not None."""
    ids = {sample.rollout_id for sample in siblings}
    if len(ids) == 1 and None not in ids:
        return
    raise UserError(
        f"--rollout-function-path: {place} holds {len(siblings)} samples of one execution with rollout_id "
        f"{sorted(ids, key=str)}; all samples of one execution must share one rollout_id that is not None"
    )


def _flatten(node: list[Any] | tuple[Any, ...], place: str, depth: int) -> Iterator[Sample]:
    for position, entry in enumerate(node):
        if not isinstance(entry, Sample | list | tuple):
            raise UserError(
                f"--rollout-function-path: {place}[{position}] is {type(entry).__name__}; expected Sample or a list of them"
            )
    own = [entry for entry in node if isinstance(entry, Sample)]
    if depth >= _EXECUTION_DEPTH and len(own) > 1:
        validate_rollout_id_of_execution(own, place)
    for position, entry in enumerate(node):
        if isinstance(entry, Sample):
            yield entry
        else:
            yield from _flatten(entry, f"{place}[{position}]", depth + 1)
