"""Pitfalls of rollouts that are nobody's alone: of the loop that never stops, dialogues, and functions that share `args`."""

import argparse
import asyncio
import copy
import json
import pickle

import orjson
import pytest

from slime.rollout.dialogue import dialogue
from slime.rollout.fully_async_rollout import AsyncRolloutWorker
from slime.rollout.generate_state import rollout_sampling_params
from slime.rollout.generation import generate_and_rm_group
from slime.rollout.generation_call import GenerationCall
from slime.rollout.staleness import hold_to_bound
from slime.utils.errors import UserError
from slime.utils.run_values import SharedArguments, with_run_values
from slime.utils.types import Sample
from tests.support.models.rollout_args import CountingDataSource, make_args
from tests.support.models.rollout_steps import group_numbers, params, plugin, run

Status = Sample.Status
ALL_AT_ONCE = """
import asyncio
waiting, all_here = [], asyncio.Event()

async def fn(args, sample, sampling_params):
    waiting.append(sample.group_index)
    if len(waiting) == 1001:
        all_here.set()
    await all_here.wait()
    sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0])
    sample.status, sample.reward = Sample.Status.COMPLETED, 0.0
    return sample
"""


def test_r4_what_a_thousand_callbacks_bring_at_once_is_all_handed_out_in_turn(server, checkpoint, tmp_path):
    """The pool are 1,001 groups of one sample, which finish in one turn of the loop; rollouts take 400 each."""
    path = plugin(tmp_path, ALL_AT_ONCE)
    args = make_args(
        checkpoint, server.port, custom_generate_function_path=path, sglang_server_concurrency=1001,
        n_samples_per_prompt=1, rollout_batch_size=400,
    )  # fmt: skip

    async def main():
        worker = AsyncRolloutWorker(args, CountingDataSource(1))
        taken = []
        try:
            for number in range(3):
                with GenerationCall(number).under_way():
                    taken.append(group_numbers((await asyncio.wait_for(worker.rollout(number), 60)).samples))
        finally:
            for task in [*worker._tasks, *worker.in_flight]:
                task.cancel()
            await asyncio.gather(*worker._tasks, *worker.in_flight, return_exceptions=True)
        return taken

    taken = run(main())
    assert list(map(len, taken)) == [400] * 3 and len(set().union(*taken)) == 1200, "none twice"
    # The queue had the rest of the first thousand before what was drawn since.
    assert set(range(1001)) <= set().union(*taken) and max(taken[0] + taken[1]) <= 1000


def test_r11_a_turn_ends_at_its_stop_string_and_what_the_tool_says_is_not_trained(server, checkpoint):
    """The engine gives the stop string whole (`no_stop_trim`); the retrieved text behind it is nobody's token."""
    args = make_args(checkpoint, server.port, rollout_stop=["</search>"], rollout_max_response_len=100)
    said = ["<search>q</search>", "so"]
    turns = [list(text.encode()) for text in said]
    server.answer = lambda payload: turns[len(server.requests) - 1]
    found = "<information>told</information>"

    def reply(text):
        return found if text.endswith("</search>") else None

    sample = run(dialogue(args, Sample(index=0, prompt="p"), params(args), reply))
    retrieved = sample.response_length - sum(map(len, turns))
    assert sample.response == said[0] + found + said[1] and retrieved > 0
    assert sample.loss_mask == [1] * len(turns[0]) + [0] * retrieved + [1] * len(turns[1])
    assert all(
        (log_prob == 0.0) != trained
        for log_prob, trained in zip(sample.rollout_log_probs, sample.loss_mask, strict=True)
    )
    for request in server.requests:
        assert request["sampling_params"]["stop"] == ["</search>"] and request["sampling_params"]["no_stop_trim"]


@pytest.mark.parametrize("limit", [None, 2])
def test_r19_the_age_of_samples_is_told_and_bounded(checkpoint, limit):
    """A trainer that lags: weights 1 … 5 made the samples that train weights 5."""
    samples = [
        Sample(index=version, tokens=[1, 2], response_length=1, weight_versions=[str(version)])
        for version in range(1, 6)
    ]
    metrics = hold_to_bound(make_args(checkpoint, max_weight_staleness=limit), samples, trained_as=5)
    kept = [sample.index for sample in samples if not sample.remove_sample]
    ages = [5 - version for version in kept]
    assert kept == ([1, 2, 3, 4, 5] if limit is None else [3, 4, 5])
    assert metrics["rollout/staleness/mean"] == sum(ages) / len(ages)
    assert metrics["rollout/staleness/max"] == max(ages)
    assert metrics.get("rollout/stale_samples") == (None if limit is None else 2)


