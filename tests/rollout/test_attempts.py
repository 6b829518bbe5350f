"""Attempts on prompts that stay as they are: what returns to the data source, and the masks after a resumption."""

import operator
import random
from types import SimpleNamespace

import numpy as np
import pytest

from slime.observability.trace_utils import trace_event, trace_next_attempt
from slime.rollout.attempts import (
    as_continuable_group,
    as_finished_group,
    as_partial_group,
    as_prompts,
    begin_anew_where_sampled_otherwise,
    mask_finished_earlier,
    mask_tokens_before_resumption,
    new_attempt,
    own_copy,
)
from slime.rollout.data_source_files import groups_from_plain, groups_to_plain, read_state, write_state
from slime.rollout.generation import generate_and_rm, generate_and_rm_group
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.models.rollout_args import CONTEXT_LENGTH, CountingDataSource, make_args
from tests.support.models.rollout_steps import params, plugin, prompt_number, run, run_step

Status = Sample.Status
ARGS = SimpleNamespace(
    rollout_temperature=1.0, rollout_top_p=1.0, rollout_top_k=-1, rm_type="math", custom_rm_path=None, rm_url=None,
    reward_key=None, group_rm=False, use_rollout_routing_replay=False,
)  # fmt: skip
MASKING = SimpleNamespace(partial_rollout=True, mask_offpolicy_in_partial_rollout=True)


def partial_sample(prompt_length, response_length, **fields):
    tokens = list(range(prompt_length + response_length))
    return Sample(tokens=tokens, response_length=response_length, status=Status.ABORTED, **fields)


def test_prompts_are_copies_and_the_originals_stay_as_they_are():
    sample = partial_sample(3, 2, index=4, prompt="p", metadata={"mine": 1, "fail_reason": "x"}, reward=1.0)
    sample.train_metadata = {"task": "t"}
    (prompt,) = as_prompts([sample])
    assert (prompt.index, prompt.prompt, prompt.metadata) == (4, "p", {"mine": 1})
    assert (prompt.reward, prompt.status, prompt.response_length) == (None, Status.PENDING, 0)
    assert (prompt.tokens, prompt.train_metadata) == ([0, 1, 2], {"task": "t"})
    assert (sample.response_length, sample.reward, sample.status) == (2, 1.0, Status.ABORTED)
    prompt.metadata["new"] = prompt.train_metadata["new"] = 1
    prompt.tokens.append(9)
    assert "new" not in sample.metadata and "new" not in sample.train_metadata
    assert sample.tokens == [0, 1, 2, 3, 4]


def test_an_attempt_goes_on_in_its_session_and_a_new_one_has_its_own():
    """The router leads a session to the engine that has its prefix."""
    begun = partial_sample(3, 2, session_id="mine")
    prompts = [Sample(prompt="p"), Sample(prompt="p")]
    sessions = [attempt.session_id for attempt in new_attempt([begun, *prompts, *as_prompts([begun])])]
    assert sessions[0] == "mine" and len({*sessions, None}) == 5


def test_a_copy_has_containers_of_its_own_wherever_they_are():
    sample = Sample(metadata={"mixed": [1, {"deep": []}, 2], "plain": [1, 2]})
    copied = own_copy(sample)
    copied.metadata["mixed"][1]["deep"].append(3)
    copied.metadata["plain"].append(3)
    assert sample.metadata == {"mixed": [1, {"deep": []}, 2], "plain": [1, 2]}


def test_what_is_recorded_for_a_copy_is_not_recorded_for_the_sample():
    sample = Sample(index=0)
    trace_event(sample, "first")
    copied = own_copy(sample)
    trace_event(copied, "second")
    trace_next_attempt(copied)
    assert [event["name"] for event in copied.trace["events"]] == ["first", "second"]
    assert [event["name"] for event in sample.trace["events"]] == ["first"] and sample.trace["attempt"] == 0
    # An attribute of the user's of the same name is copied as any other.
    sample.trace = {"own": []}
    own_copy(sample).trace["own"].append(1)
    assert sample.trace == {"own": []}


def test_prompts_of_ids_without_text_survive():
    origin = [Sample(index=0, tokens=[5, 6, 7]), [Sample(index=1, tokens=[8, 9], response_length=1)]]
    assert [(prompt.tokens, prompt.response_length) for prompt in as_prompts(origin)] == [([5, 6, 7], 0), ([8], 0)]
    failed = Sample(index=0, tokens=[5, 6, 7, 1], response_length=1, status=Status.FAILED)
    assert as_partial_group(ARGS, origin[:1], [failed], 0)[0].tokens == [5, 6, 7]


