"""Ends the generation of one call: the engines of every served model let its requests go, and every task comes to an end.

If the call is the only one of this process, the engines abort all that they do, until they are idle. If another call is under
way, its requests must go on, so engines are told the ids of this call's requests one by one. Only the router knows which engine
has a request, unless that was sent past it: so every engine is told of every request that is still unanswered.

`--abort-timeout` bounds all of it: a router, an engine or a task that has not answered by then is named and left behind.
"""

import asyncio
import logging
from typing import Any

from slime.rollout.engine_request import list_engine_urls, router_urls
from slime.rollout.generation_call import GenerationCall, current_call
from slime.utils.engine_answers import num_requests
from slime.utils.errors import RunError
from slime.utils.http_utils import HttpError, get, post_control

logger = logging.getLogger(__name__)

LIST_ATTEMPTS = 3
REPEAT_S = 3.0
# How many aborts of one call an engine gets at a time.
ABORTS_AT_A_TIME = 32
POLL_S = 0.1
CANCEL_TIMEOUT_S = 10.0
# A cancelled task needs a few turns of the event loop to end, also when the loop is late.
MIN_CANCEL_TIMEOUT_S = 0.1
# The last part of --abort-timeout, in which the tasks that are left are cancelled.
CANCEL_SHARE = 0.1


async def abort(args: Any, rollout_id: int | None = None) -> None:
    """Set the abort flag of the call that is under way here, abort its requests on all engines, and wait for its tasks."""
    call = current_call()
    call.aborted = True
    tasks = set(call.pendings)
    now = asyncio.get_running_loop().time
    deadline = now() + args.abort_timeout
    cancel_at = deadline - min(CANCEL_TIMEOUT_S, CANCEL_SHARE * args.abort_timeout)
    await asyncio.gather(
        *[_abort_model(call, rollout_id, name, url, tasks, cancel_at) for name, url in router_urls(args).items()],
        _wait_for(tasks, cancel_at),
    )
    unfinished = {task for task in tasks if not task.done()}
    await cancel_tasks(unfinished, f"--abort-timeout {args.abort_timeout:g} s is over", deadline - now())


async def cancel_tasks(
    tasks: set[asyncio.Task[Any]], reason: str, timeout: float | None = None, level: int = logging.WARNING
) -> None:
    """Cancel `tasks`, tell so at `level`, and wait a moment for their end; those that refuse are left behind with an error.

    Args:
        timeout: seconds to wait; None takes `CANCEL_TIMEOUT_S`.
    """
    if not tasks:
        return
    logger.log(level, "%s: cancelling %s", reason, _names(tasks))
    for task in tasks:
        task.cancel()
    limit = CANCEL_TIMEOUT_S if timeout is None else max(timeout, MIN_CANCEL_TIMEOUT_S)
    _, alive = await asyncio.wait(tasks, timeout=limit)
    if alive:
        logger.error("ignoring tasks that do not let themselves be cancelled: %s", _names(alive))


def _names(tasks: set[asyncio.Task[Any]]) -> str:
    names = sorted(task.get_name() for task in tasks)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


async def _wait_for(tasks: set[asyncio.Task[Any]], deadline: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))


async def _abort_model(
    call: GenerationCall,
    rollout_id: int | None,
    name: str,
    router_url: str,
    tasks: set[asyncio.Task[Any]],
    deadline: float,
) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            urls = await list_engine_urls(name, router_url, max_retries=LIST_ATTEMPTS)
    except (RunError, TimeoutError) as error:
        reason = str(error) or f"its router at {router_url} did not answer"
        logger.warning("rollout %s: no abort was sent to the engines of model %r: %s", rollout_id, name, reason)
        return
    shares = (number / len(urls) for number in range(len(urls)))
    await asyncio.gather(
        *[_abort_engine(call, url, tasks, deadline, share) for url, share in zip(urls, shares, strict=True)]
    )


async def _abort_engine(
    call: GenerationCall, url: str, tasks: set[asyncio.Task[Any]], deadline: float, share: float
) -> None:
    """Send the abort every 3 s until all tasks are done, and the engine is idle if it works for no other call.

    Args:
        share: the part of the requests that this engine is told of last. Each engine begins at another place in the list, so
            that many requests are answered before all engines were told of them.
    """
    engine = _AbortingEngine(call, url, share)
    try:
        async with asyncio.timeout_at(deadline):
            while not (await engine.has_let_go() and all(task.done() for task in tasks)):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        what = "is still busy at" if engine.has_answered else "did not answer before"
        logger.warning("engine %s %s the end of --abort-timeout", url, what)


class _AbortingEngine:
    """An engine that is told again and again to let go of the requests of a call."""

    def __init__(self, call: GenerationCall, url: str, share: float) -> None:
        self._call, self._url, self._share = call, url, share
        self._next_abort = 0.0
        self._has_failed = False
        self.has_answered = False

    async def has_let_go(self) -> bool:
        """Send the next abort if it is due. Returns whether there is nothing of the engine to wait for, beside the tasks.

        An engine that fails may be dead, and then it holds no request. But it may also have closed one connection just then, so
        it gets the next abort all the same.
        """
        now = asyncio.get_running_loop().time()
        is_due = now >= self._next_abort
        if self._has_failed and not is_due:
            return True
        try:
            if is_due:
                self._next_abort = now + REPEAT_S
                await _send_abort(self._call, self._url, self._share)
            is_idle = not self._call.is_alone() or await _is_idle(self._url)
        except HttpError as error:
            level = logging.DEBUG if self._has_failed else logging.WARNING
            logger.log(level, "engine %s did not take part in the abort: %s", self._url, error)
            self._has_failed = True
            return True
        self._has_failed, self.has_answered = False, True
        return is_idle


async def _send_abort(call: GenerationCall, url: str, share: float) -> None:
    if call.is_alone():
        await post_control(f"{url}/abort_request", {"abort_all": True}, max_retries=1)
        return
    # A copy of the set, since adapters of agents add to it from other threads.
    ids = [name for name in list(call.request_ids) if call.engine_of_request.get(name, url) == url]
    first = int(share * len(ids))
    left = iter(ids[first:] + ids[:first])

    async def abort_one_by_one() -> None:
        for request_id in left:
            if request_id in call.request_ids:
                # An engine that does not have the request takes no notice.
                await post_control(f"{url}/abort_request", {"rid": request_id}, max_retries=1)

    sent = await asyncio.gather(*[abort_one_by_one() for _ in ids[:ABORTS_AT_A_TIME]], return_exceptions=True)
    for failure in filter(None, sent):
        raise failure


async def _is_idle(url: str) -> bool:
    """Whether the engine has no request. One that cannot tell counts as idle: its tasks are awaited anyway.

    Raises:
        HttpError: it did not answer, or a proxy on the way gave its page instead.
    """
    try:
        answer = await get(f"{url}/v1/loads?include=core", max_retries=1)
    except HttpError as error:
        if error.status == 404:
            return True
        raise
    try:
        return num_requests(answer) == 0
    except ValueError as error:
        raise HttpError(f"GET {url}/v1/loads was not answered by an engine: {error}", url=url) from error
