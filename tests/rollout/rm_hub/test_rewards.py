"""The rewards behind `--rm-type`."""

import socket
import subprocess
import time
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest

from slime.rollout.rm_hub import grading as builtin_rewards
from slime.rollout.rm_hub import worker_pool
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.grading import compute_builtin_reward, needs_worker
from slime.rollout.rm_hub.math_dapo_utils import compute_score, normalize_final_answer, remove_boxed
from slime.utils.errors import UserError
from slime.utils.reward_types import BOXED, REMOTE, REWARD_TYPES, needs_label
from slime.utils.types import Sample


def grade(rm_type, response, label, metadata=None):
    args = SimpleNamespace(rm_type=rm_type, rollout_seed=1)
    return compute_builtin_reward(args, Sample(index=3, response=response, label=label, metadata=metadata or {}))


def test_a_vector_of_f1():
    assert f1_score("the cat sat", "cat sat down") == (pytest.approx(0.8), 1.0, pytest.approx(2 / 3))


def test_f1_reads_the_end_of_megabytes():
    before = time.thread_time()
    _, precision, recall = f1_score("w " * 4_000_000 + "cat sat", "cat sat down")
    assert time.thread_time() - before < 0.2
    assert 2 / 60_000 < precision < 2 / 40_000 and recall == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("prediction", "truth", "score"),
    [("Yes!", "yes", 1.0), ("yes it is", "yes", 2 * (1 / 3) / (1 / 3 + 1)), ("no", "yes", 0.0), ("no", "no idea", 0.0),
     ("A dog", "the DOG.", 1.0), ("noanswer", "noanswer", 1.0), ("noanswer here", "noanswer", 0.0),
     ("", "x", 0.0), (None, "x", 0.0)],
)  # fmt: skip
def test_exact_words_and_normalisation_of_f1(prediction, truth, score):
    expected = 0.0 if truth == "yes" and prediction == "yes it is" else score
    assert f1_score(prediction, truth)[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("Answer: $42$", "no idea", -1.0),
        ("Answer: $42$", "42", 1.0),
        ("answer: 042", 42, 1.0),
        ("Answer: 1\nAnswer: 2", "2", 1.0),
        ("Answer: 2\nAnswer: 1", "2", -1.0),
        ("Answer: 42 " + "x" * 300, "42", -1.0),
        ("ANSWER: \\boxed{1,234}", "1234", 1.0),
        ("The result is 42", "42", -1.0),
        # A comma between thousands is no part of a number, and every other one makes a list.
        ("Answer: -1,234,567.5", "-1234567.5", 1.0),
        ("Answer: 1234", "$1,234$", 1.0),
        ("Answer: 1, 2", "1,2", 1.0),
        ("Answer: 1,2", "12", -1.0),
        ("Answer: 12", "1, 2", -1.0),
        ("Answer: 12,34", "1234", -1.0),
        ("Answer: 1234,567", "1234567", -1.0),
        ("Answer: 120,240", "120,240", 1.0),
        ("Answer: 10:30 PM", r"10:30\text{ p.m.}", 1.0),
        ("Answer: 10:30 AM", "10:30 PM", -1.0),
        (r"Answer: 10:30\text{ AM}", r"10:30\text{ PM}", -1.0),
    ],
)
def test_dapo_scores(response, label, score):
    result = compute_score(response, label)
    assert result["score"] == score
    assert result["acc"] is (score == 1.0)


def test_dapo_with_boxes_alone():
    def score(text, label="42"):
        return compute_score(text, label, strict_box_verify=True)["score"]

    assert [score(r"\boxed{41} \boxed{42}"), score(r"\fbox{042}", 42), score(r"\boxed{\frac12}", "1/2")] == [1.0] * 3
    assert [score("Answer: 42"), score(r"\boxed{42}" + "x" * 100), score(r"\boxed{41}")] == [-1.0] * 3


