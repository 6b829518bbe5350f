"""What became of the groups that were generated: interrupted, finished, failed, or dropped by the dynamic filter.

A step holds a ledger of its own. The worker that never stops holds one, too, and begins a page of it for each rollout.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from slime.rollout.attempts import as_partial_group, as_prompts, group_name
from slime.rollout.base_types import leaves
from slime.rollout.failures import FailureTally
from slime.rollout.filter_hub.base_types import (
    FILTER_FLAG,
    MetricGatherer,
    should_drop_dynamic_filter_output,
    verdict_on_group,
)
from slime.utils.errors import RunError
from slime.utils.plugin_loader import load_function
from slime.utils.types import Sample

MAX_INTERRUPTIONS_OF_A_GROUP = 5


class GroupLedger:
    """The ledger; `whole` is what its groups belong to, for messages.

    Attributes:
        counts: numbers by name, of this page: `finished` and `dropped` groups, `aborted_samples`, and what the holder adds.
        drops: why groups were dropped, of this page.
        failures: those of the finished groups of this page.
    """

    def __init__(self, args: Any, whole: str = "this step") -> None:
        self._args, self._whole = args, whole
        path = args.dynamic_sampling_filter_path
        self._filter = load_function(path, flag=FILTER_FLAG) if path else None
        # Groups are known by their names here, and not by page, because a group that comes back may belong to another one.
        self._interruptions: Counter[str] = Counter()
        self.begin_page()

    def begin_page(self) -> None:
        """Count from zero, except how often groups were interrupted."""
        self.counts: Counter[str] = Counter()
        self.drops = MetricGatherer()
        self.failures = FailureTally(self._whole)

    def unfinished(self, origin: list[Any], group: list[Any], rollout_id: int) -> list[Any]:
        """What the aborted `group`, made of `origin`, goes back to the data source as; its aborted samples are counted."""
        self.counts["aborted_samples"] += sum(sample.status is Sample.Status.ABORTED for sample in leaves(group))
        if self._args.partial_rollout:
            return as_partial_group(self._args, origin, group, rollout_id)
        return as_prompts(origin)

    def interrupted(self, origin: list[Any]) -> None:
        """Count that something aborted the group although nothing is being wound down.

        Raises:
            RunError: that happened too often, without an end of the group in between.
        """
        name = group_name(origin)
        self._interruptions[name] += 1
        if self._interruptions[name] > MAX_INTERRUPTIONS_OF_A_GROUP:
            raise RunError(
                f"{name:.200} was aborted {self._interruptions[name]} times while nothing was being wound down; does something "
                "abort the engines, or does a custom function always return ABORTED?"
            )

    def finished(self, origin: list[Any], group: list[Any]) -> None:
        """Count a group that is whole, and its failed samples."""
        if self._interruptions:
            del self._interruptions[group_name(origin)]
        self.counts["finished"] += 1
        self.failures.add(group)

    async def drops_group(self, group: list[Any], obtainable: Callable[[], float]) -> bool:
        """Whether the dynamic filter drops a finished group, which is then counted.

        Args:
            obtainable: how many groups can still be had, this one included; asked when the verdict is there.
        """
        if self._filter is None:
            return False
        verdict = await verdict_on_group(self._args, self._filter, group)
        target = self._args.rollout_batch_size
        drop = should_drop_dynamic_filter_output(verdict, remaining_batch_size=obtainable(), target_data_size=target)
        if drop:
            self.counts["dropped"] += 1
            self.drops.on_dynamic_filter_drop(verdict.reason)
        return drop

    def stop_if_a_service_seems_dead(self) -> None:
        """Raise RunError if most samples failed of as many as a rollout has, or more."""
        self.failures.stop_if_a_service_seems_dead(self._args.rollout_batch_size * self._args.n_samples_per_prompt)
