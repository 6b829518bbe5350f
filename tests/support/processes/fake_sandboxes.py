"""A `docker` whose containers are directories, and a package `e2b` whose sandboxes do what a test tells."""

from __future__ import annotations

import asyncio
import types

# Containers are directories, and what runs in one runs here. As with Docker, a command goes on when its client is killed.
DOCKER = """\
#!{python}
import json, os, pathlib, shutil, subprocess, sys
home = pathlib.Path(os.environ["FAKE_DOCKER"])
with open(home / "calls", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
kind, *words = sys.argv[1:]
if kind == "run":
    if "absent" in words:
        sys.exit("Unable to find image 'absent' locally")
    made = home / words[words.index("--name") + 1] / "tmp"
    if "slow" in words:
        # It is made even if the client is killed meanwhile.
        later = f"touch {{home}}/ordered; sleep 1; mkdir -p {{made}}; touch {{home}}/made"
        subprocess.run(["sh", "-c", later], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    else:
        made.mkdir(parents=True)
elif kind == "rm":
    if (home / "away").exists():
        sys.exit("Cannot connect to the Docker daemon")
    if not (home / words[-1]).exists():
        sys.exit(f"Error response from daemon: No such container: {{words[-1]}}")
    shutil.rmtree(home / words[-1])
    print(words[-1])
else:
    env = {{"PATH": os.environ["PATH"]}}
    while words[0].startswith("--"):
        flag = words.pop(0)
        value = words.pop(0) if flag != "--interactive" else ""
        if flag == "--env":
            name, told, value = value.partition("=")
            env[name] = value if told else os.environ[name]
        if flag == "--user":
            env["USER"] = value
    name, *command = words
    if not (home / name).is_dir():
        sys.exit(f"Error response from daemon: No such container: {{name}}")
    env |= {{"TMPDIR": f"{{home}}/{{name}}/tmp", "HOME": f"{{home}}/{{name}}"}}
    sys.exit(subprocess.run(command, cwd=home / name, env=env, start_new_session=True).returncode)
"""


class SandboxException(Exception):
    pass


class TimeoutException(SandboxException):
    pass


class NotFoundException(SandboxException):
    pass


class CommandExitException(SandboxException):
    def __init__(self, code, out, err):
        super().__init__(f"Command exited with code {code}")
        self.exit_code, self.stdout, self.stderr = code, out, err


class Dropped(Exception):
    """An error of a transport."""


class Service:
    """The package e2b: what its calls do stands in `events`, one after the other: an error, or what comes back."""

    def __init__(self):
        self.calls, self.events, self.files = [], [], {}
        self.killed = 0
        # How long it takes to make a sandbox; and what ends none.
        self.creation_seconds, self.ends_none = 0.0, False
        service = self

        class AsyncSandbox:
            sandbox_id = "sb-1"

            @classmethod
            async def create(cls, template=None, timeout=None, metadata=None, envs=None, **more):
                service.happens("create", template=template, timeout=timeout, metadata=metadata)
                await asyncio.sleep(service.creation_seconds)
                return cls()

            def __init__(self):
                self.commands = types.SimpleNamespace(run=self.run)
                self.files = types.SimpleNamespace(write=self.write, read=self.read)

            async def run(
                self, cmd, background=None, envs=None, user=None, cwd=None, on_stdout=None, on_stderr=None, timeout=60
            ):
                event = service.happens("run", cmd=cmd, envs=envs, user=user, timeout=timeout)
                if event == "hangs":
                    on_stdout("so far")
                    await asyncio.sleep(timeout)
                    raise TimeoutException("context deadline exceeded")
                if event == "never answers":
                    await asyncio.Event().wait()
                return types.SimpleNamespace(exit_code=0, stdout=event or "", stderr="")

            async def write(self, path, data, user=None):
                service.happens("write", path=path, user=user)
                service.files[path] = data

            async def read(self, path, format="text", user=None):
                service.happens("read", path=path, format=format, user=user)
                return bytearray(service.files[path])

            async def kill(self):
                service.happens("kill")
                if service.ends_none:
                    await asyncio.Event().wait()
                service.killed += 1
                return True

        self.module = types.ModuleType("e2b")
        vars(self.module).update(
            AsyncSandbox=AsyncSandbox, CommandExitException=CommandExitException, TimeoutException=TimeoutException,
            NotFoundException=NotFoundException,
        )  # fmt: skip

    def happens(self, kind, **given):
        self.calls.append((kind, given, asyncio.get_running_loop().time()))
        event = self.events.pop(0) if self.events and kind not in ("create", "kill") else None
        if isinstance(event, Exception):
            raise event
        return event

    def waits(self, kind):
        times = [time for name, _, time in self.calls if name == kind]
        return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
