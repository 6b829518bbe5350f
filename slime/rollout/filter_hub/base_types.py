"""The verdict of a dynamic sampling filter, the counters of what it dropped, and the filters that are shipped.

Those drop groups whose rewards carry no signal (arXiv 2503.14476).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.rollout.base_types import leaves, path_of
from slime.rollout.user_functions import call_within_request_time, describe_samples
from slime.utils.errors import UserError
from slime.utils.types import Sample, failed_and_masked

FILTER_FLAG = "--dynamic-sampling-filter-path"
# Rewards such as 0.1, summed and averaged in floating point, have a standard deviation near 1e-17 instead of 0.
ZERO_STD_THRESHOLD = 1e-6


@dataclass
class DynamicFilterOutput:
    """`keep`: use the group. `reason`: short text for the drop counter.

    `keep_when_insufficient`: a rejected group stays when the groups still obtainable do not exceed the target.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def samples_to_judge(group: list[Any]) -> list[Sample]:
    """The samples of a group for its filter.

    Raises:
        UserError: one has no reward.
    """
    samples = leaves(group)
    if missing := [sample for sample in samples if sample.reward is None]:
        raise UserError(f"{FILTER_FLAG}: {describe_samples(missing)} reached the filter without a reward")
    return samples


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Ask the filter; no filter keeps everything, a bool is accepted as the whole verdict. One of numpy or torch is a bool.

    Raises:
        UserError: the filter returned something else.
    """
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(*args, **kwargs)
    keep = _as_bool(output.keep if isinstance(output, DynamicFilterOutput) else output)
    if keep is not None and isinstance(output, DynamicFilterOutput):
        return DynamicFilterOutput(keep, output.reason, bool(output.keep_when_insufficient))
    if keep is not None:
        return DynamicFilterOutput(keep)
    raise UserError(
        f"{FILTER_FLAG} {path_of(fn)} returned {output!r} ({type(output).__name__}); "
        "expected DynamicFilterOutput(keep=bool, ...) or bool"
    )


def _as_bool(value: Any) -> bool | None:
    """`value` if it is a bool, of numpy or, without dimensions, of torch included; else None."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    return value if isinstance(value, bool) else None


async def verdict_on_group(args: Any, function: Callable[..., Any], group: list[Any]) -> DynamicFilterOutput:
    """What `function`, that of `--dynamic-sampling-filter-path`, says of a group; it has as long as a request.

    Raises:
        UserError: a sample has no reward; or the filter raised, did not return in time, or returned something unusable.
    """
    samples = samples_to_judge(group)
    called = FILTER_FLAG, args.dynamic_sampling_filter_path, describe_samples(samples)
    return await call_within_request_time(args, *called, call_dynamic_filter, function, args, samples)


def should_drop_dynamic_filter_output(
    out: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Whether the group is dropped, given how many groups are still obtainable, this one included."""
    if out.keep:
        return False
    return not (out.keep_when_insufficient and remaining_batch_size <= target_data_size)


class MetricGatherer:
    """Counts what the filter dropped, by reason."""

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: Any) -> None:
        self._drops["unspecified" if reason in (None, "") else str(reason)] += 1

    def __str__(self) -> str:
        return ", ".join(f"{reason}: {count}" for reason, count in self._drops.most_common())

    def collect(self) -> dict[str, int]:
        """`rollout/dynamic_filter/drop_{reason}` → number of groups."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in sorted(self._drops.items())}


def check_reward_nonzero_std(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group iff the unbiased standard deviation of its rewards exceeds 1e-6; one sample alone has none.

    Samples that failed and are masked have no reward of their own, and do not count.
    """
    graded = [sample for sample in samples if not failed_and_masked(sample)]
    if not graded:
        return DynamicFilterOutput(keep=False, reason="all_failed")
    rewards = np.asarray([sample.get_reward_value(args) for sample in graded], dtype=np.float64)
    if rewards.size > 1 and rewards.std(ddof=1) > ZERO_STD_THRESHOLD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(float(rewards[0]), 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """As `check_reward_nonzero_std`, but a rejected group stays when there would be too few groups without it."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output
