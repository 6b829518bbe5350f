"""What the driver's loop decides and reports: when to save and evaluate, and what a step printed and logged."""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from slime.observability.console import evaluation_line, evaluation_name, rollout_line
from slime.observability.logging_utils import LoggedMetrics, forget_lost_steps, write_to_trackers
from slime.utils.misc import should_run_periodic_action

logger = logging.getLogger(__name__)


def saves(args: argparse.Namespace, rollout_id: int) -> bool:
    """Whether a checkpoint is due after this rollout. Driver and rollout manager must agree."""
    return should_run_periodic_action(rollout_id, args.save_interval, args.rollouts_per_epoch, args.num_rollout)


def evaluates_before_training(args: argparse.Namespace) -> bool:
    """Whether to evaluate before the first rollout: of a new run, or as all that a run with `--num-rollout 0` does."""
    if args.start_rollout_id >= args.num_rollout > 0:
        logger.info("nothing left to do: %d of %d rollouts are done", args.start_rollout_id, args.num_rollout)
    if not args.has_engines or args.eval_interval is None:
        return False
    return args.num_rollout == 0 or (args.start_rollout_id == 0 and not args.skip_eval_before_train)


def evaluates(args: argparse.Namespace, rollout_id: int) -> bool:
    """Whether an evaluation is due after this rollout."""
    if not args.has_engines:
        return False
    return should_run_periodic_action(rollout_id, args.eval_interval, args.rollouts_per_epoch, args.num_rollout)


class StepReport:
    """Collects the metrics of a step, hands them to the trackers and prints the step's line."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        # Of the step that is under way or was the last one; None before the first.
        self._rollout_id: int | None = None
        self._merged: dict[str, Any] = {}
        # From here on the end of the run has something to tell, before the first rollout is done too.
        args.rollouts_done, args.rollout_saved = args.start_rollout_id, None
        forget_lost_steps(args)

    @contextlib.contextmanager
    def step(self, rollout_id: int) -> Iterator[None]:
        """A rollout step; its line is printed when the block ends without an error."""
        self._rollout_id, self._merged = rollout_id, {}
        started = time.perf_counter()
        yield
        self.add_metrics({"perf/step_time": time.perf_counter() - started})
        if self._args.loss_type == "sft_loss":
            # Nothing is graded: a reward of zero in the line would look like a failure.
            self._merged.pop("rollout/raw_reward", None)
        self._args.rollouts_done = rollout_id + 1
        logger.info("%s", rollout_line(rollout_id, self._args.num_rollout, self._merged))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the step, logged as `perf/{name}_time`."""
        started = time.perf_counter()
        yield
        self.add_metrics({f"perf/{name}_time": time.perf_counter() - started})

    def saved(self, rollout_id: int) -> None:
        """The checkpoint of the rollout is written, and is about to be published: the end of the run may find it."""
        self._args.rollout_saved = rollout_id

    def add(self, logged: list[LoggedMetrics]) -> None:
        """Metrics that came back from an actor."""
        write_to_trackers(logged)
        for metrics, _ in logged:
            self._merged.update(metrics)

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Metrics of this step that the driver measured."""
        self.add([({**metrics, "rollout/step": self._rollout_id}, "rollout/step")])

    def evaluation(self, logged: list[LoggedMetrics]) -> None:
        """Metrics of an evaluation, before the first step or after the last one; prints its line."""
        write_to_trackers(logged)
        before = self._rollout_id is None
        name = evaluation_name(self._args.start_rollout_id if before else self._rollout_id, before=before)
        for metrics, step_key in logged:
            if step_key == "eval/step":
                logger.info("%s", evaluation_line(name, metrics))