def test_dapo_vector_with_a_text_label():
    assert compute_score("Answer: $42$", "42")["score"] == 1.0
    assert compute_score("no idea", "42")["score"] == -1.0
    assert compute_score("no idea", "42")["pred"] == "[INVALID]"


def test_w8_labels_that_are_no_integers_are_compared_as_text():
    assert compute_score("Answer: 1/2", "1/2")["score"] == 1.0
    assert compute_score("Answer: 1/3", "1/2")["score"] == -1.0
    assert normalize_final_answer(r"x = \frac12") == normalize_final_answer("1/2")


def test_dapo_remove_boxed():
    assert remove_boxed(r"\boxed{5}") == "5"
    with pytest.raises(AssertionError, match="box error"):
        remove_boxed("5")


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"<think>\boxed{4}</think> \boxed{5}", 1),
        (r"<think>\boxed{5}</think> \boxed{4}", 0),
        (r"a</think>\boxed{4}b</think>\boxed{5}", 1),
        (r"###Response \boxed{5}", 1),
        # What follows the first one is all of the answer, also where that repeats the mark.
        (r"###Response \boxed{5} ###Response as said", 1),
        (r"\boxed{5}", 0),
    ],
)
def test_deepscaler_grades_what_follows_the_reasoning(response, reward):
    assert get_deepscaler_rule_based_reward(response, "5") == reward
    assert grade("deepscaler", response, "5") == reward


def test_deepscaler_without_a_solution_says_why():
    sample = Sample(index=0, response=r"\boxed{5}", label="5")
    assert compute_builtin_reward(SimpleNamespace(rm_type="deepscaler"), sample) == 0
    assert "no </think>" in sample.metadata["fail_reason"]


def test_a_rollout_in_which_there_is_nothing_to_judge_is_told_once(caplog):
    args = SimpleNamespace(rm_type="deepscaler")
    answers = [Sample(index=index, response=r"\boxed{5}", label="5") for index in range(3)]
    answers[2].response = r"</think>\boxed{4}"
    assert [compute_builtin_reward(args, sample) for sample in answers] == [0, 0, 0]
    builtin_rewards._tell_of_missing_solutions.cache_clear()
    # Wrong answers are no reason to complain, nor is a rollout of which nothing is there.
    failed = Sample(index=3, status=Sample.Status.FAILED, remove_sample=True)
    for samples in (answers, [failed], []):
        builtin_rewards.warn_of_missing_solutions(args, samples)
    assert caplog.messages == []
    for _ in range(2):
        builtin_rewards.warn_of_missing_solutions(args, [*answers[:2], failed])
    (message,) = caplog.messages
    assert "</think>" in message and "--rm-type deepscaler" in message and "--rm-type math" in message


def test_math_accepts_labels_of_other_types():
    assert grade("math", r"\boxed{5}", 5) == 1
    assert grade("math", r"\boxed{5}", 5.0) == 1
    assert grade("math", "5", 5) == 0


@pytest.mark.parametrize("mark", ["<|im_end|>", "</s>", "<｜end▁of▁sentence｜>", "[e~["])
@pytest.mark.parametrize(
    ("rm_type", "response", "label"),
    [
        ("dapo", "Answer: 42", "42"),
        ("dapo", "Answer: 41", "42"),
        ("dapo", "Answer: no solution", "no solution"),
        ("f1", "Paris", "Paris"),
        ("f1", "yes", "yes"),
        ("boxed_f1", r"It is \boxed{the cat}", "cat"),
        ("gpqa", "B", "B"),
        ("gpqa", "The answer is B", "C"),
        ("math", r"\boxed{5}", "5"),
        ("deepscaler", r"</think> \boxed{5}", "5"),
    ],
)
def test_the_mark_that_ends_a_turn_is_no_part_of_an_answer(mark, rm_type, response, label):
    """The text of an engine has it."""
    assert grade(rm_type, response + mark, label) == grade(rm_type, response, label)


