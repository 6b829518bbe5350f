"""Traces of samples: spans and events of what happened when. The sample itself carries them, into dumps and other processes.

`sample.trace` is `{version, trace_id, sample_id, group_id, attempt, events}` in plain values. An entry of `events` is a span,

    {"kind": "span", "name", "span_id", "parent_id", "attempt", "start", "end", "status", "attrs"}

with `end` and `status` None while it lasts, or an event, `{"kind": "event", "name", "parent_id", "attempt", "time", "attrs"}`.
Times are seconds since the epoch; the lengths of spans are measured with a monotonic clock. Spans nest by the context in which
they are opened, which tasks and threads of `asyncio.to_thread` inherit.

Invariants
- A target without a trace gets one; a target of many samples writes into the trace of each.
- Tracing never raises into the traced code. Whatever fails is not recorded, and gives one warning for each kind.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import logging
import operator
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from slime.utils.misc import unique_hex
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

TRACE_VERSION = 1
# So many are enough for a conversation of a thousand turns. A loop that never ends must not fill the memory.
MOST_EVENTS = 4000
_LONGEST_TEXT = 1000
# Types of most attributes, which are plain as they are.
_NUMBERS = frozenset({bool, int, float, type(None)})
_told: set[str] = set()
_trace_id = operator.itemgetter("trace_id")

# The spans that are open in this context, outermost first: (span id, ids of the traces that it is in; None: it encloses spans
# of any trace).
_Open = tuple[tuple[str, Container[str] | None], ...]
_open: contextvars.ContextVar[_Open] = contextvars.ContextVar("open_spans", default=())
# The target that is meant if a target is None.
_bound: contextvars.ContextVar[Any] = contextvars.ContextVar("bound_trace", default=None)

_ENGINE_VALUES = {
    "id", "prompt_tokens", "completion_tokens", "cached_tokens", "weight_version", "e2e_latency", "queue_time",
    "decode_throughput", "num_retractions", "spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct",
}  # fmt: skip
_OF_TWO_ENGINES = "pd_"
_PREFILL, _DECODE, _TRANSFER = "pd_prefill_", "pd_decode_", "pd_transfer_"
_DURATION = "_duration"


class trace_span:
    """A span of `target` that lasts as long as the `with` or `async with` block.

        with trace_span(sample, "tool", {"name": "python"}) as span:
            span.set("exit_code", run())

    Args:
        target: a sample, a list of them, nested or not, or a carrier (`export_trace`). None: the target that `bind_trace` has
            bound. An empty list: the targets that `include` adds; spans within the block are then below this one, whatever
            their targets are.
        attrs: plain values; others are kept as text.
    """

    def __init__(self, target: Any, name: str, attrs: dict[str, Any] | None = None) -> None:
        self.name = name
        self.attrs: dict[str, Any] = dict(attrs) if attrs else {}
        self.span_id: str | None = None
        self._targets: list[Any] = [target]
        # In the traces of all targets. Copies of a sample share the record, but for those that `include` finds one in.
        self._records: list[dict[str, Any]] = []
        self._outer: _Open = ()
        self._token: contextvars.Token[Any] | None = None

    def set(self, name: str, value: Any) -> None:
        """Give the span an attribute."""
        self.attrs[name] = value

    def update(self, attrs: dict[str, Any] | None = None, **more: Any) -> None:
        """Give the span several attributes."""
        self.attrs.update(attrs or {}, **more)

    def include(self, target: Any) -> None:
        """Put the span also into the traces of `target`: the results of the block, which may be copies of its samples."""
        with _harmless(f"what span {self.name!r} includes"):
            self._targets.append(target)
            for trace in _traces_of(target):
                record = self._record_in(trace)
                if record is None:
                    self._put_into(trace)
                else:
                    self._records.append(record)

    def child(self, name: str, start: float, end: float, attrs: dict[str, Any] | None = None) -> None:
        """Add a span within this one that was measured elsewhere; `start` and `end` are seconds from the start of this one."""
        with _harmless("a span of somebody else's"):
            for trace in _traces_of(self._targets):
                own = self._record_in(trace)
                if own is None:
                    continue
                record = _span_record(
                    name, unique_hex(16), self.span_id, own["attempt"], self._start + start, attrs or {}
                )
                record.update(end=self._start + end, status="ok")
                _append(trace, record)

    def __enter__(self) -> trace_span:
        # Every sample has several spans, so what is common to them is done here: a `_harmless` block, or a function for each
        # part, would take longer than the rest.
        try:
            if self._targets[0] is None:
                self._targets[0] = _bound.get()
            target, self._outer = self._targets[0], _open.get()
            self.span_id, self._started, self._start = unique_hex(16), time.perf_counter(), time.time()
            traces = _traces_of(target)
            for trace in traces:
                self._put_into(trace)
            ids = [*map(_trace_id, traces)] if target or not isinstance(target, list | tuple) else None
            self._token = _open.set((*self._outer, (self.span_id, ids)))
        except Exception as error:
            _tell_once(f"span {self.name!r}", error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if self._token is not None:
                _open.reset(self._token)
            end, status = self._start + time.perf_counter() - self._started, "ok"
            attrs = _plain(self.attrs) if self.attrs else {}
            if error is not None:
                attrs["error"], status = _plain(f"{kind.__name__}: {error}"), "error"
            for record in self._records:
                record["end"], record["status"], record["attrs"] = end, status, attrs
        except Exception as own_error:
            _tell_once(f"the end of span {self.name!r}", own_error)

    async def __aenter__(self) -> trace_span:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.__exit__(kind, error, trace)

    def _put_into(self, trace: dict[str, Any]) -> None:
        """Add a record of the span, which has not ended, to `trace`."""
        parent_id = _parent_in(trace, self._outer)
        record = _span_record(self.name, self.span_id, parent_id, trace["attempt"], self._start, self.attrs)
        self._records.append(record)
        _append(trace, record)

    def _record_in(self, trace: dict[str, Any]) -> dict[str, Any] | None:
        """The span's record in `trace`, which may be a copy of a trace that has the span, since functions may return copies."""
        # Searched from the end: few records come after that of a span which ends.
        span_id = self.span_id
        for record in reversed(trace["events"]):
            if record.get("span_id") == span_id:
                return record
        return None


