"""Generation that never stops: who takes what, what waits, and that no prompt is lost on the way or in a checkpoint."""

import asyncio
import contextlib
import re
import threading
from types import SimpleNamespace

import pytest

from slime.rollout import fully_async_rollout
from slime.rollout.base_types import leaves
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.draws import DataSourceSnapshots, draw_groups
from slime.rollout.fully_async_rollout import AsyncRolloutWorker, generate_rollout_fully_async
from slime.rollout.generation_call import GenerationCall
from slime.utils.errors import RunError, UserError
from slime.utils.http_utils import close_http_client
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.models.data_sources import Flat
from tests.support.models.rollout_args import CountingDataSource, make_args
from tests.support.models.rollout_steps import group_numbers, plugin, prompt_number
from tests.support.processes.waiting import until

Status = Sample.Status


@contextlib.asynccontextmanager
async def worker_of(args, source):
    worker = AsyncRolloutWorker(args, source)
    try:
        yield worker
    finally:
        for task in [*worker._tasks, *worker.in_flight]:
            task.cancel()
        await asyncio.gather(*worker._tasks, *worker.in_flight, return_exceptions=True)
        await close_http_client()


async def rollout(worker, number, trained_as=None):
    with GenerationCall(number, trained_as).under_way():
        return await asyncio.wait_for(worker.rollout(number), 30)


def test_it_does_not_evaluate(checkpoint):
    with pytest.raises(ValueError, match="--eval-function-path slime.rollout.sglang_rollout.generate_rollout"):
        generate_rollout_fully_async(make_args(checkpoint), 0, None, evaluation=True)


def test_rollouts_take_what_was_finished_first_and_generation_stops_when_a_full_pool_waits(server, checkpoint):
    """Concurrency 8, groups of 2: the pool are four groups."""
    args = make_args(checkpoint, server.port, sglang_server_concurrency=8)
    source = CountingDataSource(2)
    server.hold = lambda payload: prompt_number(payload, args) == 0

    async def main():
        async with worker_of(args, source) as worker:
            first = await rollout(worker, 0)
            assert sorted(group_numbers(first.samples)) == [1, 2], "the one that takes long holds up nobody"
            # One is held, all others are done, and the worker waits: nothing is being drawn any more.
            await until(lambda: len(worker.queue) >= 4 and len(worker.in_flight) == 1 and worker._changed._waiters)
            waiting = [leaves(group)[0].group_index for _, group in worker.queue]
            assert len(waiting) <= 6, (
                "at most three waited when the last draw filled the pool beside the one that is held"
            )
            handed_out = list(source.handed_out)
            second = await rollout(worker, 1)
            assert sorted(group_numbers(second.samples)) == sorted(waiting[:2])
            assert second.metrics["queued_groups"] == len(waiting) - 2
            taken = [*group_numbers(first.samples), *group_numbers(second.samples)]
            while source.handed_out == handed_out:
                taken += group_numbers((await rollout(worker, 2)).samples)
            server.release()
            while 0 not in taken:
                taken += group_numbers((await rollout(worker, 3)).samples)
            assert len(taken) == len(set(taken))

    asyncio.run(main())


def test_as_many_groups_are_in_flight_as_the_engines_take_requests(server, checkpoint):
    args = make_args(checkpoint, server.port, sglang_server_concurrency=8)
    source = CountingDataSource(2)
    server.hold = lambda payload: True

    async def main():
        async with worker_of(args, source) as worker:
            taking = asyncio.create_task(rollout(worker, 0))
            await until(lambda: server.in_flight == 8)
            assert source.handed_out == [0, 1, 2, 3] and len(worker.in_flight) == 4
            server.release()
            await taking

    asyncio.run(main())
    assert server.max_in_flight == 8


def test_groups_are_ordered_by_their_index_and_packed(server, checkpoint):
    args = make_args(checkpoint, server.port, rollout_batch_size=6)

    async def main():
        async with worker_of(args, CountingDataSource(2)) as worker:
            output = await rollout(worker, 0)
            assert group_numbers(output.samples) == sorted(group_numbers(output.samples))
            assert all(
                sample.status is Status.COMPLETED and sample.reward is not None for sample in leaves(output.samples)
            )

    asyncio.run(main())


