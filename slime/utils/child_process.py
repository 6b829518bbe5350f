"""Child processes that end with their parent, and are ended without affecting any other process.

Invariants:
- A child runs in a process group of its own. `terminate` signals only that group, so processes that the child started end with
  it, and nothing else does. It waits for the end of all of them.
- A child's standard input is a pipe whose other end only the parent holds; forked copies of the parent, such as a plug-in's
  pool of processes, close theirs. When the parent ends, in whatever way (`kill -9` included), the pipe closes and a child that
  called `exit_when_parent_dies` ends its whole group. The kernel's parent-death signal is not used: it fires when the *thread*
  that started the child ends.
- A child's output goes to one log file, so that a failure can be shown with its last lines.

`ForkedCall` is another kind of child: a copy of this process, for one call. It follows its parent by a pipe of its own.
`run_to_end` is a program that is waited for by a coroutine, and whose output is kept in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import multiprocessing
import os
import pickle
import select
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from slime.utils.errors import RunError

_EXIT_POLL_SECONDS = 0.02
# How long a process may take to end after its pipes have closed, or after a signal.
_EXIT_SECONDS = 5.0
# How long a killed process may take, which has to give back its memory; that of devices may take long.
_KILLED_SECONDS = 30.0
_TAIL_BYTES = 64 * 1024
# A forked call's message begins with its length; it is read in pieces.
_LENGTH_BYTES, _PIECE_BYTES = 8, 2**20

# Our ends of the pipes by which children notice that this process has ended.
_lifelines: set[int] = set()


def open_lifeline() -> tuple[int, int]:
    """A pipe: (the end that a child watches by `end_with`, our end, which `close_lifeline` closes)."""
    watched, ours = os.pipe()
    _lifelines.add(ours)
    return watched, ours


def close_lifeline(ours: int) -> None:
    """Close our end: the child ends, if it has not yet."""
    _lifelines.discard(ours)
    os.close(ours)


def _leave_lifelines() -> None:
    """Run in a forked copy of this process: close the lifelines, so that children of the parent do not wait for the copy."""
    while _lifelines:
        os.close(_lifelines.pop())


os.register_at_fork(after_in_child=_leave_lifelines)


class ChildProcess:
    """One process that this process starts, watches and ends.

    `argv` is the command line, `log_path` takes standard output and error, `env` is the child's whole environment
    (None: ours). `name` is used in messages.
    """

    def __init__(self, name: str, argv: Sequence[str], log_path: str | Path, env: Mapping[str, str] | None = None):
        self.name = name
        self.argv = list(argv)
        self.log_path = Path(log_path)
        self._env = None if env is None else dict(env)
        self._process: subprocess.Popen | None = None
        self._lifeline: int | None = None
        # Processes of the group that were there when it was killed because its leader had ended.
        self._left: list[psutil.Process] = []
        # An ended process can be reaped only once, by whichever of our threads asks first.
        self._collecting = threading.RLock()

    def start(self) -> None:
        """Start the process; returns as soon as it exists. May be called once.

        Raises:
            OSError: the program cannot be started or the log file cannot be opened.
        """
        if self._process is not None:
            raise RuntimeError(f"{self.name} was already started")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, write_end = open_lifeline()
        try:
            with open(self.log_path, "ab") as log:
                self._process = subprocess.Popen(
                    self.argv, stdin=read_end, stdout=log, stderr=log, env=self._env, start_new_session=True
                )
        except BaseException:
            close_lifeline(write_end)
            raise
        finally:
            os.close(read_end)
        self._lifeline = write_end

    @property
    def pid(self) -> int | None:
        """Process id, which is also the id of the child's process group; None before `start`."""
        return None if self._process is None else self._process.pid

    def poll(self) -> int | None:
        """Exit status if the process ended (negative: ended by that signal), else None.

        When it has ended, what is left of its process group is ended too.
        """
        with self._collecting:
            if self._process is None or self._process.returncode is not None:
                return None if self._process is None else self._process.returncode
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self._reap()
            return self._process.returncode

    def wait(self, timeout: float) -> int | None:
        """Wait up to `timeout` seconds for the end; the exit status, or None when it still runs."""
        deadline = time.monotonic() + timeout
        # Polled, as in the standard library, because the kernel's own wait has no time limit.
        while (status := self.poll()) is None and self._process is not None and time.monotonic() < deadline:
            time.sleep(_EXIT_POLL_SECONDS)
        return status

    def terminate(self, timeout: float = 10.0) -> int | None:
        """End the process and its group: SIGTERM, after `timeout` seconds SIGKILL. Harmless when it already ended.

        When it returns all of them have ended. A process that the kernel does not let go, because a device or a disk hangs, is
        waited for only so long, and once.

        Returns:
            The exit status; None if the process was never started, or has not ended.
        """
        deadline = time.monotonic() + timeout + _KILLED_SECONDS
        steps = [(signal.SIGTERM, timeout)] if timeout > 0 else []
        for signal_number, seconds in (*steps, (signal.SIGKILL, _KILLED_SECONDS)):
            with self._collecting:
                if self._process is None or self.poll() is not None:
                    break
                self._signal_group(signal_number)
            self.wait(seconds)
        while any(map(_lives, self._left)) and time.monotonic() < deadline:
            time.sleep(_EXIT_POLL_SECONDS)
        self._left = []
        return self.poll()

    def log_tail(self, lines: int = 30) -> str:
        """The last `lines` lines of the log, for error messages."""
        return read_log_tail(self.log_path, lines)

    def describe_end(self, lines: int = 30) -> str:
        """One text for an error message: exit status in words, path of the log and its last lines."""
        return f"{describe_exit_status(self.poll())}; {self.describe_log(lines)}"

    def describe_log(self, lines: int = 30) -> str:
        """Path of the log and its last lines, for error messages."""
        return f"log {self.log_path} ends with:\n{self.log_tail(lines)}"

    def _signal_group(self, signal_number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal_number)

    def _reap(self) -> None:
        # The ended leader is still a zombie, so its id cannot be that of another group yet.
        self._signal_group(signal.SIGKILL)
        self._left = _members(self._process.pid)
        self._process.wait()
        close_lifeline(self._lifeline)
        self._lifeline = None