class OwnSample(Sample):
    """A sample with a method of the user's."""

    def question(self):
        return self.prompt


def test_the_prompt_of_an_attempt_is_of_the_users_class():
    group = [OwnSample(prompt="p", index=0)]
    attempt = OwnSample(prompt="p", index=0, tokens=[1, 2], response_length=1, response="t", status=Status.ABORTED)
    (returned,) = as_continuable_group(ARGS, group, [attempt])
    (prompt,) = as_prompts([returned])
    assert prompt == group[0] and prompt.question() == "p"


def test_partial_groups_keep_the_first_rollout_and_restart_unfinished_fan_outs():
    origin = [Sample(index=i, prompt="p") for i in range(4)]
    finished = Sample(index=1, tokens=[1, 2], response_length=1, status=Status.COMPLETED)
    finished_pair = [Sample(index=2, status=Status.COMPLETED), Sample(index=2, status=Status.TRUNCATED)]
    broken_pair = [Sample(index=3, status=Status.COMPLETED), Sample(index=3, status=Status.ABORTED)]
    group = [partial_sample(2, 3, index=0, metadata={"start_rollout_id": 1}), finished, finished_pair, broken_pair]
    returned = as_partial_group(ARGS, origin, group, rollout_id=6)
    assert returned[0] is group[0] and returned[0].metadata["start_rollout_id"] == 1
    assert returned[1] is finished and finished.metadata["start_rollout_id"] == 6
    assert returned[2] == finished_pair
    assert (returned[3].index, returned[3].status, returned[3].tokens) == (3, Status.PENDING, [])


@pytest.mark.parametrize("group_rm", [False, True])
def test_what_finished_ungraded_is_graded_where_its_group_goes_on(server, checkpoint, group_rm):
    """It waited for its siblings with --group-rm, which the resumed run may do without."""
    args = make_args(checkpoint, server.port, rm_type="f1", group_rm=group_rm)
    values = {"prompt": "p", "label": "6", "response": "6", "status": Status.COMPLETED}
    first, *pair = (Sample(index=index, tokens=[1, 2], response_length=1, **values) for index in (0, 1, 1))
    single, several = run(generate_and_rm_group(args, [first, pair], params(args)))
    assert (single.reward, [sample.reward for sample in several]) == (1.0, [1.0, 1.0])
    assert not server.requests


def test_failed_entries_of_a_returned_group_are_the_prompts_that_were_handed_out():
    origin = [Sample(index=i, prompt=f"p{i}", label="l") for i in range(3)]
    # A function may return samples of its own, which know nothing of the prompt.
    stranger = Sample(index=0, tokens=[1, 2], response_length=1, status=Status.FAILED)
    pair = [Sample(index=2, status=Status.COMPLETED), Sample(index=2, status=Status.FAILED)]
    aborted = partial_sample(2, 3, index=1)
    for returned in (
        as_partial_group(ARGS, origin, [stranger, aborted, pair], 3),
        as_continuable_group(ARGS, origin, [stranger, aborted, pair]),
    ):
        assert [(entry.prompt, entry.status) for entry in returned] == [
            ("p0", Status.PENDING), ("", Status.ABORTED), ("p2", Status.PENDING)
        ]  # fmt: skip
        assert (returned[0].label, returned[0].tokens) == ("l", [])


# Notes what an attempt finds, and changes all of it; an attempt ends as the next of `args.ends` says.
CHANGES_EVERYTHING = """
import copy
from slime.rollout.failures import SampleFailed

async def fn(args, sample, sampling_params):
    args.found.append(copy.deepcopy(sample.to_dict()))
    sample.metadata["nested"]["list"].append("mine")
    sample.metadata["nested"]["set"].add("mine")
    sample.metadata["pair"][0].append("mine")
    sample.metadata["new"] = sample.own_attribute["new"] = 1
    sample.prompt[0]["content"] = "another question"
    sample.train_metadata["task"] = sample.apply_chat_template_kwargs["mine"] = "other"
    sample.tokens[:0] = [9, 9]
    sample.spec_info.completion_token_num += 5
    sample.label, sample.non_generation_time = "other", 3.0
    end = args.ends.pop(0)
    sample.custom_rm_path = None if end == "completed" else "no.such"
    sample.append_response_tokens(args, tokens=[5, 6], log_probs=[-1.0, -1.0], text="no")
    if end == "fails":
        raise SampleFailed("the tool broke")
    sample.status = Sample.Status(end)
    return sample
"""


