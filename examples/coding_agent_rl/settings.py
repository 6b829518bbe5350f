"""Settings of the example by variables of the environment; a row that is not set has the default that stands here."""

from dataclasses import dataclass

from slime.agent.trajectory import FORK_THRESHOLD_TOKENS
from slime.utils import env
from slime.utils.http_utils import get_host_info


@dataclass(frozen=True)
class Settings:
    """Of one sample, in seconds: for the agent, for its grade, for all of it. Sandboxes that start at a time, and tries more of
    a start that fails. Where the adapter listens; and up to which length an answer that a client rewrites is masked."""

    agent_time_budget_sec: int
    eval_timeout_sec: int
    rollout_guard_sec: int
    boot_concurrency: int
    boot_retries: int
    adapter_host: str
    adapter_port: int
    fork_threshold_tokens: int

    @classmethod
    def from_environment(cls) -> "Settings":
        """Raises UserError for a value that is no number."""
        budget = env.whole_number("SWE_AGENT_TIME_BUDGET_SEC", 1800, least=1)
        evaluation = env.whole_number("SWE_EVAL_TIMEOUT_SEC", 600, least=1)
        return cls(
            agent_time_budget_sec=budget,
            eval_timeout_sec=evaluation,
            rollout_guard_sec=env.whole_number("SWE_ROLLOUT_GUARD_SEC", budget + evaluation + 180, least=1),
            boot_concurrency=env.whole_number("SWE_BOOT_CONCURRENCY", 16, least=1),
            boot_retries=env.whole_number("SWE_BOOT_RETRIES", 2),
            # Sandboxes are elsewhere: loopback would be their own.
            adapter_host=env.adapter_bind_host() or get_host_info()[1],
            adapter_port=env.whole_number("ADAPTER_PORT", 18001),
            fork_threshold_tokens=env.whole_number("SLIME_FORK_MERGE_MAX_RESPONSE_TOKENS", FORK_THRESHOLD_TOKENS),
        )
