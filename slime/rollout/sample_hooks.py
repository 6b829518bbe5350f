"""Runs `--rollout-sample-hook-path` on every generated sample, before it is graded."""

from typing import Any

from slime.rollout.user_functions import CallKind, accepted_keywords, call_slots, call_user_function
from slime.utils.errors import UserError
from slime.utils.http_utils import generation_concurrency
from slime.utils.plugin_loader import load_function, user_function_error
from slime.utils.types import Sample

FLAG = "--rollout-sample-hook-path"


async def apply_rollout_sample_hooks(
    args: Any, sample: Sample | list[Any], *, rollout_id: int | None = None, evaluation: bool = False
) -> Sample | list[Any]:
    """`sample` (or every leaf of a nested list) after all hooks, in the order of the flags.

    Raises:
        TypeError: a hook returned neither a Sample nor None.
        UserError: a hook raised (its traceback is part of the message), or left lengths that do not fit together.
    """
    paths = getattr(args, "rollout_sample_hook_path", None)
    if not paths:
        return sample
    if isinstance(sample, list):
        return [
            await apply_rollout_sample_hooks(args, entry, rollout_id=rollout_id, evaluation=evaluation)
            for entry in sample
        ]
    for path in paths:
        sample = await _apply_hook(args, path, sample, rollout_id, evaluation)
    return sample


async def _apply_hook(args: Any, path: str, sample: Sample, rollout_id: int | None, evaluation: bool) -> Sample:
    hook = load_function(path, flag=FLAG)
    keywords = accepted_keywords(hook, {"rollout_id": rollout_id, "evaluation": evaluation})
    # A hook follows each generation, so that as many as generations are enough.
    slots = call_slots(CallKind.HOOK, generation_concurrency(args))
    options = {"source": f"{FLAG} {path}", "at_a_time": slots.size, "timeout": args.http_request_timeout}
    try:
        async with slots:
            result = await call_user_function(hook, args, sample, **options, keywords=keywords)
    except Exception as error:
        raise user_function_error(FLAG, path, f"sample {sample.index}", error) from error
    result = sample if result is None else result
    if not isinstance(result, Sample):
        raise TypeError(
            f"{FLAG} {path} returned {type(result).__name__} for sample {sample.index}; expected Sample or None"
        )
    try:
        result.validate_lengths()
    except ValueError as error:
        raise UserError(f"{FLAG} {path} left a sample whose fields do not fit together: {error}") from error
    return result
