"""Processes of a server that end, each in its way."""

import http.server
import importlib
import multiprocessing
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import types
from multiprocessing import resource_tracker

import psutil
import pytest
import urllib3

from slime.backends.sglang_utils import sglang_engine, worker_watch
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.backends.sglang_utils.worker_watch import WorkerWatch
from slime.utils.child_process import ChildProcess, environment_for_python
from slime.utils.errors import RunError
from tests.support.processes.waiting import wait_until

FORK = multiprocessing.get_context("fork")
SLEEPER = [sys.executable, "-c", "import time; time.sleep(3600)"]


def sleep_for_ever() -> None:
    signal.pause()


def sleep_beside_a_helper(pipe, waits=False) -> None:
    """As a data-parallel controller does: the scheduler is a child of the child. `waits`: the kernel tells it how that ends."""
    with subprocess.Popen(["sglang::scheduler_DP0", *SLEEPER[1:]], executable=sys.executable) as helper:
        pipe.send(helper.pid)
        if waits:
            helper.wait()
        signal.pause()


def start_a_helper_later(name, pipe) -> None:
    importlib.import_module("setproctitle").setproctitle(name)
    pipe.recv()
    with subprocess.Popen(["sglang::scheduler_DP0", *SLEEPER[1:]], executable=sys.executable) as helper:
        pipe.send(helper.pid)
        signal.pause()


def spawn_one_that_never_gets_its_name(pipe) -> None:
    importlib.import_module("setproctitle").setproctitle("sglang::data_parallel_controller")
    # It starts a tracker of its own, also where the process that it was forked from has one.
    resource_tracker._resource_tracker._fd = None
    process = multiprocessing.get_context("spawn").Process(target=pipe.recv)
    process.start()
    pipe.send(process.pid)
    signal.pause()


@pytest.fixture
def watch(tmp_path):
    started, causes = [], queue.Queue()

    def begin(target, *arguments, name="scheduler_0"):
        process = FORK.Process(target=target, args=arguments)
        # Ray leaves a handler in every process in which it has run.
        handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGTERM, handler)
        watch = WorkerWatch(tmp_path / "cause", [process], [name], causes.put)
        started.append((process, watch))
        return process, watch, causes

    yield begin
    for process, watch in started:
        watch.stop()
        process.kill()
        process.join()


@pytest.mark.parametrize(
    "number, words", [(signal.SIGKILL, "ended by SIGKILL (by itself"), (signal.SIGTERM, "ended by SIGTERM")]
)
def test_the_signal_is_named(watch, tmp_path, number, words):
    process, of_server, causes = watch(sleep_for_ever)
    of_server.start()
    os.kill(process.pid, number)
    cause = causes.get(timeout=60)
    assert cause.startswith(f"its scheduler_0 (process {process.pid}): {words}")
    assert [path.name for path in tmp_path.iterdir()] == ["cause"] and (tmp_path / "cause").read_text() == cause


def test_the_exit_code_is_named(watch):
    process, of_server, causes = watch(os._exit, 3, name="detokenizer")
    of_server.start()
    assert causes.get(timeout=60) == f"its detokenizer (process {process.pid}): exit code 3"


def test_who_ended_in_order_did_not_die(watch, monkeypatch):
    first, of_server, causes = watch(os._exit, 0)
    first.join(60)
    looks = []
    is_set = of_server._stopped.wait
    monkeypatch.setattr(of_server._stopped, "wait", lambda seconds: looks.append(seconds) or is_set(0.01))
    of_server.start()
    wait_until(lambda: len(looks) > 3)
    assert causes.empty()


