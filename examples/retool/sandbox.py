"""Programs of a model, each in a process of its own that can do little: no network, no processes, an empty directory, an end.

What holds a program: namespaces of user, network and processes (`unshare`), and, all in `limited.py`, limits of CPU time,
memory and files, rules for what it may read and write (Landlock), and a filter of system calls. When its time is over its
whole process namespace ends, with all in it.
"""

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from examples.retool.limited import ARCHITECTURES, LANDLOCK_VERSION, landlock_version
from slime.utils.errors import UserError

LIMITED = Path(__file__).with_name("limited.py")
NAMESPACES = ("--user", "--map-current-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
CUT = "\n[cut]"
# Between the kill of a program and its end.
END_SECONDS = 30.0


@dataclass(frozen=True)
class Limits:
    """Of one program: seconds by the clock and of the CPU, bytes of memory, of each file, and of output that is kept."""

    seconds: float = 5.0
    cpu_seconds: int = 5
    memory_bytes: int = 256 * 2**20
    file_bytes: int = 2**20
    output_bytes: int = 2048


@functools.cache
def require_sandbox() -> tuple[str, ...]:
    """The words that put a command into namespaces of its own.

    Raises:
        UserError: this machine lets nobody have them; says what is missing.
    """
    unshare = shutil.which("unshare")
    if unshare is None:
        raise UserError("programs of a model run by `unshare`, and it is not on PATH; install util-linux")
    if os.uname().machine not in ARCHITECTURES:
        raise UserError(
            f"programs of a model run on {' and '.join(ARCHITECTURES)}; this machine is a {os.uname().machine}"
        )
    if landlock_version() < LANDLOCK_VERSION:
        raise UserError(
            f"programs of a model are kept from the files of this machine by Landlock, version {LANDLOCK_VERSION} or later "
            f"(Linux 6.2), and its kernel has version {landlock_version()} (0: none, or not switched on)"
        )
    words = (unshare, *NAMESPACES)
    done = subprocess.run([*words, "true"], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise UserError(
            f"programs of a model need namespaces of user, network and processes, and `{' '.join(words)} true` says: "
            f"{done.stderr.strip()}. In a container allow them (docker run --security-opt seccomp=unconfined "
            "--security-opt systempaths=unconfined), or set sysctl kernel.unprivileged_userns_clone=1 on the machine"
        )
    return words


async def run_python(program: str, limits: Limits = Limits()) -> str:
    """What the program writes on standard output and error, cut at `limits.output_bytes`; standard library alone.

    Raises:
        UserError: this machine has no sandbox.
    """
    words = require_sandbox()
    given = {name: getattr(limits, name) for name in ("cpu_seconds", "memory_bytes", "file_bytes")}
    with tempfile.TemporaryDirectory(prefix="slime-program-") as directory:
        process = await asyncio.create_subprocess_exec(
            *words, sys.executable, "-I", "-S", "-B", str(LIMITED), json.dumps(given),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            cwd=directory, env={}, start_new_session=True,
        )  # fmt: skip
        output, over = b"", "\n[out of time]"
        try:
            async with asyncio.timeout(limits.seconds):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    process.stdin.write(program.encode(errors="replace"))
                    await process.stdin.drain()
                process.stdin.close()
                while len(output) <= limits.output_bytes and (chunk := await process.stdout.read(65536)):
                    output += chunk
                over = ""
        except TimeoutError:
            pass
        finally:
            # Of its group, which is its own; what it started lives in its process namespace, and ends with that.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # What the pipe still holds has to be read: until then the process does not count as ended.
            async with asyncio.timeout(END_SECONDS):
                await process.communicate()
    text = output[: limits.output_bytes].decode(errors="replace")
    return text.rstrip("\n") + (CUT if len(output) > limits.output_bytes else "") + over
