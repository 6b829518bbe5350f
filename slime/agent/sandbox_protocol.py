"""What every sandbox does: the methods of `Sandbox`, and the errors that they raise.

A call that fails because of the sandbox, and not because of the command, raises `SandboxError`: nothing can be learned from
such a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from slime.utils.errors import RunError

Content = str | bytes | Path
# (exit status, standard output, standard error)
Result = tuple[int, str, str]

# The status of a command that `exec` ended because its time was over; timeout(1) has the same.
EXIT_TIMED_OUT = 124


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
