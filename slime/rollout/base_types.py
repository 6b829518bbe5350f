"""What a rollout function returns, for training and for evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.utils.errors import UserError
from slime.utils.types import Sample


@dataclass
class RolloutFnTrainOutput:
    """`samples`: groups of samples (an entry of a group may be a list: one execution). `metrics` join `rollout/`."""

    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """`data`: set name → {"rewards": [...], "truncated": [...], "samples": [...]}, three lists of one length.

    `"failed"` may hold the samples that got no reward; they are counted, and stand in none of the other lists.
    """

    data: dict[str, dict[str, list[Any]]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function and wrap a bare list (training) or dict (evaluation) into its output type.

    Raises:
        UserError: the function returned something else.
    """
    output = fn(*args, **kwargs, evaluation=evaluation)
    output_type, bare_type = (RolloutFnEvalOutput, dict) if evaluation else (RolloutFnTrainOutput, list)
    if isinstance(output, bare_type):
        output = output_type(output)
    if not isinstance(output, output_type):
        flag = "--eval-function-path" if evaluation else "--rollout-function-path"
        raise UserError(
            f"{flag}: {_name(fn)} returned {type(output).__name__}; "
            f"expected {output_type.__name__} or a bare {bare_type.__name__}"
        )
    return output


def _name(fn: Callable[..., Any]) -> str:
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"


def leaves(entry: Any) -> list[Sample]:
    """The samples of a group, an entry or one sample, in order, with all nesting removed."""
    if not isinstance(entry, list | tuple):
        return [entry]
    return [sample for inner in entry for sample in leaves(inner)]


def first_index(group: Any) -> int:
    """The index of the first sample of a group, by which groups are ordered; −1 where it has none."""
    index = leaves(group)[0].index
    return -1 if index is None else index


def sample_line(sample: Sample) -> str:
    """Prompt, response, label and reward of a sample on one line, long texts cut in the middle."""
    prompt = sample.prompt if isinstance(sample.prompt, str) else str(sample.prompt)
    return f"{_shorten(prompt)} -> {_shorten(sample.response)} | label {sample.label} | reward {sample.reward}"


def _shorten(text: str, limit: int = 240) -> str:
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
    return repr(text)