class OnePrompt(CountingDataSource):
    """Hands out one prompt that has something in every field of the user's."""

    def __init__(self):
        super().__init__(1, limit=1)

    def _new_group(self):
        self.prompt = Sample(
            index=0, group_index=0, prompt=[{"role": "user", "content": "question"}], tokens=[1, 2, 3], label="label",
            metadata={"nested": {"list": [1, "a"], "set": {1}}, "pair": (["x"], 2)}, train_metadata={"task": "t"},
        )  # fmt: skip
        self.prompt.own_attribute = {"old": 0}
        self.handed_out.append(0)
        return [self.prompt]


def attempts_that_end(server, checkpoint, tmp_path, ends, **flags):
    """What the attempts of a step found, without their sessions and traces; the finished sample; and the source."""
    path = plugin(tmp_path, CHANGES_EVERYTHING)
    sizes = {"rollout_batch_size": 1, "over_sampling_batch_size": 1, "n_samples_per_prompt": 1}
    args = make_args(checkpoint, server.port, custom_generate_function_path=path, **sizes, **flags)
    args.ends, args.found = list(ends), []
    args.rm_type = None
    args.custom_rm_path = plugin(tmp_path, "def one(args, sample):\n    return 1.0\n", name="one")
    source = OnePrompt()
    (group,) = run_step(args, source).samples
    assert args.ends == []
    for found in args.found:
        del found["session_id"], found["trace"]
    return args.found, group[0], source


@pytest.mark.parametrize("ends", [["fails", "completed"], ["aborted", "completed"], ["aborted", "fails", "completed"]])
def test_nothing_that_a_function_changed_reaches_the_next_attempt(server, checkpoint, tmp_path, ends):
    whole = OnePrompt()._new_group()[0].to_dict()
    found, _, source = attempts_that_end(server, checkpoint, tmp_path, ends)
    del whole["session_id"]
    assert found == [whole] * len(ends)
    assert source.prompt.to_dict() == {**whole, "session_id": None}, "what left the source stays as it is"


def test_an_interrupted_attempt_goes_on_with_what_it_has_and_one_that_fails_then_leaves_nothing(
    server, checkpoint, tmp_path
):
    ends = ["aborted", "aborted", "fails", "completed"]
    found, finished, source = attempts_that_end(server, checkpoint, tmp_path, ends, partial_rollout=True)
    assert [attempt["response"] for attempt in found] == ["", "no", "nono", ""]
    assert [attempt["metadata"]["nested"]["list"][2:] for attempt in found] == [[], ["mine"], ["mine"] * 2, []]
    assert found[3] == found[0]
    assert (finished.tokens, finished.response_length) == ([9, 9, 1, 2, 3, 5, 6], 2)
    assert (
        not {"prompt_beside", "sampled_under"} & finished.__dict__.keys()
        and "start_rollout_id" not in finished.metadata
    )
    assert source.prompt.metadata["nested"] == {"list": [1, "a"], "set": {1}}


def test_a_saved_attempt_still_knows_its_prompt(tmp_path):
    origin = [Sample(index=0, prompt="p", label="l"), Sample(index=1, prompt="q", metadata={"pair": (1, [2])})]
    group = [partial_sample(2, 3, index=0, prompt="changed"), partial_sample(2, 3, index=1, prompt="changed")]
    write_state(tmp_path / "state", {"buffer": groups_to_plain([as_partial_group(ARGS, origin, group, 4)])})
    (returned,) = groups_from_plain(read_state(tmp_path / "state")["buffer"])
    assert [(sample.prompt, sample.response_length) for sample in returned] == [("changed", 3)] * 2
    assert as_prompts(returned) == origin


@pytest.mark.parametrize("flag", ["rollout_temperature", "rollout_top_p", "rollout_top_k"])
def test_attempts_that_were_sampled_under_other_flags_are_prompts_again(tmp_path, flag, caplog):
    origin = [Sample(index=0, prompt="p"), Sample(index=1, prompt="q"), Sample(index=2, prompt="r")]
    pair = [Sample(index=2, status=Status.COMPLETED), Sample(index=2, status=Status.TRUNCATED)]
    group = as_partial_group(ARGS, origin, [partial_sample(2, 3, index=0), Sample(index=1), pair], 4)
    write_state(tmp_path / "state", {"buffer": groups_to_plain([group])})
    saved = groups_from_plain(read_state(tmp_path / "state")["buffer"])
    of_a_user = [partial_sample(2, 3), Sample(), Sample()]
    same = begin_anew_where_sampled_otherwise(ARGS, [*saved, of_a_user], 5)
    assert same[0] is saved[0] and same[1] is of_a_user and not caplog.records
    begun = begin_anew_where_sampled_otherwise(SimpleNamespace(**{**vars(ARGS), flag: 0.5}), [*saved, of_a_user], 5)
    assert begun[0] == origin and begun[1] is of_a_user
    (warning,) = caplog.messages
    assert warning.startswith("rollout 5: 2 attempts of an earlier start begin anew")
    assert f"(--{flag.replace('_', '-')} {getattr(ARGS, flag)} → 0.5)" in warning