def test_the_boxed_prefix_and_the_metadata_override():
    assert grade("boxed_f1", r"long text \boxed{the cat}", "cat") == 1.0
    assert grade("f1", r"long text \boxed{the cat}", "cat") < 1.0
    assert grade("boxed_f1", "cat", "cat") == 0.0
    assert grade("boxed_math", r"\boxed{5}", "5") == 1
    assert grade("f1", r"\boxed{5}", "5", {"rm_type": "math"}) == 1


def test_the_coin_is_fair_and_falls_the_same_way_again():
    args = SimpleNamespace(rm_type="random", rollout_seed=7)
    coins = [compute_builtin_reward(args, Sample(index=i)) for i in range(400)]
    assert coins == [compute_builtin_reward(args, Sample(index=i)) for i in range(400)]
    assert set(coins) == {0, 1}
    assert 140 < sum(coins) < 260
    args.rollout_seed = 8
    assert coins != [compute_builtin_reward(args, Sample(index=i)) for i in range(400)], "a run of another seed"


@pytest.mark.parametrize(("behind", "score"), [(250, 1.0), (300, -1.0)])
def test_dapo_reads_the_last_300_characters(behind, score):
    assert compute_score("Answer: 42\n" + "x" * behind, "42")["score"] == score


@pytest.mark.parametrize(("rm_type", "metadata"), [(None, {}), ("maths", {}), ("math", {"rm_type": "gpqa2"})])
def test_unknown_types_list_the_known_ones(rm_type, metadata):
    with pytest.raises(
        UserError, match=r"sample 3: .*known types: dapo, deepscaler, f1, gpqa, ifbench, math, random, remote_rm"
    ):
        grade(rm_type, "x", "y", metadata)


def test_a_missing_label_is_named():
    with pytest.raises(UserError, match=r"sample 3 has no label, which --rm-type math needs; see --label-key"):
        grade("math", r"\boxed{5}", None)


@pytest.mark.parametrize("rm_type", ["dapo", "deepscaler", "f1", "math"])
@pytest.mark.parametrize("label", [["5"], {"ground_truth": "5"}, b"5", ()])
def test_a_label_whose_text_no_answer_has_is_an_error_and_no_reward_of_0(rm_type, label):
    with pytest.raises(UserError, match=rf"sample 3: the label is {type(label).__name__}, .*--label-key"):
        grade(rm_type, r"</think> Answer: \boxed{5}", label)


@pytest.mark.parametrize("label", [float("nan"), np.float64("nan"), ""])
def test_the_mark_of_a_missing_value_is_no_label(label):
    with pytest.raises(UserError, match="sample 3 has no label"):
        grade("math", r"\boxed{nan}", label)


@pytest.mark.parametrize("label", [0.00001, np.float32(0.00001), Decimal("1e-5")])
def test_a_number_is_compared_as_it_is_written_out(label):
    assert grade("math", r"\boxed{0.00001}", label) == grade("f1", "0.00001", label) == 1
    assert grade("math", r"\boxed{0.0001}", label) == 0
    assert grade("dapo", "Answer: 100000000000000000000000", 1e23)["acc"]


@pytest.mark.parametrize("label", [3.0, np.float32(3), Decimal("3.00"), 3])
def test_a_whole_number_is_compared_without_a_point(label):
    assert (
        grade("f1", "3", label) == grade("math", r"\boxed{3}", label) == grade("dapo", "Answer: 3.0", label)["acc"] == 1
    )
    assert grade("f1", "30", label) == grade("f1", "300", label) == grade("math", r"\boxed{30}", label) == 0
    assert grade("f1", "30", label * 10) == grade("f1", "3.5", 3.5) == 1


def test_labels_of_tables_are_numbers_and_texts():
    for label in (np.int64(5), np.float32(5), np.str_("5"), Decimal("5.0")):
        assert grade("math", r"\boxed{5}", label) == 1


