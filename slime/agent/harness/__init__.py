"""Harnesses start a command-line agent in a sandbox, and direct it to an adapter of slime instead of its own service.

A harness writes the agent's configuration, gives it a prompt, and waits. The agent's key is the adapter's session, so that its
requests are recorded there.

Invariants: an agent over budget is ended together with its process group; the prompt is in no command line; if the sandbox has
users, agents run as one of their own, who is not root.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
from pathlib import Path

from slime.agent.adapters.asking import READ_TIMEOUT_S
from slime.agent.harness.base import AGENT_USER, BaseHarness, HarnessContext, ensure_agent_user, home_of, run_agent
from slime.agent.sandbox_base import Sandbox
from slime.utils import env as variables

__all__ = [
    "AGENT_USER", "BaseHarness", "ClaudeCodeHarness", "CodexHarness", "HarnessContext", "ensure_agent_user", "home_of",
    "install_node22", "install_npm_cli", "run_agent",
]  # fmt: skip

logger = logging.getLogger(__name__)

NPM_TRIES = 3
CLAUDE_CODE_PACKAGE = "@anthropic-ai/claude-code"
# Later versions speak only the Responses API, whereas adapters serve chat completions.
CODEX_PACKAGE = "@openai/codex@0.80.0"
_NODE_URL = "https://nodejs.org/dist/latest-v22.x"
# An agent that gave a slow engine up would ask again from the start; so the adapter gives up first.
_CLIENT_TIMEOUT_MS = round(1000 * (READ_TIMEOUT_S + 60))
_INSTALL_SECONDS = 600.0
_NPM_WAIT_SECONDS = 5.0


async def install_node22(sb: Sandbox, *, prefix: str = "/usr/local") -> None:
    """Install Node.js 22 below `prefix`, unless there is one as new: from `SLIME_AGENT_NODE_TARBALL`, else by a download in the
    sandbox.

    Raises:
        SandboxError: it cannot be fetched or unpacked.
    """
    version = "node --version 2> /dev/null | sed -n 's/^v\\([0-9]*\\).*/\\1/p'"
    _, found, _ = await sb.exec(version)
    if found.strip().isdigit() and int(found) >= 22:
        return
    tarball = variables.node_tarball()
    archive = await _put_archive(sb, tarball) if tarball else '"${TMPDIR:-/tmp}/node.tar.gz"'
    fetch = (
        "case $(uname -m) in x86_64) kind=x64 ;; *) kind=arm64 ;; esac\n"
        f'name=$(curl -fsSL {_NODE_URL}/SHASUMS256.txt | sed -n "s/.* \\(node-.*-linux-$kind.tar.gz\\)$/\\1/p")\n'
        f"curl -fsSL -o {archive} {_NODE_URL}/$name\n"
    )
    unpack = f"mkdir -p {shlex.quote(prefix)} && tar -xf {archive} -C {shlex.quote(prefix)} --strip-components=1"
    await sb.exec(f"set -e\n{'' if tarball else fetch}{unpack}\nrm -f {archive}", timeout=_INSTALL_SECONDS, check=True)


async def install_npm_cli(sb: Sandbox, package: str, *, program: str, tarball: Path | None = None) -> None:
    """Install an npm package that contains `program`, for all users, with three tries, because registries are busy at times.

    Args:
        tarball: a file of this machine, as `npm pack` makes it, that is installed instead of the registry's `package`.

    Raises:
        SandboxError: it cannot be installed.
    """
    what = await _put_archive(sb, tarball) if tarball else shlex.quote(package)
    cmd = f"npm install --global --no-audit --no-fund {what} && command -v {shlex.quote(program)}"
    for left in reversed(range(NPM_TRIES)):
        code, _, err = await sb.exec(cmd, timeout=_INSTALL_SECONDS, check=not left)
        if code == 0:
            return
        logger.warning("npm could not install %s in sandbox %s: %s", package, sb.sandbox_id, err.strip()[-500:])
        await asyncio.sleep(_NPM_WAIT_SECONDS)


async def _put_archive(sb: Sandbox, tarball: Path) -> str:
    """Put a file of this machine into the sandbox, and return its quoted path there. It keeps its name, since tar and npm go by
    the suffix."""
    _, place, _ = await sb.exec('printf %s "${TMPDIR:-/tmp}"', check=True)
    await sb.write_file(f"{place}/{tarball.name}", tarball)
    return shlex.quote(f"{place}/{tarball.name}")


class ClaudeCodeHarness(BaseHarness):
    """Claude Code, without questions to a user, at the adapter's Anthropic routes."""

    name = "claude-code"

    async def install_cli(self, sb: Sandbox) -> None:
        """Install Node.js and the package, from `SLIME_AGENT_NODE_TARBALL` and `SLIME_AGENT_CC_TARBALL` if they are set."""
        await install_node22(sb)
        await install_npm_cli(sb, CLAUDE_CODE_PACKAGE, program="claude", tarball=variables.agent_program("CC").tarball)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write a configuration with which a first start asks no questions."""
        path = f"{await home_of(sb, self.user)}/.claude.json"
        await sb.write_file(path, json.dumps({"hasCompletedOnboarding": True, "autoUpdates": False}), user=self.user)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """See `BaseHarness.launch_and_wait`."""
        program = variables.agent_program("CC")
        words = ["claude", "--print", "--dangerously-skip-permissions", "--model", ctx.model_label, *program.extra_args]
        models = dict.fromkeys(
            (
                "ANTHROPIC_MODEL",
                "ANTHROPIC_SMALL_FAST_MODEL",
                "ANTHROPIC_DEFAULT_HAIKU_MODEL",
                "CLAUDE_CODE_SUBAGENT_MODEL",
            ),
            ctx.model_label,
        )
        env = {
            "ANTHROPIC_BASE_URL": ctx.adapter_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            **models,
            "API_TIMEOUT_MS": str(_CLIENT_TIMEOUT_MS),
            # Requests to its own services fail in most sandboxes, and updates would change what is measured.
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            # Only in a sandbox does it let the superuser skip permissions.
            "IS_SANDBOX": "1",
            **program.extra_env,
        }
        return await run_agent(
            sb, name=self.name, cmd=shlex.join(words), ctx=ctx, prompt=prompt, time_budget_sec=time_budget_sec, env=env,
            user=self.user, poll_interval_sec=self.poll_interval_sec,
        )  # fmt: skip


_CODEX_CONFIG = """\
model = {model}
model_provider = "slime"