def test_graded_attempts_begin_anew_where_the_run_grades_otherwise(caplog):
    """Beside new rewards of another kind they would be compared with these."""
    origin = [Sample(index=0, prompt="p"), Sample(index=1, prompt="q")]
    graded = Sample(index=0, status=Status.COMPLETED, response="a", response_length=1, reward=1.0)
    saved = groups_from_plain(groups_to_plain([as_partial_group(ARGS, origin, [graded, partial_sample(2, 3)], 4)]))
    for flag, value in (
        ("rm_type", "f1"), ("custom_rm_path", "own.py:reward"), ("rm_url", "http://other:1"), ("reward_key", "score"),
        ("group_rm", True),
    ):  # fmt: skip
        caplog.clear()
        args = SimpleNamespace(**{**vars(ARGS), flag: value})
        ((begun, continued),) = begin_anew_where_sampled_otherwise(args, saved, 5)
        assert begun == origin[0] and continued is saved[0][1]
        assert f"(--{flag.replace('_', '-')} {getattr(ARGS, flag)} → {value})" in caplog.text


def test_finished_attempts_without_experts_begin_anew_where_the_run_replays_them(caplog):
    """Nobody would ask for them again. Unfinished ones get those of all their tokens with the rest."""
    origin = [Sample(index=index, prompt="p") for index in range(3)]
    finished = {"status": Status.COMPLETED, "response": "a", "response_length": 1, "reward": 1.0}
    group = [Sample(index=0, **finished), partial_sample(2, 3, index=1), Sample(index=2, **finished)]
    group[2].rollout_routed_experts = np.zeros((2, 2, 1), np.int32)
    saved = groups_from_plain(groups_to_plain([as_partial_group(ARGS, origin, group, 4)]))
    args = SimpleNamespace(**{**vars(ARGS), "use_rollout_routing_replay": True})
    ((begun, *kept),) = begin_anew_where_sampled_otherwise(args, saved, 5)
    assert begun == origin[0] and all(map(operator.is_, kept, saved[0][1:]))
    assert "rollout 5: 1 attempts of an earlier start begin anew" in caplog.text
    assert "(--use-rollout-routing-replay)" in caplog.text


def test_one_verdict_on_a_group_is_kept_whole_or_not_at_all():
    origin = [Sample(index=index, prompt="p") for index in range(2)]
    group = [Sample(index=0, status=Status.COMPLETED, reward=1.0), Sample(index=1, status=Status.FAILED, reward=0.0)]
    assert as_finished_group(SimpleNamespace(**{**vars(ARGS), "group_rm": True}), origin, group) == origin
    kept = as_finished_group(ARGS, origin, group)
    assert kept[0] is group[0] and kept[1] == origin[1]
    group[1].status = Status.TRUNCATED
    assert as_finished_group(SimpleNamespace(**{**vars(ARGS), "group_rm": True}), origin, group) == group


def test_partial_answers_begin_anew_where_the_run_starts_again_at_another_temperature(server, checkpoint, caplog):
    """Their log-probs would come from two distributions."""
    args = make_args(checkpoint, server.port, partial_rollout=True, over_sampling_batch_size=3)
    source = CountingDataSource(2)
    server.hold = lambda payload: prompt_number(payload, args) == 0
    run_step(args, source)
    source.returned = groups_from_plain(groups_to_plain(source.returned))
    assert {len(sample.rollout_log_probs) for sample in source.returned[0]} == {1}
    SingletonMeta.clear_instances()
    server.hold = lambda payload: False
    server.requests.clear()
    args.rollout_temperature = 0.5
    output = run_step(args, source, rollout_id=1)
    group = next(g for g in output.samples if g[0].group_index == 0)
    assert [(s.prompt, s.response, len(s.rollout_log_probs)) for s in group] == [("question 0", "FGH", 3)] * 2
    assert {request["sampling_params"]["temperature"] for request in server.requests} == {0.5}
    assert [message for message in caplog.messages if "begin anew" in message] == [
        "rollout 1: 2 attempts of an earlier start begin anew, from their prompts: they were sampled or graded under other "
        "flags (--rollout-temperature 1.0 → 0.5)"
    ]


