"""Turns become samples: which messages are one conversation, which turns one sample, and what of them is trained."""

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.agent.trajectory import TrajectoryManager, TurnRecord
from slime.utils.types import Sample

USER, TOOL, OTHER = ({"role": role, "content": text} for role, text in (("user", "u"), ("tool", "t"), ("user", "o")))
BASE = Sample(group_index=3, index=7, prompt="p", label="l", metadata={"own": 1})


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def turn(prompt, output, finish="stop", **more):
    """A turn whose log-probs are −0.1 times its ids."""
    return TurnRecord(prompt, output, finish, [-0.1 * token for token in output], **more)


def recorded(*turns, threshold=1024):
    """A manager whose session `s` has these: (turn, messages before it, its own message)."""
    manager = TrajectoryManager(threshold)
    for record, before, message in turns:
        manager.record_turn("s", turn=record, prompt_messages=before, response_message=message)
    return manager


def samples_of(manager, **options):
    return manager.get_trajectory("s", base_sample=BASE, **options)


def two_turns(second_prompt, second_output=(12,), threshold=1024):
    """A turn with the ids 10 and 11 to the prompt 1, 2, 3, and one after a tool's message."""
    before = [USER, said("a"), TOOL]
    first = (turn([1, 2, 3], [10, 11]), [USER], said("a"))
    return recorded(first, (turn(second_prompt, list(second_output)), before, said("b")), threshold=threshold)


# -- how turns are put together ----------------------------------------------------------------------------------------


def test_a_prompt_that_goes_on_extends_the_sample():
    (sample,) = samples_of(two_turns([1, 2, 3, 10, 11, 4]))
    assert sample.tokens == [1, 2, 3, 10, 11, 4, 12] and sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == pytest.approx([-1.0, -1.1, 0.0, -1.2]) and sample.response_length == 4
    assert sample.status is Sample.Status.COMPLETED


def test_a_prompt_that_says_the_last_answer_otherwise_takes_its_place_as_context():
    (sample,) = samples_of(two_turns([1, 2, 3, 10, 99, 4]))
    assert sample.tokens == [1, 2, 3, 10, 99, 4, 12] and sample.loss_mask == [0, 0, 0, 1]
    assert sample.rollout_log_probs == pytest.approx([0.0, 0.0, 0.0, -1.2])


@pytest.mark.parametrize("made", [np.array, torch.tensor])
def test_ids_may_be_arrays_or_tensors_and_the_end_the_dict_of_the_engine(made):
    first = TurnRecord(made([1, 2, 3]), made([10, 11]), {"type": "stop", "matched": 11}, made([-1.0, -1.5]))
    second = TurnRecord(made([1, 2, 3, 10, 11, 4]), made([12, 13]), {"type": "length"}, made([-0.5, -0.25]))
    (sample,) = samples_of(recorded((first, [USER], said("a")), (second, [USER, said("a"), TOOL], said("b"))))
    assert sample.tokens == [1, 2, 3, 10, 11, 4, 12, 13] and sample.loss_mask == [1, 1, 0, 1, 1]
    assert sample.rollout_log_probs == [-1.0, -1.5, 0.0, -0.5, -0.25] and sample.truncated
    assert json.loads(json.dumps(sample.tokens)) == sample.tokens


def test_another_prompt_begins_another_sample():
    first, second = samples_of(two_turns([1, 9, 4]))
    assert (first.tokens, first.loss_mask) == ([1, 2, 3, 10, 11], [1, 1])
    assert (second.tokens, second.loss_mask, second.response_length) == ([1, 9, 4, 12], [1], 1)


@pytest.mark.parametrize(("length", "count"), [(1023, 1), (1024, 2)])
def test_an_output_as_long_as_the_threshold_begins_another_sample(length, count):
    samples = samples_of(two_turns([1, 2, 3, 10, 99, 4], [12] * length))
    assert len(samples) == count and sum(samples[-1].loss_mask) == length


def test_a_threshold_of_0_masks_nothing():
    first, second = samples_of(two_turns([1, 2, 3, 10, 99, 4], threshold=0))
    assert first.loss_mask == [1, 1] and second.tokens == [1, 2, 3, 10, 99, 4, 12]


def test_a_prompt_that_is_shorter_than_what_is_held():
    """Within the last response it is context; before it, another prompt."""
    (sample,) = samples_of(two_turns([1, 2, 3, 10]))
    assert (sample.tokens, sample.loss_mask) == ([1, 2, 3, 10, 12], [0, 1])
    assert len(samples_of(two_turns([1, 2]))) == 2


