"""Rewards of samples: which function grades a sample, ours or the user's, under which limits, and what it may return.

The first that is set decides: `sample.custom_rm_path`, `--custom-rm-path`, `metadata["rm_type"]`, `--rm-type`. At most
`--rm-concurrency` calls run at a time; for types that are graded in worker processes, no more than there are of these. A call
may take `--rm-timeout` seconds, not counting its wait for a slot. A call that gave no reward in that time is made once more.
Grading never runs on the event loop.

With the prefix `boxed_`, a built-in type grades the content of the last box instead of the response.

A function by path has one of three forms: single, `fn(args, sample, **kw)`; batch, `fn(args, samples, **kw)`, which is known by
the name of the second parameter (with `--group-rm` any name but `sample` will do); or a class with
`compute_reward(prompts, responses[, labels, samples])`. Every call gets copies of the samples. A plain function that is called
once more may run twice at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from slime.rollout.attempts import own_copy
from slime.rollout.base_types import check_sample
from slime.rollout.failures import SampleFailed
from slime.rollout.rm_hub.deepscaler import solution_part
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.ifbench import compute_ifbench_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.rm_hub.math_utils import extract_boxed_answer, grade_answer_verl
from slime.rollout.rm_hub.remote import remote_rm
from slime.rollout.rm_hub.worker_pool import pool_size
from slime.rollout.user_functions import (
    CallKind,
    CallTimedOut,
    call_slots,
    call_user_function,
    call_within_request_time,
    describe_samples,
    is_batch_form,
    wrong_result_error,
)
from slime.utils.async_utils import SingleFlight
from slime.utils.errors import UserError
from slime.utils.finite_number import finite_number
from slime.utils.plugin_loader import (
    accepted_keywords,
    calling_user_code,
    is_coroutine_function,
    load_function,
    parameters_of,
    user_function_error,
)
from slime.utils.processing_utils import without_end_mark
from slime.utils.reward_types import (
    BOXED,
    REMOTE,
    bare_reward_type,
    compares_as_text,
    known_reward_types,
    lacks_label,
    text_of_label,
)
from slime.utils.types import Sample, failed_and_masked

logger = logging.getLogger(__name__)


async def async_rm(args: Any, sample: Sample, *, evaluation: bool = False, **kwargs: Any) -> float | dict[str, Any]:
    """The reward of one sample; it is not stored. A custom function gets those of `kwargs` that it accepts.

    Raises:
        SampleFailed: there was no reward within `--rm-timeout`, twice.
        UserError: the type is unknown, the function raised, or its result is no reward.
    """
    custom = _custom_reward(args, sample)
    if custom is None:
        at_a_time = args.rm_concurrency
        if needs_worker(args, sample):
            # Further calls would spend their time limit waiting for a worker.
            at_a_time = min(at_a_time, pool_size())
        reward = await _limited(
            args, [sample], at_a_time, lambda graded, limit: _grade_by_type(args, *graded, at_a_time, limit)
        )
        return checked_reward(args, sample, reward, "--rm-type", evaluation)
    keywords = {"evaluation": evaluation, **kwargs}
    reward = await _limited(
        args, [sample], args.rm_concurrency, lambda graded, limit: custom.grade_one(*graded, limit, keywords)
    )
    check_sample(sample, f"{custom.source} left")
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
    for sample in samples:
        check_sample(sample, f"{custom.source} left")
    return [
        checked_reward(args, sample, reward, custom.source, evaluation)
        for sample, reward in zip(samples, raw, strict=True)
    ]


async def _grade_by_type(args: Any, sample: Sample, at_a_time: int, limit: float | None) -> Any:
    options = {"source": "--rm-type", "at_a_time": at_a_time, "timeout": limit}
    if _type_of(args, sample) == REMOTE:
        # This call does not block: it returns the coroutine function that asks the service.
        reward = compute_builtin_reward(args, sample)
    else:
        reward = await call_user_function(compute_builtin_reward, args, sample, **options)
    return await call_user_function(reward, **options) if callable(reward) else reward


def _custom_reward(args: Any, sample: Sample) -> CustomReward | None:
    path = sample.custom_rm_path or args.custom_rm_path
    return CustomReward(path, args) if path else None


async def _limited(
    args: Any, samples: list[Sample], at_a_time: int, call: Callable[[list[Sample], float | None], Awaitable[Any]]
) -> Any:
    """The result of `call(samples, time limit)`, at the second attempt if need be, so that nothing is generated again.

    A plain function may still be busy with the first attempt then. Every attempt gets copies of the samples, and the changes
    that the successful one made to its copies are taken over.
    """
    for last_attempt in (False, True):
        async with call_slots(CallKind.REWARD, at_a_time):
            graded = [own_copy(sample) for sample in samples]
            try:
                # The function gets a list of its own, which it may sort.
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


def compute_builtin_reward(args: Any, sample: Sample) -> Any:
    """The reward of `sample` by its `metadata["rm_type"]`, else `--rm-type`. May block; run it off the event loop.

    If a service grades, the result is a function for the event loop that asks the service.

    Raises:
        UserError: the type is missing or unknown, or a label that the type needs is missing.
    """
    rm_type = _type_of(args, sample)
    name = bare_reward_type(rm_type)
    if name not in _REWARDS:
        source = "metadata rm_type" if sample.metadata.get("rm_type") else "--rm-type"
        raise UserError(
            f"sample {sample.index}: {source} is {rm_type or 'missing'}; known types: {known_reward_types()}, or give "
            "--custom-rm-path"
        )
    response = sample.response
    # math looks for the box itself; deepscaler looks for the end of the reasoning before it.
    if rm_type.startswith(BOXED) and name not in ("math", "deepscaler"):
        response = extract_boxed_answer(response) or ""
    return _REWARDS[name](args, sample, response)


def warn_of_missing_solutions(args: Any, samples: Sequence[Sample]) -> None:
    """Warn, once per process, if `deepscaler` found nothing to judge in any answer of a rollout, so that all rewards are 0
    whatever the answers are. Samples that failed and are masked do not count."""
    graded = [sample for sample in samples if not failed_and_masked(sample)]
    if graded and all(sample.metadata.get("fail_reason") == _NO_SOLUTION for sample in graded):
        _tell_of_missing_solutions(args.rm_type)


@functools.cache
def _tell_of_missing_solutions(rm_type: str | None) -> None:
    logger.warning(
        "no answer of a whole rollout has the </think> or ###Response that the reward deepscaler looks behind, so all rewards "
        "are 0 and nothing can be learned (--rm-type %s): does the model write </think>, and within "
        "--rollout-max-response-len? --rm-type math grades answers without it",
        rm_type,
    )


def needs_worker(args: Any, sample: Sample) -> bool:
    """Whether the reward of `sample` may be decided in a worker process."""
    return bare_reward_type(_type_of(args, sample)) in _IN_WORKERS


def _type_of(args: Any, sample: Sample) -> str:
    return str(sample.metadata.get("rm_type") or args.rm_type or "").strip()


def _label(sample: Sample, rm_type: str) -> str:
    if lacks_label(sample.label):
        raise UserError(f"sample {sample.index} has no label, which --rm-type {rm_type} needs; see --label-key")
    if not compares_as_text(sample.label):
        raise UserError(
            f"sample {sample.index}: the label is {type(sample.label).__name__}, and --rm-type {rm_type} compares with one "
            "text or number; name a field that holds one with --label-key, or grade with a function of yours (--custom-rm-path)"
        )
    return text_of_label(sample.label)


def _math(args: Any, sample: Sample, response: str) -> int:
    return int(grade_answer_verl(response, _label(sample, "math")))


_NO_SOLUTION = "no </think> and no ###Response in the response"


def _deepscaler(args: Any, sample: Sample, response: str) -> int:
    label = _label(sample, "deepscaler")
    solution = solution_part(response)
    if solution is None:
        sample.metadata["fail_reason"] = _NO_SOLUTION
        return 0
    return int(grade_answer_verl(solution, label))


def _dapo(args: Any, sample: Sample, response: str) -> dict[str, Any]:
    return compute_score(response, _label(sample, "dapo"))


def _f1(args: Any, sample: Sample, response: str) -> float:
    return f1_score(response, _label(sample, "f1"))[0]


def _gpqa(args: Any, sample: Sample, response: str) -> float:
    with _naming(sample):
        return compute_gpqa_reward(response, sample.label, sample.metadata)


def _ifbench(args: Any, sample: Sample, response: str) -> float:
    user = sample.prompt if isinstance(sample.prompt, str) else next(
        (turn.get("content") for turn in reversed(sample.prompt) if turn.get("role") == "user"), ""
    )  # fmt: skip
    if isinstance(user, list):
        user = "".join(part["text"] for part in user if isinstance(part, dict) and part.get("type") == "text")
    with _naming(sample):
        return compute_ifbench_reward(response, sample.label, {"prompt": user or "", **sample.metadata})


def _remote(args: Any, sample: Sample, response: str) -> Callable[[], Awaitable[Any]]:
    asked = own_copy(sample)
    asked.response = without_end_mark(response)
    return functools.partial(remote_rm, args, asked)


@contextlib.contextmanager
def _naming(sample: Sample) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"sample {sample.index}: {error}") from None


def _random(args: Any, sample: Sample, response: str) -> int:
    """A coin toss, with the same result when a seeded run is repeated."""
    if sample.index is None:
        return random.SystemRandom().randint(0, 1)
    return random.Random(f"{args.rollout_seed}-{sample.index}").randint(0, 1)


_REWARDS: dict[str, Callable[[Any, Sample, str], Any]] = {
    "dapo": _dapo,
    "deepscaler": _deepscaler,
    "f1": _f1,
    "gpqa": _gpqa,
    "ifbench": _ifbench,
    "math": _math,
    "random": _random,
    REMOTE: _remote,
}
_IN_WORKERS = frozenset({"deepscaler", "ifbench", "math"})


FLAG = "--custom-rm-path"

_instances: dict[type, Any] = {}
# Classes are constructed in threads; concurrent first calls wait for one constructor, or for its failure.
_first_calls: defaultdict[type, SingleFlight] = defaultdict(SingleFlight)


def clear_reward_instances() -> None:
    """Forget the constructed class-style rewards."""
    _instances.clear()


class CustomReward:
    """A reward of the user, by path.

    Attributes:
        source: flag and path, for messages.
        takes_batch: whether one call grades a list.
    """

    def __init__(self, path: str, args: Any) -> None:
        self.path, self.args = path, args
        self.source = f"{FLAG} {path}"
        self._loaded = function = load_function(path, flag=FLAG, batched=args.group_rm)
        self.takes_batch = inspect.isclass(function) or is_batch_form(function)
        if args.group_rm and parameters_of(function).names[1:2] != ("sample",):
            self.takes_batch = True

    async def grade_one(self, sample: Sample, timeout: float | None, keywords: dict[str, Any]) -> Any:
        """The raw reward of one sample."""
        if self.takes_batch:
            return (await self.grade_batch([sample], timeout, keywords))[0]
        return await self._call(self._loaded, [sample], timeout, keywords, self.args, sample)

    async def grade_batch(self, samples: list[Sample], timeout: float | None, keywords: dict[str, Any]) -> list[Any]:
        """The raw rewards of `samples` by one call of a batch form."""
        if inspect.isclass(self._loaded):
            rewards = await self._grade_with_class(samples, timeout)
        else:
            rewards = await self._call(self._loaded, samples, timeout, keywords, self.args, samples)
        if hasattr(rewards, "tolist") and not isinstance(rewards, list):
            rewards = rewards.tolist()
        if not isinstance(rewards, list | tuple) or len(rewards) != len(samples):
            expected = f"a list of {len(samples)} rewards, one per sample"
            raise wrong_result_error(FLAG, self.path, describe_samples(samples), rewards, expected)
        return list(rewards)

    async def _grade_with_class(self, samples: list[Sample], timeout: float | None) -> Any:
        compute_reward = (await self._instance(samples)).compute_reward
        offered = {"labels": [sample.label for sample in samples], "samples": samples}
        keywords = accepted_keywords(compute_reward, offered)
        prompts, responses = [sample.prompt for sample in samples], [sample.response for sample in samples]
        return await self._call(compute_reward, samples, timeout, keywords, prompts, responses)

    async def _instance(self, samples: list[Sample]) -> Any:
        """The object of the class, made at the first call: in a thread, because it may load for long, while requests go on. It
        has as long as a request.

        One whose `compute_reward` is a coroutine function is made on the event loop, which its constructor may ask for: a
        session of a client does.
        """
        if self._loaded in _instances:
            return _instances[self._loaded]
        subject = f"{describe_samples(samples)} (constructor)"
        if is_coroutine_function(self._loaded.compute_reward):
            with calling_user_code(FLAG, self.path, subject):
                return self._construct()
        construct = functools.partial(
            call_within_request_time, self.args, FLAG, self.path, subject, self._construct,
            at_a_time=self.args.rm_concurrency,
        )  # fmt: skip
        return await _first_calls[self._loaded].join(construct)

    def _construct(self) -> Any:
        offered = {"args": self.args, "model_path": self.args.rm_model_path or self.args.hf_checkpoint}
        instance = self._loaded(**accepted_keywords(self._loaded, offered))
        return _instances.setdefault(self._loaded, instance)

    async def _call(
        self,
        function: Callable[..., Any],
        samples: list[Sample],
        timeout: float | None,
        keywords: dict[str, Any],
        *arguments: Any,
    ) -> Any:
        accepted = accepted_keywords(function, keywords)
        try:
            return await call_user_function(
                function,
                *arguments,
                source=self.source,
                at_a_time=self.args.rm_concurrency,
                timeout=timeout,
                keywords=accepted,
            )
        except CallTimedOut:
            raise
        except Exception as error:
            raise user_function_error(FLAG, self.path, describe_samples(samples), error) from error


def checked_reward(args: Any, sample: Sample, reward: Any, source: str, evaluation: bool) -> Any:
    """`reward` as a float, or as a dict whose reward entry is one.

    With `--custom-reward-post-process-path` any value passes, because only that function knows what to make of it.

    Raises:
        UserError: it is not a finite number, or a dict without the entry of `--reward-key` / `--eval-reward-key`.
    """
    if args.custom_reward_post_process_path and not evaluation:
        return reward
    if not isinstance(reward, dict):
        return _number(reward, sample, source)
    key = args.reward_key
    if evaluation:
        key = args.eval_reward_key or key
    if not key or key not in reward:
        wanted = f"has no entry {key!r}" if key else "is a dict, so --reward-key must say which entry counts"
        raise UserError(f"{source}: the reward of sample {sample.index} {wanted}; it has {', '.join(map(str, reward))}")
    return {**reward, key: _number(reward[key], sample, source)}


def _number(value: Any, sample: Sample, source: str) -> float:
    number = finite_number(value)
    if number is None:
        raise UserError(
            f"{source}: the reward of sample {sample.index} is {value!r} ({type(value).__name__}); "
            "expected a finite number, or a dict with --reward-key"
        )
    return number