def test_groups_of_plain_prompts_are_numbered_on_from_draw_to_draw(server, checkpoint):
    """The pool is one group, so that each is drawn by itself."""
    args = make_args(checkpoint, server.port, sglang_server_concurrency=2, rollout_batch_size=3)

    async def main():
        async with worker_of(args, Flat(["a prompt"])) as worker:
            assert group_numbers((await rollout(worker, 0)).samples) == [0, 1, 2]

    asyncio.run(main())


@pytest.mark.parametrize("stays_when_insufficient", [False, True])
def test_the_dynamic_filter_drops_and_is_counted(server, checkpoint, tmp_path, stays_when_insufficient):
    """Where the source has prompts there are enough, however few are in flight."""
    path = plugin(
        tmp_path,
        "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"
        "def fn(args, samples):\n"
        f"    return DynamicFilterOutput(samples[0].group_index % 2 == 0, 'odd', {stays_when_insufficient})\n",
    )
    args = make_args(checkpoint, server.port, dynamic_sampling_filter_path=path, sglang_server_concurrency=2)

    async def main():
        async with worker_of(args, CountingDataSource(2)) as worker:
            output = await rollout(worker, 0)
            assert all(number % 2 == 0 for number in group_numbers(output.samples))
            assert output.metrics["rollout/dynamic_filter/drop_odd"] >= 1

    asyncio.run(main())


@pytest.mark.parametrize("which", ["get_samples", "filter"])
def test_what_never_returns_ends_the_rollout_that_waits_by_its_name(server, checkpoint, tmp_path, which):
    path = plugin(tmp_path, "def fn(args, samples):\n    args.goes_on.wait(60)\n")
    generate = plugin(
        tmp_path,
        "async def generate(args, sample, sampling_params):\n"
        "    sample.tokens, sample.response_length, sample.status = [1, 2], 1, Sample.Status.COMPLETED\n"
        "    return sample\n",
        "generate",
    )
    source, late = CountingDataSource(2), f"--dynamic-sampling-filter-path {path}"
    plug_ins = {"dynamic_sampling_filter_path": path, "custom_generate_function_path": generate}
    args = make_args(checkpoint, server.port, http_request_timeout=0.5, **plug_ins)
    args.goes_on = threading.Event()
    if which == "get_samples":
        late = f"--data-source-path {args.data_source_path}: get_samples"
        source.get_samples = lambda size: args.goes_on.wait(60)

    async def main():
        async with worker_of(args, source) as worker:
            with pytest.raises(
                UserError, match="^" + re.escape(f"{late} did not return within --http-request-timeout 0.5 s")
            ):
                await rollout(worker, 0)

    try:
        asyncio.run(main())
    finally:
        args.goes_on.set()


def test_groups_that_grew_too_old_in_the_queue_are_generated_again(server, checkpoint):
    args = make_args(checkpoint, server.port, max_weight_staleness=2, async_buffer_size=1, update_weights_interval=1)
    source = CountingDataSource(2)

    async def main():
        async with worker_of(args, source) as worker:
            await rollout(worker, 0, trained_as=1)
            await until(lambda: len(worker.queue) == 4)
            # Two groups a rollout, and a bound that is one above what the loop makes unavoidable: no more may wait.
            assert not worker.in_flight
            server.weight_version = "9"
            waiting = [leaves(group)[0].group_index for _, group in worker.queue]
            output = await rollout(worker, 1, trained_as=9)
            assert output.metrics["stale_groups"] == 4
            assert {v for sample in leaves(output.samples) for v in sample.weight_versions} == {"9"}
            taken = group_numbers(output.samples)
            while len(taken) < 8:
                taken += group_numbers((await rollout(worker, 2, trained_as=9)).samples)
            assert set(waiting) <= set(taken) and len(set(taken)) == len(taken), "none is lost, none comes twice"

    asyncio.run(main())


