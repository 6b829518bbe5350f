"""The per-token fields of a sample, and what an engine's `meta_info` does to a sample.

A per-token field that comes from an engine is held as a read-only array, but reads as a Python list. An array takes a fraction
of a list's memory and is shared, not copied. The first read of the field gives a list, which replaces the array from then on,
because the reader may change it. Code that only needs numbers or lengths calls `held` or `token_array`, which leave the array
in place.

`meta_info` brings weight versions and their spans, counters, routed experts, kept sets and the final status. Only
`Sample.append_response_tokens` takes it. It checks first and applies afterwards, so a refused `meta_info` leaves the sample
unchanged.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from slime.utils.types import Sample
from slime.utils.misc import decode_int32_meta_array

# The dtypes of the train batch. A field with values that its dtype cannot hold exactly keeps a wider dtype.
TOKEN_FIELDS = {
    "tokens": np.dtype(np.int64),
    "loss_mask": np.dtype(np.int32),
    "rollout_log_probs": np.dtype(np.float32),
    "teacher_log_probs": np.dtype(np.float32),
}
# Readers in two threads must get the same list, because each may change it.
_becoming_list = threading.Lock()


class TokenField:
    """Descriptor of a field that holds a list, an array that is read as a list, or None; `tokens` takes None as [].

    An assigned array is held itself if it is read-only and owns its data. Else it is copied: a view would keep the whole of
    another array in memory. A tensor becomes a list. In an assigned list numbers of numpy and torch become Python's, and so do
    those that `+=` adds at its end. A deleted field has its default.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, sample: Sample | None, owner: type | None = None) -> Any:
        if sample is None:
            return self
        value = held(sample, self._name)
        if not isinstance(value, np.ndarray):
            return value
        with _becoming_list:
            value = held(sample, self._name)
            if isinstance(value, np.ndarray):
                value = sample.__dict__[self._name] = value.tolist()
        return value

    def __set__(self, sample: Sample, value: Any) -> None:
        if isinstance(value, np.ndarray) and (value.flags.writeable or not value.flags.owndata):
            value = read_only(value.copy())
        elif isinstance(value, list):
            _make_numbers_plain(value, grown=value is sample.__dict__.get(self._name))
        elif value is None and self._name == "tokens":
            # In the other fields None has a meaning: all tokens are trained, or nothing is known.
            value = []
        elif hasattr(value, "tolist") and not isinstance(value, np.ndarray):
            value = value.tolist()
        sample.__dict__[self._name] = value

    def __delete__(self, sample: Sample) -> None:
        sample.__dict__.pop(self._name, None)


def held(sample: Sample, name: str) -> Any:
    """The field as it is held: an array, the assigned value, or None. Nothing is converted; do not change it."""
    values = sample.__dict__
    if name in values:
        return values[name]
    return values.setdefault(name, []) if name == "tokens" else None


def plain_numbers(values: Iterable[Any]) -> list[Any]:
    """A list of `values` with Python's numbers in place of those of numpy and torch, which JSON cannot hold."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return [value.item() if _is_boxed(value) else value for value in values]


_PLAIN = frozenset({int, float, bool})


def _is_boxed(value: Any) -> bool:
    """Whether `value` is a number of numpy, or a tensor that holds a single one."""
    return type(value) not in _PLAIN and getattr(value, "ndim", None) == 0


def _make_numbers_plain(values: list[Any], *, grown: bool) -> None:
    """Replace numbers of numpy and torch by Python's, in a list that has `grown` only those at its end."""
    if not grown:
        if not _PLAIN.issuperset(map(type, values)):
            values[:] = plain_numbers(values)
        return
    # A look at every entry at every `+=` would be quadratic.
    position = len(values) - 1
    while position >= 0 and _is_boxed(value := values[position]):
        values[position] = value.item()
        position -= 1


def first_not_finite(values: Any) -> int | None:
    """Position of the first of `values` that is no finite number (NaN, infinite, None); None where all are."""
    numbers = values if isinstance(values, np.ndarray) and values.dtype.kind == "f" else np.asarray(values, np.float64)
    finite = np.isfinite(numbers)
    return None if np.logical_and.reduce(finite, axis=None) else int(finite.argmin())


def token_array(sample: Sample, name: str) -> np.ndarray | None:
    """The values of the field as a read-only array, in the dtype of `TOKEN_FIELDS` if that holds them exactly.

    Raises:
        ValueError: the field holds something else than a flat sequence of numbers.
    """
    value = held(sample, name)
    return None if value is None else _require_array(sample, name, value)


def join(sample: Sample, name: str, present: Any, added: Any) -> np.ndarray:
    """Two stretches of the field as one array.

    Raises:
        ValueError: one of them is something else than a flat sequence of numbers.
    """
    if not len(present):
        # These are the first tokens of a response, and most often all of them, so the array is shared if it can be.
        array = _require_array(sample, name, added)
        own = array.flags.writeable or not array.flags.owndata
        return read_only(array.copy()) if own else array
    both = np.concatenate([_require_array(sample, name, present), _require_array(sample, name, added)])
    return _require_array(sample, name, read_only(both))


