"""The process of one rehearsed rank."""

import contextlib
import os
import signal
import subprocess
import sys

from tests.support.processes.waiting import runs, wait_until


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
        wait_until(lambda: not runs(pid))
        os.close(writer)
    finally:
        driver.kill()
        driver.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def test_no_compiler_is_imported_for_what_is_called_as_it_is():
    program = (
        "import sys; from slime.rehearsal.fake_device import lift_megatron; lift_megatron(); "
        "import megatron.core.fusions.fused_bias_swiglu; sys.exit('torch._inductor.compile_fx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=300).returncode == 0


def opened(fifo):
    with contextlib.suppress(OSError):
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
