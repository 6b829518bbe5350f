"""Log lines and metrics of a run.

Every process writes one line per event to its standard output; Ray prefixes the lines of actors with the actor's name.

Only the driver has trackers (TensorBoard event files, a W&B run), so that metrics have one order and no event file has two
writers. `log` may be called in any process: its metrics travel to the driver with the answer of the call in which they were
logged.
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
from slime.utils.errors import RunError
from slime.utils.finite_number import as_float

# Libraries that log too much. Their errors still pass.
_CHATTY = (
    "absl", "asyncio", "filelock", "httpx", "matplotlib", "megatron", "ray", "sglang", "torch", "transformers", "urllib3",
    "wandb",
)  # fmt: skip

LoggedMetrics = tuple[dict[str, Any], str]

# Axes that count rollouts; `--wandb-always-use-train-step` turns their steps into optimizer steps.
_ROLLOUT_AXES = ("rollout/step", "eval/step")

_trackers: list[TensorBoardTracker | WandbTracker] = []
# Trackers that failed: they get no more metrics, and are closed with the others.
_failed_trackers: list[TensorBoardTracker | WandbTracker] = []
_steps_per_rollout = 1
# The trackers get the metrics of every so many-th optimizer step.
_train_interval = 1
# Metrics that were logged outside of `collected_metrics`.
_outbox: list[LoggedMetrics] = []
_collected: contextvars.ContextVar[list[LoggedMetrics]] = contextvars.ContextVar("collected_metrics", default=_outbox)
# Lists of the blocks that have not ended. Work that outlives its block still has the block's list in its context, which nobody
# reads any more.
_collecting: list[list[LoggedMetrics]] = [_outbox]


def configure_logger(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Write one line per event from `level` on; of libraries only errors, and with SLIME_DEBUG=1 everything.

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
    """Hold back what the modules of `package` log until the block ends; then each line is logged once.

    If an exception leaves the block the lines are dropped, so that a user whose flags are refused reads only the refusal.
    """
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
    """Keeps the first record of every text, in order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.by_text: dict[str, logging.LogRecord] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.by_text.setdefault(record.getMessage(), record)


def tracking_directory(args: argparse.Namespace) -> Path:
    """Directory of the event files: `TENSORBOARD_DIR`, `--tensorboard-dir`, `outputs/{project}/{experiment or time}`.

    A directory that is named after the time is created, and gets a number if a run of the same second has the name already.
    """
    override = env.tensorboard_dir() or args.tensorboard_dir
    if override is not None:
        return Path(os.path.expanduser(override))
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


def init_tracking(args: argparse.Namespace, directory: Path | None = None, *, again: bool = False) -> None:
    """Open the trackers. Called by the driver, at each start. A W&B run goes on under `args.wandb_run_id`; None: a new one
    begins.

    `again`: a part of the run failed, and it starts once more. A tracker that cannot be opened then gives a warning, as one
    does that fails under way.

    Raises:
        UserError: a tracker's package is missing, or W&B refuses its settings.
        RunError: no event file can be written.
    """
    global _steps_per_rollout, _train_interval
    logger = logging.getLogger(__name__)
    directory = directory or tracking_directory(args)
    _steps_per_rollout = args.num_steps_per_rollout if args.wandb_always_use_train_step else 1
    _train_interval = args.tensorboard_log_interval
    by_axis = {"train/step": args.num_steps_per_rollout, **dict.fromkeys(_ROLLOUT_AXES, _steps_per_rollout)}
    if args.use_tensorboard:
        with _left_out(again, "TensorBoard"):
            try:
                _trackers.append(TensorBoardTracker(directory, by_axis))
            except OSError as error:
                raise RunError(
                    f"no event file can be written in {directory} ({error}); make room there, give the run another directory "
                    "(--tensorboard-dir), or give --no-use-tensorboard"
                ) from error
            logger.info("TensorBoard event files: %s", os.fspath(directory))
    if args.use_wandb:
        with _left_out(again, "W&B"):
            tracker = WandbTracker(args, directory, plain_arguments(args), by_axis)
            _trackers.append(tracker)
            logger.info("W&B run %s: files in %s", tracker.run_id, os.fspath(tracker.directory / "wandb"))


@contextlib.contextmanager
def _left_out(may_fail: bool, name: str) -> Iterator[None]:
    """In the block a tracker is opened; one that may fail then gives a warning."""
    try:
        yield
    except Exception as error:
        if not may_fail:
            raise
        logging.getLogger(__name__).warning("%s gets no metrics any more; the run goes on without it: %s", name, error)