def hold_arrays(sample: Sample) -> None:
    """Let the sample hold arrays in place of those lists that are flat and have only numbers."""
    values = sample.__dict__
    for name in TOKEN_FIELDS:
        value = values.get(name)
        if isinstance(value, list) and value:
            array = _exact_array(name, value)
            if array is not None:
                values[name] = array


def read_only(array: np.ndarray) -> np.ndarray:
    """`array` itself, made read-only."""
    array.flags.writeable = False
    return array


def exactly_as(array: np.ndarray, dtype: np.dtype | type) -> np.ndarray | None:
    """`array` as `dtype`, or None if a value would change by that."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    same = np.logical_and.reduce(cast == array, axis=None) or np.array_equal(cast, array, equal_nan=True)
    return cast if same else None


def _require_array(sample: Sample, name: str, values: Any) -> np.ndarray:
    if type(values) is np.ndarray and values.ndim == 1 and values.dtype == TOKEN_FIELDS[name]:
        return values
    array = _exact_array(name, values)
    if array is None:
        raise ValueError(f"sample {sample.index}: {name} is no flat list of numbers")
    return array


def _exact_array(name: str, values: Any) -> np.ndarray | None:
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different length
        return None
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        # An empty list has no kind of its own.
        return read_only(np.empty(0, TOKEN_FIELDS[name])) if array.shape == (0,) else None
    exact = exactly_as(array, TOKEN_FIELDS[name])
    array = array if exact is None else exact
    return read_only(array.copy() if array is values and array.flags.writeable else array)


# The names by which patched engines tell the ids of kept sets.
KEPT_IDS = ("top_p_token_ids", "top_p_kept_token_ids")
# Why an engine ended an answer → the status that the sample has then.
STATUS_OF_FINISH_REASON = {"length": "TRUNCATED", "abort": "ABORTED", "stop": "COMPLETED"}

# Our name of a counter → the names that engines use for it.
_SPECULATIVE_KEYS = {
    "spec_accept_token_num": ("spec_accept_token_num", "spec_num_correct_drafts"),
    "spec_draft_token_num": ("spec_draft_token_num", "spec_num_proposed_drafts"),
    "spec_verify_ct": ("spec_verify_ct",),
    "completion_token_num": ("completion_tokens",),
}


def kept_sets(
    sample: Sample, meta_info: dict[str, Any], count: int, trainable: bool
) -> tuple[np.ndarray, np.ndarray] | None:
    """The tokens that sampling kept at each response token, including `count` new ones; None if nothing tells them.

    Token i was sampled among ids[offsets[i] : offsets[i + 1]]: ids int32 [K], offsets int32 [response tokens + 1]. Tokens that
    are not trained have empty sets.

    Raises:
        ValueError: there is not one set per token, or only some of the trained tokens have sets.
    """
    new, earlier = _kept_sets_of(meta_info), sample.rollout_top_p_token_offsets
    if new is None and earlier is None:
        return None
    where = f"sample {sample.index}: kept sets"
    if new is None:
        if trainable and count:
            raise ValueError(
                f"{where} are missing for {count} trained tokens; the {sample.response_length} before have them"
            )
        new = np.empty(0, np.int32), np.zeros(count + 1, np.int32)
    ids, offsets = new
    if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise ValueError(f"{where} have {len(offsets)} offsets to {len(ids)} ids for {count} tokens")
    if earlier is None:
        if sample.effective_response_length:
            raise ValueError(f"{where} cannot follow {sample.response_length} response tokens without sets")
        earlier_ids, earlier = np.empty(0, np.int32), np.zeros(sample.response_length + 1, np.int32)
    else:
        earlier_ids, earlier = np.asarray(sample.rollout_top_p_token_ids, np.int32), np.asarray(earlier, np.int32)
    joined = np.concatenate([earlier_ids, ids]), np.concatenate([earlier, earlier[-1] + offsets[1:]])
    return read_only(joined[0]), read_only(joined[1])


def check_log_probs_among_kept(sample: Sample, meta_info: dict[str, Any], log_probs: Sequence[float]) -> None:
    """Raise ValueError if `log_probs`, which go beside the kept sets, differ from the log-probs among the kept tokens that the
    engine reports. They are then those of the whole vocabulary, which a trainer would not compute again."""
    told = meta_info.get("output_token_sampling_logprobs")
    if told is not None and len(told) == len(log_probs) and not np.allclose(told, log_probs, rtol=1e-4, atol=1e-5):
        raise ValueError(
            f"sample {sample.index}: log-probs beside kept sets have to be those of `output_token_sampling_logprobs`, among "
            "the kept tokens, and those of `output_token_logprobs` are of the whole vocabulary"
        )


def _kept_sets_of(meta_info: dict[str, Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """(ids, offsets) of an answer, in whichever form its engine sends them; None if it sends none."""
    lists = meta_info.get("output_token_sampling_mask")
    if lists is not None:
        offsets = np.zeros(len(lists) + 1, np.int32)
        np.cumsum([len(ids) for ids in lists], out=offsets[1:])
        return np.fromiter(itertools.chain.from_iterable(lists), np.int32, int(offsets[-1])), offsets
    ids = decode_int32_meta_array(meta_info, KEPT_IDS)
    if ids is None:
        return None
    offsets = decode_int32_meta_array(meta_info, [name.replace("_ids", "_offsets") for name in KEPT_IDS])
    if offsets is None:
        raise ValueError(f"meta_info has {' or '.join(KEPT_IDS)} without their offsets")
    return ids, offsets


def routed_experts(sample: Sample, meta_info: dict[str, Any], count: int, args: Any) -> np.ndarray | None:
    """The sample's rows with those of the answer, int32 [total length − 1, layers, k]; None if the engine sent none.

    The answer's rows begin at `routed_experts_start_len`. The sample's rows before it are kept, those from there on replaced.

    Args:
        count: number of tokens in the answer, which the sample does not have yet.

    Raises:
        ValueError: the answer does not have one row per remaining position, or the sample has too few before it.
    """
    if meta_info.get("routed_experts") is None:
        return None
    flat = decode_int32_meta_array(meta_info, "routed_experts")
    where = f"sample {sample.index}: routed_experts"
    if args is None:
        raise ValueError(f"{where}: their shape is that of the model; give `args`")
    start, total_length = meta_info.get("routed_experts_start_len") or 0, len(held(sample, "tokens")) + count
    shape = (total_length - 1 - start, args.num_layers, args.moe_router_topk)
    if start < 0 or shape[0] < 0 or flat.size != shape[0] * shape[1] * shape[2]:
        raise ValueError(
            f"{where} have {flat.size} entries from position {start} on, expected (tokens - 1 - start) x layers x k = "
            f"({total_length} - 1 - {start}) x {shape[1]} x {shape[2]}"
        )
    rows, earlier = flat.reshape(shape), sample.rollout_routed_experts
    if start == 0:
        return rows
    known = 0 if earlier is None else len(earlier)
    if known < start:
        raise ValueError(f"{where} begin at position {start}, but the sample has those of {known} positions only")
    return np.concatenate([np.asarray(earlier, np.int32)[:start], rows])


def check_version_spans(meta_info: dict[str, Any], response_length: int) -> None:
    """Raise ValueError if the engine's version spans reach beyond the end of the response."""
    spans = meta_info.get("weight_versions")
    if spans and spans[-1]["end"] > response_length:
        raise ValueError(f"weight_versions end at token {spans[-1]['end']} of a response of {response_length} tokens")