class SlowToTakeBack(CountingDataSource):
    """Takes back what `takes` is set for, and raises what it has as `error`."""

    def __init__(self):
        super().__init__(2)
        self.asked, self.takes, self.error = threading.Event(), threading.Event(), None

    def add_samples(self, groups):
        self.asked.set()
        self.takes.wait(30)
        if self.error is not None:
            raise self.error
        super().add_samples(groups)


@pytest.mark.parametrize("takes", [True, False], ids=["a source that takes it", "a source that raises"])
@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "waited for"])
def test_a_group_that_is_too_old_is_in_the_queue_or_in_the_source_whatever_ends_the_rollout(
    server, checkpoint, takes, cancelled
):
    args = make_args(checkpoint, server.port, max_weight_staleness=2)
    source = SlowToTakeBack()
    source.error = None if takes else KeyError("made to fail")

    async def main():
        async with worker_of(args, source) as worker:
            await rollout(worker, 0, trained_as=1)
            await until(lambda: len(worker.queue) == 4)
            server.hold = lambda payload: True
            waiting = [leaves(group)[0].group_index for _, group in worker.queue]
            taking = asyncio.create_task(rollout(worker, 1, trained_as=9))
            await until(source.asked.is_set)
            if cancelled:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)
            source.takes.set()
            if not cancelled and not takes:
                with pytest.raises(UserError, match="made to fail"):
                    await taking

            def places():
                back = [*source.returned, *worker.in_flight.values()]
                return sorted(leaves(group)[0].group_index for group in [*(group for _, group in worker.queue), *back])

            await until(lambda: set(waiting) <= set(places()))
            assert len(set(places())) == len(places())
            assert waiting[0] in [leaves(group)[0].group_index for _, group in worker.queue] or takes
            taking.cancel()
            server.release()

    asyncio.run(main())


def test_what_was_interrupted_or_failed_is_counted_and_what_was_interrupted_generated_again(
    server, checkpoint, tmp_path
):
    path = plugin(
        tmp_path,
        "from collections import Counter\n"
        "calls = Counter()\n"
        "async def fn(args, sample, sampling_params):\n"
        "    calls[sample.prompt] += 1\n"
        "    is_cut = sample.prompt == 'question 0' and calls[sample.prompt] <= 2\n"
        "    sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0])\n"
        "    sample.status = Sample.Status.ABORTED if is_cut else Sample.Status.COMPLETED\n"
        "    sample.status = Sample.Status.FAILED if sample.index == 4 else sample.status\n"
        "    return sample\n",
    )
    args = make_args(checkpoint, server.port, custom_generate_function_path=path, sglang_server_concurrency=2)

    async def main():
        async with worker_of(args, CountingDataSource(2)) as worker:
            return [await rollout(worker, number) for number in range(2)]

    first, second = asyncio.run(main())
    assert (group_numbers(first.samples), group_numbers(second.samples)) == ([0, 1], [2, 3])
    assert [output.metrics["aborted_samples"] for output in (first, second)] == [2, 0]
    assert [output.metrics["failed_samples"] for output in (first, second)] == [0, 1]


def test_a_rollout_of_which_most_samples_failed_is_an_error_with_the_first_cause(server, checkpoint, tmp_path):
    path = plugin(
        tmp_path,
        "async def fn(args, sample, sampling_params):\n"
        "    sample.status, sample.metadata['fail_reason'] = Sample.Status.FAILED, 'no tool'\n"
        "    return sample\n",
    )
    args = make_args(checkpoint, server.port, custom_generate_function_path=path)

    async def main():
        async with worker_of(args, CountingDataSource(2)) as worker:
            with pytest.raises(RunError, match=r"4 of 4 samples of rollout 7 failed.*sample \d+: no tool"):
                await rollout(worker, 7)

    asyncio.run(main())


