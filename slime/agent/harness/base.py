"""What all harnesses have in common: a run of an agent, its user, its prompt, the wait for its end."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.agent.long_commands import POLL_INTERVAL_SEC, exec_and_wait

if TYPE_CHECKING:
    from slime.agent.sandbox import Sandbox

logger = logging.getLogger(__name__)

AGENT_USER = "agent"


@dataclass(frozen=True)
class HarnessContext:
    """One run: where the agent works, under which session, at which adapter, and what the model is called there."""

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"


class BaseHarness:
    """What an agent of one's own overrides: `launch_and_wait`, and what it needs of the others."""

    name = ""
    user = AGENT_USER
    poll_interval_sec = POLL_INTERVAL_SEC

    async def install_cli(self, sb: Sandbox) -> None:
        """Put the agent into the sandbox. For images that lack it: `run` does not call this."""

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write what the agent reads at its start."""

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Have the agent work on `prompt`; its exit status, or `EXIT_TIME_BUDGET_EXCEEDED`."""
        raise NotImplementedError(f"{type(self).__name__} has no launch_and_wait")

    async def run(
        self, sb: Sandbox, *, workdir: str, session_id: str, adapter_url: str, time_budget_sec: float, prompt: str
    ) -> int:
        """The agent's exit status after it worked on `prompt` in `workdir`, `EXIT_TIME_BUDGET_EXCEEDED` over budget.

        Raises:
            SandboxError: the sandbox cannot be reached, is gone, or cannot start the agent.
        """
        ctx = HarnessContext(workdir, session_id, adapter_url.rstrip("/"))
        await ensure_agent_user(sb, user=self.user, workdir=workdir)
        await self.write_config(sb, ctx)
        return await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)


async def ensure_agent_user(sb: Sandbox, *, user: str, workdir: str) -> None:
    """Make `user`, if there is none, and give it `workdir`. A sandbox with a single user stays as it is.

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
    """The exit status of the shell command `cmd`, which gets the prompt on standard input and runs in `ctx.workdir`.

    What it wrote is logged where it ended otherwise than well.
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
