"""An evaluation set that ends before its last prompt."""

import asyncio

import pytest

from slime.rollout.evaluation import finished_prompts
from slime.utils.errors import RunError
from slime.utils.eval_config import EvalDatasetConfig

NEVER = 3600.0


def run(seconds, **limits):
    """The prompts (by number) that were finished when the set ended; prompt i takes `seconds[i]`."""

    async def prompt(number):
        await asyncio.sleep(seconds[number])
        return number

    async def main():
        config = EvalDatasetConfig("aime", "p", n_samples_per_eval_prompt=2, **limits)
        tasks = [asyncio.create_task(prompt(number)) for number in range(len(seconds))]
        try:
            async with asyncio.timeout(20):
                return await finished_prompts(tasks, config)
        finally:
            for task in tasks:
                task.cancel()

    return asyncio.run(main())


def test_without_limits_all_prompts_finish():
    assert run([0.02, 0.0, 0.01]) == [0, 1, 2]


def test_limits_that_nothing_reaches_change_nothing():
    assert run([0.02, 0.0], eval_task_timeout=20, eval_early_stop_idle_timeout=15) == [0, 1]


def test_the_time_limit_leaves_the_rest_out(caplog):
    assert run([0.0, NEVER, 0.01], eval_task_timeout=0.3) == [0, 2]
    assert "evaluation set aime: 1 of 3 prompts were left unfinished" in caplog.text


def test_the_time_limit_is_an_error_when_too_little_finished():
    with pytest.raises(
        RunError, match=r"2 of 3 prompts \(4 samples\) finished within eval_task_timeout 0.3 s.*at least 5"
    ):
        run([0.0, NEVER, 0.01], eval_task_timeout=0.3, min_eval_samples=5)
    with pytest.raises(RunError, match=r"0 of 1 prompts"):
        run([NEVER], eval_task_timeout=0.05)


def test_stragglers_are_left_as_soon_as_few_remain():
    assert run([0.0, NEVER, 0.0, NEVER], eval_early_stop_remaining=2) == [0, 2]


def test_stragglers_are_waited_for_until_nothing_finishes():
    seconds = [0.0, 0.1, NEVER]
    assert run(seconds, eval_early_stop_remaining=2, eval_early_stop_idle_timeout=1.0) == [0, 1]


def test_many_that_remain_are_waited_for():
    assert run([0.0, 0.4, 0.4, 0.4], eval_early_stop_remaining=1, eval_early_stop_idle_timeout=0.1)[:2] == [0, 1]


def test_an_early_stop_waits_for_enough_samples():
    assert run([0.0, 0.2, NEVER], eval_early_stop_idle_timeout=0.05, min_eval_samples=4) == [0, 1]


def test_a_failure_is_passed_on():
    async def fail():
        raise ValueError("broken prompt")

    async def main():
        task = asyncio.create_task(fail())
        return await finished_prompts([task], EvalDatasetConfig("a", "p", eval_task_timeout=5))

    with pytest.raises(ValueError, match="broken prompt"):
        asyncio.run(main())