@pytest.mark.parametrize(
    ("prompt", "counts"),
    [([1, 2, 3, 10, 11, 4], {}), ([1, 2, 3, 10, 99, 4], {"masked_turns": 1}), ([1, 9, 4], {"forks": 1})],
)
def test_turns_that_are_not_trained_and_samples_that_begin_anew_are_counted(prompt, counts):
    manager = two_turns(prompt)
    samples_of(manager)
    assert manager.counts == counts


def test_a_turn_that_another_path_trains_does_not_count_as_masked():
    before = [USER, said("a")]
    manager = recorded(
        (turn([1], [10]), [USER], said("a")),
        (turn([1, 19, 2], [20]), [*before, TOOL], said("b")),
        (turn([1, 10, 3], [30]), [*before, OTHER], said("c")),
    )
    assert [sample.loss_mask for sample in samples_of(manager)] == [[0, 0, 1], [1, 0, 1]] and not manager.counts


def test_three_turns_of_which_the_middle_one_is_rewritten():
    manager = recorded(
        (turn([1], [10]), [USER], said("a")),
        (turn([1, 10, 2], [20, 21]), [USER, said("a"), TOOL], said("b")),
        (turn([1, 10, 2, 29, 3], [30]), [USER, said("a"), TOOL, said("b"), TOOL], said("c")),
    )
    (sample,) = samples_of(manager)
    assert sample.tokens == [1, 10, 2, 29, 3, 30] and sample.loss_mask == [1, 0, 0, 0, 1]
    assert sample.metadata["round_number"] == 3


# -- which messages are one conversation -------------------------------------------------------------------------------


def test_turns_that_leaves_share_are_trained_once():
    before = [USER, said("a")]
    manager = recorded(
        (turn([1], [10]), [USER], said("a")),
        (turn([1, 10, 2], [20]), [*before, TOOL], said("b")),
        (turn([1, 10, 3], [30]), [*before, OTHER], said("c")),
    )
    first, second = samples_of(manager)
    assert (first.tokens, first.loss_mask) == ([1, 10, 2, 20], [1, 0, 1])
    assert (second.tokens, second.loss_mask) == ([1, 10, 3, 30], [0, 0, 1])
    assert second.rollout_log_probs == pytest.approx([0.0, 0.0, -3.0])


def test_a_shared_turn_that_the_first_leaf_masks_is_trained_in_the_next():
    before = [USER, said("a")]
    manager = recorded(
        (turn([1], [10]), [USER], said("a")),
        (turn([1, 99, 2], [20]), [*before, TOOL], said("b")),
        (turn([1, 10, 3], [30]), [*before, OTHER], said("c")),
    )
    assert [sample.loss_mask for sample in samples_of(manager)] == [[0, 0, 1], [1, 0, 1]]


def test_an_answer_that_a_client_rewrites_goes_on_in_its_chain_and_is_not_trained():
    """Also where its tokens are those that were recorded."""
    rewritten = [USER, said("A"), TOOL]
    first = (turn([1], [10, 11]), [USER], said("a"))
    manager = recorded(first, (turn([1, 10, 11, 2], [20]), rewritten, said("b")))
    assert manager.recorded_turns("s", [*rewritten, said("b")])[0][0] == 3, "its own answer alone"
    (sample,) = samples_of(manager)
    assert sample.tokens == [1, 10, 11, 2, 20] and sample.loss_mask == [0, 0, 0, 1]


@pytest.mark.parametrize(("threshold", "masks"), [(3, [[0, 0, 0, 1]]), (2, [[1, 1], [1]]), (0, [[1, 1], [1]])])
def test_a_rewritten_answer_branches_off_from_the_threshold_on(threshold, masks):
    first = (turn([1], [10, 11]), [USER], said("a"))
    manager = recorded(first, (turn([1, 10, 11, 2], [20]), [USER, said("A"), TOOL], said("b")), threshold=threshold)
    assert [sample.loss_mask for sample in samples_of(manager)] == masks


def test_an_answer_that_was_gone_on_with_is_not_rewritten():
    """Nor one of two to the same question: nobody tells which."""
    followed = recorded(
        (turn([1], [10]), [USER], said("a")),
        (turn([1, 10, 2], [20]), [USER, said("a"), TOOL], said("b")),
        (turn([1, 11, 2], [30]), [USER, said("A"), TOOL], said("c")),
    )
    assert len(samples_of(followed)) == 2
    twice = recorded(
        (turn([1], [10]), [USER], said("a")),
        (turn([1], [11]), [USER], said("b")),
        (turn([1, 12, 2], [30]), [USER, said("A"), TOOL], said("c")),
    )
    assert [sample.loss_mask for sample in samples_of(twice)] == [[1], [1], [1]]


