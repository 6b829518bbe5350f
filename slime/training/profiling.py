"""What a training rank records about itself when it is asked to: traces of its operators and kernels, and its allocations.

Traces are those of torch's profiler. A rollout from `--profile-step-start` up to before `--profile-step-end` is traced,
whenever in the life of a rank it comes: who resumes within that window traces the rest of it. Each traced part of a rank's
work on one rollout is a file of its own in the run's directory,

    {role}_{part}_rank_{rank}.{rollout}.pt.trace.json.gz

which TensorBoard reads as one worker with a span for each rollout, and Perfetto as it is. The phases of the timer are
ranges in it, named `phase NAME`. Files are written when the rank's work on the rollout has ended, also where it raised:
while ranks wait for each other nobody writes. A trace is a look at a training, and never the end of it: what cannot be
written is said in the log, and the run goes on.

Nothing of the command line or of the environment gets into these files.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gzip
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import torch

from slime.observability.timer import Timer
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError
from slime.utils.filesystem import unwritable

logger = logging.getLogger(__name__)

# Levels above the first make files little smaller, and take several times as long.
_COMPRESSION = 1
# Bytes: a line with the path of the file.
_LONGEST_END = 16384
# Kineto tells at every trace that it begins and ends; above all of its levels it tells errors alone.
_KINETO_LOG_LEVEL = "99"


class Part(StrEnum):
    """Work of a rank on a rollout that is traced by itself. All but the last are words of `--profile-target`."""

    # A whole call: of the actor with log-probs and optimizer steps, of the critic with its steps.
    OVERALL = "train_overall"
    # The actor's optimizer steps.
    STEPS = "train_actor"
    # The actor's passes for log-probs: of reference, teacher, and the actor itself.
    LOG_PROBS = "train_log_probs"
    # The critic's other call on a rollout, with OVERALL.
    VALUES = "values"


class Profiler:
    """Traces parts of the work of one rank.

    Args:
        role, rank: whose they are, for the names of its files.
        rollouts: whose work is traced.
        parts: that are asked for. One within another that is traced is in the trace of that.
    """

    def __init__(
        self,
        directory: Path,
        role: str,
        rank: int,
        rollouts: range,
        parts: frozenset[Part],
        *,
        shapes: bool = False,
        stacks: bool = False,
    ) -> None:
        self._directory, self._role, self._rank = directory, role, rank
        self._rollouts, self._parts = rollouts, parts
        self._shapes, self._stacks = shapes, stacks
        self._depth = 0
        self._is_tracing = False
        self._made: list[tuple[Path, torch.profiler.profile]] = []

    def begin(self, first: int, tell: Callable[[str], None]) -> None:
        """The rank works on its first rollout, `first`: who resumes behind the window is told."""
        if first >= self._rollouts.stop:
            tell(f"no traces: the run goes on at rollout {first}, and --profile-step-end is {self._rollouts.stop}")

    @contextlib.contextmanager
    def traced(self, part: Part, rollout_id: int) -> Iterator[None]:
        """The block is that part of the work on a rollout. The outermost of such blocks writes what was traced when it ends."""
        if rollout_id not in self._rollouts:
            yield
            return
        self._depth += 1
        try:
            if self._is_tracing or part not in self._parts:
                yield
            else:
                with self._recorded(part, rollout_id):
                    yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._write()

    @contextlib.contextmanager
    def _recorded(self, part: Part, rollout_id: int) -> Iterator[None]:
        if torch.autograd._profiler_enabled():
            # The second would take the events of the first, and end it.
            logger.error("rollout %d: %s is not traced: another profiler is at work in this process", rollout_id, part)
            yield
            return
        # Read when the first profile of a process begins.
        os.environ.setdefault("KINETO_LOG_LEVEL", _KINETO_LOG_LEVEL)
        activities = get_accelerator().profiled_activities()
        profile = torch.profiler.profile(activities=activities, record_shapes=self._shapes, with_stack=self._stacks)
        profile.start()
        about = {"role": self._role, "rank": self._rank, "part": part, "rollout": rollout_id}
        profile.add_metadata_json("slime", json.dumps(about))
        self._is_tracing, Timer().range_of = True, torch.profiler.record_function
        try:
            yield
        finally:
            self._is_tracing, Timer().range_of = False, None
            if torch.autograd._profiler_enabled():
                profile.stop()
                name = f"{self._role}_{part}_rank_{self._rank}.{rollout_id}.pt.trace.json.gz"
                self._made.append((self._directory / name, profile))
            else:
                # To stop what was stopped already would end the process.
                logger.error(
                    "rollout %d: the trace of %s is lost: a function in it has used a profiler", rollout_id, part
                )

    def _write(self) -> None:
        made, self._made = self._made, []
        for path, profile in made:
            started = time.perf_counter()
            try:
                write_trace(profile, path)
            except OSError as error:
                logger.error("the trace %s could not be written: %s; the run goes on", path, error.strerror or error)
            else:
                size, seconds = path.stat().st_size / 2**20, time.perf_counter() - started
                logger.info("trace: %s (%.1f MiB, written in %.1f s)", path, size, seconds)


def write_trace(profile: torch.profiler.profile, path: Path) -> None:
    """Write a profile that was stopped, whole or not at all.

    Raises:
        OSError: there is no room, or the directory is gone.
    """
    plain, packed = (path.with_name(f".{path.name}.{kind}.writing") for kind in ("plain", "packed"))
    try:
        profile.export_chrome_trace(str(plain))
        # The profiler tells nobody that it could not write.
        if not _is_whole(plain):
            raise OSError("it is not there, or ends early: is the disk full, or the directory gone?")
        with open(plain, "rb") as source, gzip.open(packed, "wb", _COMPRESSION) as target:
            shutil.copyfileobj(source, target, 2**20)
        os.replace(packed, path)
    finally:
        for left in (plain, packed):
            left.unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    """Whether the file is there, to its end: behind the last event stands the name. Every event ends with a brace, as the file
    does."""
    if not path.exists():
        return False
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _LONGEST_END))
        last = file.read().rstrip().rpartition(b"\n")[2]
    return b'"traceName"' in last and last.endswith(b"}")


def _profiler_of(args: argparse.Namespace, rank: int) -> Profiler | None:
    if not args.use_pytorch_profiler or rank not in (args.profile_ranks or [0]):
        return None
    parts = frozenset(map(Part, args.profile_target))
    return Profiler(
        _made_directory(args.run_dir, "--use-pytorch-profiler", rank),
        args.role,
        rank,
        range(args.profile_step_start, args.profile_step_end),
        parts | ({Part.VALUES} if Part.OVERALL in parts else set()),
        shapes=args.pytorch_profiler_collect_shapes,
        stacks=args.pytorch_profiler_collect_callstack,
    )


class Recorder(Protocol):
    """Records allocations from when it is made until it is stopped."""

    def write(self, rollout_id: int) -> None:
        """What there is to write after a rollout.

        Raises:
            OSError: the disk refuses.
        """

    def stop(self) -> None:
        """Record no more."""


class DeviceMemoryRecorder:
    """Allocations on the device, by torch. It writes a snapshot when one fails, the first that does, and when it is asked to.

    Args:
        place: a path whose name every file's begins with.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._has_failed = False
        get_accelerator().record_memory(self._out_of_memory)

    def write(self, rollout_id: int) -> None:
        self._snapshot(f"rollout_{rollout_id}")

    def stop(self) -> None:
        get_accelerator().stop_recording_memory()
        self._has_failed = True

    def _out_of_memory(self) -> None:
        # Code that catches the error may come here again and again.
        if self._has_failed:
            return
        self._has_failed = True
        try:
            self._snapshot("out_of_memory")
        except Exception as error:
            # What is raised here would take the place of the error that everybody is to see.
            logger.error("out of memory, and its snapshot could not be written: %s", error)

    def _snapshot(self, what: str) -> None:
        path = self._place.with_name(f"{self._place.name}_{what}.pickle")
        unfinished = path.with_name(f".{path.name}.writing")
        try:
            get_accelerator().write_recorded_memory(unfinished)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        logger.info("memory: %s; https://pytorch.org/memory_viz draws it", path)


