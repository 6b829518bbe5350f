"""Programs of a model, each in a process of its own that can do little: no network, no processes, an empty directory, an end.

What holds a program: namespaces of user, network and processes (`unshare`), and, all in `slime/agent/limited.py`, limits of CPU
time, memory and files, rules for what it may read and write (Landlock), and a filter of system calls. When its time is over its
whole process namespace ends, with all in it.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from slime.agent.limited import READABLE
from slime.agent.sandbox import LIMITED, SandboxError, require_namespaces

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


async def run_python(program: str, limits: Limits = Limits()) -> str:
    """What the program writes on standard output and error, cut at `limits.output_bytes`; standard library alone.

    Raises:
        UserError: this machine has no sandbox.
        SandboxError: it does not tell, since no process starts or ends on it.
    """
    words = (*await asyncio.to_thread(require_namespaces), "--net")
    given = {
        "readable": READABLE,
        "rlimits": {
            "CPU": limits.cpu_seconds, "AS": limits.memory_bytes, "FSIZE": limits.file_bytes, "NOFILE": 64, "CORE": 0,
        },
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="slime-program-") as directory:
        given["directory"] = directory
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
            # Of its group, which is its own; what it started lives in its process namespace, and ends with that. When the
            # process has ended, its number may be another one's.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            # What the pipe still holds has to be read: until then the process does not count as ended.
            try:
                async with asyncio.timeout(END_SECONDS):
                    await process.communicate()
            except TimeoutError:
                raise SandboxError(f"a program was killed and did not end within {END_SECONDS:g} s") from None
    text = output[: limits.output_bytes].decode(errors="replace")
    return text.rstrip("\n") + (CUT if len(output) > limits.output_bytes else "") + over
