"""Runs a command and measures it from outside: its output, CPU time and memory, with a time limit."""

import os
import signal
import subprocess
import tempfile
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """status: exit status as in `subprocess`. text: output and errors. cpu_seconds: CPU time of the command and its
    descendants. peak_bytes: peak memory of the largest of these processes."""

    status: int
    text: str
    cpu_seconds: float
    peak_bytes: int


def run_measured(command: list[str], env: dict[str, str], deadline: float) -> Measured:
    """Run `command` to its end.

    Raises:
        TimeoutError: it took more than `deadline` seconds; it has been ended, with all that it started.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        late = threading.Event()

        def end() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(deadline, end)
        timer.start()
        # Unlike subprocess's `wait`, this one returns resource usage, including that of descendants that were waited for.
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if late.is_set():
        raise TimeoutError(f"{' '.join(command)} did not end within {deadline:.0f} s:\n{text}")
    return Measured(process.returncode, text, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
