import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from slime.utils import child_process
from slime.utils.child_process import (
    ChildProcess,
    ForkedCall,
    StillRunning,
    describe_exit_status,
    environment_for_python,
    read_log_tail,
    run_to_end,
)
from slime.utils.errors import RunError
from tests.support.processes.waiting import runs, wait_until

# A child that follows its parent and has a child of its own, as a server has. It holds the interpreter lock, as the
# router does, so that no Python thread could watch the parent.
FOLLOWER = """
import os, sys
from slime.utils.child_process import exit_when_parent_dies
exit_when_parent_dies()
helper = os.fork()
if helper:
    open(sys.argv[1], "w").write(f"{os.getpid()} {helper}\\n")
import ctypes
ctypes.PyDLL(None).sleep(600)
"""

PARENT = """
import sys, time
from slime.utils.child_process import ChildProcess, environment_for_python
child = ChildProcess("child", [sys.executable, "-c", sys.argv[1], sys.argv[2]], sys.argv[2] + ".log", environment_for_python())
child.start()
time.sleep(600)
"""

FORKING_PARENT = """
import sys, time
from slime.utils.child_process import ForkedCall
calls = [ForkedCall(lambda: time.sleep(600)) for _ in range(3)]
open(sys.argv[1], "w").write(" ".join(str(call.pid) for call in calls) + "\\n")
time.sleep(600)
"""

# A plug-in has a pool of processes; they do not follow their parent.
PARENT_WITH_COPY = """
import os, sys, time
from slime.utils.child_process import ChildProcess, ForkedCall, environment_for_python
child = ChildProcess("child", [sys.executable, "-c", sys.argv[1], sys.argv[2]], sys.argv[2] + ".log", environment_for_python())
child.start()
call = ForkedCall(lambda: time.sleep(600))
copy = os.fork()
if copy:
    open(sys.argv[2] + ".others", "w").write(f"{copy} {call.pid}\\n")
time.sleep(600)
"""


def pids_in(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()] if path.exists() and path.read_text().endswith("\n") else []


@pytest.fixture
def started():
    children = []

    def start(code: str, log: Path, *arguments: str) -> ChildProcess:
        child = ChildProcess("child", [sys.executable, "-c", code, *arguments], log, environment_for_python())
        children.append(child)
        child.start()
        return child

    yield start
    for child in children:
        child.terminate(timeout=0)


def test_a_child_and_its_helper_follow_a_parent_that_is_killed(tmp_path):
    marker = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, FOLLOWER, str(marker)], env=environment_for_python())
    try:
        pids = wait_until(lambda: pids_in(marker))
        # Both sleep: whatever they have to do about their parent is done, and they are still there.
        wait_until(lambda: [psutil.Process(pid).status() for pid in pids] == [psutil.STATUS_SLEEPING] * 2)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(runs(pid) for pid in pids))


def test_a_child_follows_a_parent_that_is_killed_and_had_a_copy_made_of_itself(tmp_path):
    marker = tmp_path / "pids"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT_WITH_COPY, FOLLOWER, str(marker)], env=environment_for_python()
    )
    copy = None
    try:
        copy, call = wait_until(lambda: pids_in(tmp_path / "pids.others"))
        followers = [*wait_until(lambda: pids_in(marker)), call]
        wait_until(lambda: [psutil.Process(pid).status() for pid in followers] == [psutil.STATUS_SLEEPING] * 3)
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(runs(pid) for pid in followers))
        assert runs(copy)
    finally:
        parent.kill()
        parent.wait()
        if copy is not None:
            os.kill(copy, signal.SIGKILL)


def test_the_helper_of_a_killed_child_is_ended_when_the_parent_looks(tmp_path, started):
    marker = tmp_path / "pids"
    child = started(FOLLOWER, tmp_path / "log", str(marker))
    pids = wait_until(lambda: pids_in(marker))
    os.kill(pids[0], signal.SIGKILL)
    assert wait_until(child.poll) == -signal.SIGKILL
    wait_until(lambda: not runs(pids[1]))


