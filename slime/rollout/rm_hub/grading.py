"""Rewards of samples: which function grades a sample, under which limits, and what it may return.

Precedence: `sample.custom_rm_path`, `--custom-rm-path`, `metadata["rm_type"]`, `--rm-type`. At most `--rm-concurrency`
calls run, of types that compare symbolically no more than there are workers, each for at most `--rm-timeout` seconds,
waiting not counted. One that gave no reward in that time is made once more; grading never runs on the event loop.
"""

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from slime.rollout.failures import SampleFailed
from slime.rollout.rm_hub.builtin_rewards import compute_builtin_reward, needs_worker
from slime.rollout.rm_hub.custom_reward import CustomReward
from slime.rollout.rm_hub.reward_values import checked_reward
from slime.rollout.rm_hub.symbolic_pool import pool_size
from slime.rollout.user_functions import CallKind, CallTimedOut, call_slots, call_user_function, describe_samples
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


async def async_rm(args: Any, sample: Sample, *, evaluation: bool = False, **kwargs: Any) -> float | dict[str, Any]:
    """The reward of one sample; it is not stored. `kwargs` reach a custom function as far as it accepts them.

    Raises:
        SampleFailed: twice no reward within `--rm-timeout`.
        UserError: unknown type, raising function, or a result that is no reward.
    """
    custom = _custom_reward(args, sample)
    if custom is None:
        at_a_time = args.rm_concurrency
        if needs_worker(args, sample):
            # More would wait for a worker within their time limit.
            at_a_time = min(at_a_time, pool_size())
        reward = await _limited(args, [sample], at_a_time, lambda graded, limit: call_user_function(
            compute_builtin_reward, args, *graded, source="--rm-type", at_a_time=at_a_time, timeout=limit
        ))  # fmt: skip
        return checked_reward(args, sample, reward, "--rm-type", evaluation)
    keywords = {"evaluation": evaluation, **kwargs}
    reward = await _limited(
        args, [sample], args.rm_concurrency, lambda graded, limit: custom.grade_one(*graded, limit, keywords)
    )
    return checked_reward(args, sample, reward, custom.source, evaluation)


async def batched_async_rm(
    args: Any, samples: list[Sample], *, evaluation: bool = False, **kwargs: Any
) -> list[float | dict[str, Any]]:
    """The rewards of `samples`, in order. Samples of one batch-form function are graded by one call."""
    rewards: list[Any] = [None] * len(samples)
    batches: dict[str, list[int]] = {}
    for position, sample in enumerate(samples):
        custom = _custom_reward(args, sample)
        # Without a batch form every sample is a call of its own.
        key = custom.path if custom is not None and custom.takes_batch else f"\0{position}"
        batches.setdefault(key, []).append(position)

    async def grade(positions: list[int]) -> None:
        graded = await _grade_batch(args, [samples[position] for position in positions], evaluation, kwargs)
        for position, reward in zip(positions, graded, strict=True):
            rewards[position] = reward

    tasks = [asyncio.ensure_future(grade(positions)) for positions in batches.values()]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return rewards


async def _grade_batch(args: Any, samples: list[Sample], evaluation: bool, kwargs: dict[str, Any]) -> list[Any]:
    custom = _custom_reward(args, samples[0])
    if custom is None or not custom.takes_batch:
        return [await async_rm(args, sample, evaluation=evaluation, **kwargs) for sample in samples]
    keywords = {"evaluation": evaluation, **kwargs}
    raw = await _limited(
        args, samples, args.rm_concurrency, lambda graded, limit: custom.grade_batch(graded, limit, keywords)
    )
    return [
        checked_reward(args, sample, reward, custom.source, evaluation)
        for sample, reward in zip(samples, raw, strict=True)
    ]


def _custom_reward(args: Any, sample: Sample) -> CustomReward | None:
    path = sample.custom_rm_path or args.custom_rm_path
    return CustomReward(path, args) if path else None


async def _limited(
    args: Any, samples: list[Sample], at_a_time: int, call: Callable[[list[Sample], float | None], Awaitable[Any]]
) -> Any:
    """The result of `call(samples, time limit)`, at the second attempt if need be: nothing is generated again.

    A plain function may still be at the first attempt then. Every attempt gets copies of the samples, and what the one that
    answered did to its own is taken over.
    """
    for last_attempt in (False, True):
        async with call_slots(CallKind.REWARD, at_a_time):
            graded = [_own_copy(sample) for sample in samples]
            try:
                # The list is the function's own: it may sort it.
                result = await call(list(graded), args.rm_timeout)
            except CallTimedOut as error:
                reason = f"no reward for {describe_samples(samples)} within --rm-timeout {args.rm_timeout:g} s"
                if last_attempt:
                    raise SampleFailed(f"{reason}, asked twice", retryable=False) from error
                logger.warning("%s; asking once more", reason)
            else:
                for sample, copied in zip(samples, graded, strict=True):
                    sample.__dict__ = dict(copied.__dict__)
                return result
    raise AssertionError("unreachable: the last attempt returns")


def _own_copy(sample: Sample) -> Sample:
    """A copy with dicts and lists of its own, also within those; other objects, which may be the user's, are shared."""
    copied = copy.copy(sample)
    copied.__dict__ = _own_containers(sample.__dict__)
    return copied


def _own_containers(value: Any) -> Any:
    if not isinstance(value, dict | list):
        return value
    copied = copy.copy(value)
    if isinstance(value, dict):
        for name, entry in value.items():
            copied[name] = _own_containers(entry)
    # Lists per token are long and flat: their first entry decides.
    elif value and not isinstance(value[0], int | float):
        copied[:] = [_own_containers(entry) for entry in value]
    return copied
