"""The least that a harness is: a command, and where its agent finds the adapter. The agent is `toy_agent.py`."""

import shlex
import sys
from pathlib import Path

from slime.agent.harness import BaseHarness, HarnessContext, run_agent
from slime.agent.sandbox import Sandbox

AGENT = Path(__file__).with_name("toy_agent.py")


class ToyHarness(BaseHarness):
    """`toy_agent.py`, which sandboxes of this machine read where it is."""

    name = "toy"

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """See `BaseHarness.launch_and_wait`."""
        return await run_agent(
            sb, name=self.name, cmd=shlex.join([sys.executable, "-I", "-S", "-B", str(AGENT)]), ctx=ctx, prompt=prompt,
            time_budget_sec=time_budget_sec, env={"AGENT_URL": ctx.adapter_url, "AGENT_KEY": ctx.session_id},
            poll_interval_sec=self.poll_interval_sec,
        )  # fmt: skip
