"""From the data source to the batches of the training ranks: all of a rollout or an evaluation but the serving.

A rollout draws prompts, calls the rollout function, dumps and logs what came back, and cuts it into one shard per data-parallel
rank. Methods block, and several may run at a time, each in a thread of its own: what belongs to one call lies in its
`GenerationCall`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

from slime.arguments.config_files.role_config import critic_args
from slime.observability.console import Progress, evaluation_name, generation_name
from slime.observability.logging_utils import LoggedMetrics, collected_metrics, drain_outbox
from slime.observability.rollout_metrics import (
    compute_eval_metrics,
    compute_rollout_metrics,
    compute_rollout_perf_metrics,
    merge_extra_metrics,
)
from slime.ray.driver import RolloutResult, RunLength, save_is_due
from slime.rollout.base_types import (
    call_rollout_fn,
    check_eval_output,
    check_metrics,
    check_sample,
    leaves,
    sample_line,
)
from slime.rollout.data_source import create_data_source
from slime.rollout.data_source_files import prompts_per_epoch
from slime.rollout.draws import DataSourceSnapshots
from slime.rollout.generation_call import GenerationCall
from slime.rollout.rm_hub.grading import warn_of_missing_solutions
from slime.rollout.rollout_dump import load_rollout, save_evaluation, save_rollout
from slime.rollout.staleness import hold_to_bound
from slime.rollout.train_data import convert_samples_to_train_batch, post_process_rewards
from slime.rollout.user_functions import CallTimedOut, call_for_step, wrong_result_error
from slime.scheduling.dp_schedule import DPSchedule
from slime.training.batch_transport import open_transport, send_shard
from slime.training.rollout_batch import split_for_data_parallel
from slime.training.schedule import schedule_from_args, train_parallel_config
from slime.utils.errors import RunError, UserError
from slime.utils.misc import Box, host_memory_gib
from slime.utils.plugin_loader import calling_user_code, load_function
from slime.utils.run_values import SharedArguments, add_run_values
from slime.utils.types import Sample, failed_and_masked

logger = logging.getLogger(__name__)

# A list at this depth or deeper that holds more than one sample directly is one execution: its samples share one `rollout_id`.
# Depth 0 is the list of groups, depth 1 a group.
_EXECUTION_DEPTH = 2


class RolloutPipeline:
    """Owns the data source, which a run that trains on dumps does not have, and the source's states.

    Attributes:
        length: how long the run is, by its flags and its data.
        engine_memory: tells the GiB of host memory of the engine that has most; None where there is no engine to ask.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.data_source: Any = None
        self.states: DataSourceSnapshots | None = None
        # The last rollout at which samples were shown, for the rollouts and for every evaluation set.
        self._shown: dict[str, int] = {}
        # The progress of each call that is under way, by its name.
        self._progress: dict[str, Progress] = {}
        # Flags whose log function did not return in time, and is not called any more.
        self._given_up: set[str] = set()
        self.engine_memory: Callable[[], float | None] = lambda: None
        self.args = SharedArguments(args)
        if args.has_trainer:
            open_transport(args)
        if args.load_debug_rollout_data is None:
            self.data_source = create_data_source(self.args)
            self.states = DataSourceSnapshots(self.args, self.data_source)
        self.length = self._length(args)
        add_run_values(self.args, **dataclasses.asdict(self.length))

    def _length(self, args: argparse.Namespace) -> RunLength:
        epoch = None
        if self.data_source is not None and args.rollout_global_dataset:
            prompts = prompts_per_epoch(args, self.data_source)
            epoch = None if prompts is None else max(1, prompts // args.rollout_batch_size)
        return RunLength(args.num_epoch * epoch if args.num_rollout is None else args.num_rollout, epoch)

    def progress(self, name: str) -> tuple[str, int, int] | None:
        """(description, done, total) of what the call with this name generates (`generation_name`, `evaluation_name`)."""
        progress = self._progress.get(name)
        return None if progress is None else progress.snapshot()

    @contextlib.contextmanager
    def _call(
        self, name: str, rollout_id: int, trained_as: int | None = None, **evaluation: bool
    ) -> Iterator[list[LoggedMetrics]]:
        """The block is a generation call of its own. Gives the list that the user's functions log into meanwhile."""
        call = GenerationCall(rollout_id, trained_as, **evaluation)
        self._progress[name] = call.progress
        try:
            with call.under_way(), collected_metrics() as logged:
                yield logged
            # A user's own threads have no context, so what they log belongs to no call. It leaves with the next call that ends.
            logged += drain_outbox()
        finally:
            del self._progress[name]

    def generate(self, rollout_id: int, trained_as: int | None = None) -> RolloutResult:
        """Run the rollout function for one step and build the shards of its train batch.

        `trained_as`: the version of the weights that the rollout will train; None where that is not known.
        """
        drawing = contextlib.nullcontext() if self.states is None else self.states.of_rollout(rollout_id)
        with self._call(generation_name(rollout_id), rollout_id, trained_as) as logged, drawing:
            started = time.perf_counter()
            samples, extra_metrics = self.samples_of(rollout_id)
            seconds = time.perf_counter() - started
            self._remember_state(rollout_id)
            warn_of_missing_solutions(self.args, samples)
            staleness = hold_to_bound(self.args, samples, trained_as)
            if self.args.save_debug_rollout_data is not None:
                save_rollout(self.args.save_debug_rollout_data, rollout_id, samples)
            shards, critic_shards, dropped = self._build_shards(samples) if self.args.has_trainer else ([], [], 0)
            metrics = merge_extra_metrics({"rollout/dropped_rollouts": dropped, **staleness}, extra_metrics, "rollout/")
            if not self.logged_by_user(rollout_id, samples, metrics, seconds):
                metrics.update(compute_rollout_metrics(self.args, samples))
                if not self.args.has_trainer:
                    metrics.update(_raw_reward(self.args, samples))
                metrics.update(compute_rollout_perf_metrics(self.args, samples, seconds))
                metrics["perf/manager_host_memory_gib"] = host_memory_gib()
                if (gib := self.engine_memory()) is not None:
                    metrics["perf/engine_host_memory_gib"] = gib
                logged.append(({**metrics, "rollout/step": rollout_id}, "rollout/step"))
        return RolloutResult(shards, logged, critic_shards)

    def _remember_state(self, rollout_id: int) -> None:
        """Keep the data state for the checkpoint of `rollout_id`, if one will be written."""
        args = self.args
        writes_checkpoints = self.states is not None and args.save is not None and args.has_trainer
        if writes_checkpoints and save_is_due(args, self.length, rollout_id):
            self.states.remember(rollout_id)

    def samples_of(self, rollout_id: int) -> tuple[list[Any], dict[str, Any] | None]:
        """The step's samples, flat, from the rollout function or from a dump."""
        args = self.args
        if args.load_debug_rollout_data is not None:
            fraction = args.load_debug_rollout_data_subsample
            return load_rollout(args.load_debug_rollout_data, rollout_id, fraction), None
        flag, path = "--rollout-function-path", args.rollout_function_path
        source, function = f"{flag} {path}", load_function(path, flag=flag)
        with _calling(flag, path, f"rollout {rollout_id}"):
            output = call_rollout_fn(function, args, rollout_id, self.data_source, evaluation=False)
        check_metrics(output.metrics, source)
        samples = flatten_rollout_output(output.samples, source)
        if args.rollout_sample_filter_path is not None:
            self._mark_samples_to_leave_out(rollout_id, output.samples, samples)
        if self._shows_samples("rollouts", rollout_id):
            for which, sample in (("first", samples[0]), ("last", samples[-1])):
                logger.info("rollout %d, %s sample: %s", rollout_id, which, sample_line(sample))
        return samples, output.metrics

    def _shows_samples(self, source: str, rollout_id: int) -> bool:
        """Whether samples of `source` (rollouts, or an evaluation set) are shown at this rollout, which they are at the first
        one of the run, and whenever `--log-samples-interval` rollouts have passed since."""
        interval, last = self.args.log_samples_interval, self._shown.get(source)
        due = interval > 0 and (last is None or rollout_id - last >= interval)
        if due:
            self._shown[source] = rollout_id
        return due

    def _mark_samples_to_leave_out(self, rollout_id: int, groups: list[Any], samples: list[Sample]) -> None:
        """Call the user's `--rollout-sample-filter-path`, which sets `remove_sample` of what must not be trained. `samples` are
        those of `groups`, flat."""
        called = "--rollout-sample-filter-path", self.args.rollout_sample_filter_path, f"rollout {rollout_id}"
        returned = call_for_step(self.args, *called, self.args, groups)
        if returned is not None and returned is not groups:
            raise wrong_result_error(*called, returned, "None: a sample is left out by `sample.remove_sample = True`")
        if set(map(id, leaves(groups))) != set(map(id, samples)):
            flag, path, subject = called
            raise UserError(
                f"{flag} {path} left {len(leaves(groups))} of {len(samples)} samples in the list of {subject}, or other ones; "
                "a sample is left out by `sample.remove_sample = True`, and keeps its place in its group"
            )

    def _build_shards(self, samples: list[Any]) -> tuple[list[Box], list[Box], int]:
        """One boxed object per data-parallel rank of the actor and of the critic, if there is one, and the number of
        rollouts that fit no whole step."""
        batch = convert_samples_to_train_batch(self.args, samples)
        schedule = batch_schedule(self.args, batch)
        shards = [send_shard(self.args, shard) for shard in split_for_data_parallel(batch, schedule)]
        if not self.args.use_critic:
            return shards, [], schedule.dropped
        schedule_of_critic = batch_schedule(critic_args(self.args), batch)
        if schedule_of_critic == schedule:
            # The same objects serve the ranks of both models.
            return shards, shards, schedule.dropped
        # The critic has a layout or a token budget of its own.
        of_critic = [send_shard(self.args, shard) for shard in split_for_data_parallel(batch, schedule_of_critic)]
        return shards, of_critic, schedule.dropped

    def logged_by_user(self, rollout_id: int, samples: list[Any], metrics: dict[str, Any], seconds: float) -> bool:
        """Whether a user's function logged the rollout in the place of the usual metrics."""
        flag, path = "--custom-rollout-log-function-path", self.args.custom_rollout_log_function_path
        return self._call_log_function(flag, path, rollout_id, samples, metrics, seconds)

    def evaluate(self, rollout_id: int, *, before: bool = False) -> list[LoggedMetrics]:
        """Evaluate all data sets, `before` training on `rollout_id` or after it, and return what was logged."""
        args, name = self.args, evaluation_name(rollout_id, before=before)
        flag, path = "--eval-function-path", args.eval_function_path
        log_flag, log_path = "--custom-eval-rollout-log-function-path", args.custom_eval_rollout_log_function_path
        function = load_function(path, flag=flag)
        with self._call(name, rollout_id, evaluation=True, before_training=before) as logged:
            with _calling(flag, path, name):
                output = call_rollout_fn(function, args, rollout_id, self.data_source, evaluation=True)
            check_eval_output(output, f"{flag} {path}")
            for which, result in output.data.items():
                samples = result.get("samples")
                if samples is not None and len(samples) and self._shows_samples(f"set {which}", rollout_id):
                    logger.info("evaluation set %s, first sample: %s", which, sample_line(samples[0]))
            if args.save_debug_rollout_data is not None:
                save_evaluation(args.save_debug_rollout_data, rollout_id, output.data, before_training=before)
            if not self._call_log_function(log_flag, log_path, rollout_id, output.data, output.metrics):
                metrics = merge_extra_metrics(compute_eval_metrics(args, output.data), output.metrics, "eval/")
                # The step is the number of rollouts trained so far. So an evaluation and the rollout that is generated with the
                # same weights have one step, where weights are pushed after every rollout.
                logged.append(({**metrics, "eval/step": rollout_id + (not before)}, "eval/step"))
        return logged

    def _call_log_function(self, flag: str, path: str | None, rollout_id: int, *arguments: Any) -> bool:
        """Call a user's log function, if there is one. Returns whether it logged in place of us.

        A function that fails, or does not return in time, is reported and never ends the run. One that did not return is not
        called any more: every step would wait for it as long.
        """
        if path is None or flag in self._given_up:
            return False
        try:
            called = flag, path, f"rollout {rollout_id}"
            return bool(call_for_step(self.args, *called, rollout_id, self.args, *arguments))
        except Exception as error:
            is_late = isinstance(error.__cause__, CallTimedOut)
            if is_late:
                self._given_up.add(flag)
            logger.exception("%s %s failed; default logging is used%s", flag, path, " from here on" if is_late else "")
            return False


def batch_schedule(args: argparse.Namespace, batch: dict[str, Any]) -> DPSchedule:
    """How the samples of a step are dealt to ranks and micro-batches."""
    return schedule_from_args(
        args,
        train_parallel_config(args),
        batch["total_lengths"].tolist(),
        global_batch_size=args.global_batch_size,
        execution_ids=batch["rollout_ids"].tolist(),
    )


@contextlib.contextmanager
def _calling(flag: str, path: str, subject: str) -> Iterator[None]:
    """`calling_user_code` for a user's function. Our own functions raise errors that need no such frame; only a cancellation,
    which we did not ask for, is turned into one."""
    if not path.startswith("slime."):
        with calling_user_code(flag, path, subject):
            yield
        return
    try:
        yield
    except CancelledError:
        raise RunError(
            f"{subject} was cancelled; does a function of yours cancel tasks that are not its own?"
        ) from None


def _raw_reward(args: argparse.Namespace, samples: Sequence[Sample]) -> dict[str, float]:
    """`rollout/raw_reward` as training ranks would report it. Nothing, with a warning, where they could not get rewards."""
    try:
        raw, _ = post_process_rewards(args, samples)
    except UserError as error:
        logger.warning("no rollout/raw_reward: a run that trains would end here: %s", error)
        return {}
    graded = [reward for reward, sample in zip(raw, samples, strict=True) if not failed_and_masked(sample)]
    return {"rollout/raw_reward": sum(graded) / len(graded)} if graded else {}


def flatten_rollout_output(groups: list[Any], source: str = "--rollout-function-path") -> list[Sample]:
    """All samples in order, with all nesting removed; `source` are the flag and the path that errors name.

    Raises:
        UserError: something that is neither a list nor a Sample, an empty output, one object in two places, a sample with
            fields of other kinds or that do not fit together, an execution whose samples do not share a `rollout_id`, or one
            `rollout_id` in two groups.
    """
    if not isinstance(groups, list | tuple):
        raise UserError(f"{source} returned {type(groups).__name__} as samples; expected a list of groups of Samples")
    samples = list(_flatten(groups, "samples", 0, source))
    if not samples:
        raise UserError(f"{source} returned no samples")
    if len(set(map(id, samples))) < len(samples):
        raise UserError(
            f"{source} returned one Sample object in several places, so these would count as one answer; return objects of "
            "their own (copy.deepcopy(sample) keeps one as it is), each with a rollout_id of its own where it is another answer"
        )
    group_of: dict[int, int | None] = {}
    for sample in samples:
        check_sample(sample, f"{source} returned")
        if (
            sample.rollout_id is not None
            and group_of.setdefault(sample.rollout_id, sample.group_index) != sample.group_index
        ):
            raise UserError(
                f"{source}: groups {group_of[sample.rollout_id]} and {sample.group_index} both have an execution "
                f"with rollout_id {sample.rollout_id}, and would count as one; where samples come from a data source of yours, "
                "give each an `index` of its own"
            )
    return samples


def validate_execution_id(siblings: list[Sample], place: str, source: str) -> None:
    """Raise UserError, naming source, place and ids, unless all samples share one `rollout_id` that is not None."""
    ids = {sample.rollout_id for sample in siblings}
    if len(ids) == 1 and None not in ids:
        return
    raise UserError(
        f"{source}: {place} holds {len(siblings)} samples of one execution with rollout_id "
        f"{sorted(ids, key=str)}; all samples of one execution must share one rollout_id that is not None"
    )


def _flatten(node: list[Any] | tuple[Any, ...], place: str, depth: int, source: str) -> Iterator[Sample]:
    for position, entry in enumerate(node):
        if not isinstance(entry, Sample | list | tuple):
            raise UserError(
                f"{source}: {place}[{position}] is {type(entry).__name__}; expected Sample or a list of them"
            )
    own = [entry for entry in node if isinstance(entry, Sample)]
    if depth >= _EXECUTION_DEPTH and len(own) > 1:
        validate_execution_id(own, place, source)
    for position, entry in enumerate(node):
        if isinstance(entry, Sample):
            yield entry
        else:
            yield from _flatten(entry, f"{place}[{position}]", depth + 1, source)
