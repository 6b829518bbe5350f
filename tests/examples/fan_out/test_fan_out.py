"""Two answers of one prompt, each a training sample of its own; and the task with both kinds of questions."""

import pytest

from examples.fan_out import toy_task
from examples.fan_out.fan_out import generate, second_question
from slime.rollout.custom_generate import share_execution_id
from slime.utils.types import Sample
from tests.support.models.toy_rows import operands, toy_rows
from tests.support.processes.spoken import spoken

pytestmark = pytest.mark.usefixtures("fresh_state")
QUESTION = [{"role": "user", "content": "What is 47+38?"}]
CHECK = "What is 47+38?\nFirst answer: 75. Check it."


@pytest.mark.parametrize(
    ("response", "shown"),
    [("3=7 \\boxed{75}<|im_end|>", "75"), ("\\boxed{1} \\boxed{2}", "2"), ("no box", "none"), ("\\boxed{1", "none")],
)
def test_the_second_question_has_the_last_box_and_nothing_of_the_way_there(response, shown):
    messages = [{"role": "system", "content": "s"}, *QUESTION]
    assert second_question(messages, response) == [
        messages[0],
        {"role": "user", "content": f"What is 47+38?\nFirst answer: {shown}. Check it."},
    ]
    assert messages[1:] == QUESTION


def test_training_gets_both_answers_each_with_its_own_context_tokens_and_log_probs(checkpoint):
    prompt = Sample(index=7, group_index=3, prompt=QUESTION, label="85")
    answers = ["long way \\boxed{75}<|im_end|>", "\\boxed{85}<|im_end|>"]
    (first, second), requests = spoken(checkpoint, generate, prompt, answers)
    assert [first.response, second.response] == answers
    assert [first.prompt, second.prompt] == [QUESTION, [{"role": "user", "content": CHECK}]]
    for answer, request in zip((first, second), requests, strict=True):
        context = len(answer.tokens) - answer.response_length
        assert list(answer.tokens[:context]) == request["input_ids"]
        assert len(answer.rollout_log_probs) == answer.response_length
        assert (answer.index, answer.group_index, answer.label) == (7, 3, "85")
    assert prompt.status is Sample.Status.PENDING and not prompt.response
    share_execution_id(prompt, [first, second], "test")
    assert first.rollout_id == second.rollout_id == 7


def test_an_evaluation_gets_the_second_answer_alone(checkpoint):
    prompt = Sample(index=0, prompt=QUESTION)
    answer, _ = spoken(checkpoint, generate, prompt, ["\\boxed{75}", "\\boxed{85}"], arguments=(True,))
    assert answer.response == "\\boxed{85}"


def test_half_of_the_demonstrations_are_shown_an_answer_and_held_out_sums_are_nowhere_else(tmp_path):
    task = toy_rows(tmp_path, toy_task)
    shown = ["First answer" in row["messages"][0]["content"] for row in task["sft"]]
    assert 0.4 < sum(shown) / len(shown) < 0.6

    held_out = {operands(row) for row in task["eval"]}
    assert len(held_out) == 64
    assert not held_out & {operands(row) for row in task["train"] + task["sft"]}
    assert all(row["label"] == str(sum(operands(row))) for row in task["train"] + task["eval"])
