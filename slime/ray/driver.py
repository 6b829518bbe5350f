"""The parts that the loops of `train.py` and `train_async.py` are written with.

- What the loops pass around: `StartedRun`, `RunLength`, `RolloutResult`, and `RunProgress`, which outlives them.
- What they ask: whether a save, a push or an evaluation is due after a rollout.
- What they do: report a step (`StepReport`), whose numbers a test run checks as they come (`check_numbers`), save and publish
  (`Saver`), give the devices to one side or the other (`SharedDevices`), generate ahead (`RolloutsAhead`).

Nothing here talks to Ray itself: ranks and engines are reached through `TrainGroup` and `RolloutClient`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.observability.console import StartupClock, evaluation_line, evaluation_name, has_line, rollout_line
from slime.observability.logging_utils import LoggedMetrics, forget_lost_steps, write_to_trackers
from slime.plan.before_start import lacks_evaluation
from slime.scheduling.device_turns import ENGINES, TRAINER, Holds, Sides, Turn, steps_to
from slime.utils.checkpoint_directory import EVALUATED, evaluated_rollouts
from slime.utils.errors import RunError, UserError
from slime.utils.filesystem import write_json_atomically, write_text_atomically
from slime.utils.misc import Box, host_memory_gib, should_run_periodic_action

if TYPE_CHECKING:
    from slime.plan.longest_batch import Lengths, ProbedMemory
    from slime.ray.rollout_manager import RolloutClient, RunningCall
    from slime.ray.train_group import TrainGroup

logger = logging.getLogger(__name__)

# When a run fails while a checkpoint is being written, each question to the ranks about it may take this long.
_RESCUE_SECONDS = 10.0
# `--ci-test` takes numbers that should be zero for zero up to this.
_EQUAL = 1e-8
# `--ci-load-grad-norm` lets a gradient norm differ from that of the earlier run by a share of it or by a number, whichever is
# larger.
_NORM_SHARE, _NORM_DIFFERENCE = 0.01, 0.01
_NORMS = {"train/grad_norm": "actor", "train/critic-grad_norm": "critic"}


@dataclass(frozen=True)
class RunLength:
    """How long a run is, by its flags and its data.

    Attributes:
        num_rollout: the number of its rollouts, those of earlier starts included.
        rollouts_per_epoch: None without a global data set, or where the data source does not tell its length.
    """

    num_rollout: int
    rollouts_per_epoch: int | None = None

    def is_due(self, interval: int | None, rollout_id: int) -> bool:
        """Whether something that happens every `interval` rollouts is due after this one; it is also due where an epoch or the
        run ends. With None it never is."""
        return should_run_periodic_action(rollout_id, interval, self.rollouts_per_epoch, self.num_rollout)


@dataclass(frozen=True)
class StartedRun:
    """A run whose processes are there, and which has all that it starts from.

    Attributes:
        actor: the training ranks; None where nothing is trained.
        start_rollout_id: the first rollout of this start.
    """

    rollout_manager: RolloutClient
    actor: TrainGroup | None
    length: RunLength
    start_rollout_id: int


@dataclass
class RunProgress:
    """How far a run has come. `StepReport` writes it; whoever ends the run reads from it what is kept and what is lost.

    All starts of one command (`--max-restarts`) share one of these.

    Attributes:
        start_rollout_id, num_rollout: the first rollout of this run, and the number of all; None before the loop.
        rollouts_done: the number of rollouts that are finished, counted from rollout 0; None before the loop.
        rollout_saved: the last one of which this run has written a checkpoint, None before the first.
    """

    start_rollout_id: int | None = None
    num_rollout: int | None = None
    rollouts_done: int | None = None
    rollout_saved: int | None = None


def save_is_due(args: argparse.Namespace, length: RunLength, rollout_id: int) -> bool:
    """Whether a checkpoint is due after this rollout. Driver and rollout manager must agree."""
    return length.is_due(args.save_interval, rollout_id)


def push_is_due(args: argparse.Namespace, length: RunLength, rollout_id: int) -> bool:
    """Whether the engines get new weights after this rollout: every `--update-weights-interval`, and at the end."""
    return (rollout_id + 1) % args.update_weights_interval == 0 or rollout_id + 1 == length.num_rollout


def evaluates_before_training(args: argparse.Namespace, run: StartedRun) -> bool:
    """Whether to evaluate before the first rollout: of a new run, as all that a run with `--num-rollout 0` does, or because the
    run that goes on here ended within the evaluation that followed its checkpoint."""
    start, num_rollout = run.start_rollout_id, run.length.num_rollout
    if 0 < start <= num_rollout and evaluation_is_due(args, run.length, start - 1) and lacks_evaluation(args, start):
        logger.info("the evaluation after rollout %d was not finished, and is made now", start - 1)
        return True
    if start >= num_rollout > 0:
        logger.info("nothing left to do: %d of %d rollouts are done", start, num_rollout)
    if not args.has_engines or args.eval_interval is None:
        return False
    return num_rollout == 0 or (start == 0 and not args.skip_eval_before_train)


def evaluation_is_due(args: argparse.Namespace, length: RunLength, rollout_id: int) -> bool:
    """Whether an evaluation is due after this rollout."""
    return args.has_engines and length.is_due(args.eval_interval, rollout_id)


@dataclass(frozen=True)
class RolloutResult:
    """A generated rollout: one boxed shard per data-parallel rank (empty without a trainer), and what was logged.

    `critic_shards`: the same samples as a critic's ranks take them; empty without a critic.
    """

    shards: list[Box]
    logged: list[LoggedMetrics]
    critic_shards: list[Box] = field(default_factory=list)


def probe_memory(args: argparse.Namespace, run: StartedRun) -> None:
    """Before the first step, try out whether the memory suffices for the longest one, while the engines hold as much memory as
    they do in any step.

    `--memory-probe` and `--no-memory-probe` decide whether this is tried; without either flag it is tried on GPUs alone.

    Raises:
        UserError: memory ran out on a rank.
    """
    if run.actor is None or run.start_rollout_id >= run.length.num_rollout:
        return
    is_wanted = args.on_gpus is not False if args.memory_probe is None else args.memory_probe
    if not is_wanted:
        return
    try:
        run.actor.probe_memory()
    except UserError:
        raise
    except Exception:
        logger.error("the memory probe (--memory-probe) failed: --no-memory-probe leaves it out")
        raise
    StartupClock().mark("memory probe")


def log_probe(args: argparse.Namespace, probe: Callable[[list[Lengths]], list[ProbedMemory]]) -> None:
    """Have the ranks of a model go through its longest micro-batches, and log how much memory that took. Where no flag limits
    the length of micro-batches, only a warning is logged.

    Args:
        args: the arguments of the model's role, actor or critic.
        probe: has all ranks go through the micro-batches that it is given, and returns what each rank measured.
    """
    # Importing the plan takes as long as all that `--help` does.
    from slime.plan.longest_batch import longest_micro_batches, probe_line

    batches = longest_micro_batches(args)
    if batches:
        logger.info("memory probe of the %s begins (--no-memory-probe leaves it out)", args.role)
        logger.info("%s", probe_line(args, batches, probe(batches)))
        return
    logger.warning(
        "no memory probe of the %s: no flag says how large a micro-batch may be (--rollout-max-context-len, or "
        "--use-dynamic-batch-size with --max-tokens-per-gpu)",
        args.role,
    )


class RolloutsAhead:
    """Rollouts that are generated while others are trained."""

    def __init__(self, args: argparse.Namespace, run: StartedRun) -> None:
        self._args, self._run = args, run
        self._next = run.start_rollout_id
        self._calls: dict[int, RunningCall[RolloutResult]] = {}

    def start(self, rollout_id: int) -> None:
        """`rollout_id` is trained next: start it, and those that may be generated meanwhile, unless they are under way."""
        length = self._run.length
        last = min(rollout_id + self._args.async_buffer_size, length.num_rollout - 1)
        while self._next <= last:
            pushes_ahead = sum(push_is_due(self._args, length, before) for before in range(rollout_id, self._next))
            self._calls[self._next] = self._run.rollout_manager.generate(self._next, pushes_ahead)
            self._next += 1

    def ready_for_push(self) -> contextlib.AbstractContextManager[None]:
        """In the block no rollout is under way, unless `--update-weights-in-flight` lets requests go on with other weights."""
        in_flight = self._args.update_weights_in_flight
        return contextlib.nullcontext() if in_flight else self._run.rollout_manager.between_rollouts()

    def take(self, rollout_id: int) -> RolloutResult:
        """Wait for a rollout that was started, and forget it."""
        return self._calls.pop(rollout_id).result()


class StepReport:
    """Collects the metrics of a step, hands them to the trackers and prints the step's line.

    Args:
        progress: is brought up to date as steps and saves end.
    """

    def __init__(self, args: argparse.Namespace, run: StartedRun, progress: RunProgress) -> None:
        self._args = args
        self._progress = progress
        # The step that is under way, or else the last one; None before the first.
        self._rollout_id: int | None = None
        self._merged: dict[str, Any] = {}
        starts_again = progress.rollouts_done is not None
        # From here on the closing lines have something to say, even if no rollout gets done.
        progress.rollouts_done = self._start_rollout_id = run.start_rollout_id
        if progress.start_rollout_id is None:
            progress.start_rollout_id = run.start_rollout_id
        progress.num_rollout = run.length.num_rollout
        forget_lost_steps(args, run.start_rollout_id, run.length.num_rollout, again=starts_again)
        # Whoever goes on from a checkpoint of this run knows by the file which evaluation it lacks. It is there from the start,
        # because a run may end within its first one.
        self._saves = run.actor is not None and args.save is not None and args.eval_interval is not None
        if self._saves and evaluated_rollouts(args.save) is None:
            self._note_evaluation(run.start_rollout_id)

    @contextlib.contextmanager
    def step(self, rollout_id: int) -> Iterator[None]:
        """A rollout step; its line is printed when the block ends without an error."""
        self._rollout_id, self._merged = rollout_id, {}
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.add_metrics({"perf/step_time": seconds, "perf/driver_host_memory_gib": host_memory_gib()})
        if self._args.loss_type == "sft_loss":
            # Nothing is graded: a reward of zero in the line would look like a failure.
            self._merged.pop("rollout/raw_reward", None)
        self._progress.rollouts_done = rollout_id + 1
        args, num_rollout = self._args, self._progress.num_rollout
        if has_line(rollout_id, num_rollout, steps=args.num_steps_per_rollout, interval=args.log_interval):
            logger.info("%s", rollout_line(rollout_id, num_rollout, self._merged))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the step, logged as `perf/{name}_time`."""
        started = time.perf_counter()
        yield
        self.add_metrics({f"perf/{name}_time": time.perf_counter() - started})

    def saved(self, rollout_id: int) -> None:
        """The checkpoint of the rollout is written, and is about to be published: the end of the run may find it."""
        self._progress.rollout_saved = rollout_id

    def add(self, logged: list[LoggedMetrics]) -> None:
        """Metrics that came back from an actor.

        Raises:
            RunError: as `check_numbers`.
        """
        write_to_trackers(logged)
        for metrics, step_key in logged:
            self._merged.update(metrics)
            check_numbers(self._args, metrics, step_key)

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Metrics of this step that the driver measured."""
        self.add([({**metrics, "rollout/step": self._rollout_id}, "rollout/step")])

    def evaluation(self, logged: list[LoggedMetrics]) -> None:
        """Metrics of an evaluation, before the first step or after the last one; prints its line, and notes beside the
        checkpoints that it was made."""
        write_to_trackers(logged)
        before = self._rollout_id is None
        self._note_evaluation(self._start_rollout_id if before else self._rollout_id + 1)
        name = evaluation_name(self._start_rollout_id if before else self._rollout_id, before=before)
        for metrics, step_key in logged:
            if step_key == "eval/step":
                logger.info("%s", evaluation_line(name, metrics))

    def _note_evaluation(self, rollouts: int) -> None:
        if not self._saves:
            return
        try:
            write_text_atomically(Path(self._args.save) / EVALUATED, str(rollouts))
        except OSError as error:
            # A later start may make the evaluation again, which costs time and no data.
            logger.warning("%s: %s", Path(self._args.save) / EVALUATED, error)


def check_numbers(args: argparse.Namespace, metrics: dict[str, Any], step_key: str) -> None:
    """What a test run asks of its metrics: `--ci-test`, `--ci-save-grad-norm`, `--ci-load-grad-norm`.

    Args:
        metrics: some of one step, with the step under `step_key`.

    Raises:
        RunError: a number is not as it should be, or there is no file with the one that it should be.
    """
    if not args.ci_test and args.ci_save_grad_norm is None and args.ci_load_grad_norm is None:
        return
    step = metrics[step_key]
    rollout_id, step_id = divmod(step, args.num_steps_per_rollout) if step_key == "train/step" else (step, 0)
    place = {"rollout_id": rollout_id, "step_id": step_id}
    wrong = _unhealthy(args, metrics, **place) if args.ci_test else []
    norms = {name: float(metrics[name]) for name in _NORMS if name in metrics}
    if args.ci_load_grad_norm is not None:
        for name, norm in norms.items():
            wrong += _other_norm(name, norm, Path(args.ci_load_grad_norm.format(role=_NORMS[name], **place)))
    if wrong:
        raise RunError(f"rollout {rollout_id}, step {step_id}: {'; '.join(wrong)}")
    if args.ci_save_grad_norm is not None:
        # The comparison comes first: both flags may name the same files.
        for name, norm in norms.items():
            write_json_atomically(args.ci_save_grad_norm.format(role=_NORMS[name], **place), norm)


def _other_norm(name: str, norm: float, path: Path) -> list[str]:
    """A line that tells how far the gradient norm is from that of an earlier run; none where it is close enough."""
    try:
        before = float(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"--ci-load-grad-norm {path}: no gradient norm of an earlier run: {error}") from None
    # Written so that a NaN differs, and an infinite norm from any other.
    if norm == before or abs(norm - before) <= max(_NORM_SHARE * abs(before), _NORM_DIFFERENCE) < math.inf:
        return []
    return [f"{name} is {norm:.6g}, and was {before:.6g} in {path} (--ci-load-grad-norm)"]


def _unhealthy(args: argparse.Namespace, metrics: dict[str, Any], rollout_id: int, step_id: int) -> list[str]:
    """What `--ci-test` finds wrong with metrics, a line each. Comparisons are written so that a NaN is wrong too."""
    limit = args.ci_train_rollout_logprob_abs_diff_threshold
    # The bounds themselves are not allowed.
    between = {"rollout/log_probs": (-1, 0), "rollout/entropy": (0, 1), "train/mtp_loss": (-math.inf, 1)}
    found = [
        f"{name} is {metrics[name]:.6g}, not between {low} and {high} (--ci-test)"
        for name, (low, high) in between.items()
        if name in metrics and not low < metrics[name] < high
    ]
    # Of a step of the policy on what engines generated.
    expected = args.loss_type == "policy_loss" and args.has_engines and "train/pg_loss" in metrics
    difference = metrics.get("train/train_rollout_logprob_abs_diff", None if expected else 0)
    if difference is None:
        found.append(
            "train/train_rollout_logprob_abs_diff is missing: samples have no log-probs of engines (--ci-test); a function "
            "of --custom-generate-function-path has to return rollout_log_probs"
        )
    elif not difference <= limit:
        found.append(
            f"train/train_rollout_logprob_abs_diff is {difference:.6g}, above {limit} "
            "(--ci-train-rollout-logprob-abs-diff-threshold)"
        )
    if args.ci_disable_kl_checker:
        return found
    # In a rollout's first step the policy is still the one that gave the old log-probs, where the trainer computed them with
    # these weights. In the run's first step it is still the reference, too.
    zeros = {"train/ppo_kl": step_id == 0 and not (args.use_rollout_logprobs or args.keep_old_actor)}
    zeros["train/kl_loss"] = rollout_id == step_id == 0
    differences = {name: metrics[name] for name, is_due in zeros.items() if is_due and name in metrics}
    if rollout_id == 0 and {"rollout/log_probs", "rollout/ref_log_probs"} <= metrics.keys():
        name = "rollout/log_probs - rollout/ref_log_probs"
        differences[name] = metrics["rollout/log_probs"] - metrics["rollout/ref_log_probs"]
    return found + [
        f"{name} is {value:.6g}, not 0 (--ci-test; --ci-disable-kl-checker leaves it out)"
        for name, value in differences.items()
        if not abs(value) < _EQUAL
    ]


class Saver:
    """Saves and publishes the checkpoints of a run: the weights, and the place in the data that belongs to them.

    A resume takes the newest checkpoint that is published. With `--async-save` one is published as soon as somebody finds that
    it is wholly written: a later rollout, the next save, or the end of the loop, even if the loop ends by an error.
    """

    def __init__(self, args: argparse.Namespace, run: StartedRun, report: StepReport) -> None:
        self._args, self._run, self._report = args, run, report
        # The rollout whose checkpoint is being written in the background, and whether all of it is on disk.
        self._unpublished: int | None = None
        self._is_written = False

    def after(self, rollout_id: int) -> None:
        """A rollout has been trained: save it if that is due, and publish what has been written meanwhile.

        Raises:
            RunError: a checkpoint could not be written, this one or that of an earlier rollout.
        """
        actor, due = self._run.actor, save_is_due(self._args, self._run.length, rollout_id)
        if self._unpublished is not None and (due or actor.save_has_ended()):
            self.finish()
        if not due:
            return
        with self._report.phase("save_model"):
            actor.save(rollout_id)
            self._run.rollout_manager.save(rollout_id)
            if not self._args.async_save:
                self._publish(rollout_id)
                return
        self._unpublished, self._is_written = rollout_id, False

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and publish it.

        Raises:
            RunError: it could not be written.
        """
        if self._unpublished is None:
            return
        with self._report.phase("finish_save"):
            self._run.actor.finish_save()
            self._is_written = True
            self._publish(self._unpublished)
        self._unpublished = None

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """The block is the loop; `finish` at its end. After an error a checkpoint is published only if it is wholly written.

        Raises:
            RunError: as `finish`. After an error of the block, that error is raised and no other.
        """
        try:
            yield
            self.finish()
        except BaseException:
            self._rescue()
            raise

    def _rescue(self) -> None:
        rollout_id, self._unpublished = self._unpublished, None
        if rollout_id is None:
            return
        try:
            # Ranks answer one question after the other. So a rank that still trains does not answer in time, nor does a dead
            # one; and when they answer, a publication that was under way is over. A second Ctrl-C ends the wait.
            if self._run.actor.save_has_ended(_RESCUE_SECONDS):
                if not self._is_written:
                    self._run.actor.finish_save(_RESCUE_SECONDS)
                    self._publish(rollout_id)
                return
        except BaseException:
            # The error that ended the loop is the one that is told.
            logger.debug("the checkpoint of rollout %d could not be finished", rollout_id, exc_info=True)
        if not self._is_written:
            logger.warning("the checkpoint of rollout %d was not wholly written, and is lost with the run", rollout_id)

    def _publish(self, rollout_id: int) -> None:
        # Noted first: if the run ends in the middle of a publication, this checkpoint may already be the newest.
        self._report.saved(rollout_id)
        self._run.actor.publish(rollout_id)


