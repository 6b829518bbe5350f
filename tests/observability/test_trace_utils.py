"""Spans and events that samples carry."""

import asyncio
import contextvars
import copy
import json

import numpy as np
import pytest

from slime.observability import trace_utils
from slime.observability.trace_utils import (
    bind_trace,
    bind_trace_carrier,
    build_sglang_meta_trace_attrs,
    carry_trace,
    export_trace,
    import_trace,
    trace_engine_answer,
    trace_event,
    trace_function,
    trace_next_attempt,
    trace_span,
)
from slime.utils.types import Sample


@pytest.fixture(autouse=True)
def told(monkeypatch):
    monkeypatch.setattr(trace_utils, "_told", set())


@pytest.fixture
def sample():
    return Sample(index=5, group_index=2)


def spans(sample):
    return {record["name"]: record for record in sample.trace["events"] if record["kind"] == "span"}


def test_a_sample_carries_what_happened_to_it_in_plain_values(sample):
    with trace_span(sample, "outer", {"a": 1, "array": np.arange(3), "number": np.float32(0.5), "none": None}) as span:
        span.set("b", (1, "x"))
        span.update({"c": 2}, d=3)
        trace_event(sample, "told", {"why": "because"})
    assert (sample.trace["version"], sample.trace["sample_id"], sample.trace["group_id"]) == (1, 5, 2)
    outer, event = sample.trace["events"]
    assert outer["attrs"] == {
        "a": 1,
        "array": "array([0, 1, 2])",
        "number": 0.5,
        "none": None,
        "b": [1, "x"],
        "c": 2,
        "d": 3,
    }
    assert outer["status"] == "ok" and outer["start"] <= event["time"] <= outer["end"]
    assert event["parent_id"] == outer["span_id"] and event["attrs"] == {"why": "because"}
    assert json.loads(json.dumps(sample.trace)) == sample.trace
    assert Sample.from_dict(sample.to_dict()).trace == sample.trace


def test_spans_nest_by_the_task_that_they_are_in(sample):
    async def inner(name):
        async with trace_span(sample, name):
            await asyncio.sleep(0)
            with trace_span(sample, f"{name} within"):
                await asyncio.to_thread(trace_event, sample, f"{name} event")

    async def main():
        with trace_span(sample, "outer"):
            await asyncio.gather(inner("one"), inner("two"))

    asyncio.run(main())
    found = spans(sample)
    for name in ("one", "two"):
        assert found[name]["parent_id"] == found["outer"]["span_id"]
        assert found[f"{name} within"]["parent_id"] == found[name]["span_id"]
    events = {record["name"]: record for record in sample.trace["events"] if record["kind"] == "event"}
    assert events["two event"]["parent_id"] == found["two within"]["span_id"]


def test_a_span_of_a_group_is_in_every_sample_of_it_and_in_no_other():
    group, other = [Sample(index=0), [Sample(index=1), Sample(index=2)]], Sample(index=9)
    with trace_span(group, "group"):
        with trace_span(group[1][0], "one"):
            trace_event(other, "elsewhere")
    ids = {spans(one)["group"]["span_id"] for one in (group[0], *group[1])}
    assert len(ids) == 1 and spans(group[1][0])["one"]["parent_id"] in ids
    assert "one" not in spans(group[0]) and other.trace["events"][0]["parent_id"] is None


def test_a_span_of_what_comes_of_its_block():
    """Of samples that are there only later, copies of what is recorded meanwhile among them."""
    with trace_span([], "group") as span:
        first, second = Sample(index=1), Sample(index=2)
        with trace_span(first, "one") as inner:
            copied = copy.deepcopy(first)
            inner.include(carry_trace(first, [copied, second]))
        span.include([copied, [second]])
    for sample in (copied, second):
        found = spans(sample)
        assert found["one"]["parent_id"] == found["group"]["span_id"] and found["group"]["parent_id"] is None
        assert found["one"]["end"] is not None and found["group"]["end"] is not None
        assert found["group"]["start"] <= found["one"]["start"] and len(sample.trace["events"]) == 2
    assert second.trace is first.trace and copied.trace is not first.trace


def test_a_span_of_samples_that_share_a_trace_is_in_it_once_and_ends(sample):
    other = Sample()
    with trace_span(sample, "once"):
        pass
    carry_trace(sample, other)
    both = trace_span([sample, other], "group_reward_model")
    for _ in range(2):
        with both:
            pass
    assert [record["name"] for record in sample.trace["events"]] == ["once", *["group_reward_model"] * 2]
    assert all(record["end"] is not None and record["status"] == "ok" for record in sample.trace["events"])
    assert len({record["span_id"] for record in other.trace["events"]}) == 3


def test_what_happened_to_samples_that_share_a_trace_is_in_it_once(sample):
    other = Sample()
    trace_event(sample, "made")
    carry_trace(sample, other)
    trace_event([sample, [other]], "graded")
    trace_next_attempt([sample, other])
    assert [record["name"] for record in sample.trace["events"]] == ["made", "graded"]
    assert sample.trace["attempt"] == 1


def test_a_span_whose_block_raises_says_so_and_lets_it_pass(sample):
    with pytest.raises(KeyError), trace_span(sample, "broken"):
        raise KeyError("no such tool")
    assert spans(sample)["broken"]["status"] == "error"
    assert spans(sample)["broken"]["attrs"]["error"] == "KeyError: 'no such tool'"


