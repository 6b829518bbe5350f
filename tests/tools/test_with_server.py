"""A command beside a server: it starts when the server listens, and the server ends with it."""

import signal
import socket
import subprocess
import sys

import psutil
import pytest

from slime.utils.http_utils import find_available_port
from tests.support.processes.waiting import runs, wait_until
from tests.support.tables.shell_arrays import ROOT

SERVER = "import socket, sys, time\ns = socket.create_server(('127.0.0.1', {port}))\nprint('up', flush=True)\ntime.sleep(600)"


@pytest.fixture
def port():
    return find_available_port(23000)


def words(tmp_path, port, server, *command, timeout="20"):
    options = ["--port", str(port), "--log", str(tmp_path / "log"), "--timeout", timeout]
    return [
        sys.executable, str(ROOT / "tools/with_server.py"), *options,
        sys.executable, "-c", server, "--", *command,
    ]  # fmt: skip


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_the_command_finds_the_server_and_the_server_ends_with_it(tmp_path, port):
    connect = f"import socket; socket.create_connection(('127.0.0.1', {port})); print('met'); raise SystemExit(3)"
    done = subprocess.run(
        words(tmp_path, port, SERVER.format(port=port), sys.executable, "-c", connect),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "met\n"), done.stderr
    assert (tmp_path / "log").read_text() == "up\n"
    assert not listens(port)


@pytest.mark.parametrize(
    ("server", "timeout", "told"),
    [
        ("print('cannot bind'); raise SystemExit(5)", "50", "cannot bind"),
        ("import time; time.sleep(600)", "1", "does not listen"),
    ],
)
def test_a_server_that_does_not_come_up_is_told_with_its_log(tmp_path, port, server, timeout, told):
    done = subprocess.run(
        words(tmp_path, port, server, "touch", str(tmp_path / "ran"), timeout=timeout),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and told in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_port_that_is_taken_is_refused(tmp_path, port):
    with socket.create_server(("127.0.0.1", port)):
        done = subprocess.run(words(tmp_path, port, "pass", "true"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"port {port} is taken" in done.stderr


def test_a_signal_ends_both(tmp_path, port):
    mark = tmp_path / "running"
    process = subprocess.Popen(
        words(tmp_path, port, SERVER.format(port=port), "sh", "-c", f"touch {mark}; exec sleep 600")
    )
    wait_until(mark.exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not listens(port)


# Both would wait longer than the test.
COMMAND = """
import os, signal, sys, time
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda *_: sys.exit(42))
with open("running.draft", "w") as file:
    file.write(str(os.getpid()))
os.rename("running.draft", "running")
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_neither_outlives_what_started_them(tmp_path, port, number):
    """Without a terminal, which would have told the command of Ctrl-C, and of its own end, too."""
    with subprocess.Popen(
        words(tmp_path, port, SERVER.format(port=port), sys.executable, "-c", COMMAND), cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    ) as process:  # fmt: skip
        try:
            wait_until((tmp_path / "running").exists, 60)
            command = psutil.Process(int((tmp_path / "running").read_text()))
            process.send_signal(number)
            assert process.wait(60) == (-number if number == signal.SIGKILL else 42)
            wait_until(lambda: not runs(command), 30)
            wait_until(lambda: not listens(port), 30)
        finally:
            process.terminate()


def test_a_command_that_there_is_not_is_told(tmp_path, port):
    done = subprocess.run(
        words(tmp_path, port, SERVER.format(port=port), "no-such-program"), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (127, "no-such-program: No such file or directory\n")
