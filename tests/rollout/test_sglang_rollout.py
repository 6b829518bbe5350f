"""Whole steps of the default loop: what is kept, what returns to the data source, how it ends when something fails."""

import asyncio
import logging
import threading

import numpy as np
import pytest

from slime.rollout import sleep_rollout
from slime.rollout.base_types import leaves
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation_call import GenerationCall
from slime.rollout.sglang_rollout import generate_rollout, generate_rollout_async
from slime.utils import async_utils
from slime.utils.errors import RunError, UserError
from slime.utils.http_utils import close_http_client
from slime.utils.packed_sample import pack_sample
from slime.utils.plugin_loader import load_function
from slime.utils.sample_fields import held
from slime.utils.types import Sample
from tests.support.models.rollout_args import CountingDataSource, make_args
from tests.support.models.rollout_steps import group_numbers, plugin, prompt_number, run_step

Status = Sample.Status


def test_the_synchronous_function_gives_sorted_packed_groups(server, checkpoint):
    server.delay_s = 0.01
    args = make_args(checkpoint, server.port, rollout_batch_size=4, over_sampling_batch_size=4)
    source = CountingDataSource(2)
    try:
        output = generate_rollout(args, 3, source)
    finally:
        async_utils.run(close_http_client())
        async_utils.stop_async_loop()
    assert group_numbers(output.samples) == [0, 1, 2, 3]
    samples = leaves(output.samples)
    assert [sample.index for sample in samples] == list(range(8))
    assert all(isinstance(held(sample, "tokens"), np.ndarray) for sample in samples)
    assert all(pack_sample(sample).tokens is held(sample, "tokens") for sample in samples)
    assert output.metrics == {"rollout/surplus_groups": 0, "rollout/aborted_samples": 0, "rollout/failed_samples": 0}
    assert source.returned == []
    assert server.aborts == 0


def test_r3_no_prompt_of_surplus_and_unfinished_groups_is_lost(server, checkpoint):
    args = make_args(checkpoint, server.port, rollout_batch_size=2, over_sampling_batch_size=6)
    source = CountingDataSource(2)
    # Groups 0 and 1 never finish; of the others, two are chosen and two are surplus or were interrupted.
    server.hold = lambda payload: prompt_number(payload, args) in (0, 1)
    output = run_step(args, source)
    assert len(output.samples) == 2
    chosen, returned = group_numbers(output.samples), group_numbers(source.returned)
    assert sorted(chosen + returned) == source.handed_out == [0, 1, 2, 3, 4, 5]
    assert returned == sorted(returned)
    for sample in leaves(source.returned):
        assert (sample.status, sample.reward, sample.response) == (Status.PENDING, None, "")
        assert (sample.response_length, sample.rollout_log_probs) == (0, None)
        assert sample.tokens in ([], GenerateState(args).tokenizer.encode(sample.prompt))
        assert sample.prompt == f"question {sample.group_index}"
        assert sample.metadata == {}
    assert server.aborts >= 1
    assert output.metrics["rollout/aborted_samples"] >= 4
    # The next step takes them first.
    server.hold = lambda payload: False
    second = run_step(args, source, rollout_id=1)
    assert set(group_numbers(second.samples)) | set(group_numbers(source.returned)) == set(returned) | set(
        source.handed_out[6:]
    )
    assert source.handed_out == list(range(8))


def test_r3_finished_surplus_groups_are_kept_on_request(server, checkpoint, tmp_path):
    # All six groups are finished when the first is judged: four are surplus for certain.
    filter_path = plugin(
        tmp_path,
        "from slime.rollout.generate_state import GenerateState\n"
        "from tests.support.processes.waiting import wait_until\n"
        "def fn(args, samples):\n"
        "    return wait_until(lambda: not GenerateState(args).pendings)\n",
    )
    options = {"rollout_batch_size": 2, "over_sampling_batch_size": 6, "dynamic_sampling_filter_path": filter_path}
    args = make_args(checkpoint, server.port, keep_surplus_groups=True, **options)
    source = CountingDataSource(2)
    output = run_step(args, source)
    assert output.metrics["rollout/surplus_groups"] == 4
    assert all(sample.status is Status.COMPLETED for sample in leaves(source.returned))
    assert all(sample.weight_versions == ["1"] for sample in leaves(source.returned))
    requests = len(server.requests)
    second = run_step(args, source, rollout_id=1)
    assert len(second.samples) == 2
    assert requests == 12
    assert len(server.requests) <= requests + 4, "the kept groups are not generated again"