[model_providers.slime]
name = "slime"
base_url = {url}
env_key = "SLIME_SESSION"
wire_api = "chat"
stream_idle_timeout_ms = {timeout}
"""


class CodexHarness(BaseHarness):
    """Codex, without questions to a user, at the adapter's OpenAI routes."""

    name = "codex"

    async def install_cli(self, sb: Sandbox) -> None:
        """Install Node.js and the package, from `SLIME_AGENT_NODE_TARBALL` and `SLIME_AGENT_CODEX_TARBALL` if they are set."""
        await install_node22(sb)
        await install_npm_cli(sb, CODEX_PACKAGE, program="codex", tarball=variables.agent_program("CODEX").tarball)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write a configuration with the adapter as provider of models."""
        # A JSON string is a TOML string, too.
        content = _CODEX_CONFIG.format(
            model=json.dumps(ctx.model_label), url=json.dumps(f"{ctx.adapter_url}/v1"), timeout=_CLIENT_TIMEOUT_MS
        )
        await sb.write_file(f"{await home_of(sb, self.user)}/.codex/config.toml", content, user=self.user)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """See `BaseHarness.launch_and_wait`."""
        program = variables.agent_program("CODEX")
        words = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return await run_agent(
            sb, name=self.name, cmd=shlex.join([*words, *program.extra_args, "-"]), ctx=ctx, prompt=prompt,
            time_budget_sec=time_budget_sec, env={"SLIME_SESSION": ctx.session_id, **program.extra_env}, user=self.user,
            poll_interval_sec=self.poll_interval_sec,
        )  # fmt: skip