def _members(group: int) -> list[psutil.Process]:
    """The processes of a process group without its leader, which must not have been reaped yet."""
    members = []
    for pid in psutil.pids():
        # Processes end meanwhile, and some may belong to others.
        with contextlib.suppress(OSError, psutil.Error):
            if pid != group and os.getpgid(pid) == group:
                members.append(psutil.Process(pid))
    return members


def _lives(process: psutil.Process) -> bool:
    """Whether a process is still there. One that nobody has reaped yet is not, unless only its first thread has ended."""
    try:
        has_ended = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1
        return process.is_running() and not has_ended
    except psutil.NoSuchProcess:
        return False


def environment_for_python() -> dict[str, str]:
    """Our environment, for a Python child that imports this package, even if the package is not installed."""
    root = str(Path(__file__).resolve().parents[2])
    import_path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{import_path}" if import_path else root}


def describe_exit_status(status: int | None) -> str:
    """An exit status of `ChildProcess.poll` in words, with a hint where the kernel's out-of-memory killer is likely."""
    if status is None:
        return "still running"
    if status >= 0:
        return f"exit code {status}"
    hint = (
        " (by itself or somebody else; by the kernel when memory ran out: see `dmesg`)"
        if -status == signal.SIGKILL
        else ""
    )
    try:
        return f"ended by {signal.Signals(-status).name}{hint}"
    except ValueError:
        return f"ended by signal {-status}"


