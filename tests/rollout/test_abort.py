"""How a step is wound down: who is aborted, and that nobody stretches the time limit."""

import asyncio
import functools
import socket
from types import SimpleNamespace

import pytest

from slime.rollout import abort
from slime.rollout.engine_request import ask_engine
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation_call import GenerationCall
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.utils import http_utils
from slime.utils.http_utils import close_http_client
from slime.utils.types import Sample
from tests.support.models.rollout_args import CountingDataSource, make_args
from tests.support.models.rollout_steps import group_numbers, plugin, prompt_number, run_step
from tests.support.processes.clocks import LeapingLoop, has_ended, run_in_no_time
from tests.support.processes.fake_generate_server import FakeGenerateServer
from tests.support.processes.waiting import until

Status = Sample.Status

# Every other limit is far above the one of the abort: whoever waits for another one does not come back in time.
PATIENT = {"abort_timeout": 0.5, "http_control_timeout": 600.0, "http_request_timeout": 600.0, "http_max_retries": 600}
SOON_S = 200.0
# Of the abort, in tests where others have to answer before it is over: the clock leaps to its end when they have.
LONG_S = 100.0
LATER_S = 400.0


def leaping(when):
    """A loop on which the abort is over as soon as `when` holds."""
    return functools.partial(LeapingLoop, when, LONG_S)


def test_r6_an_engine_that_stays_busy_does_not_hold_the_step(server, checkpoint, caplog):
    args = make_args(checkpoint, server.port, over_sampling_batch_size=3, **PATIENT)
    args.abort_timeout = LONG_S
    server.hold = lambda payload: prompt_number(payload, args) == 0
    server.always_busy = True
    # When it is asked again, its first answer was seen.
    output = run_step(
        args, CountingDataSource(2), limit_s=LATER_S, loop_factory=leaping(lambda _: server.loads_asked >= 2)
    )
    assert len(output.samples) == 2
    assert "still busy at the end of --abort-timeout" in caplog.text


def test_r6_an_engine_is_told_every_three_seconds_until_the_end(monkeypatch):
    """A request that arrives behind an abort is not aborted by it."""
    sent = []

    async def send(call, url, share):
        sent.append(asyncio.get_running_loop().time())

    async def is_idle(url):
        return False

    monkeypatch.setattr(abort, "_send_abort", send)
    monkeypatch.setattr(abort, "_is_idle", is_idle)
    run_in_no_time(abort._abort_engine(GenerationCall(), "http://e", set(), 10.0, 0.0))
    assert sent == pytest.approx([0, 3, 6, 9], abs=0.5)


def test_r6_engines_of_every_model_are_aborted(server, checkpoint):
    with FakeGenerateServer() as other:
        routers = {"actor": ("127.0.0.1", server.port), "reward": ("127.0.0.1", other.port)}
        args = make_args(checkpoint, server.port, over_sampling_batch_size=3, sglang_model_routers=routers)
        server.hold = lambda payload: prompt_number(payload, args) == 0
        run_step(args, CountingDataSource(2))
        assert server.aborts >= 1 and other.aborts >= 1


def test_an_abort_waits_for_a_router_that_comes_back_and_lists_its_engines(server, checkpoint, monkeypatch):
    looks = []
    supply = SimpleNamespace(
        is_serving=lambda: True, has_router=lambda: looks.append(server.aborts) or len(looks) > 3,
        is_decided=lambda: True, deaths=lambda: 0, doubt_all=lambda cause: None,
    )  # fmt: skip
    monkeypatch.setitem(http_utils._supplies, server.url, supply)
    args = make_args(checkpoint, server.port, over_sampling_batch_size=3)
    server.hold = lambda payload: prompt_number(payload, args) == 0
    run_step(args, CountingDataSource(2))
    assert looks[:4] == [0] * 4 and server.aborts >= 1


