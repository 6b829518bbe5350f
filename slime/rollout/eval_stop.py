"""When an evaluation set ends before all of its prompts have finished.

`eval_task_timeout` is a limit in seconds for the whole set. Early stop leaves stragglers behind: it needs at most
`eval_early_stop_remaining` unfinished prompts and `eval_early_stop_idle_timeout` seconds in which none has finished;
either may be given alone. Neither ends a set before `min_eval_samples` samples have finished: early stop waits, the time
limit is an error then.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from slime.utils.errors import RunError
from slime.utils.eval_config import EvalDatasetConfig

logger = logging.getLogger(__name__)


def is_limited(config: EvalDatasetConfig) -> bool:
    """Whether the set may end with prompts unfinished."""
    limits = (config.eval_task_timeout, config.eval_early_stop_remaining, config.eval_early_stop_idle_timeout)
    return any(limit is not None for limit in limits)


async def finished_prompts(tasks: list[asyncio.Task[Any]], config: EvalDatasetConfig) -> list[Any]:
    """The results of the prompts that finished in time, in the order of `tasks`; the others are left running.

    Raises:
        RunError: too few finished within `eval_task_timeout`.
        Exception: whatever a task raised.
    """
    if not is_limited(config):
        return await asyncio.gather(*tasks)
    now = asyncio.get_running_loop().time
    ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
    for task in tasks:
        task.add_done_callback(ended.put_nowait)
    started = last = now()
    finished = 0
    while finished < len(tasks):
        end = min(_time_limit(config, started), _early_end(config, last, len(tasks), finished))
        try:
            async with asyncio.timeout(None if end == float("inf") else end - now()):
                task = await ended.get()
        except TimeoutError:
            break
        task.result()
        finished += 1
        last = now()
    if finished < len(tasks):
        _check_enough(config, finished, len(tasks))
        logger.warning(
            "evaluation set %s: %d of %d prompts were left unfinished", config.name, len(tasks) - finished, len(tasks)
        )
    return [task.result() for task in tasks if task.done()]


def _time_limit(config: EvalDatasetConfig, started: float) -> float:
    return float("inf") if config.eval_task_timeout is None else started + config.eval_task_timeout


def _early_end(config: EvalDatasetConfig, last: float, total: int, finished: int) -> float:
    remaining, idle = config.eval_early_stop_remaining, config.eval_early_stop_idle_timeout
    if remaining is None and idle is None:
        return float("inf")
    too_many_left = remaining is not None and total - finished > remaining
    if too_many_left or finished * config.n_samples_per_eval_prompt < (config.min_eval_samples or 1):
        return float("inf")
    return last + (idle or 0.0)


def _check_enough(config: EvalDatasetConfig, finished: int, total: int) -> None:
    samples = finished * config.n_samples_per_eval_prompt
    wanted = config.min_eval_samples or 1
    if samples < wanted:
        raise RunError(
            f"evaluation set {config.name}: {finished} of {total} prompts ({samples} samples) finished within "
            f"eval_task_timeout {config.eval_task_timeout:g} s, and at least {wanted} samples must; raise the limit, or "
            "lower min_eval_samples"
        )
