"""What a reward function may return, checked before it can poison a batch."""

from typing import Any

from slime.utils.errors import UserError
from slime.utils.finite_number import finite_number
from slime.utils.types import Sample


def checked_reward(args: Any, sample: Sample, reward: Any, source: str, evaluation: bool) -> Any:
    """`reward` as a float, or as a dict whose reward entry is one.

    With `--custom-reward-post-process-path` any value passes: only that function knows what to make of it.

    Raises:
        UserError: no number, not finite, or a dict without the entry of `--reward-key` / `--eval-reward-key`.
    """
    if getattr(args, "custom_reward_post_process_path", None) and not evaluation:
        return reward
    if not isinstance(reward, dict):
        return _number(reward, sample, source)
    key = getattr(args, "reward_key", None)
    if evaluation:
        key = getattr(args, "eval_reward_key", None) or key
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