@pytest.mark.parametrize(
    "waits, end",
    [(False, ": ended by SIGKILL (by itself"), (True, " is gone")],
    ids=["unasked", "the controller asked"],
)
def test_a_scheduler_below_a_controller_is_watched_too(watch, monkeypatch, waits, end):
    ours, theirs = multiprocessing.Pipe()
    _, of_server, causes = watch(sleep_beside_a_helper, theirs, waits, name="controller")
    scheduler = psutil.Process(ours.recv())
    # A process has started a moment before it has its title.
    wait_until(lambda: scheduler.cmdline()[:1] == ["sglang::scheduler_DP0"])
    if waits:
        # The watch is not to come before the controller.
        monkeypatch.setattr(worker_watch, "_runs", lambda process: psutil.pid_exists(process.pid))
    of_server.start()
    scheduler.kill()
    assert causes.get(timeout=60).startswith(f"its scheduler_DP0 of controller (process {scheduler.pid}){end}")


@pytest.mark.parametrize(
    "name, is_watched", [("sglang::data_parallel_controller", True), ("sglang::scheduler_TP0", False)]
)
def test_a_scheduler_that_dies_while_its_server_starts_is_missed(watch, monkeypatch, name, is_watched):
    """What a scheduler itself starts has its name only until it is another program."""
    pytest.importorskip("setproctitle")
    monkeypatch.setattr(worker_watch, "_SEARCH_SECONDS", 0.01)
    runs, looked_at = worker_watch._runs, set()
    monkeypatch.setattr(worker_watch, "_runs", lambda process: looked_at.add(process) or runs(process))
    searches, search = [], WorkerWatch._schedulers_of_controllers
    monkeypatch.setattr(WorkerWatch, "_schedulers_of_controllers", lambda of: searches.append(of) or search(of))
    ours, theirs = multiprocessing.Pipe()
    process, of_server, causes = watch(start_a_helper_later, name, theirs)
    wait_until(lambda: psutil.Process(process.pid).cmdline()[:1] == [name])
    of_server.start_early()
    wait_until(lambda: searches)
    ours.send("start it")
    helper = psutil.Process(ours.recv())
    wait_until(lambda: helper.cmdline()[:1] == ["sglang::scheduler_DP0"])
    before = len(searches)
    wait_until(lambda: helper in looked_at if is_watched else len(searches) > before + 3)
    helper.kill()
    if is_watched:
        cause = causes.get(timeout=60)
        assert cause.startswith(f"its scheduler_DP0 of scheduler_0 (process {helper.pid}): ended by SIGKILL")
        return
    before = len(searches)
    wait_until(lambda: len(searches) > before + 3)
    assert causes.empty()


def test_a_scheduler_that_dies_before_it_has_its_name_is_missed_too(watch, monkeypatch):
    """It is spawned, and imports for long; what keeps account of shared memory beside it is none."""
    pytest.importorskip("setproctitle")
    monkeypatch.setattr(worker_watch, "_SEARCH_SECONDS", 0.01)
    runs, looked_at = worker_watch._runs, set()
    monkeypatch.setattr(worker_watch, "_runs", lambda process: looked_at.add(process) or runs(process))
    ours, theirs = multiprocessing.Pipe()
    process, of_server, causes = watch(spawn_one_that_never_gets_its_name, theirs)
    spawned = psutil.Process(ours.recv())
    wait_until(lambda: len(psutil.Process(process.pid).children()) == 2)
    of_server.start_early()
    wait_until(lambda: looked_at)
    spawned.kill()
    assert causes.get(timeout=60).startswith(f"its scheduler of scheduler_0 (process {spawned.pid}): ended by SIGKILL")
    assert looked_at == {spawned}


SERVER_WHOSE_SCHEDULER_DIES = """
import multiprocessing, os, pathlib, signal, sys
from slime.backends.sglang_utils.worker_watch import WorkerWatch
process = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
process.start()
WorkerWatch(pathlib.Path(sys.argv[1]), [process], ["scheduler_0"]).start()
signal.pause()
"""


@pytest.mark.parametrize(("cause", "log"), [("gone/cause", os.devnull), ("cause", "/dev/full")])
def test_a_server_ends_although_its_disks_are_full(tmp_path, cause, log):
    """It would live on without its scheduler, and answer that it is healthy."""
    program = [sys.executable, "-c", SERVER_WHOSE_SCHEDULER_DIES, str(tmp_path / cause)]
    with open(log, "w") as stderr:
        done = subprocess.run(program, stderr=stderr, env=environment_for_python(), timeout=60)
    assert done.returncode == worker_watch._EXIT_STATUS