CHANGES_ARGS = """
import asyncio

async def changes(args, sample, sampling_params):
    if sample.index == 1:
        args.rollout_max_response_len = 4000
    return await asks(args, sample, sampling_params)

async def asks(args, sample, sampling_params):
    if not hasattr(args, "my_lock"):
        args.my_lock, args.my_count = asyncio.Lock(), 0
    async with args.my_lock:
        args.my_count += 1
        args.rollout_max_response_len = 8
    sample.append_response_tokens(args, tokens=[args.my_count], log_probs=[-1.0])
    sample.status = Sample.Status.COMPLETED
    return sample
"""


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_r20_a_function_that_changes_the_arguments_of_all_is_named_with_what_it_changes(
    server, checkpoint, tmp_path, in_evaluation
):
    """Of two tasks one would change what the other reads. Attributes of their own, they share."""
    path = plugin(tmp_path, CHANGES_ARGS, name="changes")
    args = SharedArguments(make_args(checkpoint, server.port, custom_generate_function_path=path))
    if in_evaluation:
        args = with_run_values(args, rollout_max_context_len=100)
    group = [Sample(index=index, tokens=[9]) for index in range(2)]
    with pytest.raises(UserError, match=r"changes.*sample 1") as caught:
        run(generate_and_rm_group(args, group, {}))
    assert "args.rollout_max_response_len was to become 4000 and is 8" in str(caught.value)
    assert args.rollout_max_response_len == 8
    with pytest.raises(AttributeError, match="args.rollout_seed was to be deleted"):
        del args.rollout_seed


CHANGES_LISTS = """
async def changes_lists(args, sample, sampling_params):
    if sample.index == 1:
        args.rollout_stop.append("</search>")
    sampling_params["stop"].append("</answer>")
    sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0])
    sample.status = Sample.Status.COMPLETED
    return sample
"""


def test_r20_a_function_that_changes_a_list_of_the_arguments_is_named_with_what_it_changes(
    server, checkpoint, tmp_path
):
    """Requests of all samples that follow would stop elsewhere."""
    path = plugin(tmp_path, CHANGES_LISTS, name="changes_lists")
    given = make_args(checkpoint, server.port, custom_generate_function_path=path, rollout_stop=["</s>"])
    args = SharedArguments(given)
    group = [Sample(index=index, tokens=[9]) for index in range(2)]
    with pytest.raises(UserError, match=r"changes_lists.*sample 1") as caught:
        run(generate_and_rm_group(args, group, rollout_sampling_params(args)))
    assert "args.rollout_stop was to be changed in place and is ['</s>']; all functions" in str(caught.value)
    assert args.rollout_stop == given.rollout_stop == ["</s>"]


@pytest.mark.parametrize(
    "change",
    [
        lambda args: args.names.append("c"), lambda args: args.names.extend("c"), lambda args: args.names.insert(0, "c"),
        lambda args: args.names.remove("a"), lambda args: args.names.sort(), lambda args: args.names.reverse(),
        lambda args: args.names.pop(), lambda args: args.names.clear(), lambda args: args.names.__setitem__(0, "c"),
        lambda args: args.names.__delitem__(0), lambda args: args.names.__iadd__(["c"]), lambda args: args.names.__imul__(2),
        lambda args: args.table.update(b=1), lambda args: args.table.setdefault("b", 1), lambda args: args.table.popitem(),
        lambda args: args.table.pop("a"), lambda args: args.table.clear(), lambda args: args.table.__setitem__("a", 2),
        lambda args: args.table.__delitem__("a"), lambda args: args.table.__ior__({"b": 1}),
    ],
)  # fmt: skip
def test_r20_lists_and_dicts_of_the_arguments_stay_in_every_way_of_changing_them(change):
    given = argparse.Namespace(names=["b", "a"], table={"a": 1})
    args = with_run_values(SharedArguments(given), num_rollout=2)
    with pytest.raises(
        TypeError, match=r"^args.(names was .* is \['b', 'a'\]|table was .* is \{'a': 1\}); all functions"
    ):
        change(args)
    change(given)
    # Whatever looks at them finds what they are.
    assert json.dumps(args.names) == orjson.dumps(args.names).decode().replace(",", ", ") == '["b", "a"]'
    assert sorted(args.names) == ["a", "b"] and args.names + ["c"] == ["b", "a", "c"] and {**args.table} == {"a": 1}


def test_r20_lists_that_are_of_no_flag_are_for_functions_to_fill():
    books = {"origins": {"names": "default", "seen": "YAML"}, "custom_config": {"seen": []}}
    given = argparse.Namespace(names=["a"], seen=[], of_a_driver={}, **books)
    for args in (SharedArguments(given), with_run_values(SharedArguments(given), num_rollout=2)):
        args.seen.append(1)
        args.of_a_driver["x"] = 1
        with pytest.raises(TypeError, match=r"^args.names was to be changed in place and is \['a'\]"):
            args.names.append("b")


def test_r20_copies_of_the_arguments_belong_to_their_owner(checkpoint):
    shared = SharedArguments(make_args(checkpoint, rollout_stop=["</s>"], apply_chat_template_kwargs={"think": True}))
    for own in (copy.copy(shared), copy.deepcopy(shared), pickle.loads(pickle.dumps(shared))):
        assert vars(own) == vars(shared)
        own.rollout_seed = 7
        del own.rollout_seed
        assert type(own.rollout_stop) is list and type(own.apply_chat_template_kwargs) is dict
        own.rollout_stop.append("</search>")
    assert shared.rollout_stop == ["</s>"]
    for copied in (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        assert type(copied(shared.rollout_stop)) is list and type(copied(shared.apply_chat_template_kwargs)) is dict
    shared.mine = [1]
    shared.mine = [2]
    del shared.mine
    assert shared.rollout_seed == 42
    shared.mine = 3
    in_evaluation = with_run_values(shared, rollout_max_context_len=100)
    in_evaluation.mine += 1
    with pytest.raises(AttributeError, match="rollout_max_context_len"):
        in_evaluation.rollout_max_context_len = 7