def test_a_repeated_request_goes_on_where_its_last_answer_is():
    manager = recorded(
        (turn([1], [10]), [USER], said("a")),
        (turn([1], [11]), [USER], said("a")),
        (turn([1, 11, 2], [20]), [USER, said("a"), TOOL], said("b")),
    )
    assert [sample.tokens for sample in samples_of(manager)] == [[1, 10], [1, 11, 2, 20]]


def test_what_the_model_wrote_itself_is_found_among_messages():
    manager = two_turns([1, 2, 3, 10, 11, 4])
    messages = [USER, said("a"), TOOL, said("b"), OTHER]
    assert [(place, record.output_ids) for place, record in manager.recorded_turns("s", messages)] == [
        (1, [10, 11]),
        (3, [12]),
    ]
    assert manager.recorded_turns("s", [OTHER, said("a")]) == manager.recorded_turns("unknown", messages) == []


# -- samples -----------------------------------------------------------------------------------------------------------


def test_siblings_are_one_execution_with_the_full_reward_each():
    calls = {"tool_calls": [{"name": "f", "arguments": {}}]}
    manager = recorded(
        (turn([1], [10]), [USER], said("", **calls)),
        (turn([2], [20], ill_formed=True), [OTHER], said("b")),
    )
    first, second = samples_of(manager, reward=0.5, extra_metadata={"file": "x"})
    for sample in (first, second):
        assert (sample.index, sample.group_index, sample.prompt, sample.label) == (7, 3, "p", "l")
        assert (sample.rollout_id, sample.reward, sample.session_id) == (7, 0.5, "s")
        assert sample.metadata["own"] == 1 and sample.metadata["file"] == "x" and not sample.metadata["truncated"]
    assert [sample.metadata["use_tool"] for sample in (first, second)] == [True, False]
    assert [sample.metadata["ill_formed"] for sample in (first, second)] == [False, True]
    assert BASE.metadata == {"own": 1}
    given = recorded((turn([1], [10]), [USER], said("a")))
    (sample,) = given.get_trajectory("s", base_sample=Sample(index=7, rollout_id=4), reward=None)
    assert (sample.rollout_id, sample.reward) == (4, None)


def test_metadata_of_turns_reaches_their_sample():
    manager = TrajectoryManager()
    for number, message in enumerate(([USER], [OTHER])):
        manager.record_turn(
            "s",
            turn=turn([number], [10]),
            prompt_messages=message,
            response_message=said("a"),
            metadata={"number": number},
        )
    assert [sample.metadata["number"] for sample in samples_of(manager)] == [0, 1]


@pytest.mark.parametrize(
    ("limit", "tokens", "mask"),
    [(0, 7, [1, 1, 0, 1]), (7, 7, [1, 1, 0, 1]), (6, 6, [1, 1, 0]), (4, 4, [1])],
)
def test_g2_a_sample_that_is_cut_is_truncated(limit, tokens, mask):
    manager = two_turns([1, 2, 3, 10, 11, 4])
    (sample,) = samples_of(manager, max_sample_tokens=limit)
    assert len(sample.tokens) == tokens and sample.loss_mask == mask and sample.response_length == len(mask)
    assert sample.truncated == sample.metadata["truncated"] == (0 < limit < 7) and manager.counts["cut"] == (
        0 < limit < 7
    )


def test_a_last_turn_that_ended_by_length_truncates_its_sample():
    manager = recorded((turn([1], [10], "length"), [USER], said("a")), (turn([2], [20]), [OTHER], said("b")))
    assert [sample.truncated for sample in samples_of(manager)] == [True, False]
    manager = recorded((turn([1], [10], "abort"), [USER], said("a")))
    assert samples_of(manager)[0].status is Sample.Status.ABORTED


@pytest.mark.parametrize("prompt", [[1, 2, 3, 10, 11, 4], [1, 2, 3, 10, 99], [5]])
def test_a_turn_without_output_adds_nothing_but_how_the_sample_ended(prompt):
    """Its prompt is longer than the context, where no room was left for an answer."""
    first = (turn([1, 2, 3], [10, 11]), [USER], said("a"))
    manager = recorded(first, (turn(prompt, [], "length"), [USER, said("a"), TOOL], said("")))
    (sample,) = samples_of(manager)
    assert sample.tokens == [1, 2, 3, 10, 11] and sample.loss_mask == [1, 1]
    assert sample.truncated and sample.metadata["round_number"] == 2 and not manager.counts


