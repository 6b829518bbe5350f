"""Log lines and metrics of a run.

Lines: every process writes one line per event to its standard output; Ray prefixes those of actors with the actor's
name. Metrics: only the driver owns trackers (TensorBoard event files, a W&B run). `log` may be called in any process: what it
is given travels back with the answer of the call that it was made in, so that one writer orders them and no event file is
written by two processes.
"""

import argparse
import contextlib
import contextvars
import datetime
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from slime.observability.run_record import plain_arguments
from slime.observability.trackers import TensorBoardTracker, WandbTracker
from slime.utils import env

# Libraries that tell their users too much; errors still pass.
_CHATTY = (
    "absl", "asyncio", "filelock", "httpx", "matplotlib", "megatron", "ray", "sglang", "torch", "transformers", "urllib3",
    "wandb",
)  # fmt: skip

LoggedMetrics = tuple[dict[str, Any], str]

# Axes that count rollouts; `--wandb-always-use-train-step` turns their steps into optimizer steps.
_ROLLOUT_AXES = ("rollout/step", "eval/step")

_trackers: list[TensorBoardTracker | WandbTracker] = []
# Those that failed: they are told nothing more, and end with the others.
_failed_trackers: list[TensorBoardTracker | WandbTracker] = []
_steps_per_rollout = 1
# Of optimizer steps, every so many-th is told to the trackers.
_train_interval = 1
# What was logged outside of `collected_metrics`.
_outbox: list[LoggedMetrics] = []
_collected: contextvars.ContextVar[list[LoggedMetrics]] = contextvars.ContextVar("collected_metrics", default=_outbox)
# Lists of the blocks that have not ended: work that outlives its block has its context still.
_collecting: list[list[LoggedMetrics]] = [_outbox]


def configure_logger(level: str = "INFO", stream: TextIO | None = None) -> None:
    """One line per event at `level`; libraries only from ERROR on (all of it with SLIME_DEBUG=1).

    Args:
        stream: where the lines go; None: standard output.
    """
    debug = env.debug_enabled()
    handler = logging.StreamHandler(sys.stdout if stream is None else stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname_if_bad)s%(message)s", "%H:%M:%S"))
    handler.addFilter(_mark_level)
    logging.basicConfig(level=logging.DEBUG if debug else level, handlers=[handler], force=True)
    if not debug:
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")


def _mark_level(record: logging.LogRecord) -> bool:
    record.levelname_if_bad = "" if record.levelno <= logging.INFO else f"{record.levelname}: "
    return True


@contextlib.contextmanager
def said_when_it_ends(package: str) -> Iterator[None]:
    """Hold back what the modules of `package` log: it is said at the end of the block, each line once, and never where an
    exception leaves the block. Somebody whose flags are refused is to read the refusal and nothing else."""
    of_package, held = logging.getLogger(package), _HeldLines()
    of_package.addHandler(held)
    of_package.propagate = False
    try:
        yield
    finally:
        of_package.propagate = True
        of_package.removeHandler(held)
    for record in held.by_text.values():
        logging.getLogger(record.name).handle(record)