@pytest.mark.parametrize("boxed", ["", BOXED])
@pytest.mark.parametrize("rm_type", REWARD_TYPES)
def test_which_rewards_need_a_label_is_known_before_they_grade(rm_type, boxed):
    told = ""
    try:
        grade(boxed + rm_type, "</think>Answer: 5", None)
    except UserError as error:
        told = str(error)
    assert ("has no label" in told) is needs_label(boxed + rm_type)


@pytest.mark.parametrize(
    ("rm_type", "message"),
    [("gpqa", "sample 3: gpqa: the right answer 'xyz' is none"), ("ifbench", "sample 3: ifbench: the metadata needs")],
)
def test_an_unsuitable_row_is_named(rm_type, message):
    with pytest.raises(UserError, match=message):
        grade(rm_type, "x", "xyz", {"choices": ["u", "v"]})


def test_instructions_about_the_prompt_find_it(monkeypatch):
    asked = []
    monkeypatch.setattr(worker_pool, "followed_instructions", lambda text, prompt, rows: asked.append(prompt) or [True])
    args, given = SimpleNamespace(rm_type="ifbench"), {"instruction_id_list": ["x"], "kwargs": [{}]}
    messages = [
        {"role": "user", "content": "first"},
        {"role": "user", "content": "last"},
        {"role": "tool", "content": "t"},
    ]
    picture = {"type": "image", "image": "data:image/png;base64,iVBORw0KGgo="}
    parts = [{"type": "text", "text": "in "}, picture, {"type": "text", "text": ", what?"}]
    for prompt, metadata in (
        ("text", given),
        (messages, given),
        (messages, {**given, "prompt": "of the row"}),
        ([], given),
        ([{"role": "user", "content": parts}], given),
    ):
        assert compute_builtin_reward(args, Sample(index=0, response="r", prompt=prompt, metadata=metadata)) == 1.0
    assert asked == ["text", "last", "of the row", "", "in , what?"]


def test_w6_grading_installs_nothing_and_needs_no_network(monkeypatch):
    def refused(*arguments):
        raise OSError("no network")

    started, popen = [], subprocess.Popen

    def recorded(command, **keywords):
        started.append(command)
        return popen(command, **keywords)

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(subprocess, "Popen", recorded)
    answers = {
        "dapo": ("Answer: 5", "5"), "deepscaler": (r"</think>\boxed{(x+1)^2}", "x^2+2x+1"), "f1": ("5", "5"),
        "math": (r"\boxed{(x+1)^2}", "x^2+2x+1"), "random": ("", ""), "gpqa": ("the answer is (b)", "B"),
    }  # fmt: skip
    # These two have tests of their own: one needs a library, the other a service.
    assert answers.keys() | {"ifbench", REMOTE} == set(REWARD_TYPES)
    for rm_type, (answer, label) in answers.items():
        reward = grade(rm_type, answer, label)
        assert (reward["score"] if rm_type == "dapo" else reward) in ((0, 1) if rm_type == "random" else (1,)), rm_type
    # Only the worker that compares formulas is a process of its own.
    assert all(command[-2].endswith("grading_worker.py") for command in started)


def test_the_command_line_knows_the_same_names():
    assert tuple(sorted(builtin_rewards._REWARDS)) == REWARD_TYPES


@pytest.mark.parametrize("rm_type", [prefix + name for name in REWARD_TYPES for prefix in ("", BOXED)])
def test_a_worker_is_asked_by_the_types_that_say_so(monkeypatch, rm_type):
    asked = []
    monkeypatch.setattr(worker_pool, "are_equal", lambda *pair: asked.append(pair) or True)
    monkeypatch.setattr(worker_pool, "followed_instructions", lambda *text: asked.append(text) or [True])
    metadata = {"instruction_id_list": ["x"], "kwargs": [{}], "correct_letter": "A"}
    sample = Sample(index=0, response="</think> Answer: \\boxed{x + 1}", label="1 + x", metadata=metadata)
    args = SimpleNamespace(rm_type=rm_type, rollout_seed=1, rm_url=None)
    compute_builtin_reward(args, sample)
    assert bool(asked) == needs_worker(args, sample)
