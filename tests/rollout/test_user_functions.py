"""How many calls of user functions run at a time, how they nest, and what becomes of those that never return."""

import asyncio
import re
import sys
import threading
from types import SimpleNamespace

import pytest

from slime.rollout import user_functions
from slime.rollout.user_functions import (
    CallKind,
    CallSlots,
    CallTimedOut,
    TooManyLeftBehind,
    call_for_step,
    call_user_function,
    left_behind,
)
from slime.utils import async_utils
from slime.utils.errors import RunError
from slime.utils.plugin_loader import EndingRaised
from tests.support.processes.waiting import until

# Only ever reached by a test that fails.
LIMIT_S = 60.0


def run(coroutine):
    async def main():
        async with asyncio.timeout(LIMIT_S):
            return await coroutine

    return asyncio.run(main())


async def in_slot(slots, call):
    async with slots:
        return await call()


async def leave_behind(number, function, **options):
    """Start calls in threads of their own, and give them up."""
    calls = [asyncio.ensure_future(call_user_function(function, **options)) for _ in range(number)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)


def test_plain_functions_run_in_all_slots_at_once_and_in_no_more():
    size, calls = 200, 450
    slots, lock = CallSlots(CallKind.REWARD, size), threading.Lock()
    full, running, most = threading.Event(), [], []

    def fn(number):
        with lock:
            running.append(number)
            most.append(len(running))
            if len(running) == size:
                full.set()
        assert full.wait(LIMIT_S)
        with lock:
            running.remove(number)
        return number

    async def main():
        call = [lambda n=n: call_user_function(fn, n, source="f", at_a_time=1) for n in range(calls)]
        return await asyncio.gather(*[in_slot(slots, one) for one in call])

    assert run(main()) == list(range(calls))
    assert max(most) == size
    # None is kept in reserve: a thread ends with its call.
    run(until(lambda: not [t for t in threading.enumerate() if t.name == "slime-fn"]))


@pytest.mark.parametrize("plain", [False, True])
def test_calls_of_one_kind_within_each_other_do_not_wait_for_each_other(plain):
    slots, depth = CallSlots(CallKind.REWARD, 2), 4

    async def nested(level):
        if level == depth:
            return level
        if not plain:
            return await in_slot(slots, lambda: nested(level + 1))
        return await in_slot(
            slots, lambda: call_user_function(lambda: async_utils.run(nested(level + 1)), source="f", at_a_time=1)
        )

    async def main():
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*[nested(0) for _ in range(20)])

    try:
        assert async_utils.run(main()) == [depth] * 20
    finally:
        async_utils.stop_async_loop()


def test_kinds_that_call_each_other_do_not_wait_for_each_other():
    generate, reward = CallSlots(CallKind.GENERATE, 1), CallSlots(CallKind.REWARD, 1)

    async def main():
        both_hold_one = asyncio.Barrier(2)

        async def meet_and_call(inner):
            await both_hold_one.wait()
            return await in_slot(inner, lambda: asyncio.sleep(0, "done"))

        return await asyncio.gather(
            in_slot(generate, lambda: meet_and_call(reward)), in_slot(reward, lambda: meet_and_call(generate))
        )

    assert run(main()) == ["done", "done"]


def test_a_reward_that_a_generate_function_asks_for_counts_like_any_other():
    generate, reward = CallSlots(CallKind.GENERATE, 8), CallSlots(CallKind.REWARD, 3)
    running, most = [], []

    async def grade():
        running.append(1)
        most.append(len(running))
        for _ in range(5):
            await asyncio.sleep(0)
        running.pop()

    async def main():
        from_generation = [in_slot(generate, lambda: in_slot(reward, grade)) for _ in range(8)]
        await asyncio.gather(*from_generation, *[in_slot(reward, grade) for _ in range(8)])

    run(main())
    assert max(most) == 3


def test_a_place_is_given_back_by_calls_that_fail_or_are_cancelled():
    slots = CallSlots(CallKind.HOOK, 1)

    async def fail():
        raise KeyError("broken")

    async def main():
        with pytest.raises(KeyError):
            await in_slot(slots, fail)
        holder = asyncio.ensure_future(in_slot(slots, asyncio.Event().wait))
        await until(slots.locked)
        waiting = asyncio.ensure_future(in_slot(slots, asyncio.Event().wait))
        await asyncio.sleep(0)
        for task in (waiting, holder):
            task.cancel()
            await asyncio.wait([task])
        assert not slots.locked()
        # What was cancelled left nothing that counts as enclosing.
        async with slots:
            assert not slots.locked(), "a call from in here has slots of its own"
        return await in_slot(slots, lambda: asyncio.sleep(0, "done"))

    assert run(main()) == "done"


