"""The process of one rehearsed rank."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil

from tests.support.processes.waiting import wait_until


def test_the_process_of_a_rank_ends_with_its_driver(tmp_path):
    # Nobody writes into it: the rank waits for its task.
    os.mkfifo(tmp_path / "task")
    rank = [sys.executable, "-m", "slime.rehearsal.rank", str(tmp_path / "task")]
    program = (
        "import time; from slime.utils.child_process import ChildProcess; "
        f"child = ChildProcess('rank', {rank}, {str(tmp_path / 'log')!r}); child.start(); print(child.pid, flush=True); "
        "time.sleep(600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid = int(driver.stdout.readline())
    try:
        # It has come to its task when the pipe has a reader.
        writer = wait_until(lambda: opened(tmp_path / "task"))
        driver.kill()
        driver.wait()
        wait_until(lambda: not psutil.pid_exists(pid))
        os.close(writer)
    finally:
        driver.kill()
        driver.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def opened(fifo):
    with contextlib.suppress(OSError):
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
