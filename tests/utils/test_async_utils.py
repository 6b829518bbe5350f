"""The shared background loop."""

import asyncio
import gc
import sys
import threading
import time
import weakref

import pytest

from slime.utils import async_utils
from tests.support.processes.waiting import until, wait_until


@pytest.fixture(autouse=True)
def own_loop():
    yield
    async_utils.stop_async_loop()


def test_run_returns_results_and_raises_exceptions():
    async def give(value):
        await asyncio.sleep(0)
        if isinstance(value, Exception):
            raise value
        return value

    assert async_utils.run(give(3)) == 3
    with pytest.raises(KeyError, match="gone"):
        async_utils.run(give(KeyError("gone")))


def test_all_callers_share_one_loop():
    async def which():
        return asyncio.get_running_loop()

    loops = []
    threads = [threading.Thread(target=lambda: loops.append(async_utils.run(which()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(loops) == 4
    assert set(map(id, loops)) == {id(async_utils.get_async_loop())}


def test_run_from_the_loop_itself_is_refused_instead_of_hanging():
    async def nested():
        async def inner():
            return 1

        return async_utils.run(inner())

    with pytest.raises(RuntimeError, match="await the coroutine"):
        async_utils.run(nested())


def test_a_stopped_loop_is_replaced():
    first = async_utils.get_async_loop()
    async_utils.stop_async_loop()
    assert first.is_closed()
    assert async_utils.get_async_loop() is not first


def test_a_task_that_wants_to_end_the_process_does_not_end_the_loop(caplog):
    async def leave():
        sys.exit("x")

    async def main():
        task = asyncio.ensure_future(leave())
        await asyncio.wait([task])
        return task.exception()

    loop = async_utils.get_async_loop()
    left = asyncio.run_coroutine_threadsafe(main(), loop).result(60)
    assert isinstance(left, SystemExit) and left.code == "x"
    assert async_utils.get_async_loop() is loop and async_utils.run(asyncio.sleep(0, "goes on")) == "goes on"
    assert "a task wanted to end the process" in caplog.text and "in leave" in caplog.text


def test_what_holds_up_the_loop_is_told_with_its_place_once_and_that_it_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(async_utils, "STALL_S", 0.2)
    monkeypatch.setattr(async_utils, "ASK_EVERY_S", 0.02)
    release = threading.Event()

    async def blocks():
        return release.wait(60)

    def blocked_here():
        # A busy machine may hold the loop up as well, wherever it stands.
        return [line for line in told(caplog, "has been held up for") if "in blocks" in line]

    for stalls in (1, 2):
        blocked = asyncio.run_coroutine_threadsafe(blocks(), async_utils.get_async_loop())
        try:
            wait_until(lambda stalls=stalls: len(blocked_here()) == stalls)
            assert f'{__file__}", line ' in blocked_here()[-1]
            assert f" in blocks ({__file__}:" in blocked_here()[-1].splitlines()[0], "and not the wait that it calls"
        finally:
            release.set()
        assert blocked.result(60)
        wait_until(lambda: len(told(caplog, "has been held up")) == len(told(caplog, "the event loop goes on after")))
        assert len(blocked_here()) == stalls
        release.clear()


def test_a_loop_that_answers_is_not_told_of(monkeypatch, caplog):
    monkeypatch.setattr(async_utils, "STALL_S", 5.0)
    monkeypatch.setattr(async_utils, "ASK_EVERY_S", 0.01)

    async def main():
        asked, loop = [], asyncio.get_running_loop()
        ask = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: asked.append(call) or ask(*call))
        await until(lambda: len(asked) > 10)

    async_utils.run(main())
    assert not caplog.messages


def told(caplog, text):
    return [message for message in caplog.messages if text in message]


def test_an_answer_under_way_is_everybodys_and_goes_on_without_who_asked_first():
    asked, flight = [], async_utils.SingleFlight()

    async def main():
        given = asyncio.get_running_loop().create_future()

        async def ask():
            asked.append(given)
            return await given

        first, second = (asyncio.create_task(flight.join(ask)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        given.set_result(7)
        assert first.cancelled() and await second == 7 and len(asked) == 1
        assert await flight.join(ask) == 7 and len(asked) == 2

    asyncio.run(main())


def test_one_task_looks_for_what_several_wait_for_and_not_for_ever(monkeypatch):
    monkeypatch.setattr(async_utils, "_LOOKS", 5)
    looks, truth = [], []

    def condition():
        looks.append(asyncio.current_task())
        return truth and truth[0]()

    async def main():
        waiting = [asyncio.create_task(async_utils.until_true(condition, 0.001)) for _ in range(3)]
        await until(lambda: len(looks) > 20)
        by_waiting, others = ([look for look in looks if (look in waiting) is theirs] for theirs in (True, False))
        # The first time, and once more after each five looks of another task.
        assert len(by_waiting) <= 3 * (1 + len(others) // 5) and len(set(others)) == -(-len(others) // 5)
        waiting.pop().cancel()
        truth.append(lambda: True)
        assert await asyncio.wait_for(asyncio.gather(*waiting), 30) == [None, None]
        truth[0] = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            await async_utils.until_true(condition, 0.001)
        truth[0] = lambda: False
        left = asyncio.create_task(async_utils.until_true(condition, 0.001))
        await asyncio.sleep(0)
        left.cancel()
        await until(lambda: len(asyncio.all_tasks()) == 1)
        truth[0] = lambda: True
        assert await async_utils.until_true(condition, 0.001) is None

    asyncio.run(main())


async def _within(seconds, awaitable):
    """(result or exception, whether the limit ended it)."""
    limit = async_utils.time_limit(seconds)
    try:
        with limit:
            return await awaitable, limit.expired
    except (TimeoutError, asyncio.CancelledError) as error:
        return type(error), limit.expired


def test_a_block_beyond_its_limit_ends_with_a_timeout_and_no_other_does():
    async def main():
        return await asyncio.gather(
            _within(0.05, asyncio.sleep(0, "early")),
            _within(0.05, asyncio.sleep(30)),
            _within(0.05, asyncio.sleep(30)),
            _within(None, asyncio.sleep(0.2, "unlimited")),
            _within(30, asyncio.sleep(0.2, "in time")),
        )

    late = (TimeoutError, True)
    assert asyncio.run(main()) == [("early", False), late, late, ("unlimited", False), ("in time", False)]


def test_each_block_has_all_of_its_time_whatever_became_of_those_before():
    async def takes_a_part():
        # The loop does nothing meanwhile, so that it is not late on a busy machine either.
        time.sleep(0.1)
        return "early"

    async def main():
        loop = asyncio.get_running_loop()
        first = asyncio.create_task(_within(0.3, takes_a_part()))
        await first
        started = loop.time()
        outcome = await _within(0.3, asyncio.sleep(30))
        return first.result(), outcome, loop.time() - started

    first, outcome, waited = asyncio.run(main())
    assert (first, outcome) == (("early", False), (TimeoutError, True))
    assert 0.3 <= waited < 25


def test_a_block_after_all_others_were_late_has_its_limit_too_and_may_end_as_it_likes():
    async def finishes_all_the_same():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return "all the same"

    async def main():
        return [await _within(0.05, work) for work in (asyncio.sleep(30), asyncio.sleep(30), finishes_all_the_same())]

    late = (TimeoutError, True)
    assert asyncio.run(main()) == [late, late, ("all the same", True)]


def test_who_is_cancelled_by_another_is_cancelled_and_not_late():
    async def main():
        task = asyncio.create_task(_within(30, asyncio.sleep(30)))
        await asyncio.sleep(0)
        task.cancel()
        return await task

    assert asyncio.run(main()) == (asyncio.CancelledError, False)


def test_of_nested_blocks_whose_time_is_over_at_once_the_outer_one_is_late():
    inner, outer = async_utils.time_limit(0.05), async_utils.time_limit(0.05)

    async def nested():
        with outer:
            try:
                with inner:
                    # Both are over when the loop comes round.
                    time.sleep(0.1)
                    await asyncio.sleep(30)
            except TimeoutError:
                return "the inner one"

    with pytest.raises(TimeoutError):
        asyncio.run(nested())
    assert outer.expired and inner.expired


def test_blocks_of_one_limit_have_one_timer():
    async def main():
        loop, timers = asyncio.get_running_loop(), []
        set_timer = loop.call_at
        loop.call_at = lambda when, *args, **keywords: (timers.append(when), set_timer(when, *args, **keywords))[1]
        await asyncio.gather(*[_within(30, asyncio.sleep(0, number)) for number in range(100)])
        return len(timers)

    assert asyncio.run(main()) == 1


def test_a_closed_loop_is_kept_by_no_limit():
    async def main():
        await _within(30, asyncio.sleep(0))
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(main())
    gc.collect()
    assert loop() is None


def test_slots_go_to_those_who_came_first_and_none_is_lost_to_who_is_cancelled():
    async def main():
        slots, order, held = async_utils.Slots(2), [], asyncio.Event()

        async def take(name):
            async with slots:
                order.append(name)
                await held.wait()

        tasks = {name: asyncio.ensure_future(take(name)) for name in "abcdefg"}
        await asyncio.sleep(0)
        assert order == ["a", "b"] and slots.locked()
        # One who still waits, and one who was just let go on.
        tasks["c"].cancel()
        tasks["a"].cancel()
        await asyncio.sleep(0)
        tasks["d"].cancel()
        await asyncio.wait([tasks[name] for name in "acd"])
        await asyncio.sleep(0)
        assert order[2:] == ["e"] and slots.locked()
        held.set()
        await asyncio.gather(*(tasks[name] for name in "befg"))
        assert order == ["a", "b", "e", "f", "g"] and not slots.locked()
        for _ in range(2):
            await asyncio.wait_for(slots.acquire(), 10)
        assert slots.locked()

    asyncio.run(main())
