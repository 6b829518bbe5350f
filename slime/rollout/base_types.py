"""What a rollout function returns, for training and for evaluation, and the check of it; and what is asked of groups, which are
lists of samples, or of lists of samples where one execution gave several."""

import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slime.utils.errors import UserError
from slime.utils.finite_number import finite_number
from slime.utils.packed_sample import pack_sample
from slime.utils.sample_fields import held
from slime.utils.types import Sample, failed_and_masked

_EVAL_DATA = 'set name → {"rewards": [...], "truncated": [...], "samples": [...]}, three lists of one length'


class _Unpacked:
    """Taken as two values (`output, groups = await generate_rollout_async(…)`) an output is itself and the groups that its
    caller gives back to the data source, of which none are left: they have gone back before."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self, []))


@dataclass
class RolloutFnTrainOutput(_Unpacked):
    """`samples`: groups of samples (an entry of a group may be a list: one execution). `metrics` join `rollout/`."""

    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput(_Unpacked):
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
            f"{flag} {path_of(fn)} returned {type(output).__name__}; "
            f"expected {output_type.__name__} or a bare {bare_type.__name__}"
        )
    return output


def check_eval_output(output: RolloutFnEvalOutput, source: str) -> None:
    """Raise UserError, naming `source` (flag and path) and the set, unless metrics can be made of `output`.

    All but `rewards` may be left out. A reward is a finite number, but for samples that failed and are masked.
    """
    check_metrics(output.metrics, source)
    if not isinstance(output.data, dict):
        raise UserError(f"{source} returned {type(output.data).__name__} as data; expected a dict: {_EVAL_DATA}")
    for name, result in output.data.items():
        where = f"{source}, set {name!r}"
        if not isinstance(result, dict) or "rewards" not in result:
            found = f"the keys {sorted(map(str, result))}" if isinstance(result, dict) else type(result).__name__
            raise UserError(f"{where} has {found}; expected {_EVAL_DATA}")
        columns = {key: result.get(key) for key in ("rewards", "truncated", "samples", "failed")}
        columns = {key: column for key, column in columns.items() if key == "rewards" or column is not None}
        for key, column in columns.items():
            _check_column(key, column, where)
        columns.pop("failed", None)
        counts = {key: len(column) for key, column in columns.items() if key == "rewards" or len(column)}
        if len(set(counts.values())) > 1:
            counted = ", ".join(f"{count} {key}" for key, count in counts.items())
            raise UserError(f"{where} has {counted}; expected lists of one length")
        for sample in (*columns.get("samples", []), *(result.get("failed") or [])):
            check_kinds(sample, f"{where} has")
        _check_rewards(result["rewards"], columns.get("samples", []), where)


def _check_column(key: str, column: Any, where: str) -> None:
    of_samples = key in ("samples", "failed")
    # A numpy scalar, such as a mean, looks like an array but has no length.
    is_array = hasattr(column, "tolist") and getattr(column, "ndim", 1) > 0
    if not isinstance(column, list | tuple) and (of_samples or not is_array):
        raise UserError(f"{where}: `{key}` is {type(column).__name__}; expected a list")
    for position, entry in enumerate(column):
        if of_samples and not isinstance(entry, Sample):
            raise UserError(f"{where}: {key}[{position}] is {type(entry).__name__}; expected Samples in one flat list")
        if key == "truncated" and finite_number(entry) is None:
            raise UserError(f"{where}: {key}[{position}] is {entry!r}; expected true or false")


def _check_rewards(rewards: Any, samples: Any, where: str) -> None:
    for position, reward in enumerate(rewards):
        if finite_number(reward) is None and not (len(samples) and failed_and_masked(samples[position])):
            raise UserError(f"{where}: reward {position} is {reward!r}; expected a finite number")


def check_metrics(metrics: Any, source: str) -> None:
    """Raise UserError, naming `source` (flag and path), unless `metrics` are None or a dict."""
    if not isinstance(metrics, dict | None):
        raise UserError(f"{source} returned {type(metrics).__name__} as metrics; expected a dict of numbers, or None")


def check_sample(sample: Sample, who_did: str) -> None:
    """`check_kinds`, and `check_fit`."""
    check_kinds(sample, who_did)
    check_fit(sample, who_did)


def check_kinds(sample: Sample, who_did: str) -> None:
    """Check the kinds of fields that a user's function may have set. The value of a status becomes that status, None as
    metadata or response what is empty, and a whole number of another library one of Python.

    Args:
        who_did: flag, path and verb, for messages: `--flag path returned`.

    Raises:
        UserError: it names `who_did`, the sample, the field and what it holds.
    """
    where = f"{who_did} sample {sample.index}"
    try:
        sample.status = Sample.Status(sample.status)
    except ValueError:
        names = ", ".join(status.name for status in Sample.Status)
        raise UserError(f"{where} with status {sample.status!r}; expected one of Sample.Status: {names}") from None
    for name, kind in (("metadata", dict), ("response", str)):
        value = getattr(sample, name)
        if value is None:
            setattr(sample, name, kind())
        elif not isinstance(value, kind):
            raise UserError(f"{where} with {name} {value!r:.80} ({type(value).__name__}); expected a {kind.__name__}")
    for name, expected in (("index", "or None"), ("rollout_id", "or None"), ("response_length", "of tokens")):
        value = getattr(sample, name)
        if type(value) is int or (value is None and expected == "or None"):
            continue
        try:
            setattr(sample, name, operator.index(value))
        except TypeError:
            raise UserError(f"{where} with {name} {value!r:.80}; expected a whole number {expected}") from None


def check_fit(sample: Sample, who_did: str) -> None:
    """Check that the fields of a sample, which a user's function may have set, fit together; `who_did` as in `check_kinds`.

    Raises:
        UserError: they do not (`Sample.validate_lengths`), or an answer that ended counts no token as its own.
    """
    try:
        sample.validate_lengths()
    except (TypeError, ValueError) as error:
        raise UserError(f"{who_did} a sample whose fields do not fit together: {error}") from error
    has_ended = sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    if has_ended and sample.response and not sample.response_length and not sample.remove_sample:
        if count := len(held(sample, "tokens")):
            raise UserError(
                f"{who_did} sample {sample.index} with a response, {count} tokens and response_length 0, so nothing of it "
                "would be trained; set response_length to the number of tokens at the end that are the response"
            )


def path_of(fn: Callable[..., Any]) -> str:
    """A path by which flags could name `fn`: its module or, if a plug-in's file was loaded, that file, and its name."""
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    module = sys.modules.get(named.__module__)
    if named.__module__.startswith("_slime_plugin_") and module is not None:
        return f"{module.__file__}:{named.__qualname__}"
    return f"{named.__module__}.{named.__qualname__}"


def leaves(entry: Any) -> list[Sample]:
    """The samples of a group, of an entry or of one sample, in order and without nesting."""
    if not isinstance(entry, list | tuple):
        return [entry]
    if set(map(type, entry)) == {Sample}:
        # Most groups are like this, and need no look at each entry.
        return list(entry)
    found = []
    for inner in entry:
        if isinstance(inner, list | tuple):
            found += leaves(inner)
        else:
            found.append(inner)
    return found


def pack_groups(groups: list[list[Any]]) -> None:
    """Let the samples of `groups` hold arrays (`pack_sample`). To be called in a thread: to make arrays of lists takes long."""
    for sample in leaves(groups):
        pack_sample(sample)


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
