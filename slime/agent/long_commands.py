"""Runs commands in a sandbox that take longer than a connection lasts: they are started once, and polled in short calls.

In the sandbox a launcher, in a process group of its own, runs the command and writes its status to a marker file. The names of
all files of a command have its tag and a digest of the command. So if a start is repeated, by a transport or by a caller that
was interrupted, it finds the lock directory of the first start, and waits for the same process.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shlex
import uuid
from collections.abc import Awaitable, Callable, Mapping

from slime.agent.sandbox_base import Sandbox

# The status of a command that was killed because its time was over.
EXIT_TIME_BUDGET_EXCEEDED = -1
# The status of a command whose launcher was killed, for example by the kernel for lack of memory.
EXIT_LOST = 137
POLL_INTERVAL_SEC = 5.0
# Only so much of an output is read: its end.
OUTPUT_BYTES = 2**19
_CALL_SECONDS = 60.0

_COMMAND_BYTES = 2**16
# A start that takes longer counts as lost: if it was interrupted, it never begins a process.
_START_SECONDS = 60.0

# `base` is the prefix of the paths of a run's files. Its directory follows from the sandbox's environment, not the command's.
_BASE = 'base="${{TMPDIR:-/tmp}}/.slime-{name}"\n'
# A command and its variables, which may be keys, are passed in files that no other user can read, not in a command line.
_PREPARE = _BASE + """umask 077; : > "$base.{part}.cmd" && : > "$base.{part}.sh" && printf %s "$base.{part}"\n"""
# It waits until the launcher has a group of its own, since some sandboxes kill the group of a call when the call ends.
_START = (
    _BASE
    + """\
command -v setsid > /dev/null || {{ echo 'there is no setsid; install util-linux in the image' >&2; exit 127; }}
mkdir "$base.lock" 2> /dev/null || {{
    rm -f "$base.{part}".*; [ -d "$base.lock" ] || echo "$base.lock cannot be made" >&2; [ -d "$base.lock" ]; exit
}}
mv "$base.{part}.cmd" "$base.cmd" && mv "$base.{part}.sh" "$base.sh" && chmod 600 "$base.cmd" "$base.sh" || exit 1
out={out}; setsid sh "$base.sh" "$base" "${{out:-$base.out}}" < /dev/null > /dev/null 2>&1 &
until [ -f "$base.group" ]; do sleep 0.02 2> /dev/null || sleep 1; done
"""
)
# At its end the launcher kills its group, and with it all processes that the command has left.
_LAUNCHER = """\
base=$1; out=$2
echo $$ > "$base.group.new" && mv "$base.group.new" "$base.group"
( {exports}{enter}exec sh "$base.cmd" ) > "$out" 2>&1
echo $? > "$base.done.new" && mv "$base.done.new" "$base.done"
kill -s KILL -- "-$$"
"""
_GOING_ON = ("starting", "running")
# The marker is read last: the launcher writes it before it is gone, so a command that ends meanwhile does not look lost.
_POLL = (
    _BASE
    + """\
state=starting
[ ! -f "$base.group" ] || if kill -0 "$(cat "$base.group")" 2> /dev/null; then state=running; else state=lost; fi
[ ! -f "$base.done" ] || state="$(cat "$base.done")"
echo "$state"
"""
)
_KILL = _BASE + """[ ! -f "$base.group" ] || kill -s KILL -- "-$(cat "$base.group")" 2> /dev/null || true\n"""
_READ = _BASE + """out={out}; tail -c {most} "${{out:-$base.out}}" 2> /dev/null || true\n"""
_FORGET = _BASE + """rm -rf "$base".*\n"""


async def exec_and_wait(
    sb: Sandbox, *, cmd: str, time_budget_sec: float, tag: str, user: str = "root", env: Mapping[str, str] | None = None,
    workdir: str | None = None, out_file: str | None = None, want_output: bool = True,
    poll_interval_sec: float = POLL_INTERVAL_SEC,
) -> tuple[int, str]:  # fmt: skip
    """Run a shell command that may take hours. Returns (exit status, the end of its output on both streams).

    The same command under the same tag is the same run, until a caller has got its result; then it may run again. Over budget
    its process group is killed, and the status is `EXIT_TIME_BUDGET_EXCEEDED`. Processes that the command leaves in its group
    are killed in any case. Neither the command nor its variables are in a command line of this machine or in a message.

    Args:
        tag: a name for the command in this sandbox, of letters, digits, dots, dashes and underscores.
        workdir: the directory in which it runs; None: that in which commands of the sandbox start.
        out_file: a file of the sandbox for the output, which is kept there.
        want_output: False returns "" for the output.
        poll_interval_sec: seconds between two polls.

    Raises:
        ValueError: the tag has other characters, the command is longer than 64 KiB, or a variable has no name of one.
        SandboxError: the sandbox cannot be reached, is gone, or cannot start the command.
    """
    env = dict(env or {})
    _require_usable(tag, cmd, env)
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in env.items())
    enter = f"cd -- {shlex.quote(workdir)} && " if workdir else ""
    launcher = _LAUNCHER.format(exports=exports, enter=enter)
    words = {
        "name": f"{tag}-{hashlib.sha256(repr((cmd, launcher, out_file)).encode()).hexdigest()[:12]}",
        "part": uuid.uuid4().hex,
        "out": shlex.quote(out_file or ""),
        "most": OUTPUT_BYTES,
    }

    async def call(script: str) -> str:
        return (await sb.exec(script.format(**words), user=user, timeout=_CALL_SECONDS, check=True))[1]

    deadline = asyncio.get_running_loop().time() + time_budget_sec
    part = await call(_PREPARE)
    await sb.write_file(f"{part}.cmd", cmd, user=user)
    await sb.write_file(f"{part}.sh", launcher, user=user)
    await call(_START)
    state = await _last_state(lambda: call(_POLL), deadline, poll_interval_sec)
    if re.fullmatch("[0-9]{1,3}", state):
        code = int(state)
    else:
        # It is over budget, or lost; the marker may also hold what the launcher did not write.
        code = EXIT_TIME_BUDGET_EXCEEDED if state in _GOING_ON else EXIT_LOST
        await call(_KILL)
    output = await call(_READ) if want_output else ""
    await call(_FORGET)
    return code, output


def _require_usable(tag: str, cmd: str, env: Mapping[str, str]) -> None:
    if not re.fullmatch(r"[\w.-]{1,100}", tag, re.ASCII):
        raise ValueError(f"tag {tag!r}: give 1 to 100 letters, digits, dots, dashes and underscores")
    if len(cmd.encode()) > _COMMAND_BYTES:
        raise ValueError(
            f"a command of {len(cmd.encode())} bytes, more than {_COMMAND_BYTES}: write it to a file, and run that"
        )
    if unnamed := [name for name in env if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]:
        raise ValueError(f"{unnamed} are no names of variables")


async def _last_state(poll: Callable[[], Awaitable[str]], deadline: float, interval: float) -> str:
    """What `poll` says when the command is no longer going on, or at the deadline, a time of the event loop."""
    clock = asyncio.get_running_loop().time
    started = clock()
    while (state := (await poll()).strip()) in _GOING_ON and (left := deadline - clock()) > 0:
        if state == "starting" and clock() - started > _START_SECONDS:
            return "lost"
        await asyncio.sleep(min(interval, left))
    return state
