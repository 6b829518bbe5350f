"""The verdict of a dynamic sampling filter, and the counters of what it dropped."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.utils.errors import UserError


@dataclass
class DynamicFilterOutput:
    """`keep`: use the group. `reason`: short text for the drop counter.

    `keep_when_insufficient`: a rejected group stays when the groups still obtainable do not exceed the target.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Ask the filter; no filter keeps everything, a (numpy) bool is accepted as the whole verdict.

    Raises:
        UserError: the filter returned something else.
    """
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(*args, **kwargs)
    if isinstance(output, bool | np.bool_):
        return DynamicFilterOutput(keep=bool(output))
    if isinstance(output, DynamicFilterOutput) and isinstance(output.keep, bool | np.bool_):
        return DynamicFilterOutput(bool(output.keep), output.reason, bool(output.keep_when_insufficient))
    name = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"
    raise UserError(
        f"--dynamic-sampling-filter-path: {name} returned {output!r} ({type(output).__name__}); "
        "expected DynamicFilterOutput(keep=bool, ...) or bool"
    )


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Whether the group is dropped, given how many groups are still obtainable, this one included."""
    if output.keep:
        return False
    return not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)


class MetricGatherer:
    """Counts what the filter dropped, by reason."""

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        self._drops[reason or "unspecified"] += 1

    def __str__(self) -> str:
        return ", ".join(f"{reason}: {count}" for reason, count in self._drops.most_common())

    def collect(self) -> dict[str, int]:
        """`rollout/dynamic_filter/drop_{reason}` → number of groups."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in sorted(self._drops.items())}
