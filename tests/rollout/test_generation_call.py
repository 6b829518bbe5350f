"""Calls side by side in one process: each has metrics, progress and an abort of its own, and none knows of another."""

import asyncio
import threading

import pytest

from slime.rollout.base_types import leaves
from slime.rollout.evaluation import clear_dataset_cache, eval_rollout
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation_call import GenerationCall, current_call
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.utils import async_utils
from slime.utils.eval_config import build_eval_dataset_configs
from slime.utils.http_utils import close_http_client
from slime.utils.types import Sample
from tests.support.models.rollout_args import CountingDataSource, make_args
from tests.support.models.rollout_steps import group_numbers, plugin, prompt_number
from tests.support.processes.waiting import until

Status = Sample.Status

# Only ever reached by a test that fails.
LIMIT_S = 200.0

# Leaves in every sample what a plug-in sees of the call that it works for.
NOTES_ITS_CALL = """
from slime.rollout.generate_state import GenerateState
def fn(args, sample):
    sample.metadata["rollout_id"] = GenerateState(args).rollout_id
"""


# Asks the engines itself, as functions with tools do.
POSTS = """
from slime.rollout.generation import append_engine_output
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.http_utils import post
async def fn(args, sample, sampling_params):
    sample.tokens = GenerateState(args).prompt_ids(sample)
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    append_engine_output(args, sample, await post(get_model_url(args, "default"), payload))
    return sample
"""


async def as_call(coroutine, calls, name):
    """`coroutine` as a rollout function is called: inside a call of its own, whose progress others may look at."""
    with GenerationCall().under_way() as call:
        calls[name] = call
        return await coroutine


def of_one_step(server, coroutines):
    """The results of calls that are begun one after another, and what each told of itself before the first ended.

    The requests of the second and of group 0 are held: the first ends when it has aborted group 0, the second goes on then.
    """

    async def main():
        calls = {}
        try:
            tasks = {"second": asyncio.create_task(as_call(coroutines["second"], calls, "second"))}
            await until(lambda: server.in_flight == 4)
            tasks["first"] = asyncio.create_task(as_call(coroutines["first"], calls, "first"))
            first = await asyncio.wait_for(tasks["first"], LIMIT_S)
            assert not tasks["second"].done() and server.in_flight == 4, "only requests of the first were aborted"
            told = {name: call.progress.snapshot() for name, call in calls.items()}
            server.release()
            return first, await asyncio.wait_for(tasks["second"], LIMIT_S), told
        finally:
            await close_http_client()

    return asyncio.run(main())


@pytest.mark.parametrize("posts", [False, True], ids=["requests of ours", "requests of a user's function"])
def test_two_rollouts_at_once_are_wound_down_one_by_one(server, checkpoint, tmp_path, posts):
    options = {"rollout_sample_hook_path": [plugin(tmp_path, NOTES_ITS_CALL)], "abort_timeout": 600.0}
    if posts:
        (tmp_path / "posts").mkdir()
        options["custom_generate_function_path"] = plugin(tmp_path / "posts", POSTS)
    args = make_args(checkpoint, server.port, over_sampling_batch_size=3, **options)
    patient = make_args(checkpoint, server.port, **options)
    source, other = CountingDataSource(2), CountingDataSource(2)
    other._next_group = 100
    server.hold = lambda payload: prompt_number(payload, args) in (0, 100, 101)
    first, second, told = of_one_step(
        server,
        {"first": generate_rollout_async(args, 3, source), "second": generate_rollout_async(patient, 4, other)},
    )
    assert (group_numbers(first.samples), group_numbers(source.returned)) == ([1, 2], [0])
    assert (group_numbers(second.samples), other.returned) == ([100, 101], [])
    assert first.metrics["rollout/aborted_samples"] == 2 and second.metrics["rollout/aborted_samples"] == 0
    assert {sample.metadata["rollout_id"] for sample in leaves(first.samples)} == {3}
    assert {sample.metadata["rollout_id"] for sample in leaves(second.samples)} == {4}
    assert told == {"first": None, "second": ("rollout 4", 0, 4)}
    of_group_0 = {r["rid"] for r in server.requests if prompt_number(r, args) == 0}
    assert server.aborts == 0 and set(server.aborted_ids) == of_group_0


def test_an_evaluation_goes_on_while_a_rollout_is_wound_down(server, checkpoint, tmp_path):
    clear_dataset_cache()
    path = plugin(tmp_path, NOTES_ITS_CALL)
    args = make_args(checkpoint, server.port, over_sampling_batch_size=3, rollout_sample_hook_path=[path])
    rows = tmp_path / "held_out.jsonl"
    rows.write_text("".join(f'{{"prompt": "question {n}", "label": "F"}}\n' for n in (100, 101)))
    entry = {"name": "held_out", "path": str(rows), "n_samples_per_eval_prompt": 2}
    args.eval_datasets = build_eval_dataset_configs(args, [entry], {})
    server.hold = lambda payload: prompt_number(payload, args) in (0, 100, 101)
    source = CountingDataSource(2)
    rollout, evaluation, told = of_one_step(
        server, {"first": generate_rollout_async(args, 3, source), "second": eval_rollout(args, 2)}
    )
    assert (group_numbers(rollout.samples), group_numbers(source.returned)) == ([1, 2], [0])
    assert rollout.metrics["rollout/aborted_samples"] == 2 and evaluation.metrics is None
    samples = evaluation.data["held_out"]["samples"]
    assert [sample.response for sample in samples] == ["FGH"] * 4
    assert {sample.status for sample in samples} == {Status.COMPLETED}
    assert {sample.metadata["rollout_id"] for sample in samples} == {2}
    assert told == {"first": None, "second": ("evaluation", 0, 4)}
    assert server.aborts == 0 and len(server.aborted_ids) == 2


def test_a_call_is_alone_with_those_that_enclose_it(checkpoint):
    outer = GenerationCall()
    with outer.under_way():
        inner = GenerationCall()
        with inner.under_way():
            assert current_call() is inner and inner.progress is outer.progress
            assert inner.is_alone() and not outer.is_alone()
        assert current_call() is outer and outer.is_alone()
    assert current_call() is not outer


@pytest.mark.parametrize("way", ["thread of a plain function", "background loop"])
def test_work_that_is_handed_on_stays_with_its_call(way):
    async def asked():
        return current_call()

    with GenerationCall(5).under_way() as call:
        if way == "background loop":
            assert async_utils.run(asked()) is call
            async_utils.stop_async_loop()
        else:
            assert asyncio.run(asyncio.to_thread(current_call)) is call
    found = []
    stranger = threading.Thread(target=lambda: found.append(current_call()))
    stranger.start()
    stranger.join()
    assert found != [call]


def test_plug_ins_see_and_steer_the_call_that_they_work_for(checkpoint):
    state = GenerateState(make_args(checkpoint))
    with GenerationCall(5).under_way() as call:
        state.remaining_batch_size += 2
        state.aborted = True
        assert (call.remaining_batch_size, call.aborted, state.rollout_id) == (2, True, 5)
        assert state.pendings is call.pendings
        state.reset()
        assert (call.remaining_batch_size, call.aborted, call.rollout_id) == (0, False, 5)
    state.aborted = True
    assert not GenerationCall().aborted
    state.reset()
