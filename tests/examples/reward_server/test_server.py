"""The reference service of remote rewards, asked as a run asks it."""

import asyncio
import re
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from slime.rollout.rm_hub import batched_async_rm, remote
from slime.utils.errors import UserError
from slime.utils.http_utils import HttpError
from slime.utils.plugin_loader import load_function
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args
from tests.support.processes.http_server import serving_app
from tests.support.tables.page import blocks

FOLDER = Path(__file__).parents[3] / "examples/reward_server"
make_app = load_function(f"{FOLDER}/server.py:make_app")
boxed = load_function(f"{FOLDER}/server.py:grade")


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.setattr(remote, "MAX_WAIT_S", 0.01)
    monkeypatch.setattr(remote.random, "uniform", lambda low, high: 0.0)
    for name in ("SLIME_RM_API_KEY", "SLIME_RM_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


@asynccontextmanager
async def running(grader, **changes):
    options = {"api_key": None, "timeout": 30.0, "max_batch": 64, "max_waiting": 100, "max_bytes": 2**20, **changes}
    async with serving_app(make_app(grader, **options)) as url:
        yield f"{url}/grade"


def graded(grader, samples, args=None, **changes):
    async def main():
        async with running(grader, **changes) as url:
            asked = make_args("", rm_type="remote_rm", **(args or {}))
            asked.rm_url = url
            return await batched_async_rm(asked, samples)

    return asyncio.run(main())


def samples(*responses):
    return [Sample(index=i, prompt="1+1?", response=text, label=2) for i, text in enumerate(responses)]


def test_boxed_answers_by_default():
    assert graded(boxed, samples(r"\boxed{2}", r"\boxed{3}", "2")) == [1.0, 0.0, 0.0]


def test_a_missing_label_is_refused_alone():
    right, without = samples(r"\boxed{2}", r"\boxed{2}")
    without.label = None
    with pytest.raises(HttpError, match="the label of a row is None.*--label-key") as refused:
        graded(boxed, [without])
    assert refused.value.status == 400
    requests = [{"response": sample.response, "label": sample.label} for sample in (without, right)]
    failure, reward = boxed(requests)
    assert isinstance(failure, UserError) and reward == 1.0


def test_what_waits_is_graded_together(monkeypatch):
    """While the first batch is held, the others gather: behind it every batch is full but the last."""
    calls, arrived, held = [], [], threading.Event()
    batcher = make_app.__globals__["Batcher"]
    queued = batcher.grade

    async def counted(self, request):
        arrived.append(request)
        return await queued(self, request)

    def slow(requests):
        calls.append(len(requests))
        held.wait(60)
        return [len(request["response"]) for request in requests]

    monkeypatch.setattr(batcher, "grade", counted)

    async def main():
        async with running(slow, max_batch=16) as url:
            args = make_args("", rm_type="remote_rm")
            args.rm_url = url
            rewards = asyncio.create_task(batched_async_rm(args, samples(*("x" * i for i in range(40)))))
            async with asyncio.timeout(60):
                while not calls or len(arrived) < 40:
                    await asyncio.sleep(0.01)
            held.set()
            return await rewards

    assert asyncio.run(main()) == [float(i) for i in range(40)]
    first, *others = calls
    assert first <= 16 and others == [16] * ((40 - first) // 16) + [(40 - first) % 16] * ((40 - first) % 16 > 0)


def test_the_token(monkeypatch):
    with pytest.raises(HttpError, match="answered 401"):
        graded(boxed, samples("x"), api_key="right")
    monkeypatch.setenv("SLIME_RM_API_KEY", "wrong")
    with pytest.raises(HttpError, match="answered 401"):
        graded(boxed, samples("x"), api_key="right")
    monkeypatch.setenv("SLIME_RM_API_KEY", "right")
    assert graded(boxed, samples(r"\boxed{2}"), api_key="right") == [1.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"{", "no JSON"), (b"[]", "an object with prompt, response, label"), (b'{"prompt": "", "label": ""}', "an object with"),
     (b'{"prompt": "", "label": "", "response": 1}', "response must be a string"), (b"\xff\xfe", "no JSON")],
)  # fmt: skip
def test_another_request_is_refused_with_a_reason(body, message):
    async def main():
        async with running(boxed) as url, aiohttp.ClientSession() as session:
            async with session.post(url, data=body) as answer:
                return answer.status, (await answer.json())["error"]

    status, reason = asyncio.run(main())
    assert status == 400 and message in reason


def test_requests_that_are_too_long_or_too_many():
    with pytest.raises(HttpError, match="answered 413"):
        graded(boxed, samples("x" * 5000), max_bytes=1000)
    held = threading.Event()

    def waits(requests):
        held.wait(60)
        return [1] * len(requests)

    async def main():
        async with running(waits, max_waiting=1, max_batch=1) as url, aiohttp.ClientSession() as session:
            asked = {"prompt": "", "response": "", "label": ""}

            async def status():
                async with session.post(url, json=asked) as answer:
                    return answer.status

            tasks = [asyncio.create_task(status()) for _ in range(5)]
            # One is graded, one waits, and the others are told to come again.
            done, _ = await asyncio.wait(tasks, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            held.set()
            return {task.result() for task in done} | set(await asyncio.gather(*tasks))

    assert asyncio.run(main()) == {200, 429}


def test_a_grader_that_raises_or_miscounts(monkeypatch):
    monkeypatch.setattr(remote, "MAX_ATTEMPTS", 2)
    with pytest.raises(HttpError, match=r"answered 500: .*ZeroDivisionError.*\(2 attempts"):
        graded(lambda requests: 1 / 0, samples("x"))
    with pytest.raises(HttpError, match="answered 500: .*ValueError"):
        graded(lambda requests: [1, 2, 3], samples("x"))


def test_a_grader_that_hangs():
    held = threading.Event()

    async def main():
        async with running(lambda requests: held.wait(60), timeout=0.1) as url, aiohttp.ClientSession() as session:
            async with session.post(url, json={"prompt": "", "response": "", "label": ""}) as answer:
                held.set()
                return answer.status, (await answer.json())["error"]

    assert asyncio.run(main()) == (504, "no grade within 0.1 s")


def test_the_judge_of_the_page(tmp_path, monkeypatch):
    (source,) = [text for kind, text in blocks(FOLDER / "README.md") if kind == "python"]
    (tmp_path / "my_judge.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    judge = load_function("my_judge.py:grade")
    assert graded(judge, samples("2", "3"), args={"reward_key": "score"}) == [
        {"score": 1.0, "length": 1}, {"score": 0.0, "length": 1}
    ]  # fmt: skip
    flags = set(re.findall(r"`(--max-\w+|--timeout|--grader)`", (FOLDER / "README.md").read_text()))
    known = set(re.findall(r'add_argument\("(--[\w-]+)"', (FOLDER / "server.py").read_text()))
    assert flags and flags <= known
