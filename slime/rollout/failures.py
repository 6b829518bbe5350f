"""Samples that could not be produced or graded: they stay in their group, masked and counted, with a reason."""

import logging
from typing import Any

from slime.rollout.base_types import leaves
from slime.utils.errors import RunError, UserError
from slime.utils.http_utils import HttpError
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample, failed_and_masked

logger = logging.getLogger(__name__)


class SampleFailed(Exception):
    """Ends the production of one sample.

    Attributes:
        retryable: a second attempt from the bare prompt may succeed.
        abandoned: the work that was given up may still run, and write into the attempt.
    """

    def __init__(self, reason: str, *, retryable: bool = True, abandoned: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable
        self.abandoned = abandoned


class failing_alone:
    """With `--use-fault-tolerance`, what a user's function or a request raises in the block fails its sample, and not the run.

    Raises:
        SampleFailed: in the place of UserError and HttpError. What a function of the user's raised may succeed at a second
            attempt; a request was sent again as often as `--http-max-retries` says, or is what engines died of.
    """

    def __init__(self, args: Any) -> None:
        self._args = args

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and isinstance(error, UserError | HttpError) and self._args.use_fault_tolerance:
            raise SampleFailed(str(error), retryable=not isinstance(error, HttpError)) from error


class _Causes(metaclass=SingletonMeta):
    """The places in code where samples failed. A dead service fails thousands of samples in one way: one traceback is
    enough."""

    def __init__(self) -> None:
        self._told: set[tuple[str, ...]] = set()

    def is_news(self, trace: str) -> bool:
        """Whether no traceback through the same lines of code was logged yet; its message, which may name a sample, does not
        matter. A reason without a traceback, say the answer of a service, is always news."""
        places = tuple(line for line in trace.splitlines() if line.startswith("  File "))
        is_news = not places or places not in self._told
        self._told.add(places)
        return is_news


def mark_failed(args: Any, sample: Sample, reason: str) -> Sample:
    """Make `sample` a FAILED one that trains nothing: masked, reward 0 so that its siblings can be normalised."""
    summary, _, trace = reason.partition("\n")
    told = reason if not trace or _Causes().is_news(trace) else f"{summary} (its traceback is that of an earlier one)"
    logger.warning("sample %s failed: %s", sample.index, told)
    sample.status = Sample.Status.FAILED
    sample.remove_sample = True
    sample.metadata["fail_reason"] = reason
    if sample.reward is None:
        sample.reward = neutral_reward(args)
    return sample


def neutral_reward(args: Any) -> float | dict[str, float]:
    """Zero, in the shape that `--reward-key` and `--eval-reward-key` ask for."""
    keys = [key for key in (args.reward_key, args.eval_reward_key) if key]
    return dict.fromkeys(keys, 0.0) if keys else 0.0


def failed_samples(groups: list[Any]) -> list[Sample]:
    """Samples of `groups` that the framework or a user function marked FAILED."""
    return [sample for sample in leaves(groups) if sample.status is Sample.Status.FAILED]


class FailureTally:
    """How many samples there were, how many of them are FAILED and masked, and why the first: without the samples.

    Args:
        whole: what the samples belong to, for the message.
    """

    def __init__(self, whole: str = "this step") -> None:
        self.whole = whole
        self.samples = 0
        self.failed = 0
        self._first = ""

    def add(self, group: list[Any]) -> None:
        """Count the samples of a finished group."""
        samples = leaves(group)
        failed = [sample for sample in samples if failed_and_masked(sample)]
        if failed and not self._first:
            reason = failed[0].metadata.get("fail_reason", "no reason was given (metadata['fail_reason'])")
            # One that was made elsewhere may have no number yet.
            name = "sample" if failed[0].index is None else f"sample {failed[0].index}"
            self._first = f"{name}: {reason}"
        self.samples += len(samples)
        self.failed += len(failed)

    def stop_if_a_service_seems_dead(self, enough: int) -> None:
        """Call `stop_when_most_failed` if `enough` samples were counted, or more.

        To a filter all failed samples look alike, so it drops every group of a dead reward service. Without this check that
        service would be asked for ever.
        """
        if self.samples >= enough:
            self.stop_when_most_failed()

    def stop_when_most_failed(self, total: int | None = None) -> None:
        """Raise RunError with the first cause when more than half failed of `total` samples; None: of those counted."""
        total = self.samples if total is None else total
        if 2 * self.failed > total:
            raise RunError(
                f"{self.failed} of {total} samples of {self.whole} failed, more than half; the first was {self._first}"
            )
