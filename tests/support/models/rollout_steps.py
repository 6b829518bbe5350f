"""Runs whole steps of the default loop, or parts of one, for tests, and reads their groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from slime.rollout.base_types import RolloutFnTrainOutput, leaves
from slime.rollout.generate_state import GenerateState
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.utils.http_utils import close_http_client


def run_step(
    args: Any,
    source: Any,
    rollout_id: int = 0,
    limit_s: float | None = None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> RolloutFnTrainOutput:
    """One step on a loop of its own; TimeoutError when it takes longer than `limit_s` seconds."""

    async def main() -> RolloutFnTrainOutput:
        try:
            return await asyncio.wait_for(generate_rollout_async(args, rollout_id, source), limit_s)
        finally:
            await close_http_client()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a part of a step on a loop of its own. Returns its result."""

    async def main() -> Any:
        try:
            return await coroutine
        finally:
            await close_http_client()

    return asyncio.run(main())


def params(args: Any) -> dict[str, Any]:
    """The sampling parameters of a rollout."""
    return dict(GenerateState(args).sampling_params)


def prompt_number(server_payload: dict[str, Any], args: Any) -> int:
    """The number of the group whose prompt is in a request."""
    text = GenerateState(args).tokenizer.decode(server_payload["input_ids"])
    return int(text.removeprefix("question ").split("\n")[0].rstrip("F"))


def group_numbers(groups: list[Any]) -> list[int]:
    """`group_index` of each group."""
    return [leaves(group)[0].group_index for group in groups]


def plugin(directory: Path, source: str, name: str = "fn") -> str:
    """Write a file with `source`, which may use asyncio and Sample. Returns the plug-in path of its function `name`."""
    file = directory / f"{name}.py"
    file.write_text("import asyncio\nfrom slime.utils.types import Sample\n" + source)
    return f"{file}:{name}"
