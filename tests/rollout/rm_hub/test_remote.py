"""Rewards from a service over HTTP."""

import asyncio
import itertools
import json
import logging
from types import SimpleNamespace

import pytest
from aiohttp import web

from slime.rollout import user_functions
from slime.rollout.rm_hub import async_rm, batched_async_rm, remote
from slime.rollout.rm_hub.remote import remote_rm
from slime.utils import http_exchange, http_utils
from slime.utils.errors import UserError
from slime.utils.http_utils import HttpError
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args
from tests.support.processes.clocks import run_in_no_time
from tests.support.processes.http_server import serving

KEY = "s3cret-token"
LONGEST_WAIT_S = remote.MAX_WAIT_S


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, "MAX_WAIT_S", 0.01)
    monkeypatch.setattr(remote.random, "uniform", lambda low, high: 0.0)
    monkeypatch.setattr(http_utils, "_told_until", {})
    monkeypatch.setattr(http_utils.outages, "_failures", {})
    for name in ("SLIME_RM_API_KEY", "SLIME_RM_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


def sample(**fields):
    return Sample(
        **{
            "index": 7,
            "prompt": [{"role": "user", "content": "1+1?"}],
            "response": r"so \boxed{2}",
            "label": 2,
            **fields,
        }
    )


class Service:
    """Answers with what `answers` gives in turn: a status and a value; the last one stays."""

    def __init__(self, *answers):
        self.answers, self.bodies, self.keys = list(answers), [], []

    async def __call__(self, request):
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        status, value = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return web.Response(status=status, text=value if isinstance(value, str) else json.dumps(value))


def graded(service, *samples, path="/reward", grade=batched_async_rm, **changes):
    async def main():
        async with serving(service) as url:
            args = make_args("", rm_type="remote_rm", **changes)
            args.rm_url = url + path
            return await grade(args, list(samples) or [sample()])

    return asyncio.run(main())


def test_a_sample_is_a_request_and_its_answer_the_reward():
    service = Service((200, 0.5))
    assert graded(service) == [0.5]
    assert service.bodies == [{"prompt": sample().prompt, "response": sample().response, "label": 2}]
    assert service.keys == [None]


def test_a_service_is_asked_without_a_thread(monkeypatch):
    monkeypatch.setattr(user_functions, "_ThreadCall", None)
    assert graded(Service((200, 0.5)), sample(), sample(index=8)) == [0.5, 0.5]


def test_the_type_of_a_row_the_last_box_and_a_dict():
    service = Service((200, {"score": 1, "why": "right"}))
    row = sample(metadata={"rm_type": "boxed_remote_rm"})
    assert graded(service, row, reward_key="score") == [{"score": 1.0, "why": "right"}]
    assert service.bodies[0]["response"] == "2" and row.response == sample().response


def test_the_answer_is_what_the_service_says():
    async def alone(args, samples):
        return await remote_rm(args, samples[0], evaluation=True)

    assert graded(Service((200, ["any", {"json": None}])), grade=alone) == ["any", {"json": None}]


@pytest.mark.parametrize(("status", "attempts"), [(503, 3), (429, 3), (500, 3)])
def test_what_may_pass_is_tried_again(status, attempts, caplog):
    service = Service(*[(status, "later")] * (attempts - 1), (200, 1))
    with caplog.at_level(logging.WARNING):
        assert graded(service) == [1.0]
    assert len(service.bodies) == attempts
    # Many samples wait for the same service; it is told of once.
    assert sum("trying again" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_r15_a_refusal_is_not_repeated(status):
    service = Service((status, "no such field"))
    with pytest.raises(HttpError, match=f"answered {status}: no such field"):
        graded(service)
    assert len(service.bodies) == 1


def test_ten_attempts_at_most():
    service = Service((503, "down"))
    with pytest.raises(
        HttpError, match=r"answered 503: down \(10 attempts; --rm-type remote_rm gives up after 120 s\)"
    ):
        graded(service)
    assert len(service.bodies) == 10


def test_a_service_that_is_not_there_or_never_answers(monkeypatch):
    async def nobody():
        args = make_args("", rm_type="remote_rm")
        args.rm_url = f"http://127.0.0.1:{http_utils.find_available_port(20000)}/"
        try:
            return await async_rm(args, sample())
        finally:
            await http_utils.close_http_client()

    with pytest.raises(HttpError, match=r"failed: ClientConnectorError.*\(10 attempts"):
        asyncio.run(nobody())
    monkeypatch.setattr(remote, "TOTAL_TIMEOUT_S", 0.05)
    held = asyncio.Event()

    async def never(request):
        await held.wait()

    with pytest.raises(HttpError, match=r"did not answer \(1 attempts"):
        graded(never)


def test_the_whole_takes_no_longer_than_its_limit(monkeypatch):
    """The next wait would pass the limit, so there is none."""
    monkeypatch.setattr(remote, "MAX_WAIT_S", 1000.0)
    monkeypatch.setattr(remote, "TOTAL_TIMEOUT_S", 0.9)
    service = Service((503, "down"))
    with pytest.raises(HttpError, match="1 attempts"):
        graded(service)


def test_waits_double_up_to_half_a_minute_and_end_with_the_whole(monkeypatch):
    times, args = [], make_args("", rm_type="remote_rm")
    args.rm_url = "http://grader:1"

    async def refused(*given):
        times.append(asyncio.get_running_loop().time())
        raise HttpError("refused", status=503)

    monkeypatch.setattr(remote, "MAX_WAIT_S", LONGEST_WAIT_S)
    # The longest that is drawn.
    monkeypatch.setattr(remote.random, "uniform", lambda low, high: high)
    monkeypatch.setattr(remote, "post_control", refused)
    with pytest.raises(HttpError, match="8 attempts"):
        run_in_no_time(remote_rm(args, sample()))
    waits = [after - before for before, after in itertools.pairwise(times)]
    assert waits == [1.5, 2.5, 4.5, 8.5, 16.5, 30.5, 30.5], "another one would end after 120 s"


@pytest.mark.parametrize("source", ["variable", "file"])
def test_the_key_is_sent_and_never_shown(monkeypatch, tmp_path, source, caplog):
    (tmp_path / "key").write_text(KEY + "\n")
    if source == "variable":
        monkeypatch.setenv("SLIME_RM_API_KEY", KEY)
    else:
        monkeypatch.setenv("SLIME_RM_API_KEY_FILE", str(tmp_path / "key"))
    service = Service((200, 1))
    assert graded(service) == [1.0] and service.keys == [f"Bearer {KEY}"]
    for status in (401, 503):
        with caplog.at_level(logging.DEBUG), pytest.raises(HttpError) as failure:
            graded(Service((status, f"wrong token {KEY}")), path="/?api_key=other-s3cret")
        told = str(failure.value) + failure.value.body + repr(failure.value.url)
        told += "".join(record.getMessage() for record in caplog.records if record.name.startswith("slime"))
        assert "s3cret" not in told and "wrong token" in told
        assert ("does SLIME_RM_API_KEY hold its token?" in told) == (status == 401)
        assert failure.value.__cause__ is None and failure.value.__context__ is None


def test_an_address_is_needed():
    args = make_args("", rm_type="remote_rm")
    args.rm_url = None
    with pytest.raises(UserError, match="--rm-type remote_rm needs --rm-url"):
        asyncio.run(async_rm(args, sample()))


def test_requests_are_limited_by_rm_concurrency_and_not_by_generation(monkeypatch):
    """Eight wait for each other: the service sees all that --rm-concurrency allows, though one generation may run."""
    running = peak = 0
    together = asyncio.Event()

    async def gathers(request):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        if running == 8:
            together.set()
        await together.wait()
        running -= 1
        return web.json_response(1)

    async def grade(args, samples):
        http_utils.init_http_client(args)
        return await batched_async_rm(args, samples)

    monkeypatch.setattr(http_utils, "_settings", http_utils.HttpSettings())
    many = [sample(index=i) for i in range(16)]
    assert graded(gathers, *many, grade=grade, rm_concurrency=8, sglang_server_concurrency=1) == [1.0] * 16
    assert peak == 8


def test_a_dead_service_is_not_waited_for_as_long_for_each_sample(monkeypatch):
    """Else a rollout whose service is dead would take as many times 120 s as there are turns of its samples."""
    seconds = itertools.count(step=10)
    monkeypatch.setattr(http_exchange, "time", SimpleNamespace(monotonic=lambda: next(seconds)))

    async def nobody():
        args = make_args("", rm_type="remote_rm")
        args.rm_url = f"http://127.0.0.1:{http_utils.find_available_port(20000)}/"
        try:
            return await asyncio.gather(async_rm(args, sample()), return_exceptions=True) + await asyncio.gather(
                *(async_rm(args, sample()) for _ in range(2)), return_exceptions=True
            )
        finally:
            await http_utils.close_http_client()

    first, *others = map(str, asyncio.run(nobody()))
    assert "(10 attempts" in first and all("(1 attempts" in other for other in others)
