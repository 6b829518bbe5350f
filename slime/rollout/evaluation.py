"""Evaluation: every set at the same time, through the same path as training rollouts.

A set may end before all of its prompts have finished, for one of two reasons:

- `eval_task_timeout` seconds are over.
- Early stop leaves stragglers behind: at most `eval_early_stop_remaining` prompts are unfinished, and none has finished for
  `eval_early_stop_idle_timeout` seconds. Either condition may be given alone.

Neither ends a set before `min_eval_samples` samples have finished: early stop waits for them, and when the time is over their
lack is an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from slime.rollout import abort
from slime.rollout.attempts import as_continuable_group, own_copy
from slime.rollout.base_types import RolloutFnEvalOutput, leaves
from slime.rollout.failures import FailureTally
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import cancelled_error, generate_and_rm_group, is_aborted
from slime.rollout.generation_call import GenerationCall
from slime.rollout.user_functions import run_in_daemon_thread
from slime.utils.dataset import Dataset
from slime.utils.errors import RunError, UserError
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.run_values import with_run_values
from slime.utils.types import Sample, failed_and_masked

logger = logging.getLogger(__name__)

MAX_INTERRUPTIONS = 5

_datasets: dict[tuple[Any, ...], list[Sample]] = {}


def clear_dataset_cache() -> None:
    """Forget the loaded evaluation sets."""
    _datasets.clear()


async def eval_rollout(args: Any, rollout_id: int) -> RolloutFnEvalOutput:
    """Generate and grade all of `args.eval_datasets`.

    Returns:
        data[set] = rewards (`--eval-reward-key` applied), truncated flags and samples, ordered by sample index;
        executions that fanned out are flattened. Samples that failed are left out, and stand under `failed`.

    Raises:
        RunError: more than half of the samples of a set failed, with the first cause.
    """
    args = evaluation_args(args)
    configs = args.eval_datasets or []
    if not configs:
        raise UserError("evaluation was asked for without an evaluation set; give --eval-prompt-data NAME PATH")
    state = GenerateState(args)
    prompts = [await run_in_daemon_thread(load_prompts, args, state, config) for config in configs]
    total = sum(len(p) * config.n_samples_per_eval_prompt for p, config in zip(prompts, configs, strict=True))
    with (
        GenerationCall(rollout_id, evaluation=True).under_way() as call,
        call.progress.start("evaluation", total) as progress,
    ):
        tasks = [
            asyncio.create_task(_evaluate_set(args, config, samples, progress.advance), name=f"eval {config.name}")
            for config, samples in zip(configs, prompts, strict=True)
        ]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            await _end(tasks, f"evaluation {rollout_id} failed", abort.CANCEL_TIMEOUT_S)
    data = {config.name: result for config, (result, _) in zip(configs, results, strict=True)}
    left = {
        f"eval/{config.name}-unfinished_prompts": unfinished
        for config, (_, unfinished) in zip(configs, results, strict=True)
        if is_limited(config)
    }
    return RolloutFnEvalOutput(data=data, metrics=left or None)


def evaluation_args(args: Any) -> Any:
    """`args` with `--eval-max-context-len` in the place of `--rollout-max-context-len`, for all that generates."""
    if args.eval_max_context_len == args.rollout_max_context_len:
        return args
    return with_run_values(args, rollout_max_context_len=args.eval_max_context_len)


def load_prompts(args: Any, state: GenerateState, config: EvalDatasetConfig) -> list[Sample]:
    """The samples of a set; sets with equal loading parameters are read once per process."""
    key = (args.hf_checkpoint, args.eval_max_prompt_len, *config.cache_key)
    if key not in _datasets:
        _datasets[key] = Dataset(
            config.path,
            state.tokenizer,
            # Only to measure prompts with images: a user's function may encode them by a processor that cannot be loaded here.
            state.processor if config.multimodal_keys and args.eval_max_prompt_len is not None else None,
            args.eval_max_prompt_len,
            prompt_key=config.input_key,
            multimodal_keys=config.multimodal_keys,
            label_key=config.label_key,
            tool_key=config.tool_key,
            metadata_key=config.metadata_key,
            seed=args.rollout_seed,
            apply_chat_template=bool(config.apply_chat_template),
            apply_chat_template_kwargs=config.apply_chat_template_kwargs or {},
            flag="--eval-prompt-data",
            allow_bad_rows=args.allow_bad_rows,
        ).samples
    return _datasets[key]


async def _evaluate_set(
    args: Any, config: EvalDatasetConfig, prompts: list[Sample], advance: Callable[[int], None]
) -> tuple[dict[str, list[Any]], int]:
    """(Rewards, truncated flags and samples of a set, the number of prompts that it left unfinished)."""
    whole = f"evaluation set {config.name}"
    tally = FailureTally(whole)

    async def evaluate_group(group: list[Sample]) -> list[Any]:
        entries = await _finished_entries(args, config, group)
        tally.add(entries)
        # Ends the set early if most samples fail: a dead service need not be asked for every one.
        tally.stop_when_most_failed(total=max(tally.samples, len(prompts) * len(group)))
        advance(len(group))
        return entries

    # In a thread, because a set may have a hundred thousand samples, and other calls are under way on this event loop.
    groups = await run_in_daemon_thread(
        lambda: [_copies(config, prompt, number) for number, prompt in enumerate(prompts)]
    )
    tasks = [
        asyncio.create_task(evaluate_group(group), name=f"prompt {number} of {whole}")
        for number, group in enumerate(groups)
    ]
    try:
        finished = await finished_prompts(tasks, config)
    except asyncio.CancelledError:
        cancelled = [task for task in tasks if task.cancelled()]
        if not cancelled or asyncio.current_task().cancelling():
            raise
        raise cancelled_error(cancelled[0]) from None
    finally:
        # Half the time that `eval_rollout` waits for this set, so that this wait ends first.
        await _end(tasks, f"{whole} is over", abort.CANCEL_TIMEOUT_S / 2)
    tally.stop_when_most_failed()
    samples = [sample for sample in leaves(finished) if not failed_and_masked(sample)]
    failed = [sample for sample in leaves(finished) if failed_and_masked(sample)]
    if failed:
        reason = failed[0].metadata.get("fail_reason", "no reason was given")
        logger.warning("%s: %d samples failed and are left out; the first: %s", whole, len(failed), reason)
    key, rewards = args.eval_reward_key or args.reward_key, [sample.reward for sample in samples]
    result = {
        "rewards": [reward[key] if key and isinstance(reward, dict) else reward for reward in rewards],
        "truncated": [sample.truncated for sample in samples],
        "samples": samples,
    }
    if failed:
        result["failed"] = failed
    return result, len(tasks) - len(finished)


async def _finished_entries(args: Any, config: EvalDatasetConfig, group: list[Sample]) -> list[Any]:
    """The entries of a group. Attempts that an engine interrupted are continued, a few times at most."""
    attempts: list[Any] = group
    for _ in range(MAX_INTERRUPTIONS):
        attempts = await generate_and_rm_group(args, attempts, config.sampling_params(), evaluation=True)
        if not is_aborted(attempts):
            return attempts
        attempts = as_continuable_group(args, group, attempts)
    name = group[0].group_index
    raise RunError(f"evaluation set {config.name}: prompt {name} was aborted {MAX_INTERRUPTIONS} times")


async def _end(tasks: list[asyncio.Task[Any]], reason: str, timeout: float) -> None:
    """Cancel tasks that still run, and leave behind what has not ended after `timeout` seconds.

    The exceptions of the others are looked at, since asyncio would log each one that nobody has seen.
    """
    unfinished = {task for task in tasks if not task.done()}
    await abort.cancel_tasks(unfinished, reason, timeout, level=logging.DEBUG)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()


def _copies(config: EvalDatasetConfig, prompt: Sample, number: int) -> list[Sample]:
    n = config.n_samples_per_eval_prompt
    # Rows of files hold nothing but containers and immutable values.
    copies = [own_copy(prompt) for _ in range(n)]
    for position, sample in enumerate(copies):
        sample.group_index = number
        sample.index = number * n + position
        config.apply_to(sample)
    return copies


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
    limit = float("inf") if config.eval_task_timeout is None else started + config.eval_task_timeout
    while finished < len(tasks):
        end = min(limit, _early_end(config, last, len(tasks), finished))
        try:
            async with asyncio.timeout(None if end == float("inf") else end - now()):
                task = await ended.get()
        except TimeoutError:
            break
        task.result()
        finished += 1
        last = now()
    # A task may have finished between the last wait and now.
    done = [task for task in tasks if task.done()]
    if left := len(tasks) - len(done):
        _check_enough(config, len(done), len(tasks))
        logger.warning("evaluation set %s: %d of %d prompts were left unfinished", config.name, left, len(tasks))
    return [task.result() for task in done]


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