@pytest.mark.parametrize("given_up_by", ["time limit", "cancellation"])
def test_calls_that_never_return_are_left_behind_until_they_are_too_many(given_up_by, caplog):
    release, limit = threading.Event(), user_functions.MIN_LEFT_BEHIND
    source = f"--custom-rm-path my.py:judge ({given_up_by})"

    async def give_up():
        if given_up_by == "time limit":
            with pytest.raises(CallTimedOut, match="no result within 0.01 s"):
                await call_user_function(release.wait, source=source, at_a_time=1, timeout=0.01)
            return
        await leave_behind(1, release.wait, source=source, at_a_time=1)

    async def main():
        for _ in range(limit):
            await give_up()
        assert left_behind(source) == limit
        with pytest.raises(TooManyLeftBehind, match=r"^64 calls of --custom-rm-path my.py:judge .* never returned"):
            await call_user_function(lambda: 1, source=source, at_a_time=1)
        # Neither do others suffer, nor one that may run more often.
        assert await call_user_function(lambda: 2, source="--custom-generate-function-path other", at_a_time=1) == 2
        assert await call_user_function(lambda: 3, source=source, at_a_time=limit) == 3
        release.set()
        await until(lambda: left_behind(source) == 0)
        assert await call_user_function(lambda: 4, source=source, at_a_time=1) == 4

    try:
        run(main())
    finally:
        release.set()
    warnings = [message for message in caplog.messages if "were given up and still run in their threads" in message]
    assert [message.split()[0] for message in warnings] == ["1", "2", "4", "8", "16", "32", "64"]


def test_calls_cancelled_within_their_limit_are_waited_for_instead_of_ending_the_run(monkeypatch, caplog):
    monkeypatch.setattr(user_functions, "MIN_LEFT_BEHIND", 4)
    source, release = "--custom-generate-function-path slow.py:fn", threading.Event()

    options = {"source": source, "at_a_time": 1, "timeout": 3600.0}

    async def main():
        for _ in range(2):  # two steps that are wound down
            await leave_behind(2, release.wait, **options)
        assert left_behind(source) == 4
        following = asyncio.ensure_future(call_user_function(lambda: "done", **options))
        await until(lambda: "waits for one of the 4 that were cancelled" in caplog.text or following.done())
        assert not following.done(), "the threads are bounded"
        release.set()
        assert await following == "done"
        await until(lambda: left_behind(source) == 0)

    try:
        run(main())
    finally:
        release.set()