def test_a_span_that_lasts_has_no_end_yet(sample):
    with trace_span(sample, "lasting"):
        assert spans(sample)["lasting"]["end"] is None and spans(sample)["lasting"]["status"] is None
    assert spans(sample)["lasting"]["end"] is not None


def test_functions_and_their_arguments(sample):
    @trace_function("named", attrs_getter=lambda args, sample: {"length": len(args)})
    async def generate(args, sample):
        return sample

    @trace_function(target=lambda group: group[0])
    def grade(group):
        return 1.0

    @trace_function(target=None)
    def anywhere():
        return 2

    assert asyncio.run(generate([1, 2], sample)) is sample and grade([sample]) == 1.0
    with bind_trace(sample):
        assert anywhere() == 2
    assert anywhere() == 2
    assert list(spans(sample)) == ["named", "grade", "anywhere"] and spans(sample)["named"]["attrs"] == {"length": 2}
    assert generate.__name__ == "generate"


def test_another_process_records_below_the_span_that_called_it(sample):
    with trace_span(sample, "here"):
        carrier = json.loads(json.dumps(export_trace(sample)))
    assert carrier["traces"][0]["events"] == []

    def elsewhere(carrier):
        with bind_trace_carrier(carrier), trace_span(None, "there"):
            trace_event(None, "note")
        return json.loads(json.dumps(carrier))

    back = contextvars.Context().run(elsewhere, carrier)
    for _ in range(2):
        import_trace(sample, back)
    assert [record["name"] for record in sample.trace["events"]] == ["here", "there", "note"]
    assert spans(sample)["there"]["parent_id"] == spans(sample)["here"]["span_id"]
    import_trace(sample, None)
    with bind_trace_carrier(None):
        trace_event(None, "nowhere")
    assert len(sample.trace["events"]) == 3


def test_attempts_are_counted(sample):
    trace_event(sample, "first")
    trace_next_attempt(sample)
    trace_event(sample, "second")
    assert [record["attempt"] for record in sample.trace["events"]] == [0, 1] and sample.trace["attempt"] == 1


@pytest.mark.parametrize(
    "misuse",
    [
        lambda: trace_span(3, "wrong").__enter__(),
        lambda: trace_event(object(), "wrong"),
        lambda: import_trace(Sample(), {"traces": [{}]}),
        lambda: trace_next_attempt(7),
        lambda: export_trace(7),
        lambda: trace_function(target="no_such_parameter")(lambda sample: sample)(1),
        lambda: trace_function(target=None, attrs_getter=lambda: 1 / 0)(lambda: 1)(),
    ],
)
def test_nothing_is_raised_into_the_code_that_is_traced(caplog, misuse):
    misuse()
    misuse()
    assert sum("is not in the trace" in record.message for record in caplog.records) == 1


def test_the_block_of_a_span_that_cannot_be_recorded_runs(caplog):
    with trace_span(3, "wrong") as span:
        span.set("a", 1)
    with bind_trace_carrier({"parent_id": 3}):
        pass
    assert "span 'wrong'" in caplog.text


def test_events_are_limited(sample, monkeypatch, caplog):
    monkeypatch.setattr(trace_utils, "MOST_EVENTS", 3)
    for _ in range(5):
        trace_event(sample, "again")
    assert len(sample.trace["events"]) == 3 and "further ones are left out" in caplog.text


META = {
    "id": "r1", "prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 0, "weight_version": "7", "e2e_latency": 1.5,
    "finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 1, None]], "spec_verify_ct": None,
}  # fmt: skip


def test_what_engines_tell_becomes_attributes(sample):
    expected = {
        "id": "r1", "prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 0, "weight_version": "7", "e2e_latency": 1.5,
        "finish_reason": "stop",
    }  # fmt: skip
    assert build_sglang_meta_trace_attrs(META) == expected
    with trace_span(sample, "sglang_generate") as span:
        trace_engine_answer(span, {"text": "x", "meta_info": META})
    assert spans(sample)["sglang_generate"]["attrs"] == expected and len(sample.trace["events"]) == 1


def test_prefill_and_decode_of_two_engines_are_spans_within(sample):
    shared = {"pd_prefill_forward_duration": 0.5, "pd_prefill_bootstrap_duration": 0.25, "pd_decode_forward_duration": 2.0,
              "pd_transfer_total_mb": 12.0, "pd_prefill_retry_count": 1}  # fmt: skip
    with trace_span(sample, "sglang_generate") as span:
        trace_engine_answer(span, {"meta_info": {**META, **shared}})
    found = spans(sample)
    start = found["sglang_generate"]["start"]
    prefill, decode, summary = (found[f"sglang_pd_{name}"] for name in ("prefill", "decode", "summary"))
    assert prefill["attrs"] == {"forward_duration": 0.5, "bootstrap_duration": 0.25, "retry_count": 1}
    assert (prefill["end"] - start, decode["start"] - start, decode["end"] - start) == pytest.approx((0.75, 0.75, 2.75))
    assert summary["attrs"] == shared and summary["end"] - start == pytest.approx(2.75)
    assert {one["parent_id"] for one in (prefill, decode, summary)} == {found["sglang_generate"]["span_id"]}