class HostMemoryRecorder:
    """Allocations on the host, by memray, which writes while it records.

    Args:
        place: as of the other; the process's number makes the name one of its own: ranks that end and begin record anew.

    Raises:
        UserError: the package is missing.
        OSError: the disk refuses.
    """

    def __init__(self, place: Path) -> None:
        try:
            import memray
        except ImportError as error:
            raise UserError(
                "--memory-recorder memray needs the package memray on every node: pip install memray"
            ) from error
        self._path = place.with_name(f"{place.name}_process_{os.getpid()}.memray")
        self._tracker: Any = memray.Tracker(destination=memray.FileDestination(self._path, overwrite=True))
        self._tracker.__enter__()

    def write(self, rollout_id: int) -> None:
        """It is all there."""

    def stop(self) -> None:
        self._tracker.__exit__(None, None, None)
        logger.info("memory: %s; `memray flamegraph` draws it", self._path)


# By the words of `--memory-recorder`.
_RECORDERS: dict[str, Callable[[Path], Recorder]] = {"torch": DeviceMemoryRecorder, "memray": HostMemoryRecorder}


class MemoryRecording:
    """A recorder, and until which rollout it records.

    Args:
        last: the rollout after which it writes and stops; None: it goes on until the rank ends.
    """

    def __init__(self, recorder: Recorder, last: int | None) -> None:
        self._recorder: Recorder | None = recorder
        self._last = last

    def begin(self, first: int, tell: Callable[[str], None]) -> None:
        """The rank works on its first rollout, `first`: nothing is recorded any more where the last to be is past."""
        if self._last is not None and first > self._last:
            said = f"--memory-snapshot-num-steps is {self._last + 1}"
            tell(f"memory is not recorded: the run goes on at rollout {first}, and {said}")
            self.stop()

    def end_of(self, rollout_id: int) -> None:
        """The rank's work on a rollout has ended."""
        if self._recorder is None or self._last is None or rollout_id < self._last:
            return
        try:
            self._recorder.write(rollout_id)
        except OSError as error:
            logger.error("the snapshot of rollout %d could not be written: %s; the run goes on", rollout_id, error)
        self.stop()

    def stop(self) -> None:
        """Record no more."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()


def _memory_of(args: argparse.Namespace, rank: int) -> MemoryRecording | None:
    if not args.record_memory_history:
        return None
    directory = _made_directory(args.memory_snapshot_dir, "--memory-snapshot-dir", rank)
    # Other runs may write there too. The last part of a run's directory is often the same in all of them, `tensorboard` say.
    run = "-".join(Path(args.run_dir).parts[-2:])
    recorder = _RECORDERS[args.memory_recorder](directory / f"memory_{run}_{args.role}_rank_{rank}")
    rollouts = args.memory_snapshot_num_steps
    return MemoryRecording(recorder, None if rollouts is None else rollouts - 1)


@dataclasses.dataclass
class Records:
    """All that a rank records about itself; at least one of the two. `tell` logs what it will not record, and why."""

    profiler: Profiler | None
    memory: MemoryRecording | None
    tell: Callable[[str], None]
    _has_begun: bool = False

    @contextlib.contextmanager
    def within(self, part: Part, rollout_id: int) -> Iterator[None]:
        """The block is that part of the rank's work on a rollout."""
        if not self._has_begun:
            # Not by the checkpoint that was loaded: `--start-rollout-id` may count from elsewhere.
            self._has_begun = True
            for record in filter(None, (self.profiler, self.memory)):
                record.begin(rollout_id, self.tell)
        with contextlib.nullcontext() if self.profiler is None else self.profiler.traced(part, rollout_id):
            yield
        if self.memory is not None and part is Part.OVERALL:
            self.memory.end_of(rollout_id)

    def close(self) -> None:
        """The rank ends."""
        if self.memory is not None:
            self.memory.stop()


def records_of(args: argparse.Namespace, rank: int) -> Records | None:
    """What the flags have a rank record, from now on; None: nothing.

    Raises:
        UserError: a directory cannot be written, a package is missing, or the device has no such recording.
    """
    profiler, memory = _profiler_of(args, rank), _memory_of(args, rank)
    if profiler is memory is None:
        return None
    # Ranks that end with every rollout begin as often.
    return Records(profiler, memory, logger.debug if args.release_train else logger.info)


def _made_directory(path: str, flag: str, rank: int) -> Path:
    directory = Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        problem = unwritable(directory)
    except OSError as error:
        problem = f"cannot be made ({error.strerror})"
    if problem is not None:
        raise UserError(f"{flag}: rank {rank} on {socket.gethostname()} writes into {directory}, which {problem}")
    return directory