def test_f5_terminate_ends_the_whole_group_and_nothing_else(tmp_path, started):
    bystander = started("import time; time.sleep(600)", tmp_path / "bystander.log")
    marker = tmp_path / "pids"
    child = started(FOLLOWER, tmp_path / "log", str(marker))
    pids = wait_until(lambda: pids_in(marker))
    assert child.terminate(timeout=60) == -signal.SIGTERM
    assert not any(runs(pid) for pid in pids)
    assert bystander.poll() is None
    assert runs(os.getpid())


def test_f2_a_child_that_ignores_sigterm_is_killed_after_the_timeout(tmp_path, started):
    code = (
        "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    )
    child = started(code, tmp_path / "log")
    wait_until(lambda: "ready" in child.log_tail())
    assert child.terminate(timeout=0.3) == -signal.SIGKILL
    assert child.terminate(timeout=0.3) == -signal.SIGKILL


@pytest.mark.parametrize("has_ended", [False, True])
def test_terminate_waits_for_processes_of_the_group_that_outlive_its_leader(tmp_path, started, monkeypatch, has_ended):
    """Those of an engine give back the memory of their devices, which others are waiting for."""
    child = started("import time; time.sleep(600)", tmp_path / "log")
    # At first it runs, then its first thread has ended, and at last all have, though nobody has reaped it.
    seen = iter([(psutil.STATUS_RUNNING, 9), (psutil.STATUS_ZOMBIE, 8), (psutil.STATUS_ZOMBIE, 1)])
    threads = []

    def status():
        state, number = next(seen)
        threads.append(number)
        return state

    member = SimpleNamespace(status=status, num_threads=lambda: threads[-1], is_running=lambda: True)
    monkeypatch.setattr(child_process, "_members", lambda group: [member] if group == child.pid else [])
    if has_ended:
        os.kill(child.pid, signal.SIGKILL)
        wait_until(child.poll)
    assert child.terminate(0) == -signal.SIGKILL and threads == [9, 8, 1]
    assert child.terminate(0) == -signal.SIGKILL


def test_a_process_of_the_group_that_the_kernel_does_not_let_go_is_not_waited_for(tmp_path, started, monkeypatch):
    monkeypatch.setattr(child_process, "_KILLED_SECONDS", 0.05)
    child = started("import time; time.sleep(600)", tmp_path / "log")
    member = SimpleNamespace(status=lambda: psutil.STATUS_DISK_SLEEP, is_running=lambda: True)
    monkeypatch.setattr(child_process, "_members", lambda group: [member])
    assert child.terminate(0) == -signal.SIGKILL


def test_a_child_that_the_kernel_does_not_let_go_is_not_waited_for(tmp_path, started, monkeypatch):
    """Whoever replaces it would wait without an end, and so would all who ask whether it lives."""
    monkeypatch.setattr("slime.utils.child_process._KILLED_SECONDS", 0.05)
    child, ended = started("import time; time.sleep(600)", tmp_path / "log"), []
    with monkeypatch.context() as held:
        # As in a call of a device that hangs: the signal waits for its end.
        held.setattr(child, "_signal_group", lambda signal_number: None)
        ending = threading.Thread(target=lambda: ended.append(child.terminate(0.01)), daemon=True)
        ending.start()
        ending.join(30.0)
        was_left = not ending.is_alive()
        if not was_left:
            os.kill(child.pid, signal.SIGKILL)
    assert was_left and ended == [None] and child.describe_end().startswith("still running")
    assert child.terminate(0) == -signal.SIGKILL


def test_exit_status_and_last_log_lines(tmp_path, started):
    code = "import sys\nfor i in range(100): print(i, flush=True)\nsys.exit('boom')"
    child = started(code, tmp_path / "log")
    assert wait_until(child.poll) == 1
    assert child.log_tail(3).splitlines() == ["98", "99", "boom"]
    text = child.describe_end(200)
    assert "exit code 1" in text and str(tmp_path / "log") in text and "boom" in text


def test_a_child_that_was_never_started():
    child = ChildProcess("child", ["true"], "/nonexistent/log")
    assert child.pid is None and child.poll() is None and child.terminate() is None
    assert read_log_tail("/nonexistent/log") == "(no log file)"


def test_a_program_that_does_not_exist_leaves_nothing_open(tmp_path):
    # In a process where nobody else opens and closes anything.
    program = (
        "import os, sys\nfrom slime.utils.child_process import ChildProcess\nbefore = os.listdir('/proc/self/fd')\n"
        "try: ChildProcess('child', ['/nonexistent/program'], sys.argv[1]).start()\n"
        "except FileNotFoundError: print(before == os.listdir('/proc/self/fd'))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    told = subprocess.run(command, env=environment_for_python(), capture_output=True, text=True, timeout=120)
    assert told.stdout == "True\n", told.stderr


def test_exit_status_in_words():
    assert describe_exit_status(None) == "still running"
    assert describe_exit_status(3) == "exit code 3"
    assert describe_exit_status(-15) == "ended by SIGTERM"
    assert "memory" in describe_exit_status(-9)


@pytest.fixture
def held():
    """(wait, release): in a copy of this process `wait` returns when `release` was called here."""
    reader, writer = os.pipe()

    def wait():
        os.close(writer)
        os.read(reader, 1)

    yield wait, lambda: os.write(writer, b"1")
    os.close(reader)
    os.close(writer)


def test_a_forked_call_works_on_the_memory_of_the_moment_it_began(held):
    wait, release = held
    memory = ["then"]

    def call():
        wait()
        return memory

    copy = ForkedCall(call)
    memory[0] = "now"
    assert not copy.has_ended()
    release()
    wait_until(copy.has_ended)
    assert copy.result(60.0) == ["then"] and not runs(copy.pid)


def test_a_forked_call_that_raises_is_killed_or_hangs_is_an_error_and_leaves_no_process(held):
    def fails():
        raise OSError("no space left")

    with pytest.raises(OSError, match="^no space left$"):
        ForkedCall(fails).result(60.0)
    killed, hangs = ForkedCall(held[0]), ForkedCall(held[0])
    os.kill(killed.pid, signal.SIGKILL)
    wait_until(killed.has_ended)
    with pytest.raises(RunError, match="^its process: ended by SIGKILL"):
        killed.result(60.0)
    with pytest.raises(TimeoutError, match="^no result after 0 s$"):
        hangs.result(0.0)
    assert not runs(hangs.pid)
    hangs.kill()


def test_the_limit_of_a_forked_call_also_holds_within_its_result():
    halted, killed = (ForkedCall(lambda: bytes(2**22)) for _ in range(2))
    # As far as the pipe takes it, the result is there.
    wait_until(lambda: halted.has_ended() and killed.has_ended())
    os.kill(halted.pid, signal.SIGSTOP)
    os.kill(killed.pid, signal.SIGKILL)
    errors = []

    def wait():
        try:
            halted.result(0.5)
        except TimeoutError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(30.0)
    halted.kill()
    assert [str(error) for error in errors] == ["no result after 0.5 s"]
    with pytest.raises(RunError, match="^its process: ended by SIGKILL"):
        killed.result(60.0)


def test_a_result_of_any_length_arrives_and_a_short_one_that_is_there_is_not_waited_for():
    long = ForkedCall(lambda: bytes(range(256)) * 2**16)
    assert long.result(60.0) == bytes(range(256)) * 2**16
    short = ForkedCall(lambda: "done")
    wait_until(short.has_ended)
    assert short.result(0.0) == "done"


def test_a_forked_call_that_the_kernel_does_not_let_go_is_not_waited_for(monkeypatch, held):
    monkeypatch.setattr("slime.utils.child_process._EXIT_SECONDS", 0.05)
    hangs = ForkedCall(held[0])
    # As in a write to a disk that hangs: the signal waits for its end.
    monkeypatch.setattr(hangs._process, "kill", lambda: None)
    ending = threading.Thread(target=hangs.kill, daemon=True)
    ending.start()
    ending.join(30.0)
    was_left = not ending.is_alive()
    held[1]()
    assert was_left
    wait_until(lambda: not runs(hangs.pid))


def test_a_process_with_many_open_files_has_forked_calls_too():
    """More than `select` can watch."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit[0], 2000), limit[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert ForkedCall(lambda: 5).result(60.0) == 5
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_forked_calls_follow_a_parent_that_is_killed(tmp_path):
    marker = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, "-c", FORKING_PARENT, str(marker)], env=environment_for_python())
    try:
        pids = wait_until(lambda: pids_in(marker))
        wait_until(lambda: [psutil.Process(pid).status() for pid in pids] == [psutil.STATUS_SLEEPING] * 3)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(runs(pid) for pid in pids))


def ran(*argv, **options):
    return asyncio.run(run_to_end(argv, **{"timeout": 60, **options}))


def test_a_program_is_waited_for_with_its_streams():
    ended = ran("sh", "-c", "cat; echo $A; echo told >&2; exit 3", stdin=b"given ", env={"A": "x", "PATH": os.defpath})
    assert (ended.code, ended.out, ended.err) == (3, b"given x\n", b"told\n")
    assert ran("sh", "-c", "kill -9 $$").code == 128 + signal.SIGKILL
    assert ran("sh", "-c", "exec < /dev/null; sleep 0.1", stdin=b"x" * 2**20).code == 0
    with pytest.raises(FileNotFoundError):
        ran("no-such-program")


def test_what_is_left_of_a_programs_group_ends_with_it():
    child = int(ran("sh", "-c", "sleep 1000 & echo $!").out)
    wait_until(lambda: not runs(child))


def test_a_program_is_killed_by_its_id_only_while_that_is_its_own(monkeypatch):
    kinds = []

    def killed(pid):
        # Raises ChildProcessError where the process was collected.
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        kinds.append("runs" if ended is None else "ended")
        os.killpg(pid, signal.SIGKILL)

    monkeypatch.setattr(child_process, "kill_group", killed)
    for _ in range(20):
        assert ran("true").code == 0
    with pytest.raises(StillRunning):
        ran("sleep", "1000", timeout=0.1)
    assert kinds == ["ended"] * 40 + ["runs"]


def wrote_until_its_time_was_over(*argv, lines):
    """The output of a program that does not end; with more time where a busy machine did not let it come to its last line."""
    for seconds in (1, 8, 64):
        with pytest.raises(StillRunning, match=f"did not end within {seconds} s") as error:
            ran(*argv, timeout=seconds)
        out, _ = error.value.so_far
        if out.count(b"\n") == lines:
            break
    return out


def test_a_program_over_time_is_ended_and_what_it_wrote_is_there():
    script = "trap '' TERM; echo begun; sleep 1000 & echo $!; wait"
    begun, child = wrote_until_its_time_was_over("sh", "-c", script, lines=2).split()
    assert begun == b"begun"
    wait_until(lambda: not runs(int(child)))


def test_one_that_left_the_group_holds_its_streams_for_the_time_that_is_given():
    program = (
        "import os, time\nr, w = os.pipe()\nchild = os.fork()\nif child == 0:\n"
        " os.setsid(); os.write(w, b'.'); time.sleep(600); os._exit(0)\nos.read(r, 1); print(child)"
    )
    child = int(wrote_until_its_time_was_over(sys.executable, "-c", program, lines=1))
    assert runs(child)
    os.kill(child, signal.SIGKILL)


def test_output_is_kept_up_to_a_limit_and_the_program_is_not_held_up():
    ended = ran("sh", "-c", "head -c 5000000 /dev/zero", most=10)
    assert ended.code == 0 and ended.out == bytes(10) + b"\n[4999990 bytes more were dropped]"


def test_a_program_ends_when_nobody_waits_for_it_any_more(tmp_path):
    async def main():
        task = asyncio.create_task(run_to_end(["sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 1000"], timeout=60))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    wait_until(lambda: not runs(int((tmp_path / "pid").read_text())))