def test_a_server_that_ends_by_itself_reports_nothing(watch):
    process, of_server, causes = watch(sleep_for_ever)
    of_server.start()
    of_server.stop()
    process.kill()
    process.join()
    wait_until(lambda: not any(thread.name == "worker watch" for thread in threading.enumerate()))
    assert causes.empty()


# -- what the processes of a server do ------------------------------------------------------------------------------------

# A scheduler, or a compiler that one has started, beside a process that only answers.
COMPUTING = "import time; end = time.monotonic() + 3600\nwhile time.monotonic() < end: pass"


@pytest.fixture
def server():
    """Starts a program with children of the given titles, which compute; returns their processes."""
    started = []

    def begin(*titles):
        program = (
            f"import subprocess, sys, time\nfor title in {titles!r}:\n"
            f"    subprocess.Popen([title, '-c', {COMPUTING!r}], executable=sys.executable)\ntime.sleep(3600)"
        )
        process = psutil.Process(subprocess.Popen([sys.executable, "-c", program]).pid)
        started.append(process)
        return process, wait_until(lambda: found if len(found := process.children()) == len(titles) else None)

    yield begin
    for process in started:
        for each in [*process.children(), process]:
            each.kill()
        process.wait(60)


@pytest.mark.parametrize("title", ["sglang::scheduler_TP0", "nvcc"])
def test_schedulers_and_what_they_start_compute(server, title):
    process, _ = server(title)
    wait_until(lambda: worker_watch.computing_seconds(process.pid) > 0.05)


def test_other_processes_of_a_server_do_not_count(server):
    process, (detokenizer,) = server("sglang::detokenizer")
    wait_until(lambda: detokenizer.cpu_times().user > 0.2)
    assert worker_watch.computing_seconds(process.pid) == 0


def test_a_server_with_a_stopped_process_computes_nothing(server):
    process, children = server("sglang::scheduler_TP0", "sglang::detokenizer")
    wait_until(lambda: worker_watch.computing_seconds(process.pid) > 0)
    children[1].suspend()
    wait_until(lambda: worker_watch.computing_seconds(process.pid) == 0)
    children[1].resume()
    wait_until(lambda: worker_watch.computing_seconds(process.pid) > 0)


def test_all_processes_of_a_server_have_memory_of_its_host(server):
    process, children = server("sglang::scheduler_TP0", "nvcc")
    wait_until(lambda: worker_watch.computing_seconds(process.pid) > 0.05)
    of_each = [one.memory_info().rss / 2**30 for one in (process, *children)]
    assert min(of_each) > 0 and worker_watch.host_memory_gib(process.pid) == pytest.approx(sum(of_each), rel=0.2)
    children[0].kill()
    wait_until(lambda: worker_watch.host_memory_gib(process.pid) < sum(of_each) - 0.5 * of_each[1])


def test_a_server_that_is_gone_has_no_memory():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    assert worker_watch.host_memory_gib(process.pid) == 0.0


# -- what the engine makes of it ----------------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path):
    """An engine whose server is a process that sleeps."""
    engine = SGLangEngine(types.SimpleNamespace(), 3, tmp_path)
    engine._scratch_dir = tmp_path / "scratch"
    engine._scratch_dir.mkdir()
    engine._process = ChildProcess("engine 3", SLEEPER, tmp_path / "engine_3.log")
    engine._process.start()
    yield engine
    engine.shutdown()


def test_a_killed_server_is_heard_of_while_nothing_is_called(engine, tmp_path):
    engine._process.log_path.write_text("the last line\n")
    os.kill(engine.server_pid(), signal.SIGKILL)
    with pytest.raises(RunError) as error:
        engine.wait_for_end()
    first, last = str(error.value).splitlines()
    assert first.startswith("engine 3 died: ended by SIGKILL") and last == "the last line"