class SharedDevices:
    """Puts one side to sleep and wakes the other, in the order of `slime.scheduling.device_turns`; does nothing where neither
    side ever sleeps.

    When one side fails to follow, what was done before stays as it is, and the next turn begins there.

    Args:
        actor: the training ranks, which have just started and hold all their memory; None where nothing is trained.
        rollout_manager: its engines sleep already, if engines sleep in this run at all.
    """

    def __init__(self, args: argparse.Namespace, actor: TrainGroup | None, rollout_manager: RolloutClient) -> None:
        # Importing the plan takes as long as all that `--help` does.
        from slime.plan.placement import sleeping_sides

        self._sides = {TRAINER: actor, ENGINES: rollout_manager}
        self._sleeps = sleeping_sides(args)
        self._holds = {TRAINER: Holds.ALL, ENGINES: Holds.NOTHING if self._sleeps.engines else Holds.ALL}

    def turn_to(self, turn: Turn) -> None:
        """Have the devices ready for `turn`.

        Raises:
            RunError: a rank or an engine failed.
            IllegalTurn: the engines would generate with weights that they do not have.
        """
        for side, holds in steps_to(turn, Sides(self._holds[TRAINER], self._holds[ENGINES]), self._sleeps):
            self._sides[side].hold(holds)
            self._holds[side] = holds