def trace_event(target: Any, name: str, attrs: dict[str, Any] | None = None) -> None:
    """Record that something happened to `target` (as in `trace_span`) at this moment."""
    with _harmless(f"event {name!r}"):
        now = time.time()
        for trace in _traces_of(target):
            record = {"kind": "event", "name": name, "parent_id": _parent_in(trace), "attempt": trace["attempt"]}
            _append(trace, {**record, "time": now, "attrs": _plain(attrs or {})})


def trace_function(
    name: str | None = None,
    target: str | Callable[..., Any] | None = "sample",
    attrs_getter: Callable[..., dict[str, Any]] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that makes a span of every call of a function, plain or `async`.

    Args:
        name: name of the spans; None: that of the function.
        target: name of the parameter that is the target, or a function from the arguments to the target; None: the bound one.
        attrs_getter: a function from the arguments to attributes of the span.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        span_name, signature = name or function.__name__, inspect.signature(function)

        def span(args: tuple[Any, ...], kwargs: dict[str, Any]) -> trace_span:
            found, attrs = None, {}
            with _harmless(f"the target of span {span_name!r}"):
                if callable(target):
                    found = target(*args, **kwargs)
                elif target is not None:
                    found = signature.bind(*args, **kwargs).arguments[target]
                attrs = attrs_getter(*args, **kwargs) if attrs_getter is not None else {}
            return trace_span(found, span_name, attrs)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with span(args, kwargs):
                    return await function(*args, **kwargs)

            return awaited

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with span(args, kwargs):
                return function(*args, **kwargs)

        return called

    return decorate


@contextmanager
def bind_trace(target: Any) -> Iterator[None]:
    """In the block, and in tasks that it starts, a target None means `target`: for code that has no sample at hand."""
    token = _bound.set(target)
    try:
        yield
    finally:
        _bound.reset(token)


@contextmanager
def bind_trace_carrier(carrier: dict[str, Any] | None) -> Iterator[None]:
    """`bind_trace` in another process: spans in the block go into `carrier`, below the span where it was exported."""
    inherited = _open.get()
    with _harmless("a carrier"):
        if carrier is not None and carrier.get("parent_id") is not None:
            ids = frozenset(trace["trace_id"] for trace in carrier["traces"])
            inherited = (*inherited, (carrier["parent_id"], ids))
    token = _open.set(inherited)
    try:
        with bind_trace(carrier):
            yield
    finally:
        _open.reset(token)


def export_trace(target: Any) -> dict[str, Any]:
    """A carrier for `target`, with which another process can record: plain values, without what was recorded here."""
    with _harmless("an export"):
        traces = _traces_of(target)
        parent = _parent_in(traces[0]) if traces else None
        return {"traces": [{**trace, "events": []} for trace in traces], "parent_id": parent}
    return {"traces": [], "parent_id": None}


def import_trace(target: Any, carrier: dict[str, Any] | None) -> None:
    """Add to `target` what another process has recorded in `carrier`; importing it again adds nothing."""
    with _harmless("an import"):
        recorded = {trace["trace_id"]: trace["events"] for trace in (carrier or {}).get("traces", ())}
        for trace in _traces_of(target):
            known = {_identity(record) for record in trace["events"]}
            for record in recorded.get(trace["trace_id"], ()):
                if _identity(record) not in known:
                    _append(trace, dict(record))


def carry_trace(origin: Any, result: Any) -> Any:
    """`result`; those of its samples that have no trace share that of `origin`, the sample of which they were made."""
    with _harmless("what came of a sample"):
        trace = origin.__dict__.get("trace")
        for sample in _samples_of(result) if trace is not None else ():
            sample.__dict__.setdefault("trace", trace)
    return result


def spans_of(samples: Iterable[Sample]) -> Iterator[dict[str, Any]]:
    """The spans in the traces of `samples`, each once: a span may be in several traces, and samples may share a trace."""
    seen: set[str] = set()
    for sample in samples:
        for record in (sample.__dict__.get("trace") or {}).get("events", ()):
            if record["kind"] == "span" and record["span_id"] not in seen:
                seen.add(record["span_id"])
                yield record


def trace_next_attempt(target: Any) -> None:
    """Count all further records as those of another attempt on `target`."""
    with _harmless("the next attempt"):
        for trace in _traces_of(target):
            trace["attempt"] += 1


def build_sglang_meta_trace_attrs(meta_info: dict[str, Any]) -> dict[str, Any]:
    """The attributes that an engine's `meta_info` has: its counters and times, and why it stopped."""
    attrs = {name: value for name, value in meta_info.items() if name in _ENGINE_VALUES and value is not None}
    reason = meta_info.get("finish_reason")
    if reason is not None:
        attrs["finish_reason"] = reason.get("type") if isinstance(reason, dict) else reason
    return attrs


def trace_engine_answer(span: trace_span, answer: dict[str, Any]) -> None:
    """Give a request's span the attributes of `meta_info`, and spans of prefill and decode if two engines shared it."""
    try:
        meta_info = answer.get("meta_info") or {}
        span.attrs |= build_sglang_meta_trace_attrs(meta_info)
        # Most engines do all of it, and their answers have many names: one look for all of these.
        if _OF_TWO_ENGINES in " ".join(meta_info):
            _add_parts(span, meta_info)
    except Exception as error:
        _tell_once("an engine's answer", error)


def _add_parts(span: trace_span, meta_info: dict[str, Any]) -> None:
    """Give `span` the spans of prefill and decode, and a summary of both."""
    parts = {name: value for name, value in meta_info.items() if name.startswith((_PREFILL, _DECODE, _TRANSFER))}
    parts = {name: value for name, value in parts.items() if isinstance(value, int | float)}
    lengths = {
        prefix: sum(value for name, value in parts.items() if name.startswith(prefix) and name.endswith(_DURATION))
        for prefix in (_PREFILL, _DECODE)
    }
    begin = 0.0
    for name, prefix in (("sglang_pd_prefill", _PREFILL), ("sglang_pd_decode", _DECODE)):
        own = {key.removeprefix(prefix): value for key, value in parts.items() if key.startswith(prefix)}
        if own:
            span.child(name, begin, begin + lengths[prefix], own)
            begin += lengths[prefix]
    span.child("sglang_pd_summary", 0.0, begin, parts)


def _traces_of(target: Any) -> list[dict[str, Any]]:
    """The traces of `target`, each once: what came of one sample may share its trace."""
    if isinstance(target, Sample):
        return [target.__dict__.get("trace") or _new_trace(target)]
    if target is None:
        bound = _bound.get()
        return [] if bound is None else _traces_of(bound)
    if isinstance(target, dict):
        return list(target["traces"])
    return list({id(trace): trace for entry in target for trace in _traces_of(entry)}.values())


def _samples_of(entry: Any) -> list[Sample]:
    return [entry] if isinstance(entry, Sample) else [sample for inner in entry for sample in _samples_of(inner)]


def _new_trace(sample: Sample) -> dict[str, Any]:
    sample.trace = {
        "version": TRACE_VERSION,
        "trace_id": unique_hex(),
        "sample_id": sample.index,
        "group_id": sample.group_index,
        "attempt": 0,
        "events": [],
    }
    return sample.trace


def _parent_in(trace: dict[str, Any], spans: _Open | None = None) -> str | None:
    """The innermost of `spans`, by default those that are open here, that can be a parent in `trace`."""
    trace_id = trace["trace_id"]
    for span_id, ids in reversed(_open.get() if spans is None else spans):
        if ids is None or trace_id in ids:
            return span_id
    return None


def _span_record(
    name: str, span_id: str | None, parent_id: str | None, attempt: int, start: float, attrs: dict[str, Any]
) -> dict[str, Any]:
    """The record of a span that has not ended."""
    return {
        "kind": "span",
        "name": name,
        "span_id": span_id,
        "parent_id": parent_id,
        "attempt": attempt,
        "start": start,
        "end": None,
        "status": None,
        "attrs": _plain(attrs) if attrs else {},
    }


def _append(trace: dict[str, Any], record: dict[str, Any]) -> None:
    if len(trace["events"]) < MOST_EVENTS:
        trace["events"].append(record)
    elif "events left out" not in _told:
        _told.add("events left out")
        logger.warning("a sample has %d events in its trace; further ones are left out", MOST_EVENTS)


def _identity(record: dict[str, Any]) -> tuple[Any, ...]:
    return record.get("span_id"), record["name"], record.get("time")


def _plain(value: Any) -> Any:
    """`value` in plain types, which every dump can hold."""
    if type(value) in _NUMBERS or (type(value) is str and len(value) <= _LONGEST_TEXT):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | float | type(None)):
        return value
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"


class _harmless:
    """Stops what the block raises, and logs a warning, once for each subject.

    It is a class because it runs for every sample: a generator would take longer than what it guards.
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception):
            _tell_once(self._subject, error)
            return True
        return False


def _tell_once(subject: str, error: Exception) -> None:
    if subject not in _told:
        _told.add(subject)
        logger.warning("%s is not in the trace: %s: %s", subject, type(error).__name__, error)
