"""Generation by a stream: from events to a sample, with a connection that may break."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from slime.rollout import generation
from slime.rollout.failures import SampleFailed
from slime.rollout.generation import generate, generate_and_rm
from slime.rollout.sglang_streaming_rollout import generate_streaming
from slime.rollout.staleness import oldest_version
from slime.utils import http_utils
from slime.utils.http_utils import HttpError, init_http_client, post_control, post_generate_stream
from slime.utils.types import Sample
from tests.support.models.rollout_args import CountingDataSource, make_args
from tests.support.models.rollout_steps import params, run, run_step
from tests.support.processes.http_server import forget_everything, serving
from tests.support.processes.http_server import make_args as http_args
from tests.support.processes.waiting import until

Status = Sample.Status
PATH = "slime.rollout.sglang_streaming_rollout.generate_streaming"


def as_told(sample):
    values = sample.to_dict()
    del values["session_id"], values["trace"]
    return values


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_gives_what_one_answer_gives(server, checkpoint, begun):
    args = make_args(checkpoint, server.port)
    samples = [Sample(index=0, prompt="p") for _ in range(2)]
    for sample in samples if begun else ():
        sample.tokens = [65, 90]
        sample.append_response_tokens(tokens=[91], log_probs=[-1.0], text="[")
    whole = run(generate(args, samples[0], params(args)))
    streamed = run(generate_streaming(args, samples[1], params(args)))
    assert as_told(streamed) == as_told(whole)
    assert streamed.status is Status.COMPLETED and streamed.weight_version_spans == [("1", 0, 3 + begun)]
    assert [request.get("stream") for request in server.requests] == [None, True]


def test_what_came_before_a_broken_connection_is_kept_and_gone_on_with(server, checkpoint):
    server.break_after = lambda payload: 2 if len(payload["input_ids"]) == 1 else None
    args = make_args(checkpoint, server.port)
    cut = run(generate_streaming(args, Sample(index=0, prompt="p"), params(args)))
    assert (cut.tokens[1:], cut.response, cut.response_length) == ([70, 71], "FG", 2)
    assert cut.status is Status.ABORTED and cut.rollout_log_probs == [-0.5, -0.5]
    assert cut.weight_versions == ["1"] and cut.weight_version_spans == [("1", 0, 2)]
    server.weight_version = "2"
    cut.status = Status.PENDING
    whole = run(generate_streaming(args, cut, params(args)))
    assert (whole.tokens[1:], whole.status) == ([70, 71, 70, 71, 72], Status.COMPLETED)
    assert whole.weight_version_spans == [("1", 0, 2), ("2", 2, 5)]
    assert [request["sampling_params"]["max_new_tokens"] for request in server.requests] == [8, 6]


def test_tokens_of_a_broken_stream_keep_the_version_that_made_them(server, checkpoint, monkeypatch):
    """A push between two answers is seen in the second: what this adds may have been made before it."""

    async def stream(args, sample, payload, on_answer):
        for count, server.weight_version in ((1, "1"), (2, "1"), (4, "2"), (5, "3"), (7, "3")):
            on_answer(server._output(payload, list(range(70, 70 + count)), None))

    monkeypatch.setattr(generation, "stream_engine", stream)
    args, sample = make_args(checkpoint, server.port), Sample(index=0, prompt="p", tokens=[65, 90])
    sample.append_response_tokens(tokens=[91], log_probs=[-1.0], text="[")
    cut = run(generate_streaming(args, sample, params(args)))
    assert (cut.status, cut.response_length) == (Status.ABORTED, 8)
    assert cut.weight_version_spans == [("1", 1, 5), ("2", 5, 6), ("3", 6, 8)]
    assert cut.weight_versions == ["3"] and oldest_version(cut) == 1


def test_a_step_goes_on_with_what_came_before_its_connections_broke(server, checkpoint):
    # Prompts end with a digit, answers with an id from 70 on.
    server.break_after = lambda payload: 1 if payload["input_ids"][-1] < 70 else None
    args = make_args(checkpoint, server.port, custom_generate_function_path=PATH, partial_rollout=True)
    groups = run_step(args, CountingDataSource(2), limit_s=60).samples
    for sample in (sample for group in groups for sample in group):
        assert sample.status is Status.COMPLETED and sample.response_length == 4
    assert len(server.requests) == 2 * len([s for g in groups for s in g])


def test_a_connection_that_breaks_before_the_first_token_is_tried_again(server, checkpoint):
    broken = []
    server.break_after = lambda payload: None if broken else broken.append(1) or 0
    args = make_args(checkpoint, server.port)
    sample = run(generate_streaming(args, Sample(index=0, prompt="p"), params(args)))
    assert sample.status is Status.COMPLETED and len(server.requests) == 2


def test_an_abort_ends_a_stream_as_it_ends_an_answer(server, checkpoint):
    server.hold = lambda payload: True
    args = make_args(checkpoint, server.port, custom_generate_function_path=PATH)

    async def main():
        task = asyncio.create_task(generate_and_rm(args, Sample(index=0, prompt="p"), params(args)))
        await until(lambda: server.in_flight)
        while not task.done():
            await post_control(f"{server.url}/abort_request", {"abort_all": True})
            await asyncio.sleep(0.01)
        return await task

    sample = run(main())
    assert (sample.status, sample.response) == (Status.ABORTED, "F")


async def _streamed(body, answers, last_body=None):
    """Of several requests the last one, if there is one, is answered by `last_body`."""
    from aiohttp import web

    bodies = [body] if last_body is None else [body, last_body]

    async def handler(request):
        answer = bodies.pop(0) if len(bodies) > 1 else bodies[0]
        return web.Response(body=answer, content_type="text/event-stream")

    async with serving(handler) as url:
        await post_generate_stream(url + "/generate", {"stream": True}, answers.append)


def test_of_answers_that_have_arrived_only_the_last_is_read_and_an_error_among_them_is_told():
    answers = []
    event = b'data: {"text": "%d", "meta_info": {}}\r\n\r\n'
    body = b": a comment\n" + b"".join(event % number for number in range(50)) + b"data: [DONE]\n\n"
    run(_streamed(body, answers))
    assert answers[-1] == {"text": "49", "meta_info": {}} and len(answers) < 50
    with pytest.raises(HttpError, match="streamed .*the budget is bad"):
        run(_streamed(b'data: {"error": {"message": "the budget is bad"}}\n\ndata: [DONE]\n\n', []))


def test_a_long_event_costs_as_much_as_it_is_long_however_many_pieces_it_comes_in():
    """Experts of a long answer are megabytes of one line, and nothing else of the event loop goes on meanwhile."""
    experts, answers = "A" * 2**23, []
    body = b'data: {"meta_info": {"routed_experts": "%b"}}\r\n\r\ndata: [DONE]\n\n' % experts.encode()

    class Content:
        async def iter_any(self):
            for begin in range(0, len(body), 2**9):
                yield body[begin : begin + 2**9]

    started = time.thread_time()
    asyncio.run(http_utils._receive_events(answers.append, SimpleNamespace(content=Content(), url="http://e")))
    # To copy what is there for each of the pieces, 64 GiB in all, takes longer on the fastest of machines.
    assert time.thread_time() - started < 2
    assert answers == [{"meta_info": {"routed_experts": experts}}]


def test_a_stream_whose_engine_counts_other_tokens_than_it_tells_is_no_answer(server, checkpoint, monkeypatch):
    """Counted at the end, since answers are cumulative."""
    output, counts = server._output, []

    def counting(payload, ids, reason):
        answer = output(payload, ids, reason)
        counts.append(len(ids) + (wrong if reason else 7))
        answer["meta_info"]["completion_tokens"] = counts[-1]
        return answer

    monkeypatch.setattr(server, "_output", counting)
    args, wrong = make_args(checkpoint, server.port), 0
    assert run(generate_streaming(args, Sample(index=0, prompt="p"), params(args))).status is Status.COMPLETED
    wrong = 1
    with pytest.raises(SampleFailed, match="counts 4 tokens in its answer to sample 5, .* log-probs of 3"):
        run(generate_streaming(args, Sample(index=5, prompt="p"), params(args)))
    assert counts == [8, 9, 3, 8, 9, 4]


@pytest.mark.parametrize("page", [b"", b"<html>Back soon</html>", b"data: [DONE]\n\n"])
def test_a_stream_that_ends_without_an_answer_is_a_failed_attempt(monkeypatch, page):
    """Nobody aborted anything: a sample that counts as interrupted would be asked for again and again."""
    forget_everything(monkeypatch)
    init_http_client(http_args(http_max_retries=2))
    answers = []
    run(_streamed(page, answers, b'data: {"meta_info": {}}\n\n'))
    assert answers == [{"meta_info": {}}]
    with pytest.raises(HttpError, match=r"brought no answer, .* \(2 attempts\)") as told:
        run(_streamed(page, answers))
    assert page.decode().strip() in str(told.value)


def _ended(ids, **reason):
    """The event that ends a stream after these ids."""
    entries = [[-0.5, token, None] for token in ids]
    answer = {"text": "x" * len(ids), "meta_info": {"output_token_logprobs": entries, "finish_reason": reason or None}}
    return b"data: " + json.dumps(answer).encode() + b"\n\n"


def _failure(status, ids=()):
    return _ended(ids, type="abort", message="there is no room", status_code=status)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_failure_that_passes_is_tried_again_if_a_stream_tells_it_before_the_first_token(monkeypatch, status):
    forget_everything(monkeypatch)
    init_http_client(http_args(http_max_retries=2))
    answers = []
    run(_streamed(_failure(status), answers, _ended([70], type="stop")))
    assert [answer["text"] for answer in answers] == ["x"]
    with pytest.raises(HttpError, match=rf"answered {status}: there is no room \(2 attempts\)") as told:
        run(_streamed(_failure(status), answers))
    assert told.value.status == status and len(answers) == 1


@pytest.mark.parametrize("before", [0, 2])
def test_what_is_wrong_with_a_request_itself_is_told_by_a_stream_as_by_an_answer(monkeypatch, before):
    forget_everything(monkeypatch)
    init_http_client(http_args(http_max_retries=2))
    answers = []
    with pytest.raises(HttpError, match="answered 400: there is no room$") as told:
        run(_streamed_apart([*[_ended([70] * (n + 1)) for n in range(before)], _failure(400, [70] * before)], answers))
    assert (told.value.status, len(answers)) == (400, before)


def test_what_came_before_a_failure_that_passes_is_kept_as_if_the_connection_had_broken(monkeypatch, caplog):
    forget_everything(monkeypatch)
    answers = []
    run(_streamed_apart([_ended([70]), _failure(503, [70, 71])], answers))
    assert [answer["text"] for answer in answers] == ["x"]
    assert "the stream broke" in caplog.text and "answered 503: there is no room" in caplog.text


def test_an_abort_without_a_status_is_an_answer(monkeypatch):
    forget_everything(monkeypatch)
    answers = []
    run(_streamed(_ended([], type="abort", message="Aborted", status_code=None), answers))
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"


async def _streamed_apart(events, answers):
    """As `_streamed`, with a pause behind each event, so that the client reads them one by one."""
    from aiohttp import web

    async def handler(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
            await asyncio.sleep(0.05)
        return response

    async with serving(handler) as url:
        await post_generate_stream(url + "/generate", {"stream": True}, answers.append)