@pytest.mark.parametrize("trained_as", [2, 3])
def test_kept_groups_that_would_be_too_old_start_from_their_prompts(server, checkpoint, trained_as):
    """The server stamps version 1 on what it generates: one push old with a bound of one is fine, two are not."""
    args = make_args(checkpoint, server.port, keep_surplus_groups=True, max_weight_staleness=1)
    source = CountingDataSource(2)
    kept = run_step(args, source)
    assert kept.metrics["rollout/stale_groups"] == 0
    source.add_samples(kept.samples)
    requests = len(server.requests)
    server.weight_version = str(trained_as)
    with GenerationCall(1, trained_as).under_way():
        second = run_step(args, source, rollout_id=1)
    again = trained_as == 3
    assert group_numbers(second.samples) == group_numbers(kept.samples)
    assert len(server.requests) - requests == 4 * again
    assert second.metrics["rollout/stale_groups"] == 2 * again
    assert {v for sample in leaves(second.samples) for v in sample.weight_versions} == {"3" if again else "1"}


# The second sample of every group fails at first, behind three tokens; no group is judged before all are generated.
FAILS_AT_FIRST = """
import threading
from slime.utils.types import Sample
seen, all_generated = [], threading.Event()

def hook(args, sample):
    if sample.index % 2 and sample.index not in seen:
        sample.status = Sample.Status.FAILED
    seen.append(sample.index)
    if len(seen) == 4:
        all_generated.set()

def keep(args, samples):
    assert all_generated.wait(60)
    return True

def rm(args, samples):
    return [float(len(samples)) for _ in samples]
"""


@pytest.mark.parametrize("group_rm", [False, True])
def test_a_failed_sample_of_a_kept_surplus_group_starts_from_its_prompt(server, checkpoint, tmp_path, group_rm):
    file = tmp_path / "mine.py"
    file.write_text(FAILS_AT_FIRST)
    args = make_args(
        checkpoint,
        server.port,
        keep_surplus_groups=True,
        rollout_batch_size=1,
        dynamic_sampling_filter_path=f"{file}:keep",
        rollout_sample_hook_path=[f"{file}:hook"],
        group_rm=group_rm,
        custom_rm_path=f"{file}:rm" if group_rm else None,
    )
    source = CountingDataSource(2)
    run_step(args, source)
    returned, requests = leaves(source.returned), len(server.requests)
    args.over_sampling_batch_size = 1
    (group,) = run_step(args, source, rollout_id=1).samples
    assert [sample.response for sample in group] == ["FGH", "FGH"]
    assert [sample.status for sample in group] == [Status.COMPLETED, Status.COMPLETED]
    assert [len(sample.rollout_log_probs) for sample in group] == [3, 3]
    # A reward of the whole group is given to answers that are all there when it is asked for.
    assert len(server.requests) - requests == (2 if group_rm else 1)
    assert not group_rm or [sample.reward for sample in group] == [2.0, 2.0]
    assert Status.FAILED not in {sample.status for sample in returned}, "what is saved meanwhile can be gone on with"


def test_r5_groups_interrupted_in_the_middle_of_a_step_take_their_turn_again(server, checkpoint, tmp_path):
    path = plugin(
        tmp_path,
        "seen = set()\n"
        "async def fn(args, sample, sampling_params):\n"
        "    one = Sample(index=sample.index, group_index=sample.group_index, tokens=[1, 2], response_length=1)\n"
        "    one.status = Sample.Status.COMPLETED\n"
        "    other = Sample(index=sample.index, group_index=sample.group_index, tokens=[1])\n"
        "    other.status = Sample.Status.ABORTED if sample.index not in seen else Sample.Status.FAILED\n"
        "    seen.add(sample.index)\n"
        "    return [one, other]\n",
    )
    args = make_args(checkpoint, server.port, custom_generate_function_path=path)
    source = CountingDataSource(2)
    output = run_step(args, source)
    assert all(sample.status is not Status.ABORTED for sample in leaves(output.samples))
    assert sorted(group_numbers(output.samples) + group_numbers(source.returned)) == source.handed_out