def test_what_a_rollout_that_fails_has_taken_is_taken_by_the_next_one_in_the_same_order(
    server, checkpoint, monkeypatch
):
    # One at a time, so that groups finish in their order.
    args = make_args(checkpoint, server.port, sglang_server_concurrency=1, n_samples_per_prompt=1, rollout_batch_size=3)
    pack = fully_async_rollout.pack_groups

    def full(groups):
        monkeypatch.setattr(fully_async_rollout, "pack_groups", pack)
        raise MemoryError("made to fail")

    monkeypatch.setattr(fully_async_rollout, "pack_groups", full)

    async def main():
        async with worker_of(args, CountingDataSource(1)) as worker:
            with pytest.raises(MemoryError):
                await rollout(worker, 0)
            waiting = [leaves(group)[0].group_index for _, group in worker.queue]
            assert waiting[:3] == [0, 1, 2]
            assert group_numbers((await rollout(worker, 1)).samples) == [0, 1, 2]

    asyncio.run(main())


def test_a_bound_on_staleness_holds_while_a_rollout_is_packed_and_frees_all_of_its_room_after(
    server, checkpoint, monkeypatch
):
    args = make_args(checkpoint, server.port, max_weight_staleness=1, rollout_batch_size=4)
    source, pack, while_packing = CountingDataSource(2), fully_async_rollout.pack_groups, []
    server.hold = lambda payload: prompt_number(payload, args) >= 4

    async def main():
        async with worker_of(args, source) as worker:
            loop = asyncio.get_running_loop()

            async def look():
                while_packing.append((worker._room(), list(source.handed_out)))

            def watched(groups):
                asyncio.run_coroutine_threadsafe(look(), loop).result(60)
                pack(groups)

            monkeypatch.setattr(fully_async_rollout, "pack_groups", watched)
            await rollout(worker, 0, trained_as=1)
            await until(lambda: len(worker.in_flight) == 4)
            assert source.handed_out == list(range(8))
            server.release()

    asyncio.run(main())
    assert while_packing == [(0, [0, 1, 2, 3])]


@pytest.mark.parametrize("part", [0, 1], ids=["drawing", "judging"])
def test_rollouts_do_not_wait_for_generation_that_a_function_has_cancelled(server, checkpoint, part):
    """Between two rollouts nobody else hears of it."""
    args = make_args(checkpoint, server.port)

    async def main():
        async with worker_of(args, CountingDataSource(2)) as worker:
            await rollout(worker, 0)
            worker._tasks[part].cancel()
            with pytest.raises(
                RunError, match="^the generation that never stops was cancelled; does a function of yours"
            ):
                for number in range(1, 9):
                    await rollout(worker, number)

    asyncio.run(main())


CANCELLING_GROUPS = """
        for task in asyncio.all_tasks():
            task.cancel() if task.get_name() == 'group 3' else None
        await asyncio.Event().wait()
"""
CANCELLING_ITS_OWN = """
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel('made to fail')
        await task
"""


@pytest.mark.parametrize(
    "statement, message",
    [
        ("raise KeyError('made to fail')", "raised KeyError for sample .*made to fail"),
        ("raise SystemExit('made to fail')", "raised SystemExit for sample .*: made to fail"),
        (CANCELLING_ITS_OWN, "raised CancelledError for sample "),
        (CANCELLING_GROUPS, "^group 3 was cancelled; does a function of yours cancel tasks"),
    ],
)
def test_a_function_that_fails_ends_the_rollout_that_waits_and_its_prompts_return(
    server, checkpoint, tmp_path, statement, message
):
    path = plugin(
        tmp_path, f"async def fn(args, sample):\n    if sample.group_index == 3:\n        {statement}\n    return 1.0\n"
    )
    args = make_args(checkpoint, server.port, custom_rm_path=path)
    source = CountingDataSource(2, limit=4)

    async def main():
        async with worker_of(args, source) as worker:
            with pytest.raises((UserError, RunError), match=message):
                for number in range(3):
                    await rollout(worker, number)
            # The source may have handed it out once more before the worker ended.
            assert 3 in group_numbers([*source.returned, *worker.in_flight.values()])

    asyncio.run(main())


def test_a_group_that_is_aborted_again_and_again_is_an_error(server, checkpoint, tmp_path):
    path = plugin(
        tmp_path,
        "from slime.utils.types import Sample\n"
        "async def fn(args, sample, sampling_params):\n"
        "    sample.status = Sample.Status.ABORTED\n"
        "    return sample\n",
    )
    args = make_args(checkpoint, server.port, custom_generate_function_path=path)

    async def main():
        async with worker_of(args, CountingDataSource(2, limit=2)) as worker:
            with pytest.raises(RunError, match=r"group \d was aborted 6 times"):
                await rollout(worker, 0)

    asyncio.run(main())