class _HeldLines(logging.Handler):
    """Keeps the first record of every text, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.by_text: dict[str, logging.LogRecord] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.by_text.setdefault(record.getMessage(), record)


def tracking_directory(args: argparse.Namespace) -> Path:
    """Directory of the event files: `TENSORBOARD_DIR`, `--tensorboard-dir`, `outputs/{project}/{experiment or time}`.

    One that is named after the time is made, and has a number behind it where a run that began in the same second has that.
    """
    override = env.tensorboard_dir() or args.tensorboard_dir
    if override is not None:
        return Path(override)
    project = Path("outputs") / (args.tb_project_name or "slime")
    if args.tb_experiment_name:
        return project / args.tb_experiment_name
    stamp, number = datetime.datetime.now().strftime("%Y%m%d-%H%M%S"), 1
    while True:
        place = project / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            place.mkdir(parents=True)
            return place
        except FileExistsError:
            number += 1


def init_tracking(args: argparse.Namespace, directory: Path | None = None) -> None:
    """Open the trackers. Called once, by the driver. A W&B run goes on under `args.wandb_run_id`; None: a new one begins.

    Raises:
        UserError: a tracker's package is missing, or W&B refuses its settings.
    """
    global _steps_per_rollout, _train_interval
    logger = logging.getLogger(__name__)
    directory = directory or tracking_directory(args)
    _steps_per_rollout = args.num_steps_per_rollout if args.wandb_always_use_train_step else 1
    _train_interval = args.tensorboard_log_interval
    by_axis = {"train/step": args.num_steps_per_rollout, **dict.fromkeys(_ROLLOUT_AXES, _steps_per_rollout)}
    if args.use_tensorboard:
        _trackers.append(TensorBoardTracker(directory, by_axis))
        logger.info("TensorBoard event files: %s", os.fspath(directory))
    if args.use_wandb:
        tracker = WandbTracker(args, directory, plain_arguments(args), by_axis)
        _trackers.append(tracker)
        logger.info("W&B run %s: files in %s", tracker.run_id, os.fspath(tracker.directory / "wandb"))


def forget_lost_steps(
    args: argparse.Namespace, start_rollout_id: int, num_rollout: int, *, again: bool = False
) -> None:
    """Driver only, before the first metric of a run: no value is to come twice at one step.

    A run that resumes repeats the rollouts that its predecessor trained after its last checkpoint; what the predecessor told
    about those in the same place is taken back. A new run takes nothing back: what lies there is another run's; and one that
    starts anew after a part of it failed (`again`: there was a start before this one), what it told itself.
    """
    if not _trackers:
        return
    resumes = args.initial_weights is not None and args.initial_weights.resume
    if not (resumes or again):
        return
    # An evaluation stands at the number of rollouts before it: the one at `start_rollout_id` was made with the resumed weights.
    # Where nothing is resumed it is made again.
    firsts = {"train/step": start_rollout_id, "rollout/step": start_rollout_id, "eval/step": start_rollout_id + resumes}
    lost = {axis: range(rollout_id, sys.maxsize) for axis, rollout_id in firsts.items()}
    if num_rollout == 0:
        # Nothing is trained: that one evaluation is made again.
        lost = {"eval/step": range(start_rollout_id, start_rollout_id + 1)}
    for tracker in _trackers:
        tracker.forget(lost, own=not resumes)


def finish_tracking(*, failed: bool = False) -> None:
    """Flush and close the trackers; `failed` says how the run went. That one cannot be closed is told."""
    while _trackers or _failed_trackers:
        tracker = (_trackers or _failed_trackers).pop()
        try:
            tracker.close(failed=failed)
        except Exception as error:
            logging.getLogger(__name__).warning("%s was not closed: %s", tracker, error)


def log(args: argparse.Namespace, metrics: dict[str, Any], step_key: str) -> None:
    """Report `metrics`, which hold their step under `step_key` (for example `rollout/step`).

    Values that are no finite numbers are left out of the trackers.

    Raises:
        ValueError: they hold no such step.
    """
    if not _is_number(metrics.get(step_key)):
        step = f"no step under {step_key!r}" if step_key not in metrics else f"{step_key!r}: {metrics[step_key]!r}"
        raise ValueError(f"metrics to log have {step}; give the number of the rollout or step there, such as 3")
    own = _collected.get()
    target = own if any(own is each for each in tuple(_collecting)) else _outbox
    target.append((dict(metrics), step_key))


@contextlib.contextmanager
def collected_metrics() -> Iterator[list[LoggedMetrics]]:
    """What is logged in the block, in order: by its own code, and by the tasks and threads that it starts."""
    collected: list[LoggedMetrics] = []
    token = _collected.set(collected)
    _collecting.append(collected)
    try:
        yield collected
    finally:
        _collecting[:] = [each for each in _collecting if each is not collected]
        _collected.reset(token)


def drain_outbox() -> list[LoggedMetrics]:
    """Metrics that users logged in this process, outside of `collected_metrics`, since the last call; in order."""
    drained = list(_outbox)
    del _outbox[: len(drained)]
    return drained


def write_to_trackers(logged: list[LoggedMetrics]) -> None:
    """Driver only: hand metrics that came back from actors to the trackers.

    One that cannot take them, because its disk is full say, costs its curves and not the run: it is told of, and left alone.
    """
    if not _trackers:
        return
    for metrics, step_key in logged:
        if step_key == "train/step" and (int(metrics[step_key]) + 1) % _train_interval:
            continue
        numbers = {name: float(value) for name, value in metrics.items() if _is_number(value) and name != step_key}
        step = int(metrics[step_key]) * (_steps_per_rollout if step_key in _ROLLOUT_AXES else 1)
        for tracker in tuple(_trackers):
            try:
                tracker.add_scalars(numbers, step_key, step)
            except Exception as error:
                _trackers.remove(tracker)
                _failed_trackers.append(tracker)
                logging.getLogger(__name__).warning(
                    "%s takes no metrics any more, and the run goes on without it: %s: %s",
                    tracker, type(error).__name__, error,
                )  # fmt: skip


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