def test_a_group_that_is_always_aborted_ends_the_step_instead_of_looping(server, checkpoint, tmp_path):
    path = plugin(
        tmp_path,
        "def fn(args, sample, sampling_params):\n    sample.status = Sample.Status.ABORTED\n    return sample\n",
    )
    args = make_args(checkpoint, server.port, custom_generate_function_path=path, rollout_batch_size=1)
    with pytest.raises(RunError, match=r"group \d+ was aborted 6 times"):
        run_step(args, CountingDataSource(2, limit=3))


class Unnumbered(CountingDataSource):
    """Its samples have numbers, and its groups have none."""

    def _new_group(self):
        group = super()._new_group()
        for sample in group:
            sample.group_index = None
        return group


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("times", [2, 99])
def test_interruptions_of_groups_without_numbers_are_those_of_each(server, checkpoint, tmp_path, partial, times):
    path = plugin(
        tmp_path,
        "from collections import Counter\n"
        "calls = Counter()\n"
        "async def fn(args, sample, sampling_params):\n"
        "    calls[sample.prompt] += 1\n"
        "    sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0], text='no')\n"
        f"    ends = calls[sample.prompt] > {times} * args.n_samples_per_prompt\n"
        "    sample.status = Sample.Status.COMPLETED if ends else Sample.Status.ABORTED\n"
        "    return sample\n",
    )
    sizes = {"rollout_batch_size": 4, "over_sampling_batch_size": 4}
    args = make_args(checkpoint, server.port, custom_generate_function_path=path, partial_rollout=partial, **sizes)
    if times < 6:
        assert len(run_step(args, Unnumbered(2)).samples) == 4
    else:
        with pytest.raises(RunError, match="the group of Sample.*prompt='question [0-3]'.* was aborted 6 times"):
            run_step(args, Unnumbered(2))


def test_r5_a_raising_task_stops_the_step_and_its_prompts_return(server, checkpoint, tmp_path):
    path = plugin(
        tmp_path,
        "async def fn(args, sample, sampling_params):\n"
        "    if sample.group_index == 1:\n        raise ValueError('broken tool')\n"
        "    await asyncio.Event().wait()\n",
    )
    args = make_args(checkpoint, server.port, custom_generate_function_path=path, over_sampling_batch_size=3)
    source = CountingDataSource(2)
    with pytest.raises(UserError, match=r"(?s)fn.py:fn raised ValueError for sample 2.*broken tool"):
        run_step(args, source, limit_s=60)
    assert sorted(group_numbers(source.returned)) == [0, 1, 2]
    assert all(sample.status is Status.PENDING for sample in leaves(source.returned))


def test_r21_a_data_source_that_runs_dry_is_an_error_with_both_numbers(server, checkpoint):
    args = make_args(checkpoint, server.port, rollout_batch_size=5, over_sampling_batch_size=5)
    source = CountingDataSource(2, limit=3)
    with pytest.raises(UserError, match=r"5 groups are needed \(--rollout-batch-size\), only 3 can still be had"):
        run_step(args, source)
    assert sorted(group_numbers(source.returned)) == [0, 1, 2], "nothing is lost"


def test_a_group_of_the_wrong_size_is_refused(server, checkpoint):
    args = make_args(checkpoint, server.port, n_samples_per_prompt=3)
    with pytest.raises(UserError, match=r"a group of 2 entries; expected a list of 3"):
        run_step(args, CountingDataSource(2))


def test_the_dynamic_filter_drops_counts_and_refills(server, checkpoint, tmp_path):
    path = plugin(
        tmp_path,
        "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"
        "def fn(args, samples, **kwargs):\n"
        "    keep = samples[0].group_index % 3 == 0\n"
        "    return DynamicFilterOutput(keep, None if keep else 'odd')\n",
    )
    args = make_args(checkpoint, server.port, dynamic_sampling_filter_path=path)
    source = CountingDataSource(2)
    output = run_step(args, source)
    assert [number % 3 for number in group_numbers(output.samples)] == [0, 0]
    dropped = output.metrics["rollout/dynamic_filter/drop_odd"]
    assert len(source.handed_out) == 2 + dropped + len(source.returned)