def read_log_tail(path: str | Path, lines: int = 30) -> str:
    """The last `lines` lines of a text file, undecodable bytes replaced; a note when it is missing or empty."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return "(no log file)"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


def exit_when_parent_dies() -> None:
    """Called first thing in a program started by `ChildProcess`: our whole process group ends when the parent ends.

    The kernel itself sends SIGKILL to the group when the pipe on standard input closes, so this works also while
    foreign code holds the interpreter lock for ever (the router does). Processes forked later belong to the group.
    Standard input becomes /dev/null. Without effect when standard input is no pipe (a person started the program) or
    when we do not lead our process group (ending it would end others).
    """
    if not stat.S_ISFIFO(os.fstat(0).st_mode) or os.getpgrp() != os.getpid():
        return
    lifeline = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    end_with(lifeline, -os.getpgrp())


def end_with(lifeline: int, owner: int) -> None:
    """Have the kernel send SIGKILL to `owner` (negative: a process group) when the other end of the pipe closes."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, owner)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    # The parent may have ended before the kernel was asked to watch: then the pipe is readable (end of file) already.
    # `select` would fail for descriptors above 1023, of which a forked process may have many.
    watch = select.poll()
    watch.register(lifeline, select.POLLIN)
    if watch.poll(0):
        os.kill(owner, signal.SIGKILL)


@dataclass(frozen=True)
class Ended:
    """The result of a program: its exit status (above 128: ended by signal status − 128), and its output on both streams."""

    code: int
    out: bytes
    err: bytes


class StillRunning(TimeoutError):
    """A program had to be ended because its time was over; `so_far`: its output on both streams until then."""

    def __init__(self, seconds: float, out: bytes, err: bytes) -> None:
        super().__init__(f"it did not end within {seconds:g} s")
        self.so_far = (out, err)


async def run_to_end(
    argv: Sequence[str], *, timeout: float, stdin: bytes = b"", env: Mapping[str, str] | None = None, most: int = 2**20
) -> Ended:
    """Run a program until it ends; whatever is left of its process group then, or when its time is over, is ended too.

    Args:
        timeout: in seconds. A process that has left the group but still holds a stream is waited for, too.
        stdin: its standard input.
        env: its whole environment; None: ours.
        most: how many bytes of each stream are kept; if some are dropped a note says so.

    Raises:
        StillRunning: its time was over.
        OSError: there is no such program.
    """
    # asyncio's processes are not used, because asyncio reaps them at their end. Until we reap it its id cannot be reused.
    process = subprocess.Popen(
        list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=None if env is None else dict(env), start_new_session=True,
    )  # fmt: skip
    out, err = bytearray(), bytearray()
    readers = [
        asyncio.create_task(_keep(process.stdout, out, most)),
        asyncio.create_task(_keep(process.stderr, err, most)),
    ]
    writer = asyncio.create_task(_give(process.stdin, stdin))
    try:
        async with asyncio.timeout(timeout):
            await _leader_ended(process.pid)
            kill_group(process.pid)
            await asyncio.gather(*readers)
    except TimeoutError:
        raise StillRunning(timeout, bytes(out), bytes(err)) from None
    finally:
        kill_group(process.pid)
        for task in (*readers, writer):
            task.cancel()
        try:
            await asyncio.wait([*readers, writer])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_leader_ended(process.pid), _EXIT_SECONDS)
        finally:
            process.poll()
    code = process.returncode
    return Ended(code if code >= 0 else 128 - code, bytes(out), bytes(err))


async def _keep(pipe: IO[bytes], into: bytearray, most: int) -> None:
    stream, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    dropped = 0
    try:
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        with contextlib.closing(transport):
            while chunk := await stream.read(65536):
                room = most - len(into)
                into += chunk[:room]
                dropped += max(0, len(chunk) - room)
    finally:
        pipe.close()
    if dropped:
        into += f"\n[{dropped} bytes more were dropped]".encode()


