"""A rollout function for experiments: it trains on answers of a policy that is `rollout_delay` weight versions old.

    python train.py ... --rollout-function-path tools/bench/delayed_rollout.py:generate_rollout \\
      --custom-config-path tools/bench/delayed_rollout.yaml

It is what a deep pipeline between generation and training does, without its speed: finished batches wait in a queue. The first
call generates `rollout_delay` + 1 batches with the first policy; each later one generates one and gives out the oldest. So
every rollout trains, the first on fresh answers, rollout t on answers of min(t, `rollout_delay`) versions ago. The metric
`rollout/staleness` says so from the versions that the engines stamped on the samples. The queue is not saved: a resumed run
starts with a new one. Evaluation is never delayed.
"""

import functools
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, leaves

Batch = TypeVar("Batch")


class DelayLine(Generic[Batch]):
    """A queue that holds `delay` batches between two calls."""

    def __init__(self, delay: int) -> None:
        self._delay = delay
        self._waiting: deque[Batch] = deque()

    def exchange(self, generate: Callable[[], Batch]) -> tuple[Batch, Batch]:
        """Generate what is missing, once when the line is full; returns (oldest batch, newest batch)."""
        while len(self._waiting) <= self._delay:
            self._waiting.append(generate())
        newest = self._waiting[-1]
        return self._waiting.popleft(), newest


@functools.cache
def _line_of_this_process(delay: int) -> DelayLine[RolloutFnTrainOutput]:
    return DelayLine(delay)


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The default rollout function behind a delay of `args.rollout_delay` weight versions."""
    generate = functools.partial(sglang_rollout.generate_rollout, args, rollout_id, data_source, evaluation=evaluation)
    if evaluation:
        return generate()
    oldest, newest = _line_of_this_process(args.rollout_delay).exchange(generate)
    staleness = mean_version(newest) - mean_version(oldest)
    return RolloutFnTrainOutput(oldest.samples, {**(oldest.metrics or {}), "staleness": staleness})


def mean_version(batch: RolloutFnTrainOutput) -> float:
    """Mean over samples of the weight version that wrote the first token."""
    versions = [int(sample.weight_versions[0]) for sample in leaves(batch.samples)]
    return sum(versions) / len(versions)
