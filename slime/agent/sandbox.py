"""The sandboxes that come with slime: places in which an agent works and its work is graded.

`LocalSandbox` is on this machine, `DockerSandbox` a container of this machine's Docker, `E2BSandbox` a machine of a service.
What all of them can do, and any class that takes their place, is `slime.agent.sandbox_base.Sandbox`.

Whatever was started in a sandbox ends with it, even if this process ends first. In a container and at a service it then goes on
until the lifetime of the sandbox is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import psutil

from slime.agent.limited import ARCHITECTURES, LANDLOCK_VERSION, READABLE, landlock_version
from slime.agent.long_commands import EXIT_TIME_BUDGET_EXCEEDED, exec_and_wait
from slime.agent.sandbox_base import (
    END_SECONDS,
    EXIT_TIMED_OUT,
    START_SECONDS,
    TRANSFER_SECONDS,
    WRITE_MARK,
    CommandFailed,
    Content,
    OwnProcesses,
    Result,
    Sandbox,
    SandboxError,
    checked,
    content_bytes,
    said_by,
)
from slime.utils import env as variables
from slime.utils.child_process import kill_group, run_to_end
from slime.utils.errors import UserError

__all__ = [
    "EXIT_TIMED_OUT", "EXIT_TIME_BUDGET_EXCEEDED", "LIMITED", "NAMESPACES", "CommandFailed", "DockerSandbox", "E2BSandbox",
    "Limits", "LocalSandbox", "Sandbox", "SandboxError", "exec_and_wait", "require_namespaces",
]  # fmt: skip

logger = logging.getLogger(__name__)

LIMITED = Path(__file__).with_name("limited.py")
NAMESPACES = ("--user", "--map-current-user", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
# The program of the keeper, the first process of a sandbox's namespaces.
# - It ends when our end of its pipe closes, and all other processes of the namespaces end with it.
# - Processes that lose their parent become its children. It ignores SIGCHLD, so the kernel reaps them.
# - It makes all files of the machine read-only for commands, with their modes, owners and times; only the sandbox's directory
#   can be changed.
# - At its end it removes that directory, because our process may have been killed. In its own mount namespace the directory is
#   a mount, which cannot be removed, so it first goes back to the mount namespace in which it was started.
_KEEPER = """\
import contextlib, ctypes, os, shutil, signal, struct, sys
CLONE_NEWNS, MS_BIND, AT_FDCWD, AT_RECURSIVE, MOUNT_SETATTR, MOUNT_ATTR_RDONLY = 0x20000, 4096, -100, 0x8000, 442, 1
libc = ctypes.CDLL(None, use_errno=True)
def done(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def set_read_only(path, recursive, added, removed):
    attributes = struct.pack("=4Q", added, removed, 0, 0)
    done(libc.syscall(MOUNT_SETATTR, AT_FDCWD, path, recursive, attributes, ctypes.c_size_t(len(attributes))))
directory = os.fsencode(sys.argv[1])
first = os.open("/proc/self/ns/mnt", os.O_RDONLY)
done(libc.unshare(CLONE_NEWNS))
done(libc.mount(directory, directory, None, ctypes.c_ulong(MS_BIND), None))
set_read_only(b"/", AT_RECURSIVE, MOUNT_ATTR_RDONLY, 0)
set_read_only(directory, 0, 0, MOUNT_ATTR_RDONLY)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
with contextlib.suppress(ProcessLookupError):
    os.kill(-1, signal.SIGKILL)
done(libc.setns(first, CLONE_NEWNS))
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
# How long Docker may take to make a container for which nobody waits any more, and how often it is looked for.
_LATE_SECONDS, _LATE_POLL_SECONDS = 5.0, 0.5


# -- on this machine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Limits of each process: seconds of CPU, bytes of memory and of a file, open files; and the number of processes.

    `memory_bytes` counts address space, of which Node.js reserves many times what it uses. The kernel does not count processes
    of the superuser.
    """

    cpu_seconds: int = 600
    memory_bytes: int = 4 * 2**30
    file_bytes: int = 2**30
    processes: int = 512
    open_files: int = 1024


@functools.cache
def require_namespaces() -> tuple[str, ...]:
    """The words that put a command into its own namespaces of users, processes, mounts and shared memory.

    Raises:
        UserError: this machine does not allow namespaces, or cannot protect its files; the message says what is missing.
        SandboxError: it does not tell, since no process starts or ends on it.
    """
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("nsenter") is None:
        raise UserError(
            "programs of a model run by `unshare` and `nsenter`, and both are not on PATH; install util-linux"
        )
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
    with _machine_errors_as_sandbox_errors():
        done = subprocess.run([*words, "--net", "true"], capture_output=True, text=True, timeout=START_SECONDS)
    if done.returncode:
        raise UserError(
            f"programs of a model need namespaces of user, network and processes, and `{' '.join(words)} --net true` says: "
            f"{done.stderr.strip()}. In a container allow them (docker run --security-opt seccomp=unconfined "
            "--security-opt systempaths=unconfined), or set sysctl kernel.unprivileged_userns_clone=1 on the machine"
        )
    return words


class LocalSandbox(OwnProcesses):
    """A directory of this machine, which is all that commands can change, and namespaces, with which all their processes end.

    Commands start in `directory`. They see only their own processes, can read only programs and libraries of the machine, and
    get an environment of their own, with HOME and TMPDIR in `directory`. There is one user, without the superuser's rights.
    No limit holds for all processes together. Commands can see that other files exist, but not read them.

    Args:
        network: "host" lets commands connect to whatever this machine reaches, including sockets in its files; with "none"
            they reach nothing, and get no sockets with names in files, only socket pairs.
        readable: further paths that commands may read and run.
        env: further variables of all commands.
    """

    single_user = True

    def __init__(
        self, *, network: Literal["host", "none"] = "none", limits: Limits = Limits(), readable: Sequence[str | Path] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.directory = Path()
        self._network = network
        self._limits = limits
        self._readable = [*READABLE, *_OF_SHELLS, sys.prefix, *map(str, readable)]
        self._env = dict(env or {})
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        words = await asyncio.to_thread(require_namespaces)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(_machine_errors_as_sandbox_errors())
            made = tempfile.TemporaryDirectory(prefix="slime-sandbox-", ignore_cleanup_errors=True)
            stack.push_async_callback(asyncio.to_thread, made.cleanup)
            self.directory = Path(made.name).resolve()
            for name in ("home", "tmp"):
                (self.directory / name).mkdir()
            isolation = ["--net"] if self._network == "none" else []
            self._keeper = keeper = await asyncio.create_subprocess_exec(
                *words, "--keep-caps", *isolation, sys.executable, "-I", "-S", "-c", _KEEPER, str(self.directory),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"PATH": os.defpath},
                start_new_session=True,
            )  # fmt: skip

            async def end_all() -> None:
                if keeper.returncode is None:
                    kill_group(keeper.pid)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(keeper.communicate(), END_SECONDS)

            stack.push_async_callback(end_all)
            with contextlib.suppress(TimeoutError, ValueError, psutil.Error):
                if await asyncio.wait_for(keeper.stdout.readline(), START_SECONDS) == b"ready\n":
                    # The keeper is the one child of `unshare`, which stays outside of the namespaces and waits for it.
                    (self._first,) = psutil.Process(keeper.pid).children()
                    self.sandbox_id = self.directory.name
                    self._stack = stack.pop_all()
                    return self
            if keeper.returncode is None:
                kill_group(keeper.pid)
            said = b""
            # Whoever else has its streams, or a kernel that cannot end it, must not hold us up.
            with contextlib.suppress(TimeoutError):
                said = (await asyncio.wait_for(keeper.communicate(), END_SECONDS))[1]
        told = said.decode(errors="replace").strip() or "it said nothing"
        raise SandboxError(f"a sandbox did not start within {START_SECONDS:g} s: {told}")

    async def __aexit__(self, *error: Any) -> None:
        self.sandbox_id = ""
        await self._stack.aclose()

    async def _end(self, name: str) -> None:
        """A command ends with its program."""

    def _argv(self, cmd: str, user: str, env: Mapping[str, str], name: str) -> tuple[list[str], dict[str, str] | None]:
        if self._keeper.returncode is not None:
            # Its process id may belong to another process by now.
            raise SandboxError(f"sandbox {self.sandbox_id} ran no command: its first process has ended")
        of_keeper = f"/proc/{self._first.pid}/ns"
        own = ["--user=user", "--mount=mnt", "--ipc=ipc", "--pid=pid"]
        own += ["--net=net"] * (self._network == "none")
        limits = self._limits
        given = {
            "directory": str(self.directory),
            "readable": self._readable,
            "network": self._network,
            "rlimits": {
                "CPU": limits.cpu_seconds, "AS": limits.memory_bytes, "FSIZE": limits.file_bytes, "NPROC": limits.processes,
                "NOFILE": limits.open_files, "CORE": 0,
            },
        }  # fmt: skip
        programs = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        environment = {
            "PATH": programs, "HOME": f"{self.directory}/home", "TMPDIR": f"{self.directory}/tmp", "LANG": "C.UTF-8",
            # Git would refuse to work, because it cannot read the machine's configuration.
            "GIT_CONFIG_NOSYSTEM": "1", **self._env, **env,
        }  # fmt: skip
        argv = [
            shutil.which("nsenter"), "--preserve-credentials", *(word.replace("=", f"={of_keeper}/") for word in own), "--",
            sys.executable, "-I", "-S", "-B", str(LIMITED), json.dumps(given),
            "sh", "-c", f'{WRITE_MARK}; exec sh -c "$0"', cmd,
        ]  # fmt: skip
        return argv, environment


@contextlib.contextmanager
def _machine_errors_as_sandbox_errors() -> Iterator[None]:
    """Raise SandboxError where the machine lacks what the block needs to start a sandbox: time, room on the disk, another
    process, another open file."""
    try:
        yield
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"no sandbox starts on this machine: {error}") from error


# Files that shells, compilers and clients read besides programs and libraries. They hold no passwords or keys; homes are left
# out.
_OF_SHELLS = (
    "/bin", "/sbin", "/etc/alternatives", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf", "/etc/passwd", "/etc/profile",
    "/etc/resolv.conf", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/ca-certificates", "/dev/random", "/dev/zero",
)  # fmt: skip


# -- containers -----------------------------------------------------------------------------------------------------------


class DockerSandbox(OwnProcesses):
    """A container of `image`, started by Docker's command line; it is removed with its contents.

    The image's `sh` runs the commands, in the image's working directory. The container ends by itself after the lifetime.

    Args:
        run_args: further arguments of `docker run`, such as `("--memory", "8g", "--network", "none")`.
    """

    def __init__(self, image: str, *, run_args: Sequence[str] = (), lifetime_sec: int | None = None) -> None:
        self.image = image
        self._run_args = list(run_args)
        self._lifetime = variables.sandbox_lifetime_sec() if lifetime_sec is None else lifetime_sec

    async def __aenter__(self) -> Self:
        if shutil.which("docker") is None:
            raise UserError(
                "DockerSandbox runs `docker`, which is not on PATH; install Docker, or take another sandbox"
            )
        name = f"slime-{uuid.uuid4().hex}"
        words = ["docker", "run", "--detach", "--rm", "--init", "--name", name, *self._run_args]
        try:
            # This may take long, since an image that is not on this machine is pulled first.
            ended = await run_to_end(
                [*words, "--entrypoint", "sleep", self.image, str(self._lifetime)], timeout=self._lifetime
            )
            if ended.code != 0:
                raise SandboxError(f"no container of {self.image} starts: {ended.err.decode(errors='replace').strip()}")
        except BaseException as error:
            # Docker may still make the container for a client that was killed.
            was_killed = isinstance(error, TimeoutError | asyncio.CancelledError)
            await self._remove(name, _LATE_SECONDS if was_killed else 0.0)
            if isinstance(error, TimeoutError):
                raise SandboxError(f"no container of {self.image} started within {self._lifetime} s") from None
            if isinstance(error, OSError):
                raise SandboxError(f"no container of {self.image} starts: {error}") from error
            raise
        self.sandbox_id = name
        return self

    async def __aexit__(self, *error: Any) -> None:
        name, self.sandbox_id = self.sandbox_id, ""
        await self._remove(name)

    async def _remove(self, name: str, late: float = 0.0) -> None:
        """Remove the container `name`, which may come into being only within the next `late` seconds. A warning tells if it may
        be left."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + late
        while True:
            # Also where this machine starts no client any more: the container ends by itself.
            try:
                ended = await run_to_end(["docker", "rm", "--force", "--volumes", name], timeout=END_SECONDS)
            except OSError as error:
                said = str(error)
            else:
                # The status does not tell: some versions of Docker have 0 for one that is not there.
                if name.encode() in ended.out:
                    return
                said = said_by(ended)
            if clock() >= deadline:
                break
            await asyncio.sleep(_LATE_POLL_SECONDS)
        if "No such container" not in said:
            logger.warning(
                "container %s was not removed (%s); it ends %d s after its start, or by: docker rm --force %s",
                name, said or "docker said nothing", self._lifetime, name,
            )  # fmt: skip

    def _argv(self, cmd: str, user: str, env: Mapping[str, str], name: str) -> tuple[list[str], dict[str, str] | None]:
        # Everybody on the machine can read command lines, so the client has the values in its environment. What it has there
        # for itself, such as PATH, stays what it is.
        environment = {**env, **os.environ}
        by_name = {key: key if environment[key] == value else f"{key}={value}" for key, value in env.items()}
        given = [word for key in env for word in ("--env", by_name[key])]
        # On this machine only a client of Docker runs, whose end does not end the command. So the command gets a process group
        # in the container, by which `_end` can kill it.
        leading = (
            f'{WRITE_MARK}; echo $$ > /tmp/.slime-{name}; sh -c "$0"; code=$?; rm -f /tmp/.slime-{name}; exit $code'
        )
        return [
            "docker",
            "exec",
            "--interactive",
            "--user",
            user,
            *given,
            self.sandbox_id,
            "sh",
            "-c",
            leading,
            cmd,
        ], environment

    async def _end(self, name: str) -> None:
        kill = f'kill -s KILL -- "-$(cat /tmp/.slime-{name})"; rm -f /tmp/.slime-{name}'
        with contextlib.suppress(OSError):
            await run_to_end(
                ["docker", "exec", "--user", "root", self.sandbox_id, "sh", "-c", kill], timeout=END_SECONDS
            )


# -- a service ------------------------------------------------------------------------------------------------------------

# Names of the package's errors that are about the request or the sandbox's end. Other errors are those of the transport.
_FINAL = (
    "AuthenticationException", "InvalidArgumentException", "NotEnoughSpaceException", "NotFoundException",
    "SandboxNotRunningException",
)  # fmt: skip
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 32.0


class E2BSandbox:
    """A sandbox of E2B, or of a service with the same interface, which finds `image` under a key of the sandbox's metadata.

    Environment variables give the key, and all arguments that are None (`slime.utils.env`). A call that does not arrive is
    repeated, if that does no harm, after 1, 2, 4 seconds and so on, at most 32.

    Args:
        size: name of the service's template.
    """

    def __init__(
        self, image: str, *, size: str | None = None, lifetime_sec: int | None = None, rpc_retries: int | None = None
    ) -> None:
        self.image = image
        self.sandbox_id = ""
        self._sandbox: Any = None
        self._size = variables.e2b_sandbox_size() if size is None else size
        self._lifetime = variables.sandbox_lifetime_sec() if lifetime_sec is None else lifetime_sec
        self._retries = variables.sandbox_rpc_retries() if rpc_retries is None else rpc_retries

    async def __aenter__(self) -> Self:
        key = variables.sandbox_image_metadata_key()
        try:
            self._package = importlib.import_module("e2b")
        except ImportError as error:
            # The advice is not `slime[e2b]`, with which pip would also install requirements that the pins leave out on purpose.
            raise UserError(f"E2BSandbox needs the package e2b, the extra e2b ({error}): pip install e2b") from error
        names = [name for name in _FINAL if hasattr(self._package, name)]
        self._final = tuple(getattr(self._package, name) for name in names)
        # Not idempotent: a repeated call could make a second sandbox, which would be paid for until the end of its lifetime.
        creating = asyncio.ensure_future(
            self._call(
                f"a sandbox of {self.image}",
                lambda: self._package.AsyncSandbox.create(
                    template=self._size, timeout=self._lifetime, metadata={key: self.image}
                ),
                TRANSFER_SECONDS,
                idempotent=False,
            )
        )
        try:
            self._sandbox = await asyncio.shield(creating)
        except asyncio.CancelledError:
            # The service makes it nevertheless, and nobody else would end it before the end of its lifetime.
            await asyncio.wait([creating], timeout=END_SECONDS)
            if creating.done() and creating.exception() is None:
                self._sandbox = creating.result()
                await self._end()
            elif not creating.done():
                creating.cancel()
                logger.warning("a sandbox of %s may be left; it ends %d s after its start", self.image, self._lifetime)
            raise
        self.sandbox_id = self._sandbox.sandbox_id
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.sandbox_id = ""
        await self._end()

    async def _end(self) -> None:
        try:
            await self._call("the end", lambda: self._sandbox.kill(), END_SECONDS)
        except SandboxError as error:
            # The work in it is over, so this is no error. The service ends the sandbox at the end of its lifetime.
            logger.warning(
                "sandbox %s was not ended; it ends %d s after its start (%s)",
                self._sandbox.sandbox_id, self._lifetime, error,
            )  # fmt: skip

    async def exec(
        self, cmd: str, *, user: str = "root", env: Mapping[str, str] | None = None, timeout: float = 120,
        check: bool = False, idempotent: bool = True,
    ) -> Result:  # fmt: skip
        """See `Sandbox.exec`."""

        commands = self._entered().commands

        async def run() -> Result:
            out: list[str] = []
            err: list[str] = []
            clock = asyncio.get_running_loop().time
            started = clock()
            try:
                done = await commands.run(
                    cmd, envs=dict(env or {}), user=user, timeout=timeout, on_stdout=out.append, on_stderr=err.append
                )
            except self._package.CommandExitException as exited:
                done = exited
            except self._package.TimeoutException:
                # If the time is not over, the transport was too slow, not the command.
                if clock() - started < timeout:
                    raise
                return EXIT_TIMED_OUT, "".join(out), "".join(err)
            return done.exit_code, done.stdout, done.stderr

        # The service itself ends the command in time, if it answers at all.
        limit = timeout + END_SECONDS
        return checked(cmd, await self._call(f"`{cmd[:200]}`", run, limit, idempotent=idempotent), check)

    async def write_file(self, path: str, content: Content, *, user: str = "root") -> None:
        """See `Sandbox.write_file`."""
        data = await asyncio.to_thread(content_bytes, content)
        write = functools.partial(self._entered().files.write, path, data, user=user)
        await self._call(f"writing {path}", write, TRANSFER_SECONDS)

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """See `Sandbox.read_file`."""
        read = functools.partial(self._entered().files.read, path, format="bytes", user=user)
        return bytes(await self._call(f"reading {path}", read, TRANSFER_SECONDS)).decode(errors="surrogateescape")

    def _entered(self) -> Any:
        if not self.sandbox_id:
            raise SandboxError("E2BSandbox is used outside of its `async with` block")
        return self._sandbox

    async def _call(self, what: str, call: Callable[[], Awaitable[Any]], limit: float, idempotent: bool = True) -> Any:
        """The result of `call`, which is repeated after transport errors. Each time it may take `limit` seconds.

        Raises:
            SandboxError: the service refuses, or cannot be reached.
        """
        wait = _FIRST_WAIT_SECONDS
        for left in reversed(range(self._retries + 1 if idempotent else 1)):
            try:
                async with asyncio.timeout(limit) as time_limit:
                    return await call()
            except (TypeError, AttributeError):
                raise
            except Exception as error:
                # Transports raise errors of several libraries, and which ones changes from version to version.
                if isinstance(error, self._final) or not left:
                    name = getattr(self._sandbox, "sandbox_id", "(none yet)")
                    told = (
                        f"no answer within {limit:g} s" if time_limit.expired() else f"{type(error).__name__}: {error}"
                    )
                    raise SandboxError(f"E2B sandbox {name}: {what} failed: {told}") from error
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