def test_a_turn_after_one_without_output_goes_on_where_the_text_does():
    empty = (turn([1, 10, 4], [], "length"), [USER, said("a"), TOOL], said(""))
    last = (turn([1, 10, 4, 5], [12]), [USER, said("a"), TOOL, said(""), OTHER], said("b"))
    (sample,) = samples_of(recorded((turn([1], [10]), [USER], said("a")), empty, last))
    assert sample.tokens == [1, 10, 4, 5, 12] and sample.loss_mask == [1, 0, 0, 1] and not sample.truncated


def test_what_leaves_nothing_to_train_is_dropped_and_counted():
    manager = recorded(
        (turn([1, 2, 3, 4], [10]), [USER], said("a")),
        (turn([5], [], "length"), [OTHER], said("")),
        (turn([6], [60]), [TOOL], said("c")),
        (turn([8], [61]), [TOOL, said("C"), USER], said("d")),
    )
    (sample,) = samples_of(manager, max_sample_tokens=4)
    assert sample.tokens == [8, 61]
    assert manager.counts == {"no_response": 2, "nothing_to_train": 1, "rewritten_turns": 1, "forks": 1}


def test_a_session_is_consumed():
    manager = two_turns([1, 9, 4])
    assert manager.has_session("s") and manager.turn_count("s") == 2
    assert len(samples_of(manager)) == 2
    assert samples_of(manager) == [] and not manager.has_session("s") and manager.turn_count("s") == 0
    other = two_turns([1, 9, 4])
    other.drop_session("s")
    assert samples_of(other) == []


# -- what the engine told ----------------------------------------------------------------------------------------------


def test_log_probs_are_those_of_all_tokens_or_none():
    with pytest.raises(ValueError, match="1 log-probs for 2 output ids"):
        TurnRecord([1], [2, 3], "stop", [-0.5])
    without = (TurnRecord([1, 10, 2], [20], "stop"), [USER, said("a"), TOOL], said("b"))
    manager = recorded((turn([1], [10]), [USER], said("a")), without)
    (sample,) = samples_of(manager)
    assert sample.rollout_log_probs is None and sample.loss_mask == [1, 0, 1]


def test_weight_versions_are_those_of_the_turns():
    manager = recorded(
        (turn([1], [10, 11], weight_version="4"), [USER], said("a")),
        (turn([1, 10, 11, 2], [20, 21], weight_version="5"), [USER, said("a"), TOOL], said("b")),
    )
    (sample,) = samples_of(manager, max_sample_tokens=5)
    assert sample.weight_versions == ["4", "5"] and sample.weight_version_spans == [("4", 0, 2), ("5", 3, 4)]


def test_routing_and_kept_sets_travel_to_the_sample():
    """One layer, one expert per token: position p went to expert p; the kept sets of a token are itself and 5."""

    def told(total, output):
        experts = np.arange(total - 1, dtype=np.int32).tolist()
        sets = [[token, 5] for token in output]
        return {"routed_experts": experts, "output_token_sampling_mask": sets, "cached_tokens": 2, "prompt_tokens": 3}

    manager = recorded(
        (turn([1], [10, 11], meta_info=told(3, [10, 11])), [USER], said("a")),
        (turn([1, 10, 11, 2], [20, 21], meta_info=told(6, [20, 21])), [USER, said("a"), TOOL], said("b")),
    )
    args = SimpleNamespace(num_layers=1, moe_router_topk=1, sglang_speculative_algorithm=None)
    (sample,) = samples_of(manager, args=args, max_sample_tokens=5)
    assert sample.tokens == [1, 10, 11, 2, 20] and sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_routed_experts.flatten().tolist() == [0, 1, 2, 3]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 4, 4, 6]
    assert sample.rollout_top_p_token_ids.tolist() == [10, 5, 11, 5, 20, 5]
    assert sample.prefix_cache_info.prefix_cache_hit_rate == pytest.approx(4 / 6)


# -- threads -----------------------------------------------------------------------------------------------------------


def test_sessions_are_recorded_and_finished_from_many_threads():
    manager, failures = TrajectoryManager(), []

    def work(sid):
        try:
            for _ in range(20):
                messages = [USER]
                for step in range(10):
                    ids = list(range(2 * step + 1))
                    manager.record_turn(
                        sid,
                        turn=turn(ids, [2 * step + 1]),
                        prompt_messages=messages,
                        response_message=said(str(step)),
                    )
                    messages = [*messages, said(str(step)), TOOL]
                (sample,) = manager.get_trajectory(sid, base_sample=BASE)
                assert sample.tokens == list(range(20)) and sum(sample.loss_mask) == 10
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"s{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == [] and not any(thread.is_alive() for thread in threads)