def test_r14_a_custom_function_that_ignores_the_abort_is_cancelled_and_its_prompts_return(
    server, checkpoint, tmp_path, caplog
):
    path = plugin(
        tmp_path,
        "async def fn(args, sample, sampling_params):\n"
        "    if sample.group_index == 0:\n        await asyncio.Event().wait()\n"
        "    sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0])\n"
        "    sample.status = Sample.Status.COMPLETED\n    return sample\n",
    )
    args = make_args(
        checkpoint, server.port, custom_generate_function_path=path, over_sampling_batch_size=3, abort_timeout=0.3
    )
    source = CountingDataSource(2)
    output = run_step(args, source)
    assert group_numbers(output.samples) == [1, 2]
    assert group_numbers(source.returned) == [0]
    assert "cancelling group 0" in caplog.text
    assert output.metrics["rollout/aborted_samples"] == 2


@pytest.fixture
def silent_port():
    """A port where connections are accepted and nothing is ever answered."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1]


def held_answer(source):
    """The response that group 0 had when it was interrupted."""
    group = next(group for group in source.returned if group[0].group_index == 0)
    return {(sample.status, sample.response) for sample in group}


def test_an_engine_that_never_answers_does_not_stretch_the_abort(server, checkpoint, silent_port, caplog):
    args = make_args(checkpoint, server.port, over_sampling_batch_size=3, partial_rollout=True, **PATIENT)
    args.abort_timeout = LONG_S
    server.other_workers = [f"http://127.0.0.1:{silent_port}"]
    server.hold = lambda payload: prompt_number(payload, args) == 0
    source = CountingDataSource(2)
    output = run_step(args, source, limit_s=LATER_S, loop_factory=leaping(has_ended("group 0")))
    assert group_numbers(output.samples) == [1, 2]
    assert held_answer(source) == {(Status.ABORTED, "F")}, "the other engine is aborted all the same"
    assert f"engine http://127.0.0.1:{silent_port} did not answer before the end of --abort-timeout" in caplog.text


def test_an_engine_that_fails_once_is_sent_the_next_abort(server, checkpoint, caplog, monkeypatch):
    monkeypatch.setattr(abort, "REPEAT_S", 0.01)
    args = make_args(checkpoint, server.port, over_sampling_batch_size=3, partial_rollout=True, **PATIENT)
    args.abort_timeout = LONG_S
    server.refused_aborts = 3
    server.hold = lambda payload: prompt_number(payload, args) == 0
    source = CountingDataSource(2)
    run_step(args, source, limit_s=LATER_S)
    assert held_answer(source) == {(Status.ABORTED, "F")} and server.aborts >= 1
    assert [record.levelname for record in caplog.records if "did not take part" in record.message] == ["WARNING"]


def test_an_engine_that_is_dead_does_not_stretch_the_abort(server, checkpoint, caplog):
    args = make_args(checkpoint, server.port, over_sampling_batch_size=3, **PATIENT)
    args.abort_timeout = LONG_S
    # Nobody listens there.
    server.other_workers = ["http://127.0.0.1:1"]
    server.hold = lambda payload: prompt_number(payload, args) == 0
    run_step(args, CountingDataSource(2), limit_s=LATER_S)
    assert "engine http://127.0.0.1:1 did not take part in the abort" in caplog.text
    assert "--abort-timeout" not in caplog.text, "it is over with the tasks"


@pytest.mark.parametrize(
    "page",
    [
        "<html>Back soon</html>",
        '["back", "soon"]',
        "{}",
        '{"loads": 7}',
        '{"loads": [{}]}',
        '{"loads": [{"num_reqs": "3"}]}',
    ],
)
def test_the_page_of_a_proxy_before_an_engine_is_told_and_the_abort_goes_on(server, checkpoint, caplog, page):
    args = make_args(checkpoint, server.port, over_sampling_batch_size=3, partial_rollout=True, **PATIENT)
    args.abort_timeout = LONG_S
    server.loads_page = page
    server.hold = lambda payload: prompt_number(payload, args) == 0
    source = CountingDataSource(2)
    output = run_step(args, source, limit_s=LATER_S)
    assert group_numbers(output.samples) == [1, 2] and held_answer(source) == {(Status.ABORTED, "F")}
    (told,) = [record.message for record in caplog.records if "did not take part in the abort" in record.message]
    assert server.url in told and page.strip('"<{[')[:4] in told
    assert "--abort-timeout" not in caplog.text, "it is over with the tasks"


def test_a_router_that_answers_with_something_else_does_not_hold_the_abort(server, checkpoint, caplog):
    args = make_args(checkpoint, server.port, over_sampling_batch_size=3, abort_timeout=0.3)
    server.other_workers = [None]
    server.hold = lambda payload: prompt_number(payload, args) == 0
    output = run_step(args, CountingDataSource(2))
    assert group_numbers(output.samples) == [1, 2]
    assert f"the router of model 'default' at {server.url} did not list its workers" in caplog.text


def test_a_router_that_never_answers_does_not_stretch_the_abort(server, checkpoint, silent_port, caplog):
    args = make_args(checkpoint, server.port, over_sampling_batch_size=3, partial_rollout=True, **PATIENT)
    args.abort_timeout = LONG_S
    args.sglang_model_routers = {"judge": ("127.0.0.1", silent_port), "default": ("127.0.0.1", server.port)}
    server.hold = lambda payload: prompt_number(payload, args) == 0
    source = CountingDataSource(2)
    run_step(args, source, limit_s=LATER_S, loop_factory=leaping(has_ended("group 0")))
    assert held_answer(source) == {(Status.ABORTED, "F")}, "the engines of the other model are aborted all the same"
    assert "no abort was sent to the engines of model 'judge': its router" in caplog.text


def test_an_abort_does_not_wait_for_a_router_that_is_gone(server, checkpoint, caplog):
    args = make_args(checkpoint, server.port, over_sampling_batch_size=3, **PATIENT)
    args.sglang_model_routers = {"default": ("127.0.0.1", server.port), "reward": ("127.0.0.1", 1)}
    server.hold = lambda payload: prompt_number(payload, args) == 0
    output = run_step(args, CountingDataSource(2), limit_s=SOON_S)
    assert len(output.samples) == 2
    assert "no abort was sent to the engines of model 'reward'" in caplog.text


def test_tasks_end_by_themselves_where_no_engine_is_listed(server, checkpoint, tmp_path, monkeypatch, caplog):
    """Say in a run whose answers come from elsewhere."""
    monkeypatch.setattr(abort, "list_engine_urls", lambda *_, **__: asyncio.sleep(0, []))
    path = plugin(
        tmp_path,
        "from slime.rollout.generate_state import GenerateState\n"
        "async def fn(args, sample, sampling_params):\n"
        "    sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0], text='half')\n"
        "    while sample.group_index == 0 and not GenerateState(args).aborted:\n        await asyncio.sleep(0.01)\n"
        "    await asyncio.sleep(0.05)\n"
        "    ends = sample.group_index\n"
        "    sample.status = Sample.Status.COMPLETED if ends else Sample.Status.ABORTED\n    return sample\n",
    )
    args = make_args(
        checkpoint, server.port, custom_generate_function_path=path, over_sampling_batch_size=3, partial_rollout=True
    )
    source = CountingDataSource(2)
    run_step(args, source, limit_s=SOON_S)
    assert held_answer(source) == {(Status.ABORTED, "half")} and "cancelling" not in caplog.text


def test_a_task_that_refuses_its_cancellation_does_not_stretch_the_abort(
    server, checkpoint, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(abort, "CANCEL_TIMEOUT_S", 600.0)
    path = plugin(
        tmp_path,
        "async def fn(args, sample, sampling_params):\n"
        "    while sample.group_index == 0 and not args.released:\n"
        "        try:\n            await asyncio.sleep(0.01)\n"
        "        except asyncio.CancelledError:\n            pass\n"
        "    sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0])\n"
        "    sample.status = Sample.Status.COMPLETED\n    return sample\n",
    )
    args = make_args(checkpoint, server.port, custom_generate_function_path=path, over_sampling_batch_size=3, **PATIENT)
    args.released = False
    source = CountingDataSource(2)

    async def main():
        # Else a step that waits for the task would keep the test waiting as well.
        asyncio.get_running_loop().call_later(SOON_S, setattr, args, "released", True)
        try:
            return await asyncio.wait_for(generate_rollout_async(args, 0, source), SOON_S)
        finally:
            args.released = True
            await close_http_client()

    assert group_numbers(asyncio.run(main()).samples) == [1, 2]
    assert group_numbers(source.returned) == [0]
    assert "do not let themselves be cancelled: group 0" in caplog.text


def test_an_engine_is_told_of_those_requests_alone_that_were_sent_to_it_past_the_router(server, checkpoint):
    """A router that drops the fields for experts is passed by, and so it is known which engine has a request."""
    args = make_args(checkpoint, server.port, abort_timeout=LONG_S)
    fields = {"sampling_params": {"max_new_tokens": 8}, "return_routed_experts": True}
    GenerateState(args)

    async def main(other):
        with GenerationCall().under_way(), GenerationCall().under_way() as call:
            # Nobody's child: two calls are under way.
            call.parent = None
            for number in range(6):
                asked = ask_engine(args, Sample(index=number), {"input_ids": [70 + number], **fields})
                call.pendings.add(asyncio.create_task(asked))
            await until(lambda: len(held(server)) == len(held(other)) == 3)
            # Of those at the router, which is an engine here as well, nobody knows that it had them sent nowhere else.
            assert call.engine_of_request == dict.fromkeys(held(other), other.url)
            await asyncio.wait_for(abort.abort(args, 0), SOON_S)
            assert call.engine_of_request == {} and call.request_ids == set()
            await close_http_client()

    def held(engine):
        return [request["rid"] for request in engine.requests if request["input_ids"] != [0]]

    with FakeGenerateServer() as other:
        server.other_workers = [other.url]
        server.hold = other.hold = lambda payload: payload["input_ids"] != [0]
        asyncio.run(main(other))
        assert server.aborts == other.aborts == 0
        assert set(server.aborted_ids) == set(held(server)) and set(other.aborted_ids) >= set(held(other))


def test_engines_are_not_told_of_requests_that_are_answered_nor_of_all_at_once(monkeypatch):
    """With as many engines as here, each of as many requests would go to each of them otherwise, all in one moment."""
    urls, told, most = [f"http://engine{number}" for number in range(8)], [], 0
    owners = {f"request {number}": urls[number * 7 % 8] for number in range(800)}
    call, other = GenerationCall(), GenerationCall()

    async def post_control(url, order, max_retries):
        nonlocal most
        most = max(most, len(asyncio.all_tasks()))
        told.append(order["rid"])
        await asyncio.sleep(0)
        if url.removesuffix("/abort_request") == owners[order["rid"]]:
            call.request_ids.discard(order["rid"])

    async def listed(name, router, max_retries):
        return urls

    monkeypatch.setattr(abort, "post_control", post_control)
    monkeypatch.setattr(abort, "list_engine_urls", listed)
    call.request_ids |= owners.keys()
    with other.under_way():
        call.parent = None
        with call.under_way():
            asyncio.run(abort.abort(make_args("", 1, abort_timeout=LONG_S)))
    assert call.request_ids == set() and set(told) == set(owners)
    assert len(told) < 0.65 * len(urls) * len(owners)
    assert most <= len(urls) * (abort.ABORTS_AT_A_TIME + 1) + 10
