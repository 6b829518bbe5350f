"""What all sandboxes have in common: their methods and errors, and how a program of this machine runs a command in one.

A call that fails because of the sandbox, and not because of the command, raises `SandboxError`: nothing can be learned from
such a sample.
"""

from __future__ import annotations

import abc
import asyncio
import shlex
import signal
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from slime.utils.child_process import Ended, StillRunning, run_to_end
from slime.utils.errors import RunError

Content = str | bytes | Path
# (exit status, standard output, standard error)
Result = tuple[int, str, str]

# The status of a command that `exec` ended because its time was over; timeout(1) has the same.
EXIT_TIMED_OUT = 124
# So much of each of a command's two streams is kept; a larger file is not read.
_OUTPUT_BYTES, _FILE_BYTES = 2**20, 64 * 2**20
# How long a file may take on its way into a sandbox, or out of it.
TRANSFER_SECONDS = 300.0
# The status of a command that was killed; and a command that any sandbox can run.
_KILLED, _NOTHING = 128 + signal.SIGKILL, "true"
# The sandbox's shell writes this before it runs a command: without it the command was not run.
_MARK, WRITE_MARK = b"\0begun\0", r"printf '\000begun\000' >&2"
# How long a killed process may take to end, and namespaces to be set up.
END_SECONDS, START_SECONDS = 30.0, 60.0


class SandboxError(RunError):
    """The sandbox failed, not the command."""


class CommandFailed(SandboxError):
    """A command that was run with `check` ended with another status than 0."""


class Sandbox(Protocol):
    """An async context manager: the sandbox exists inside the block, and its contents are gone afterwards.

    `sandbox_id` names it in messages. A sandbox that runs all commands as one user, whatever `user` says, has
    `single_user = True`.
    """

    sandbox_id: str

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: Any) -> None: ...

    async def exec(
        self, cmd: str, *, user: str = "root", env: Mapping[str, str] | None = None, timeout: float = 120,
        check: bool = False, idempotent: bool = True,
    ) -> Result:  # fmt: skip
        """(exit status, standard output, standard error) of a shell command.

        Args:
            timeout: in seconds; after that the command is ended, and its status is `EXIT_TIMED_OUT`.
            check: raise CommandFailed for a status other than 0.
            idempotent: the call may be repeated if it is not known whether it arrived.

        Raises:
            SandboxError: the sandbox cannot be reached, or is gone.
        """
        ...

    async def write_file(self, path: str, content: Content, *, user: str = "root") -> None:
        """Write text, bytes, or the content of a file of this machine (a Path). Missing parent directories are created."""
        ...

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """The text of a file. Bytes that are no UTF-8 become surrogates (surrogateescape); writing the text restores them."""
        ...


def checked(cmd: str, result: Result, check: bool) -> Result:
    """`result`. Raises CommandFailed if `check` is set and the status is not 0."""
    code, out, err = result
    if check and code != 0:
        raise CommandFailed(f"`{cmd[:500]}` ended with status {code}: {(err or out).strip()[-2000:]}")
    return result


def content_bytes(content: Content) -> bytes:
    """`content` as bytes."""
    if isinstance(content, Path):
        return content.read_bytes()
    return content.encode(errors="surrogateescape") if isinstance(content, str) else content


def said_by(ended: Ended) -> str:
    """The end of what a command wrote to standard error, for a message. It need not be UTF-8: names of files are bytes."""
    return ended.err.decode(errors="replace").strip()[-2000:]


def _why(ended: Ended) -> str:
    """Why a transfer of a file failed, for a message."""
    late = f"it was not done within {TRANSFER_SECONDS:g} s" if ended.code == EXIT_TIMED_OUT else ""
    return said_by(ended) or late or f"status {ended.code}"


# -- the common part of sandboxes on this machine -------------------------------------------------------------------------


class OwnProcesses(abc.ABC):
    """A sandbox whose commands are run by programs of this machine; `_argv` says by which."""

    sandbox_id = ""

    @abc.abstractmethod
    def _argv(self, cmd: str, user: str, env: Mapping[str, str], name: str) -> tuple[list[str], dict[str, str] | None]:
        """The program with its arguments, and its environment (None: that of this process)."""

    @abc.abstractmethod
    async def _end(self, name: str) -> None:
        """End the command `name`, if it does not end with the program that runs it."""

    async def _command(
        self, cmd: str, user: str, timeout: float, env: Mapping[str, str] | None = None, stdin: bytes = b"",
        most: int = _OUTPUT_BYTES,
    ) -> Ended:  # fmt: skip
        if not self.sandbox_id:
            raise SandboxError(f"{type(self).__name__} is used outside of its `async with` block")
        name = uuid.uuid4().hex
        argv, environment = self._argv(cmd, user, env or {}, name)
        try:
            ended = await run_to_end(argv, timeout=timeout, stdin=stdin, env=environment, most=most)
        except BaseException as error:
            await self._end(name)
            if not isinstance(error, OSError):
                raise
            if not isinstance(error, StillRunning):
                raise SandboxError(f"sandbox {self.sandbox_id}: {error}") from error
            ended = Ended(EXIT_TIMED_OUT, *error.so_far)
        # Without the mark the command was not run, and the status is that of the program that should have run it.
        if not ended.err.startswith(_MARK):
            said = said_by(ended) or f"nothing within {timeout:g} s"
            raise SandboxError(f"sandbox {self.sandbox_id} ran no command: {said}")
        # When a sandbox is ended its commands are killed, and there is no other sign of that. So try another command in it.
        if ended.code == _KILLED and cmd != _NOTHING and (await self._command(_NOTHING, user, START_SECONDS)).code:
            raise SandboxError(f"sandbox {self.sandbox_id} runs no command any more: `{_NOTHING}` failed in it")
        return Ended(ended.code, ended.out, ended.err[len(_MARK) :])

    async def exec(
        self, cmd: str, *, user: str = "root", env: Mapping[str, str] | None = None, timeout: float = 120,
        check: bool = False, idempotent: bool = True,
    ) -> Result:  # fmt: skip
        """See `Sandbox.exec`."""
        ended = await self._command(cmd, user, timeout, env)
        return checked(cmd, (ended.code, ended.out.decode(errors="replace"), ended.err.decode(errors="replace")), check)

    async def write_file(self, path: str, content: Content, *, user: str = "root") -> None:
        """See `Sandbox.write_file`. A process of the sandbox writes the file, so it has only the sandbox's rights."""
        cmd = f'mkdir -p -- "$(dirname -- {shlex.quote(path)})" && cat > {shlex.quote(path)}'
        data = await asyncio.to_thread(content_bytes, content)
        ended = await self._command(cmd, user, TRANSFER_SECONDS, stdin=data)
        if ended.code != 0:
            raise SandboxError(f"sandbox {self.sandbox_id}: {path} cannot be written: {_why(ended)}")

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """See `Sandbox.read_file`."""
        ended = await self._command(f"cat -- {shlex.quote(path)}", user, TRANSFER_SECONDS, most=_FILE_BYTES)
        if ended.code != 0:
            raise SandboxError(f"sandbox {self.sandbox_id}: {path} cannot be read: {_why(ended)}")
        if len(ended.out) > _FILE_BYTES:
            raise SandboxError(f"sandbox {self.sandbox_id}: {path} has more than {_FILE_BYTES} bytes")
        return ended.out.decode(errors="surrogateescape")
