"""Where the metrics of a run go: TensorBoard event files, a Weights & Biases run. Only the driver writes both.

There are three axes: a metric is plotted over `train/step`, `rollout/step` or `eval/step`, whichever it was logged with. W&B
gets redacted arguments, but not the command line, the console or the repository, each of which may hold a secret. Event files
are written without torch, so that the driver stays light.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import secrets
import socket
import string
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slime.utils.errors import UserError
from slime.utils.filesystem import claim_directory, release_directory, write_json_atomically

logger = logging.getLogger(__name__)

DEFAULT_PROJECT = "slime"
_SUFFIX_LENGTH = 6
_INIT_SECONDS = 90.0
_FINISH_SECONDS = 120.0
_HANG_SECONDS = 10.0
_LETTERS = string.ascii_lowercase + string.digits
# Metrics without a step of their own belong to the rollout that they were logged with.
AXES = {"train": "train/step", "eval": "eval/step", "rollout": "rollout/step", "perf": "rollout/step",
        "passrate": "rollout/step", "multi_turn": "rollout/step"}  # fmt: skip
_EVENT_FILE = "events.out.tfevents."
# The entry of a W&B run's summary that corresponds to the note beside an event file.
_NOTE_OF_WANDB = "steps per rollout"
# By the id of a W&B run, the last step of each axis that this process logged. W&B itself does not know it for an offline run.
_last_told: dict[str, dict[str, int]] = {}


class TensorBoardTracker:
    """Writes scalars by tag and step to an event file in `directory`.

    Beside the event file is a note with the steps per rollout, which is locked as long as the file is written.

    Args:
        steps_per_rollout: for each axis, how many of its steps a rollout is; None: one.

    Raises:
        OSError: the files cannot be written.
    """

    def __init__(self, directory: Path, steps_per_rollout: Mapping[str, int] | None = None) -> None:
        from tensorboard.summary import Writer

        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._steps_per_rollout = dict(steps_per_rollout or dict.fromkeys(AXES.values(), 1))
        self._older = sorted(directory.glob(f"{_EVENT_FILE}*"))
        self._of_this_process = f".{socket.gethostname()}.{os.getpid()}."
        self._writer = Writer(str(directory))
        self._claimed: list[str] = []
        for path in set(directory.glob(f"{_EVENT_FILE}*")).difference(self._older):
            # Another run may begin in this directory at the same moment.
            if self._of_this_process in path.name:
                write_json_atomically(_note_beside(path), self._steps_per_rollout)
                self._claims(path)

    def __repr__(self) -> str:
        return f"TensorBoard in {self.directory}"

    def add_scalars(self, values: dict[str, float], step_key: str, step: int) -> None:
        """Write all `values` at `step`, and flush, so that a killed run loses nothing that was logged."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def forget(self, lost: Mapping[str, range], *, own: bool) -> None:
        """Take the values of the rollouts `lost[axis]` out of the event files that were here before this one; with `own`, only
        out of those that this process has written.

        The note beside each file says at which steps they are; without a note the steps per rollout are those of this run. A
        file that another run is writing stays as it is, with a warning: rewriting it would lose what that run logs from then
        on. So does one that cannot be written, say because the disk is full.
        """
        steps = self._steps_per_rollout
        for path in self._older:
            if self._of_this_process in path.name or not own:
                if not self._claims(path):
                    logger.warning(
                        "%s: another run writes this event file, so it keeps its values of rollouts that this run does again, "
                        "and curves have both; end that run, or give this one a directory of its own",
                        path,
                    )
                    continue
                steps = steps_noted_beside(path) or self._steps_per_rollout
                at = {axis: range(ids.start * steps[axis], ids.stop * steps[axis]) for axis, ids in lost.items()}
                try:
                    _drop_values(path, at)
                except OSError as error:
                    logger.warning(
                        "%s: this event file cannot be written anew (%s), so it keeps its values of rollouts that this run "
                        "does again, and curves have both; the run goes on", path, error,
                    )  # fmt: skip
        # `steps` is now that of the newest file.
        _tell_of_other_axes(lost, steps, self._steps_per_rollout, os.fspath(self.directory))

    def close(self, *, failed: bool = False) -> None:
        """Close the event file, which does not record whether the run failed."""
        self._writer.close()
        for note in self._claimed:
            release_directory(self.directory, note)

    def _claims(self, event_file: Path) -> bool:
        """Whether no other process writes the file; it is then claimed until this tracker closes. A file without a note cannot
        be claimed, and counts as free."""
        note = _note_beside(event_file)
        if note.exists():
            if not claim_directory(self.directory, note.name):
                return False
            self._claimed.append(note.name)
        return True


