"""Real runs of `train.py` in a process of their own, with all processes that they start.

    with TrainProcess(flags, directory) as run:
        run.wait_for_line("rollout 0 ")
        assert run.wait(300) == 0
    assert run.scalars("train/loss") == {0: …}

Invariants: a run is marked by an environment variable and by its working directory, so that exactly the processes that belong
to it are found. Leaving the block ends all remaining processes of the run, whatever the test did.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[3]
MARK = "TEST_RUN_OF_SLIME"
_POLL_SECONDS = 0.1
_OUTPUT_TAIL = 8000
_RAY_SESSION = re.compile(r"(/\S*/session_\d[^/\s]*)/")


@dataclasses.dataclass(frozen=True)
class ListeningSocket:
    """A TCP socket on which a process of the run listens."""

    address: str
    port: int
    command: str


class TrainProcess:
    """One `python train.py`, or another `program`, with `flags`. Its working directory, output and event files are in
    `directory`. `within`: the words of a wrapper command, which runs the command after it."""

    def __init__(
        self,
        flags: Sequence[object],
        directory: Path,
        env: Mapping[str, str] | None = None,
        program: str = "train.py",
        within: Sequence[str] = (),
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.program = program
        self.flags = [str(flag) for flag in flags]
        self.directory = directory.resolve()
        self.event_directory = self.directory / "tensorboard"
        self.output_path = self.directory / "output.txt"
        self.mark = uuid.uuid4().hex
        self.seconds: float | None = None
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLIME_"))},
            "TENSORBOARD_DIR": str(self.event_directory),
            "PYTHONUNBUFFERED": "1",
            MARK: self.mark,
            **(env or {}),
        }
        self._within = within
        self._process: subprocess.Popen | None = None
        self._started = 0.0

    def __enter__(self) -> TrainProcess:
        self._started = time.monotonic()
        with self.output_path.open("wb") as output:
            self._process = subprocess.Popen(
                [*self._within, sys.executable, str(REPOSITORY / self.program), *self.flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=self.directory,
                start_new_session=True,
                # A shell starts background jobs with SIGINT ignored, and child processes inherit that.
                preexec_fn=_restore_interrupt,
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End the run: first the driver, then all remaining processes with the run's marks."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- while it runs ----------------------------------------------------------------------------------------------

    def send_signal_to_driver(self, number: int) -> None:
        self._process.send_signal(number)

    def send_signal_to_group(self, number: int) -> None:
        """Send a signal to the driver and its whole process group, as a terminal does."""
        os.killpg(self._process.pid, number)

    def has_ended(self) -> bool:
        """Whether the driver has ended; other processes of the run may still exist."""
        return self._process.poll() is not None

    def wait(self, timeout: float) -> int:
        """Wait for the end and return the exit status; AssertionError with the end of the output after `timeout` seconds."""
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.output()[-_OUTPUT_TAIL:]}") from None
        self.seconds = time.monotonic() - self._started
        return status

    def wait_for_success(self, timeout: float) -> None:
        """Wait for the end; AssertionError with the end of the output unless the exit status is 0."""
        status = self.wait(timeout)
        assert status == 0, f"exit status {status}:\n{self.output()[-_OUTPUT_TAIL:]}"

    def finish(self, timeout: float = 400) -> TrainProcess:
        """Start the run and check that it succeeds within `timeout` seconds and leaves no process."""
        with self:
            self.wait_for_success(timeout)
            self.assert_no_process_left()
        return self

    def wait_for_line(self, pattern: str, timeout: float) -> str:
        """Wait for the first line of the output that matches `pattern`, and return it."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self._process.poll() is not None
            for line in self.output().splitlines():
                if re.search(pattern, line):
                    return line
            if ended or time.monotonic() > deadline:
                state = f"ended with {self._process.returncode}" if ended else f"did not print it within {timeout} s"
                raise AssertionError(f"no line like {pattern!r}; the run {state}:\n{self.output()[-_OUTPUT_TAIL:]}")
            time.sleep(_POLL_SECONDS)

    def listening(self) -> list[ListeningSocket]:
        """Every TCP socket on which a process of the run listens at this moment."""
        found = []
        for pid, command in self.processes().items():
            with contextlib.suppress(psutil.NoSuchProcess):
                for connection in psutil.Process(pid).net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        found.append(ListeningSocket(*connection.laddr, command))
        return found

    def ray_sessions(self) -> set[Path]:
        """The directories in which the run's Ray keeps its logs; they can only be found while the run lives."""
        return {Path(name) for command in self.processes().values() for name in _RAY_SESSION.findall(command)}

    # -- what it left -----------------------------------------------------------------------------------------------

    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        """Process id -> command line, of every process of the run."""
        return {
            int(entry.name): _read(entry / "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and self._belongs(entry)
        }

    def schedulers(self) -> dict[int, str]:
        """Process id -> name ("scheduler", "scheduler_TP1") of SGLang's schedulers; each rank of an engine has one."""
        titles = {pid: command.split(" ", 1)[0] for pid, command in sorted(self.processes().items())}
        return {
            pid: title.removeprefix("sglang::")
            for pid, title in titles.items()
            if title.startswith("sglang::scheduler")
        }

    def assert_no_process_left(self, timeout: float = 60.0) -> None:
        """Check that all processes of the run have ended, for which they have `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while left := self.processes():
            assert time.monotonic() < deadline, f"left running: {left}"
            time.sleep(_POLL_SECONDS)

    def scalars(self, tag: str) -> dict[int, float]:
        """Step -> value of a TensorBoard scalar, read from the event files."""
        return self._all_scalars().get(tag, {})

    def scalar_tags(self) -> set[str]:
        return set(self._all_scalars())

    def _all_scalars(self) -> dict[str, dict[int, float]]:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util import tensor_util

        found: dict[str, dict[int, float]] = {}
        for path in sorted(self.event_directory.glob("events.out.tfevents.*")):
            for event in EventFileLoader(str(path)).Load():
                for value in event.summary.value:
                    values = found.setdefault(value.tag, {})
                    assert event.step not in values, f"{value.tag} has two values at step {event.step}"
                    values[event.step] = float(tensor_util.make_ndarray(value.tensor))
        return found

    def _belongs(self, entry: Path) -> bool:
        """Whether a process belongs to the run, by its environment or its working directory: Ray's workers overwrite their
        environment with their title."""
        if f"{MARK}={self.mark}".encode() in _read(entry / "environ").split(b"\0"):
            return True
        with contextlib.suppress(OSError):
            return Path(os.readlink(entry / "cwd")).is_relative_to(self.directory) and bool(_read(entry / "cmdline"))
        return False


@dataclasses.dataclass(frozen=True)
class SavingRun:
    """A run, and the directory of its checkpoints."""

    process: TrainProcess
    checkpoints: Path

    def finish(self) -> SavingRun:
        self.process.finish()
        return self


def _read(path: Path) -> bytes:
    """The content of a file of a process; empty if the process has ended or belongs to another user."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _restore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def checkpoint_tensors(directory: Path) -> dict[str, bytes]:
    """The bytes of every tensor in a checkpoint, by name."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict = {}
    _load_state_dict(state, FileSystemReader(directory), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    tensors = {name: value for name, value in _flatten("", state) if torch.is_tensor(value)}
    return {name: value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in tensors.items()}


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flatten(f"{prefix}/{name}", item)
    else:
        yield prefix, value