def test_interruptions_of_groups_without_numbers_are_those_of_each(server, checkpoint, tmp_path):
    path = plugin(
        tmp_path,
        "from collections import Counter\n"
        "calls = Counter()\n"
        "async def fn(args, sample, sampling_params):\n"
        "    calls[sample.prompt] += 1\n"
        "    sample.tokens, sample.response_length = [1, 2], 1\n"
        "    ends = calls[sample.prompt] > 2 * args.n_samples_per_prompt\n"
        "    sample.status = Sample.Status.COMPLETED if ends else Sample.Status.ABORTED\n"
        "    return sample\n",
    )
    args = make_args(checkpoint, server.port, custom_generate_function_path=path, rollout_batch_size=4)
    source = CountingDataSource(2, limit=4)
    numbered = source._new_group

    def unnumbered():
        group = numbered()
        for sample in group:
            sample.group_index = None
        return group

    source._new_group = unnumbered

    async def main():
        async with worker_of(args, source) as worker:
            assert len((await rollout(worker, 0)).samples) == 4

    asyncio.run(main())


def test_a_source_that_runs_dry_is_an_error_when_nothing_is_left(server, checkpoint):
    args = make_args(checkpoint, server.port, rollout_batch_size=2)

    async def main():
        async with worker_of(args, CountingDataSource(2, limit=3)) as worker:
            await rollout(worker, 0)
            with pytest.raises(UserError, match="ran dry in rollout 1: 1 more groups"):
                await rollout(worker, 1)

    asyncio.run(main())


def saving_args(checkpoint, server, tmp_path, **changes):
    directories = {"save": str(tmp_path), "load": str(tmp_path), "fresh_data_state": False}
    source_flags = {"rollout_shuffle": False, "buffer_filter_path": None}
    made = make_args(checkpoint, server.port, sglang_server_concurrency=8, **changes)
    values = {**vars(made), **directories, **source_flags}
    return SimpleNamespace(**{**values, "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer"})


def test_a_checkpoint_lacks_what_the_filter_has_dropped(server, checkpoint, tmp_path):
    """It is done with: a run that resumes would generate it again, for nothing."""
    drops = plugin(tmp_path, "def fn(args, samples):\n    return samples[0].prompt != 'question 1'\n")
    args = saving_args(checkpoint, server, tmp_path, dynamic_sampling_filter_path=drops)
    prompts = [f"question {number}" for number in range(40)]
    source = RolloutDataSourceWithBuffer(prompts, args)
    snapshots = DataSourceSnapshots(args, source)
    snapshots.load(-1)

    async def main():
        with snapshots.of_rollout(0):
            worker = AsyncRolloutWorker(args, source)
        async with worker_of(args, source):
            with GenerationCall(0).under_way(), snapshots.of_rollout(0):
                output = await asyncio.wait_for(worker.rollout(0), 30)
            # All that was drawn is done.
            await until(lambda: len(worker.queue) >= 4 and not worker.in_flight)
            snapshots.remember(0)
            snapshots.save(0)
        return {sample.prompt for sample in leaves(output.samples)}

    taken = asyncio.run(main())
    again = RolloutDataSourceWithBuffer(prompts, args)
    resumed = DataSourceSnapshots(args, again)
    resumed.load(0)
    with resumed.of_rollout(1):
        left = {group[0].prompt for group in draw_groups(args, again, len(prompts) - len(taken) - 1, 1)}
    assert left == set(prompts) - taken - {"question 1"}


