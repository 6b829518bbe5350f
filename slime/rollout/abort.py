"""Ends the generation of a step: the engines of every served model become idle, and every task comes to an end.

Bounded by `--abort-timeout`: an engine that stays busy is named in a warning, a task that does not end is cancelled.
"""

import asyncio
import logging
from typing import Any

from slime.rollout.engine_urls import list_engine_urls
from slime.rollout.generate_state import GenerateState
from slime.utils.errors import RunError
from slime.utils.http_utils import HttpError, get, post_control

logger = logging.getLogger(__name__)

LIST_ATTEMPTS = 3
REPEAT_S = 3.0
POLL_S = 0.1
CANCEL_TIMEOUT_S = 10.0


async def abort(args: Any, rollout_id: int | None = None) -> None:
    """Set the abort flag, abort all requests on all engines, and wait for the tasks in `GenerateState.pendings`."""
    state = GenerateState(args)
    state.aborted = True
    tasks = set(state.pendings)
    deadline = asyncio.get_running_loop().time() + args.abort_timeout
    try:
        async with asyncio.timeout_at(deadline):
            urls = await list_engine_urls(args, max_retries=LIST_ATTEMPTS)
    except (RunError, TimeoutError) as error:
        logger.warning("rollout %s: no abort was sent: %s", rollout_id, str(error) or "the router did not answer")
        urls = []
    await asyncio.gather(*[_abort_engine(url, tasks, deadline) for url in urls], _wait_for(tasks, deadline))
    await cancel_tasks({task for task in tasks if not task.done()}, f"--abort-timeout {args.abort_timeout:g} s is over")


async def cancel_tasks(tasks: set[asyncio.Task[Any]], reason: str, level: int = logging.WARNING) -> None:
    """Cancel `tasks`, tell so at `level`, and wait a moment for their end; those that refuse are left behind with an error."""
    if not tasks:
        return
    logger.log(level, "%s: cancelling %s", reason, ", ".join(sorted(task.get_name() for task in tasks)))
    for task in tasks:
        task.cancel()
    _, alive = await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S)
    if alive:
        logger.error("ignoring tasks that do not let themselves be cancelled: %s", sorted(t.get_name() for t in alive))


async def _wait_for(tasks: set[asyncio.Task[Any]], deadline: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))


async def _abort_engine(url: str, tasks: set[asyncio.Task[Any]], deadline: float) -> None:
    """Send abort-all every 3 s until the engine is idle and no task can send it anything more."""
    loop = asyncio.get_running_loop()
    next_abort = loop.time()
    while True:
        try:
            if loop.time() >= next_abort:
                await post_control(f"{url}/abort_request", {"abort_all": True}, max_retries=1)
                next_abort = loop.time() + REPEAT_S
            idle = await _is_idle(url)
        except HttpError as error:
            logger.warning("engine %s did not take part in the abort: %s", url, error)
            return
        if idle and all(task.done() for task in tasks):
            return
        if loop.time() >= deadline:
            logger.warning("engine %s is still busy at the end of --abort-timeout", url)
            return
        await asyncio.sleep(POLL_S)


async def _is_idle(url: str) -> bool:
    """Whether the engine has no request. One that cannot tell counts as idle: its tasks are awaited anyway."""
    try:
        answer = await get(f"{url}/v1/loads?include=core", max_retries=1)
    except HttpError as error:
        if error.status == 404:
            return True
        raise
    loads = answer.get("loads", []) if isinstance(answer, dict) else answer
    return sum(_request_count(load) for load in loads) == 0


def _request_count(load: dict[str, Any]) -> int:
    for name in ("num_reqs", "total_reqs", "num_total_reqs"):
        if name in load:
            return load[name]
    return load.get("num_running_reqs", 0) + load.get("num_waiting_reqs", 0)
