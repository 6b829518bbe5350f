#!/usr/bin/env python3
"""Run a command together with a server that it needs, and end the server with it.

    python tools/with_server.py --port 8181 --log server.log SERVER WORDS... -- COMMAND WORDS...

The server is ready when it listens on loopback at the port. Its output goes to the log. It is stopped when the command has
ended, by itself or by a signal. The exit status is the command's, or 2 if the server did not start. The command has no standard
input. Both end with this program, even after `kill -9`.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.utils.child_process import ChildProcess, environment_for_python
from tools.tied import tied

HOST = "127.0.0.1"
POLL_S = 0.1


def listens(port: int) -> bool:
    """Whether a process accepts connections on loopback at the port."""
    try:
        with socket.create_connection((HOST, port), timeout=1):
            return True
    except OSError:
        return False


def wait_until_ready(server: ChildProcess, port: int, timeout: float) -> None:
    """Wait until the server listens.

    Raises:
        RuntimeError: it ended, or it does not listen after `timeout` seconds. The message has the end of its log.
    """
    deadline = time.monotonic() + timeout
    while not listens(port):
        if server.poll() is not None:
            raise RuntimeError(f"the server ended before it listened at port {port}: {server.describe_end()}")
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the server does not listen at port {port} after {timeout:g} s; {server.describe_log()}"
            )
        time.sleep(POLL_S)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True, help="where the server will listen on loopback")
    parser.add_argument("--log", type=Path, required=True, help="file for the server's output, which is added to")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for the server to come up")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="SERVER WORDS... -- COMMAND WORDS...")
    given = parser.parse_args(argv)
    # Some versions of Python keep a leading `--`.
    words = given.words[1:] if given.words[:1] == ["--"] else given.words
    middle = words.index("--") if "--" in words else 0
    if not words[:middle] or not words[middle + 1 :]:
        parser.error("give the words of the server, then --, then those of the command")
    if listens(given.port):
        print(f"with_server: port {given.port} is taken; end what listens there, or choose another", file=sys.stderr)
        return 2
    server = ChildProcess("server", tied(words[:middle]), given.log, env=environment_for_python())
    command: subprocess.Popen | None = None

    def hand_on(number: int, frame: object) -> None:
        if command is None:
            raise SystemExit(128 + number)
        # A terminal sends Ctrl-C and its own end only to our process group. The command's group gets them here.
        with contextlib.suppress(ProcessLookupError):
            (os.kill if number == signal.SIGTERM else os.killpg)(command.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under `nohup` SIGHUP is ignored, and must stay so.
        if number != signal.SIGHUP or signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, hand_on)
    try:
        server.start()
        wait_until_ready(server, given.port, given.timeout)
        # The command watches its standard input, which stays open as long as this process lives: this ties it to us.
        command = subprocess.Popen(tied(words[middle + 1 :]), stdin=subprocess.PIPE, process_group=0)
        status = command.wait()
    except (OSError, RuntimeError) as error:
        print(f"with_server: {error}", file=sys.stderr)
        return 2
    finally:
        server.terminate()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