def _note_beside(event_file: Path) -> Path:
    # The name must not contain "tfevents", or TensorBoard would take the note for an event file.
    return event_file.with_name(f".steps_per_rollout.{event_file.name.removeprefix(_EVENT_FILE)}.json")


def steps_noted_beside(event_file: Path) -> dict[str, int] | None:
    """The steps per rollout of an event file, by axis; None if there is no note, or, with a warning, if it cannot be read."""
    note = _note_beside(event_file)
    try:
        return _steps_per_rollout(note.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning(
            "%s does not say how many steps a rollout is in the event file beside it: taken for as many as in this run (%s)",
            note, error,
        )  # fmt: skip
        return None


def _steps_per_rollout(note: str) -> dict[str, int]:
    """The steps per rollout in the text of a note, by axis.

    Raises:
        ValueError: the note contains something else.
    """
    steps = json.loads(note)
    axes = set(AXES.values())
    if not isinstance(steps, dict) or not all(type(steps.get(axis)) is int and steps[axis] > 0 for axis in axes):
        raise ValueError(f"not a number of steps for each of {', '.join(sorted(axes))}")
    return steps


def _tell_of_other_axes(axes: Iterable[str], before: Mapping[str, int], now: Mapping[str, int], place: str) -> None:
    for axis in axes:
        if before[axis] != now[axis]:
            logger.warning(
                "%s: of %s a rollout was %d steps so far, and is %d in this run: its curves overlap there, or have a gap",
                place, axis, before[axis], now[axis],
            )  # fmt: skip


def _drop_values(path: Path, lost: Mapping[str, range]) -> None:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    kept, dropped = [], 0
    # The file of a killed run may end within a record; the records before it are read.
    for record in RawEventFileLoader(str(path)).Load():
        event = Event.FromString(record)
        values = list(event.summary.value)
        axes = [AXES.get(value.tag.partition("/")[0], "") for value in values]
        left = [value for value, axis in zip(values, axes, strict=True) if event.step not in lost.get(axis, ())]
        dropped += len(values) - len(left)
        if len(left) == len(values):
            kept.append(record)
        elif left:
            del event.summary.value[:]
            event.summary.value.extend(left)
            kept.append(event.SerializeToString())
    if dropped:
        temporary = path.with_name(f".{path.name}.writing")
        try:
            with open(temporary, "wb") as file:
                writer = RecordWriter(file)
                for record in kept:
                    writer.write(record)
            os.replace(temporary, path)
        finally:
            # TensorBoard would take what is left of it for an event file.
            temporary.unlink(missing_ok=True)


def new_run_id() -> str:
    """An id that no other run has."""
    return "".join(secrets.choice(_LETTERS) for _ in range(8))


class WandbTracker:
    """One W&B run.

    Args:
        args: the `wandb_*` arguments. Without `wandb_run_id` the run gets an id that no other one has.
        directory: where its files go if `--wandb-dir` is not given.
        config: the configuration that the run shows, redacted.
        steps_per_rollout: for each axis, how many of its steps a rollout is; noted in the run's summary.

    Raises:
        UserError: the package is missing, or it refuses the settings (address, key, login).
    """

    def __init__(
        self, args: argparse.Namespace, directory: Path, config: dict[str, Any], steps_per_rollout: Mapping[str, int]
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("--use-wandb needs the package wandb: pip install wandb") from error
        self.directory = Path(args.wandb_dir or directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                id=args.wandb_run_id,
                resume="allow",
                name=run_name(args),
                project=args.wandb_project or DEFAULT_PROJECT,
                entity=args.wandb_team,
                group=args.wandb_group,
                dir=str(self.directory),
                mode=args.wandb_mode,
                config=config,
                settings=_settings(wandb, args),
            )
        except (wandb.errors.Error, ValueError) as error:
            raise UserError(
                f"--use-wandb: {_reason(error)}; --wandb-key (or WANDB_API_KEY) and --wandb-host say where to report, "
                "--wandb-mode offline writes files only"
            ) from None
        self.run_id: str = self._run.id
        for axis in sorted(set(AXES.values())):
            self._run.define_metric(axis, hidden=True)
        for prefix, axis in AXES.items():
            self._run.define_metric(f"{prefix}/*", step_metric=axis)
        self._told: dict[str, int] = {}
        self._steps_per_rollout = dict(steps_per_rollout)
        note = self._run.summary.get(_NOTE_OF_WANDB) if self._run.resumed else None
        self._steps_before = self._steps_per_rollout
        if note is not None:
            with contextlib.suppress(ValueError, TypeError):
                self._steps_before = _steps_per_rollout(note)
        self._note(self._steps_before)

    def __repr__(self) -> str:
        return f"W&B run {self.run_id}"

    def add_scalars(self, values: dict[str, float], step_key: str, step: int) -> None:
        """Log all `values` over the axis `step_key` at `step`."""
        if step <= self._told.get(step_key, step - 1):
            return
        self._run.log({**values, step_key: step})
        _last_told.setdefault(self.run_id, {})[step_key] = step
        # The note of an axis changes only now: before this, the last step on the axis was one of the run that is continued.
        if self._noted.get(step_key) != (now := self._steps_per_rollout.get(step_key)):
            self._note({**self._noted, step_key: now})

    def _note(self, steps_per_rollout: dict[str, int]) -> None:
        self._noted = steps_per_rollout
        self._run.summary[_NOTE_OF_WANDB] = json.dumps(steps_per_rollout)

    def forget(self, lost: Mapping[str, range], *, own: bool) -> None:
        """W&B cannot take values back. So this tracker skips steps that a continued run has logged already."""
        known = self._run.summary if self._run.resumed else _last_told.get(self.run_id, {})
        before, now = self._steps_before, self._steps_per_rollout
        for axis in lost:
            if (step := known.get(axis)) is not None:
                last = int(step) // before[axis] * now[axis] + now[axis] - 1
                self._told[axis] = int(step) if before[axis] == now[axis] else last
        _tell_of_other_axes(lost, before, now, f"W&B run {self.run_id}")

    def close(self, *, failed: bool = False) -> None:
        """Upload what is left, and mark the run as finished or failed. If the upload takes too long the files stay."""
        ending = threading.Thread(target=self._run.finish, args=(1 if failed else 0,), daemon=True, name="wandb finish")
        started = time.monotonic()
        ending.start()
        # W&B gives up by itself at that time. Its process may hang, too.
        ending.join(_FINISH_SECONDS + _HANG_SECONDS)
        if time.monotonic() - started >= _FINISH_SECONDS:
            logger.warning(
                "W&B did not take the rest of the run within %d s; `wandb sync` sends what lies in %s",
                _FINISH_SECONDS, self.directory / "wandb",
            )  # fmt: skip


def run_name(args: argparse.Namespace) -> str:
    """The group or experiment, followed by 6 random characters unless they are switched off or a run is continued."""
    name = args.wandb_group or args.tb_experiment_name or DEFAULT_PROJECT
    if not args.wandb_random_suffix or "wandb_run_id" in args.typed_flags:
        return name
    return f"{name}_{''.join(secrets.choice(_LETTERS) for _ in range(_SUFFIX_LENGTH))}"


def _settings(wandb: Any, args: argparse.Namespace) -> Any:
    settings = wandb.Settings(
        init_timeout=_INIT_SECONDS,
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        save_code=False,
        silent=True,
        x_disable_meta=True,
    )
    if "finish_timeout" in type(settings).model_fields:  # Older versions do not have it.
        # It also holds at the exit of the process, which would wait for the upload without an end.
        settings.finish_timeout = _FINISH_SECONDS
    if args.wandb_host is not None:
        settings.base_url = args.wandb_host
    if args.wandb_key is not None:
        # The key is set separately: an error message about the other settings may show all of those.
        settings.api_key = args.wandb_key
    return settings


def _reason(error: Exception) -> str:
    details = getattr(error, "errors", None)
    if callable(details):  # an error of pydantic, whose text is a page long and quotes the input
        return "; ".join(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details())
    return str(error).splitlines()[0] if str(error) else type(error).__name__
