"""Samples that could not be produced or graded: they stay in their group, masked and counted, with a reason."""

import logging
from typing import Any

from slime.rollout.base_types import leaves
from slime.utils.errors import RunError
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


class SampleFailed(Exception):
    """Ends the production of one sample. `retryable`: a second attempt from the bare prompt may succeed."""

    def __init__(self, reason: str, *, retryable: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable


def mark_failed(args: Any, sample: Sample, reason: str) -> Sample:
    """Make `sample` a FAILED one that trains nothing: masked, reward 0 so that its siblings can be normalised."""
    logger.warning("sample %s failed: %s", sample.index, reason)
    sample.status = Sample.Status.FAILED
    sample.remove_sample = True
    sample.metadata["fail_reason"] = reason
    if sample.reward is None:
        sample.reward = neutral_reward(args)
    return sample


def neutral_reward(args: Any) -> float | dict[str, float]:
    """Zero, in the shape that `--reward-key` and `--eval-reward-key` ask for."""
    keys = [key for key in (getattr(args, "reward_key", None), getattr(args, "eval_reward_key", None)) if key]
    return dict.fromkeys(keys, 0.0) if keys else 0.0


def failed_samples(groups: list[Any]) -> list[Sample]:
    """Samples of `groups` that the framework or a user function marked FAILED."""
    return [sample for sample in leaves(groups) if sample.status is Sample.Status.FAILED]


def stop_when_most_failed(groups: list[Any], whole: str = "this step", total: int | None = None) -> None:
    """Raise RunError with the first cause when more than half of the samples were marked FAILED by us.

    `total`: the number of samples that `whole` will have, if `groups` is only a part of it.
    """
    tally = FailureTally()
    tally.add(groups)
    tally.stop_when_most_failed(whole, total)


class FailureTally:
    """How many samples there were, how many of them we marked FAILED ourselves, and why the first: without the samples."""

    def __init__(self) -> None:
        self.samples = 0
        self.failed = 0
        self._first = ""

    def add(self, group: list[Any]) -> None:
        """Count the samples of a finished group."""
        failed = [
            sample for sample in failed_samples(group) if sample.remove_sample and "fail_reason" in sample.metadata
        ]
        if failed and not self._first:
            self._first = f"sample {failed[0].index}: {failed[0].metadata['fail_reason']}"
        self.samples += len(leaves(group))
        self.failed += len(failed)

    def stop_when_most_failed(self, whole: str = "this step", total: int | None = None) -> None:
        """Raise RunError with the first cause when more than half failed. `total`: see the function of this name."""
        total = self.samples if total is None else total
        if 2 * self.failed > total:
            raise RunError(
                f"{self.failed} of {total} samples of {whole} failed, more than half; the first was {self._first}"
            )