def test_calls_that_were_cancelled_are_too_many_once_they_are_beyond_their_limit(monkeypatch):
    monkeypatch.setattr(user_functions, "MIN_LEFT_BEHIND", 4)
    source, release = "--custom-rm-path hung.py:fn", threading.Event()

    async def main():
        options = {"source": source, "at_a_time": 1, "timeout": 0.5}
        await leave_behind(4, release.wait, **options)
        with pytest.raises(TooManyLeftBehind, match="^4 calls of --custom-rm-path hung.py:fn were given up"):
            await call_user_function(lambda: 1, **options)

    try:
        run(main())
    finally:
        release.set()


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts the timers set on it, and whose clock a test may put ahead."""

    timers = 0
    ahead = 0.0

    def time(self):
        return super().time() + self.ahead

    def call_at(self, *arguments, **options):
        self.timers += 1
        return super().call_at(*arguments, **options)


@pytest.mark.parametrize("ends_by", ["a call that returns", "the limit of the calls"])
def test_calls_that_wait_for_room_cost_the_event_loop_one_timer(monkeypatch, ends_by):
    monkeypatch.setattr(user_functions, "MIN_LEFT_BEHIND", 4)
    source, release, waiting = f"--custom-rm-path slow.py:fn ({ends_by})", threading.Event(), 50

    async def main():
        loop, limit_s = asyncio.get_running_loop(), LIMIT_S / 2
        monkeypatch.setattr(user_functions, "time", loop)
        loop.monotonic = loop.time
        await leave_behind(5, release.wait, source=source, at_a_time=1, timeout=limit_s)
        assert left_behind(source) == 5
        loop.timers = 0
        following = [
            asyncio.ensure_future(call_user_function(lambda n=n: n, source=source, at_a_time=1)) for n in range(waiting)
        ]
        for _ in range(10):
            await asyncio.sleep(0)
        assert loop.timers == 1 and not any(task.done() for task in following)
        if ends_by == "a call that returns":
            release.set()
        else:
            loop.ahead = limit_s
        results = await asyncio.gather(*following, return_exceptions=True)
        if ends_by == "a call that returns":
            assert results == list(range(waiting))
        else:
            assert {type(result) for result in results} == {TooManyLeftBehind}

    try:
        with asyncio.Runner(loop_factory=CountingLoop) as runner:
            runner.run(asyncio.wait_for(main(), LIMIT_S))
    finally:
        release.set()


def test_one_that_waits_for_room_may_be_cancelled(monkeypatch):
    monkeypatch.setattr(user_functions, "MIN_LEFT_BEHIND", 2)
    source, release = "--custom-rm-path slow.py:cancelled", threading.Event()
    options = {"source": source, "at_a_time": 1, "timeout": 3600.0}

    async def main():
        async def end(task):
            task.cancel()
            await asyncio.wait([task])

        await leave_behind(2, release.wait, **options)
        calls = [asyncio.ensure_future(call_user_function(lambda n=n: n, **options)) for n in range(3)]
        for _ in range(5):
            await asyncio.sleep(0)
        await end(calls[1])
        await end(calls[0])
        release.set()
        assert await calls[2] == 2

    try:
        run(main())
    finally:
        release.set()


def leave():
    sys.exit("x")


def interrupt():
    raise KeyboardInterrupt("x")


async def leave_in_a_task_of_ones_own():
    async def left():
        leave()

    await asyncio.gather(left())


async def cancel_a_task_of_ones_own():
    task = asyncio.ensure_future(asyncio.Event().wait())
    await asyncio.sleep(0)
    task.cancel("x")
    await task


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    "what, raised",
    [
        (leave, SystemExit),
        (interrupt, KeyboardInterrupt),
        (leave_in_a_task_of_ones_own, SystemExit),
        (cancel_a_task_of_ones_own, asyncio.CancelledError),
    ],
)
def test_what_would_end_more_than_its_call_is_an_error_of_the_call(plain, what, raised):
    async def function():
        result = what()
        if result is not None:
            await result

    fn = (lambda: asyncio.run(function())) if plain else function
    try:
        with pytest.raises(EndingRaised, match=f"^the function raised {raised.__name__}\\('x'\\)$") as caught:
            on_the_loop(call_user_function(fn, source="f", at_a_time=1, timeout=LIMIT_S))
        assert type(caught.value.__cause__) is raised
        assert on_the_loop(call_user_function(lambda: "goes on", source="f", at_a_time=1)) == "goes on"
    finally:
        async_utils.stop_async_loop()


def on_the_loop(coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, async_utils.get_async_loop()).result(LIMIT_S)


@pytest.mark.parametrize("plain", [False, True])
def test_a_call_that_is_cancelled_counts_as_cancelled(plain):
    release = threading.Event()

    async def function():
        await asyncio.Event().wait()

    async def main():
        fn = release.wait if plain else function
        call = asyncio.ensure_future(call_user_function(fn, source="f", at_a_time=1, timeout=LIMIT_S))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        return call.cancelled()

    try:
        assert run(main())
    finally:
        release.set()


def test_a_machine_without_further_threads_is_named(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    async def main():
        monkeypatch.setattr(threading.Thread, "start", refuse)
        await call_user_function(len, [], source="f", at_a_time=1)

    with pytest.raises(RunError, match=r"no thread could be started for len: can't start .*--rm-concurrency"):
        run(main())


def test_a_function_that_a_whole_step_waits_for_is_told_of(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def convert(args, samples):\n    assert args.told.wait(60)\n    return samples\n"
    )
    flag, path = "--custom-convert-samples-to-train-data-path", f"{tmp_path}/mine.py:convert"
    told, lines = threading.Event(), []
    monkeypatch.setattr(user_functions, "REPORT_AFTER_S", 0.01)
    monkeypatch.setattr(
        user_functions.logger, "info", lambda message, *given: lines.append(message % given) or told.set()
    )
    args = SimpleNamespace(http_request_timeout=LIMIT_S, told=told)
    assert call_for_step(args, flag, path, "8 samples", args, [1]) == [1]
    told_first = (
        rf"{re.escape(f'{flag} {path}')}, called for 8 samples, has not returned for \d+ s; the step waits for it"
    )
    assert re.fullmatch(told_first, lines[0])

    async def telling():
        return [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "tell"]

    assert async_utils.run(telling()) == [], "nobody waits for it any more"