def forget_lost_steps(
    args: argparse.Namespace, start_rollout_id: int, num_rollout: int, *, again: bool = False
) -> None:
    """Driver only, before the first metric of a run: take back values that this run will log again at the same steps.

    A run that resumes repeats the rollouts that its predecessor trained after its last checkpoint, so the predecessor's values
    for those are taken back. A run that starts again after a part of it failed (`again`) takes back its own values. Any other
    run takes nothing back, since values that are there already are another run's.
    """
    if not _trackers:
        return
    resumes = args.initial_weights is not None and args.initial_weights.resume
    if not (resumes or again):
        return
    # The step of an evaluation is the number of rollouts before it. So the one at `start_rollout_id` was made with the weights
    # that are resumed, and stays; if nothing is resumed it is made again.
    firsts = {"train/step": start_rollout_id, "rollout/step": start_rollout_id, "eval/step": start_rollout_id + resumes}
    lost = {axis: range(rollout_id, sys.maxsize) for axis, rollout_id in firsts.items()}
    if num_rollout == 0:
        # Nothing is trained then, and just that one evaluation is made again.
        lost = {"eval/step": range(start_rollout_id, start_rollout_id + 1)}
    for tracker in _trackers:
        tracker.forget(lost, own=not resumes)


def finish_tracking(*, failed: bool = False) -> None:
    """Flush and close the trackers; `failed` says how the run went. A tracker that cannot be closed gives a warning."""
    write_to_trackers([])
    while _trackers or _failed_trackers:
        tracker = (_trackers or _failed_trackers).pop()
        try:
            tracker.close(failed=failed)
        except Exception as error:
            logging.getLogger(__name__).warning("%s was not closed: %s", tracker, error)


def log(args: argparse.Namespace, metrics: dict[str, Any], step_key: str) -> None:
    """Report `metrics`, which hold their step under `step_key` (for example `rollout/step`).

    Numbers count as they are now: a tensor may change afterwards. The trackers do not get values that are no finite numbers.

    Raises:
        ValueError: there is no number under `step_key`.
    """
    if not _is_finite(metrics.get(step_key)):
        step = f"no step under {step_key!r}" if step_key not in metrics else f"{step_key!r}: {metrics[step_key]!r}"
        raise ValueError(f"metrics to log have {step}; give the number of the rollout or step there, such as 3")
    own = _collected.get()
    target = own if any(own is each for each in tuple(_collecting)) else _outbox
    numbers = {name: as_float(value) for name, value in metrics.items()}
    # What is no number stays as it is, for the checks of those who read all metrics.
    target.append(({name: metrics[name] if one is None else one for name, one in numbers.items()}, step_key))


@contextlib.contextmanager
def collected_metrics() -> Iterator[list[LoggedMetrics]]:
    """The metrics that are logged in the block, in order, by its own code and by the tasks and threads that it starts."""
    collected: list[LoggedMetrics] = []
    token = _collected.set(collected)
    _collecting.append(collected)
    try:
        yield collected
    finally:
        _collecting[:] = [each for each in _collecting if each is not collected]
        _collected.reset(token)


def drain_outbox() -> list[LoggedMetrics]:
    """The metrics that users logged in this process outside of `collected_metrics` since the last call, in order."""
    drained = list(_outbox)
    del _outbox[: len(drained)]
    return drained


def logged_beside(logged: list[LoggedMetrics], others: list[LoggedMetrics]) -> list[LoggedMetrics]:
    """Those of the `others` metrics whose names `logged` does not have at their step."""
    known = {(name, key, metrics[key]) for metrics, key in logged for name in metrics}
    beside = [
        ({name: value for name, value in metrics.items() if (name, key, metrics[key]) not in known}, metrics[key], key)
        for metrics, key in others
    ]
    return [({**new, key: step}, key) for new, step, key in beside if new]


def logged_pairs(logged: Any, rank_name: str, actor_cls: type | str) -> list[LoggedMetrics]:
    """`logged` as a list of (metrics, step key). It is what `train` of a rank returned, whose class may be a user's own.

    Raises:
        RunError: it is something else.
    """
    if not isinstance(logged, list | tuple) or not all(
        isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], dict) and isinstance(entry[1], str)
        for entry in logged
    ):
        name = actor_cls if isinstance(actor_cls, str) else f"{actor_cls.__module__}.{actor_cls.__qualname__}"
        raise RunError(
            f"train of the {rank_name}s returned {logged!r}; expected a list of (metrics, step key), such as "
            f"[({{'train/loss': 0.5, 'train/step': 3}}, 'train/step')] (their class is {name})"
        )
    return [(metrics, step_key) for metrics, step_key in logged]


def write_to_trackers(logged: list[LoggedMetrics]) -> None:
    """Driver only: give metrics that came back from actors to the trackers, and those that were logged in the driver.

    A tracker that fails, say because its disk is full, does not end the run: it gives a warning, and gets no more metrics.
    """
    for metrics, step_key in [*drain_outbox(), *logged]:
        if step_key == "train/step" and (int(metrics[step_key]) + 1) % _train_interval:
            continue
        numbers = {name: float(value) for name, value in metrics.items() if _is_finite(value) and name != step_key}
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


def _is_finite(value: Any) -> bool:
    number = as_float(value)
    return number is not None and math.isfinite(number)