class RecordingDataSource(CountingDataSource):
    """Keeps how many groups were asked for each time."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = []

    def get_samples(self, num_samples):
        self.asked.append(num_samples)
        return super().get_samples(num_samples)


class PromptSource(RecordingDataSource):
    """Hands out plain prompts, of which the framework makes groups."""

    def get_samples(self, num_samples):
        return [group[0] if isinstance(group, list) else group for group in super().get_samples(num_samples)]


DROPS_ONE = (
    "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"
    "def fn(args, samples):\n    return DynamicFilterOutput(samples[0].prompt != 'question 3', 'unlucky')\n"
)


@pytest.mark.parametrize("source_class", [RecordingDataSource, PromptSource])
def test_a_dropped_group_is_replaced_by_one_other(server, checkpoint, tmp_path, source_class):
    path = plugin(tmp_path, DROPS_ONE)
    options = {"rollout_batch_size": 64, "over_sampling_batch_size": 64, "n_samples_per_prompt": 1}
    args = make_args(checkpoint, server.port, dynamic_sampling_filter_path=path, **options)
    source = source_class(1)
    output = run_step(args, source)
    assert len(output.samples) == 64
    assert source.asked == [64, 1]
    assert len(server.requests) == 65
    assert (output.metrics["rollout/surplus_groups"], source.returned) == (0, [])


def test_groups_drawn_beyond_the_target_are_used_up_before_more_are_drawn(server, checkpoint, tmp_path):
    path = plugin(tmp_path, "def fn(args, samples):\n    return samples[0].group_index not in (0, 1, 2, 3, 4)\n")
    args = make_args(checkpoint, server.port, dynamic_sampling_filter_path=path, over_sampling_batch_size=6)
    # One request at a time: the groups finish in the order in which they were drawn.
    args.sglang_server_concurrency = 1
    source = RecordingDataSource(2)
    output = run_step(args, source)
    assert group_numbers(output.samples) == [5, 6]
    assert source.asked == [6, 1]


def test_a_source_that_gives_less_than_asked_for_is_asked_for_what_is_missing(server, checkpoint):
    class Hesitant(RecordingDataSource):
        def get_samples(self, num_samples):
            return super().get_samples(num_samples)[:2]

    args = make_args(checkpoint, server.port, rollout_batch_size=5, over_sampling_batch_size=8)
    source = Hesitant(2)
    output = run_step(args, source)
    assert len(output.samples) == 5
    assert source.asked == [8, 3, 1]


def test_keep_when_insufficient_saves_groups_of_a_short_source(server, checkpoint, tmp_path):
    path = plugin(
        tmp_path,
        "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"
        "def fn(args, samples):\n    return DynamicFilterOutput(False, 'all', keep_when_insufficient=True)\n",
    )
    args = make_args(checkpoint, server.port, dynamic_sampling_filter_path=path, over_sampling_batch_size=4)
    output = run_step(args, CountingDataSource(2, limit=4))
    assert len(output.samples) == 2
    assert output.metrics["rollout/dynamic_filter/drop_all"] == 2


def test_all_samples_hook_sees_finished_groups_and_the_data_source(server, checkpoint, tmp_path):
    (tmp_path / "both.py").write_text(
        "seen = []\n"
        "def keep(args, samples):\n    return samples[0].group_index > 0\n"
        "def collect(args, groups, data_source):\n"
        "    data_source.seen = [group[0].group_index for group in groups]\n"
    )
    args = make_args(
        checkpoint,
        server.port,
        dynamic_sampling_filter_path=f"{tmp_path}/both.py:keep",
        rollout_all_samples_process_path=f"{tmp_path}/both.py:collect",
    )
    source = CountingDataSource(2)
    run_step(args, source)
    assert {0, 1, 2} <= set(source.seen)
    assert source.seen == sorted(source.seen)


@pytest.mark.parametrize("hook", [False, True])
def test_groups_that_were_dropped_are_held_for_the_hook_alone(server, checkpoint, tmp_path, hook):
    file = tmp_path / "both.py"
    file.write_text(
        "import gc, weakref\n"
        "dropped, alive = [], []\n"
        "def keep(args, samples):\n"
        "    gc.collect()\n"
        # The group before may still be on the stack of the loop, which goes on beside this thread.
        "    alive.append(sum(reference() is not None for reference in dropped[:-2]))\n"
        "    if samples[0].group_index >= 6:\n"
        "        return True\n"
        "    dropped.extend(weakref.ref(sample) for sample in samples)\n"
        "    return False\n"
        "def collect(args, groups, data_source):\n"
        "    data_source.seen = len(groups)\n"
    )
    args = make_args(
        checkpoint,
        server.port,
        rollout_batch_size=1,
        over_sampling_batch_size=1,
        dynamic_sampling_filter_path=f"{file}:keep",
        rollout_all_samples_process_path=f"{file}:collect" if hook else None,
    )
    source = CountingDataSource(2)
    source.add_samples = lambda groups: None
    run_step(args, source)
    alive = load_function(f"{file}:keep").__globals__["alive"]
    assert alive == ([0, 0, 2, 4, 6, 8, 10] if hook else [0] * 7)
    assert not hook or source.seen == 7


def test_partial_rollout_continues_where_it_stopped_and_finished_siblings_stay(server, checkpoint):
    args = make_args(checkpoint, server.port, partial_rollout=True, over_sampling_batch_size=3)
    source = CountingDataSource(2)
    first_of_group = []

    def hold(payload):
        if prompt_number(payload, args) != 0:
            return False
        first_of_group.append(payload)
        return len(first_of_group) == 2  # one sibling finishes, the other is held

    server.hold = hold
    run_step(args, source, rollout_id=7)
    assert group_numbers(source.returned)[0] == 0
    group = source.returned[0]
    assert {sample.status for sample in group} == {Status.COMPLETED, Status.ABORTED}
    assert all(sample.metadata["start_rollout_id"] == 7 for sample in group)
    interrupted = next(sample for sample in group if sample.status is Status.ABORTED)
    finished = next(sample for sample in group if sample.status is Status.COMPLETED)
    assert interrupted.response_length == 1
    before, finished_tokens = list(interrupted.tokens), list(finished.tokens)
    server.hold = lambda payload: False
    server.requests.clear()
    output = run_step(args, source, rollout_id=8)
    result = next(g for g in output.samples if g[0].group_index == 0)
    continued = next(sample for sample in result if sample.index == interrupted.index)
    assert continued.tokens[: len(before)] == before
    assert (continued.response_length, continued.response, len(continued.rollout_log_probs)) == (4, "FFGH", 4)
    request = next(r for r in server.requests if r["input_ids"] == before)
    assert request["sampling_params"]["max_new_tokens"] == 7
    assert next(s for s in result if s.index == finished.index).tokens == finished_tokens
    assert continued.metadata["start_rollout_id"] == 7


def test_r2_off_policy_tokens_are_masked_after_the_resumption(server, checkpoint):
    args = make_args(
        checkpoint,
        server.port,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=True,
        over_sampling_batch_size=3,
    )
    source = CountingDataSource(2)
    server.hold = lambda payload: prompt_number(payload, args) == 0
    run_step(args, source)
    server.hold = lambda payload: False
    output = run_step(args, source, rollout_id=1)
    group = next(g for g in output.samples if g[0].group_index == 0)
    for sample in group:
        assert sample.loss_mask == [0, 1, 1, 1]
        assert len(sample.loss_mask) == sample.response_length


def test_plain_generate_functions_that_ask_for_rewards_leave_room_for_them(server, checkpoint, tmp_path):
    # None asks for its reward before all are there, and each waits for it.
    file = tmp_path / "mine.py"
    file.write_text(
        "import threading\nfrom slime.rollout.rm_hub import async_rm\nfrom slime.utils import async_utils\n"
        "meeting = threading.Barrier(140)\n"
        "def generate(args, sample, sampling_params):\n"
        "    meeting.wait(60)\n"
        "    sample.tokens = [4]\n"
        "    sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0])\n"
        "    sample.status = type(sample).Status.COMPLETED\n"
        "    sample.reward = async_utils.run(async_rm(args, sample))\n"
        "    return sample\n"
        "def reward(args, sample):\n    return 0.5\n"
    )
    args = make_args(
        checkpoint,
        server.port,
        custom_generate_function_path=f"{file}:generate",
        custom_rm_path=f"{file}:reward",
        sglang_server_concurrency=140,
        rm_concurrency=2,
        rollout_batch_size=70,
        over_sampling_batch_size=70,
    )
    try:
        output = generate_rollout(args, 0, CountingDataSource(2))
    finally:
        async_utils.stop_async_loop()
    assert [sample.reward for sample in leaves(output.samples)] == [0.5] * 140


def test_failed_samples_are_counted_and_too_many_stop_the_run(server, checkpoint, tmp_path):
    path = plugin(
        tmp_path,
        "async def fn(args, sample):\n"
        "    if sample.index in args.slow:\n        await asyncio.Event().wait()\n    return 1.0\n",
    )
    args = make_args(checkpoint, server.port, custom_rm_path=path, rm_timeout=0.05)
    args.slow = [1, 2]
    output = run_step(args, CountingDataSource(2))
    assert output.metrics["rollout/failed_samples"] == 2
    assert [sample.remove_sample for sample in leaves(output.samples)] == [False, True, True, False]
    args.slow = [0, 1, 2]
    with pytest.raises(RunError, match=r"3 of 4 samples of this step failed.*sample 0: no reward"):
        run_step(args, CountingDataSource(2))


def test_samples_that_failed_and_were_dropped_by_the_filter_stop_the_run(server, checkpoint, tmp_path):
    filter_path = plugin(tmp_path, "def never(args, samples):\n    return False\n", name="never")
    reward = "async def fn(args, sample):\n    await asyncio.Event().wait()\n"
    args = make_args(
        checkpoint,
        server.port,
        dynamic_sampling_filter_path=filter_path,
        custom_rm_path=plugin(tmp_path, reward),
        rm_timeout=0.05,
    )
    with pytest.raises(RunError, match=r"4 of 4 samples of this step failed.*sample \d: no reward"):
        run_step(args, CountingDataSource(2))


def test_a_function_that_cancels_groups_ends_the_step_with_their_names(server, checkpoint, tmp_path):
    reward = (
        "async def fn(args, sample):\n"
        "    for task in asyncio.all_tasks():\n        task.cancel() if task.get_name().startswith('group ') else None\n"
        "    await asyncio.Event().wait()\n"
    )
    args = make_args(checkpoint, server.port, custom_rm_path=plugin(tmp_path, reward))
    with pytest.raises(RunError, match=r"^group \d was cancelled; does a function of yours cancel tasks"):
        run_step(args, CountingDataSource(2))


def test_the_state_is_reset_after_success_and_failure(server, checkpoint):
    args = make_args(checkpoint, server.port)
    run_step(args, CountingDataSource(2))
    state = GenerateState(args)
    assert (state.remaining_batch_size, state.aborted, state.pendings) == (0, False, set())
    with pytest.raises(UserError):
        run_step(args, CountingDataSource(2, limit=1))
    assert (state.remaining_batch_size, state.aborted, state.pendings) == (0, False, set())


@pytest.mark.parametrize("during", ["get_samples", "add_samples"])
def test_a_step_that_is_cancelled_while_its_source_is_busy_gives_everything_back_once(server, checkpoint, during):
    args = make_args(checkpoint, server.port, over_sampling_batch_size=4)
    source = CountingDataSource(2)
    # Two groups finish and are kept, the others return.
    server.hold = lambda payload: prompt_number(payload, args) >= 2
    busy, goes_on = threading.Event(), threading.Event()
    method = getattr(source, during)

    def waiting(*arguments):
        if not goes_on.is_set():
            busy.set()
            assert goes_on.wait(60)
        return method(*arguments)

    setattr(source, during, waiting)

    async def main():
        try:
            step = asyncio.create_task(generate_rollout_async(args, 0, source))
            assert await asyncio.to_thread(busy.wait, 60)
            step.cancel()
            # Its end begins while the source is still busy.
            for _ in range(10):
                await asyncio.sleep(0)
            goes_on.set()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(step, 60)
        finally:
            await close_http_client()

    asyncio.run(main())
    assert sorted(group_numbers(source.returned)) == source.handed_out == [0, 1, 2, 3]
    assert {(sample.status, sample.response) for sample in leaves(source.returned)} == {(Status.PENDING, "")}


def test_a_step_that_fails_at_its_very_end_gives_back_what_it_kept(server, checkpoint, tmp_path):
    path = plugin(tmp_path, "def fn(args, groups, data_source):\n    raise KeyError('lost')\n")
    args = make_args(checkpoint, server.port, rollout_all_samples_process_path=path)
    source = CountingDataSource(2)
    with pytest.raises(UserError, match="KeyError"):
        run_step(args, source)
    assert group_numbers(source.returned) == [0, 1]


def test_the_sleeping_rollout_tells_where_engines_are_and_never_returns(checkpoint, monkeypatch, caplog):
    class Ended(BaseException):
        """What ends the process."""

    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            raise Ended

    monkeypatch.setattr("slime.rollout.sglang_rollout.time.sleep", sleep)
    caplog.set_level(logging.INFO)
    for evaluation in (False, True):
        naps.clear()
        with pytest.raises(Ended):
            sleep_rollout.sleep(make_args(checkpoint, 7), 0, None, evaluation=evaluation)
    assert "http://127.0.0.1:7" in caplog.text and min(naps) >= 60