def apply_terminal_info(sample: Sample, meta_info: dict[str, Any], args: Any) -> None:
    """Apply the metadata of a finished engine call whose tokens are already part of `sample`."""
    _add_weight_version(sample, meta_info)
    sample.prefix_cache_info.cached_tokens += meta_info.get("cached_tokens") or 0
    sample.prefix_cache_info.total_prompt_tokens += meta_info.get("prompt_tokens") or 0
    if getattr(args, "sglang_speculative_algorithm", None):
        for counter, keys in _SPECULATIVE_KEYS.items():
            value = next((meta_info[key] for key in keys if meta_info.get(key) is not None), 0)
            setattr(sample.spec_info, counter, getattr(sample.spec_info, counter) + value)
    kind = finish_type(meta_info)
    if kind in STATUS_OF_FINISH_REASON:
        sample.status = getattr(type(sample).Status, STATUS_OF_FINISH_REASON[kind])


def finish_type(meta_info: dict[str, Any]) -> Any:
    """Why the engine ended its answer: `stop`, `length`, `abort`, or what else it says; None if the answer is not over."""
    finish_reason = meta_info.get("finish_reason")
    return finish_reason.get("type") if isinstance(finish_reason, dict) else finish_reason or None


def _add_weight_version(sample: Sample, meta_info: dict[str, Any]) -> None:
    version = meta_info.get("weight_version")
    if version is None:
        return
    sample.weight_versions.append(str(version))
    engine_spans = meta_info.get("weight_versions")
    if engine_spans:
        # The engine counts from the first token of its call, whose last token is the response's last one now.
        offset = sample.response_length - engine_spans[-1]["end"]
        spans = [(str(span["version"]), offset + span["start"], offset + span["end"]) for span in engine_spans]
    else:
        spans = [(str(version), _start_of_unversioned_tokens(sample), sample.response_length)]
    sample.weight_version_spans.extend(span for span in spans if span[1] < span[2])


def _start_of_unversioned_tokens(sample: Sample) -> int:
    """The start of the generated tokens at the end of the response that no span covers yet.

    A stream appends the tokens of one call in many chunks, and names the version only at the end.
    """
    covered = sample.weight_version_spans[-1][2] if sample.weight_version_spans else 0
    mask = held(sample, "loss_mask")
    untrained = [] if mask is None else np.flatnonzero(np.asarray(mask[covered : sample.response_length]) == 0)
    return covered + int(untrained[-1]) + 1 if len(untrained) else min(covered, sample.response_length)