def test_an_attempt_that_was_saved_without_its_prompt_gives_up_what_generation_wrote():
    """As in the states of data that were written before prompts stood beside attempts."""
    (saved,) = groups_from_plain([groups_to_plain([partial_sample(2, 3, prompt="p", metadata={"raw_reward": 1})])])
    assert as_prompts(saved) == [Sample(prompt="p", tokens=[0, 1])]


@pytest.mark.parametrize("seed", range(20))
def test_r2_the_mask_always_has_response_length_entries(seed):
    rng = random.Random(seed)
    prompt_length, old, new = rng.randint(1, 6), rng.randint(1, 6), rng.randint(0, 6)
    sample = partial_sample(prompt_length, old)
    before = list(sample.tokens)
    if rng.random() < 0.5:
        sample.loss_mask = [rng.randint(0, 1) for _ in range(old)]
    if new:
        sample.append_response_tokens(tokens=[200 + i for i in range(new)], trainable=False)
        sample.loss_mask[old:] = [1] * new
    sample.rollout_log_probs = None
    mask_tokens_before_resumption(MASKING, sample, before)
    assert sample.loss_mask == [0] * old + [1] * new
    assert len(sample.loss_mask) == sample.response_length


def test_r2_fan_outs_are_masked_leaf_by_leaf():
    before = [1, 2, 3, 10, 11]  # prompt of three, two generated earlier
    continued = Sample(tokens=[1, 2, 3, 10, 11, 12], response_length=3)
    rewritten = Sample(tokens=[1, 2, 3, 10, 99, 98], response_length=3, loss_mask=[1, 0, 1])
    other_context = Sample(tokens=[7, 8, 9], response_length=2)
    mask_tokens_before_resumption(MASKING, [continued, [rewritten], other_context], before)
    assert continued.loss_mask == [0, 0, 1]
    assert rewritten.loss_mask == [0, 0, 1]
    assert other_context.loss_mask == [1, 1]


def test_finished_siblings_of_a_returned_group_train_nothing():
    returned = Sample(tokens=[1, 2, 3], response_length=2, metadata={"start_rollout_id": 0})
    mask_finished_earlier(MASKING, returned)
    assert returned.loss_mask == [0, 0]
    surplus = Sample(tokens=[1, 2, 3], response_length=2)
    mask_finished_earlier(MASKING, surplus)
    assert surplus.loss_mask is None


@pytest.mark.parametrize("flags", [(True, False), (False, True), (False, False)])
def test_nothing_is_masked_without_both_flags(flags):
    args = SimpleNamespace(partial_rollout=flags[0], mask_offpolicy_in_partial_rollout=flags[1])
    sample = partial_sample(2, 2, metadata={"start_rollout_id": 0})
    mask_tokens_before_resumption(args, sample, list(sample.tokens))
    mask_finished_earlier(args, sample)
    assert sample.loss_mask is None


@pytest.mark.parametrize("evaluation", [False, True])
def test_a_group_is_graded_at_once_with_siblings_finished_earlier_and_an_evaluation_one_by_one(
    server, checkpoint, tmp_path, evaluation
):
    path = plugin(
        tmp_path, "def fn(args, samples):\n    args.graded.append(len(samples))\n    return [1.0] * len(samples)\n"
    )
    args = make_args(checkpoint, server.port, group_rm=True, custom_rm_path=path)
    args.graded = []
    finished = Sample(index=0, tokens=[1, 2], response_length=1, status=Status.COMPLETED, rollout_log_probs=[-1.0])
    group = [finished, Sample(index=1, prompt="p")]
    graded = run(generate_and_rm_group(args, group, params(args), evaluation=evaluation))
    assert [sample.reward for sample in graded] == [1.0, 1.0]
    assert args.graded == ([1, 1] if evaluation else [2])


def test_an_answer_that_fills_the_context_is_truncated_and_no_failure(server, checkpoint):
    args = make_args(checkpoint, server.port, rollout_max_response_len=None)
    whole = partial_sample(CONTEXT_LENGTH - 3, 3, index=0)
    whole.rollout_log_probs = [-1.0] * 3
    finished = run(generate_and_rm(args, whole, params(args)))
    assert (finished.status, finished.response_length, server.requests) == (Status.TRUNCATED, 3, [])
