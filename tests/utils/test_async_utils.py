"""The shared background loop."""

import asyncio
import threading

import pytest

from slime.utils import async_utils


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