def test_a_checkpoint_has_no_part_of_a_group_that_was_judged_as_one(server, checkpoint, tmp_path):
    """Where a sample has failed, the others' rewards are from a verdict that knew it as it was."""
    judge = plugin(tmp_path, "def fn(args, samples):\n    return [1.0] * len(samples)\n")
    (tmp_path / "failing.py").write_text(
        "from slime.rollout.sglang_rollout import generate\n"
        "async def fails(args, sample, sampling_params):\n"
        "    sample = await generate(args, sample, sampling_params)\n"
        "    if sample.group_index == 3 and sample.index % 2:\n"
        "        sample.status = type(sample).Status.FAILED\n"
        "    return sample\n"
    )
    names = {"custom_rm_path": judge, "custom_generate_function_path": f"{tmp_path / 'failing.py'}:fails"}
    args = saving_args(checkpoint, server, tmp_path, group_rm=True, **names)
    prompts = [f"question {number}" for number in range(40)]
    source = RolloutDataSourceWithBuffer(prompts, args)
    snapshots = DataSourceSnapshots(args, source)
    snapshots.load(-1)

    async def main():
        with snapshots.of_rollout(0):
            worker = AsyncRolloutWorker(args, source)
        async with worker_of(args, source):
            with GenerationCall(0).under_way(), snapshots.of_rollout(0):
                await asyncio.wait_for(worker.rollout(0), 30)
            await until(lambda: len(worker.queue) >= 4)
            snapshots.remember(0)
            snapshots.save(0)
            return {leaves(group)[0].group_index for _, group in worker.queue}

    waiting = asyncio.run(main())
    again = RolloutDataSourceWithBuffer(prompts, args)
    resumed = DataSourceSnapshots(args, again)
    resumed.load(0)
    with resumed.of_rollout(1):
        saved = {group[0].group_index: group for group in draw_groups(args, again, len(waiting), 1)}
    assert 3 in waiting and {sample.reward for sample in saved[3]} == {None}
    assert {sample.reward for number in waiting - {3} for sample in saved[number]} == {1.0}


@pytest.mark.parametrize("rollouts", [1, 2])
def test_a_checkpoint_has_what_waits_and_what_is_in_flight(server, checkpoint, tmp_path, rollouts):
    """After the kill the prompts that no saved rollout took come again, each once; answers that waited are not made again."""
    args = saving_args(checkpoint, server, tmp_path)
    prompts = [f"question {number}" for number in range(40)]
    held = {1, 2}
    server.hold = lambda payload: prompt_number(payload, args) in held

    async def start(resume_after):
        SingletonMeta.clear_instances()
        source = RolloutDataSourceWithBuffer(prompts, args)
        snapshots = DataSourceSnapshots(args, source)
        snapshots.load(resume_after)
        return source, snapshots

    async def one(source, snapshots, number):
        with GenerationCall(number).under_way(), snapshots.of_rollout(number):
            output = await asyncio.wait_for(AsyncRolloutWorker(args, source).rollout(number), 30)
            snapshots.remember(number)
        return [sample.prompt for sample in leaves(output.samples)[::2]]

    async def main():
        source, snapshots = await start(-1)
        with snapshots.of_rollout(0):
            worker = AsyncRolloutWorker(args, source)
        async with worker_of(args, source):
            taken = []
            for number in range(rollouts):
                taken += await one(source, snapshots, number)
            await until(lambda: len(worker.queue) >= 4)
            last = rollouts
            taken += await one(source, snapshots, last)
            waiting = [leaves(group)[0].prompt for _, group in worker.queue]
            snapshots.save(last)
        held.clear()
        requests = len(server.requests)
        source, snapshots = await start(last)
        with snapshots.of_rollout(last + 1):
            worker = AsyncRolloutWorker(args, source)
        async with worker_of(args, source):
            for number in range(last + 1, 19):
                taken += await one(source, snapshots, number)
            await until(lambda: not worker.in_flight)
        asked_again = {prompt_number(payload, args) for payload in server.requests[requests:]}
        return taken, waiting, asked_again

    taken, waiting, asked_again = asyncio.run(main())
    first_epoch = taken[: len(prompts) - 4]
    assert len(set(first_epoch)) == len(first_epoch), "none comes twice"
    assert set(taken) >= set(prompts[: len(taken) - 6]), "none is lost"
    assert {"question 1", "question 2"} <= set(taken)
    assert waiting and not {int(prompt.split()[1]) for prompt in waiting[:2]} & asked_again