def test_the_cause_that_the_server_wrote_comes_before_its_exit_status(engine):
    (engine._scratch_dir / "cause").write_text("its scheduler_0 (process 5): ended by SIGSEGV")
    os.kill(engine.server_pid(), signal.SIGKILL)
    with pytest.raises(RunError, match=r"^engine 3 died: its scheduler_0 \(process 5\): ended by SIGSEGV; log "):
        engine.wait_for_end()


@pytest.mark.parametrize(
    "path, flag",
    [
        ("/update_weights_from_disk", "3 s (--engine-load-timeout)"),
        ("/end_weight_update", "3 s (--engine-load-timeout)"),
        ("/weights_checker", "3 s (--engine-load-timeout)"),
        ("/pause_generation", "2 s (--http-control-timeout)"),
    ],
)
def test_a_time_limit_that_ran_out_is_named_by_its_flag(engine, monkeypatch, path, flag):
    limits = []

    def refuse(method, url, *, json, timeout):
        limits.append(timeout.read_timeout)
        raise urllib3.exceptions.HTTPError("too late")

    engine._args.engine_load_timeout, engine._args.http_control_timeout, engine._url = 3.0, 2.0, "http://127.0.0.1:1"
    monkeypatch.setattr(engine._connections, "request", refuse)
    monkeypatch.setattr(engine._process, "wait", lambda timeout: None)
    with pytest.raises(RunError, match=re.escape(f"engine 3 did not answer {path} within {flag}: too late")):
        engine._call("POST", path)
    assert limits == [float(flag[0])]


def test_an_engine_that_does_not_start_in_time_names_the_flag(engine, monkeypatch):
    engine._args.engine_start_timeout = 0.2
    monkeypatch.setattr(engine, "_launch", lambda *arguments: None)
    with pytest.raises(RunError, match=r"was not healthy after 0.2 s \(--engine-start-timeout\): still running"):
        engine.init()


@pytest.mark.parametrize(
    ("answers", "computed", "timeout", "outcome"),
    [
        (["/health_generate", "/health"], 0.0, 600.0, True),
        (["/health"], 1.0, 0.2, False),
        (["/health"], 0.0, 0.2, "engine 3 hangs: it gave no token within 0.2 s .* computed for 0.0 s; log "),
        ([], 1.0, 0.2, "engine 3 hangs: "),
    ],
    ids=["answers", "compiles", "hangs", "front end hangs"],
)
def test_an_engine_makes_progress_when_it_answers_or_computes(engine, monkeypatch, answers, computed, timeout, outcome):
    seconds = iter([5.0, 5.0 + computed])
    monkeypatch.setattr(sglang_engine, "computing_seconds", lambda pid: next(seconds))
    monkeypatch.setattr(engine, "_answers", lambda path, timeout: path in answers)
    if isinstance(outcome, bool):
        assert engine.makes_progress(timeout) is outcome
        return
    with pytest.raises(RunError, match=outcome):
        engine.makes_progress(timeout)


def test_an_idle_engine_is_asked_once_although_it_looks_for_its_token_only_after_a_second(engine, monkeypatch):
    asked = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            time.sleep(1.02)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words):
            pass

    monkeypatch.setattr(sglang_engine, "computing_seconds", lambda pid: asked.append("computing"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever).start()
        engine._url = f"http://127.0.0.1:{server.server_port}"
        assert engine.makes_progress(30.0) is True
        server.shutdown()
    assert asked == ["/health_generate"]


def test_a_check_of_a_dead_engine_says_how_it_died(engine):
    engine._url = "http://127.0.0.1:1"
    os.kill(engine.server_pid(), signal.SIGKILL)
    with pytest.raises(RunError, match="^engine 3 died: ended by SIGKILL"):
        engine.makes_progress(600.0)


def test_an_engine_that_is_shut_down_did_not_die(engine):
    engine.shutdown()
    assert engine.wait_for_end() is None


def test_an_engine_that_is_shut_down_leaves_nothing(engine):
    (engine._scratch_dir / "socket").touch()
    engine.shutdown()
    assert not engine._scratch_dir.exists()
