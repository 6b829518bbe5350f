"""Log lines and metrics of a run.

Lines: every process writes one line per event to its standard output; Ray prefixes those of actors with the actor's
name. Metrics: only the driver owns trackers (TensorBoard event files). `log` may be called in any process: outside the
driver the metrics wait in an outbox that travels back with the next answer to the driver, so that one writer orders
them and no event file is written by two processes.
"""

import argparse
import datetime
import logging
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from slime.observability.tensorboard_utils import TensorBoardTracker
from slime.utils import env

# Libraries that tell their users too much; errors still pass.
_CHATTY = (
    "absl", "asyncio", "filelock", "httpx", "matplotlib", "megatron", "ray", "sglang", "torch", "transformers", "urllib3",
)  # fmt: skip

LoggedMetrics = tuple[dict[str, Any], str]

_tracker: TensorBoardTracker | None = None
_outbox: list[LoggedMetrics] = []


def configure_logger(level: str = "INFO") -> None:
    """One line per event on standard output at `level`; libraries only from ERROR on (all of it with SLIME_DEBUG=1)."""
    debug = env.debug_enabled()
    handler = logging.StreamHandler(sys.stdout)
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


def tracking_directory(args: argparse.Namespace) -> Path:
    """Directory of the event files: `TENSORBOARD_DIR`, else `outputs/{project}/{experiment or time stamp}`."""
    override = env.tensorboard_dir()
    if override is not None:
        return Path(override)
    experiment = args.tb_experiment_name or datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("outputs") / (args.tb_project_name or "slime") / experiment


def init_tracking(args: argparse.Namespace, directory: Path | None = None) -> None:
    """Open the trackers. Called once, by the driver."""
    global _tracker
    if args.use_tensorboard:
        directory = directory or tracking_directory(args)
        _tracker = TensorBoardTracker(directory)
        logging.getLogger(__name__).info("TensorBoard event files: %s", os.fspath(directory))


def finish_tracking() -> None:
    """Flush and close the trackers."""
    global _tracker
    if _tracker is not None:
        _tracker.close()
        _tracker = None


def log(args: argparse.Namespace, metrics: dict[str, Any], step_key: str) -> None:
    """Report `metrics`, which hold their step under `step_key` (for example `rollout/step`).

    Values that are no finite numbers are left out of the trackers.
    """
    _outbox.append((dict(metrics), step_key))


def drain_outbox() -> list[LoggedMetrics]:
    """Metrics logged in this process since the last call, in order."""
    drained = list(_outbox)
    _outbox.clear()
    return drained


def write_to_trackers(logged: list[LoggedMetrics]) -> None:
    """Driver only: hand metrics that came back from actors to the trackers."""
    if _tracker is None:
        return
    for metrics, step_key in logged:
        numbers = {name: float(value) for name, value in metrics.items() if _is_number(value) and name != step_key}
        _tracker.add_scalars(numbers, int(metrics[step_key]))


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
