"""The common part of harnesses: a run of an agent, its user, its prompt, and the wait for its end."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from slime.agent.long_commands import POLL_INTERVAL_SEC, exec_and_wait
from slime.agent.sandbox_base import Sandbox

logger = logging.getLogger(__name__)

AGENT_USER = "agent"


@dataclass(frozen=True)
class HarnessContext:
    """One run: the directory in which the agent works, its session, the adapter's URL, and the model's name there."""

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"


class BaseHarness:
    """Base class of harnesses. One for another agent overrides `launch_and_wait`, and any of the other methods."""

    name = ""
    user = AGENT_USER
    poll_interval_sec = POLL_INTERVAL_SEC

    async def install_cli(self, sb: Sandbox) -> None:
        """Install the agent in the sandbox. Only images without it need this, and `run` does not call it."""

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write the configuration that the agent reads at its start."""

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Let the agent work on `prompt`. Returns its exit status, or `EXIT_TIME_BUDGET_EXCEEDED`."""
        raise NotImplementedError(f"{type(self).__name__} has no launch_and_wait")

    async def run(
        self, sb: Sandbox, *, workdir: str, session_id: str, adapter_url: str, time_budget_sec: float, prompt: str
    ) -> int:
        """Let the agent work on `prompt` in `workdir`. Returns its exit status, or `EXIT_TIME_BUDGET_EXCEEDED`.

        Raises:
            SandboxError: the sandbox cannot be reached, is gone, or cannot start the agent.
        """
        ctx = HarnessContext(workdir, session_id, adapter_url.rstrip("/"))
        await ensure_agent_user(sb, user=self.user, workdir=workdir)
        await self.write_config(sb, ctx)
        return await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)


async def ensure_agent_user(sb: Sandbox, *, user: str, workdir: str) -> None:
    """Create `user` if it does not exist, and make it the owner of `workdir`. A sandbox with a single user stays as it is.

    Raises:
        SandboxError: the image has neither useradd nor adduser.
    """
    if getattr(sb, "single_user", False):
        return
    name, directory = shlex.quote(user), shlex.quote(workdir)
    cmd = (
        f"id -u {name} > /dev/null 2>&1 || useradd --create-home {name} || adduser -D {name} || exit 1\n"
        f"mkdir -p {directory} && chown -R {name}: {directory}"
    )
    await sb.exec(cmd, check=True)


async def run_agent(
    sb: Sandbox, *, name: str, cmd: str, ctx: HarnessContext, prompt: str, time_budget_sec: float,
    env: Mapping[str, str] | None = None, user: str = AGENT_USER, poll_interval_sec: float = POLL_INTERVAL_SEC,
) -> int:  # fmt: skip
    """Run the shell command `cmd` in `ctx.workdir`, with the prompt on its standard input. Returns its exit status.

    If it fails its output is logged.
    """
    home = await home_of(sb, user)
    prompt_file = f"{home}/.slime-{name}-prompt"
    await sb.write_file(prompt_file, prompt, user=user)
    code, output = await exec_and_wait(
        sb, cmd=f"{{ {cmd}\n}} < {shlex.quote(prompt_file)}", time_budget_sec=time_budget_sec, tag=name, user=user, env=env,
        workdir=ctx.workdir, poll_interval_sec=poll_interval_sec,
    )  # fmt: skip
    if code != 0:
        logger.warning("%s ended with status %d in sandbox %s: %s", name, code, sb.sandbox_id, output.strip()[-2000:])
    return code


async def home_of(sb: Sandbox, user: str) -> str:
    """The home directory of a user of the sandbox."""
    _, home, _ = await sb.exec('printf %s "$HOME"', user=user, check=True)
    return home