async def _give(pipe: IO[bytes], data: bytes) -> None:
    """Write to a program that may read slowly, or not at all."""
    handle = pipe.fileno()
    os.set_blocking(handle, False)
    left, loop = memoryview(data), asyncio.get_running_loop()
    room = asyncio.Event()
    try:
        while left:
            try:
                left = left[os.write(handle, left) :]
            except BlockingIOError:
                room.clear()
                loop.add_writer(handle, room.set)
                await room.wait()
                loop.remove_writer(handle)
    except (BrokenPipeError, ConnectionResetError):
        # The program has closed its input.
        return
    finally:
        loop.remove_writer(handle)
        pipe.close()


async def _leader_ended(pid: int) -> None:
    """Wait for the end of a child that was not reaped yet, even if other processes still hold its streams."""
    handle = os.pidfd_open(pid)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def kill_group(pid: int) -> None:
    """Kill the process group of `pid`, which must not have been reaped yet. Harmless if nothing is left of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class ForkedCall:
    """`function()` in a copy of this process, which has the memory as it is now, whatever changes here afterwards.

    The copy has one thread. A lock that another thread holds at this moment stays locked in it for ever, so `function` is for
    plain work on memory and files: it uses no device, no Ray, no parallel kernels, and logs nothing. What it returns or raises
    is pickled. Memory that is mapped to be shared is no copy.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._result, sender = context.Pipe(duplex=False)
        lifeline, self._lifeline = open_lifeline()
        try:
            self._process = context.Process(target=_call_and_send, args=(function, sender, lifeline), daemon=True)
            self._process.start()
        except BaseException:
            close_lifeline(self._lifeline)
            raise
        finally:
            # Close our copies of the child's ends, so that the pipe closes when the child ends.
            os.close(lifeline)
            sender.close()
        self.pid = self._process.pid

    def has_ended(self) -> bool:
        """Whether the function has ended: its result is there, or begins to come."""
        return self._result.poll()

    def fileno(self) -> int:
        """A descriptor that is readable when the call has ended, for `multiprocessing.connection.wait`."""
        return self._result.fileno()

    def result(self, timeout: float) -> Any:
        """What the function returned; may be called once. Afterwards the copy is gone.

        Raises:
            Exception: the function raised it.
            RunError: the copy ended without a result.
            TimeoutError: the whole result was not there after `timeout` seconds; the copy is ended.
        """
        try:
            value, error = pickle.loads(self._receive(timeout))
        except (EOFError, ConnectionError):
            self._process.join(_EXIT_SECONDS)
            raise RunError(f"its process: {describe_exit_status(self._process.exitcode)}") from None
        finally:
            self.kill()
        if error is not None:
            raise error
        return value

    def _receive(self, timeout: float) -> bytes:
        """The message of `_call_and_send`. `Connection.recv` has no limit once a part of a message is there."""
        received, size, deadline = bytearray(), _LENGTH_BYTES, time.monotonic() + timeout
        while len(received) < size:
            if not self._result.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no result after {timeout:g} s")
            piece = os.read(self._result.fileno(), _PIECE_BYTES)
            if not piece:
                raise EOFError
            received += piece
            if size == _LENGTH_BYTES <= len(received):
                size += int.from_bytes(received[:_LENGTH_BYTES])
        return received[_LENGTH_BYTES:]

    def kill(self) -> None:
        """End the copy at once. Harmless when it has ended.

        A process that the kernel cannot end yet, because a disk hangs, is not waited for.
        """
        if self._lifeline is None:
            return
        self._process.kill()
        self._process.join(_EXIT_SECONDS)
        close_lifeline(self._lifeline)
        self._lifeline = None
        self._result.close()


def _call_and_send(function: Callable[[], Any], sender: Any, lifeline: int) -> None:
    end_with(lifeline, os.getpid())
    # Do not collect the parent's garbage: finalizers may need threads that the copy does not have.
    gc.freeze()
    # Signal handlers of the parent are not for its copy.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        answer = function(), None
    except Exception as error:
        answer = None, error
    message = pickle.dumps(answer)
    with os.fdopen(sender.fileno(), "wb", closefd=False) as pipe:
        pipe.write(len(message).to_bytes(_LENGTH_BYTES) + message)
