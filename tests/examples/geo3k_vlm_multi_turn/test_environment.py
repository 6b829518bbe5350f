"""Dialogues with an environment, and the one about figures: what it answers, what the model is shown, and what is trained."""

import asyncio

import pytest
from PIL import Image

from examples.geo3k_vlm_multi_turn.env_geo3k import NEITHER, NO_PART, RULES, WRONG, build_env, enlarged, part_of
from examples.geo3k_vlm_multi_turn.geo3k_multi_turn import generate
from slime.rollout.generation_call import GenerationCall
from slime.utils.errors import UserError
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args
from tests.support.models.tokenizer import build_tokenizer
from tests.support.models.vision import PLACEHOLDER, TOKENS_OF_IMAGE, make_seeing_checkpoint
from tests.support.processes.spoken import spoken

pytestmark = pytest.mark.usefixtures("fresh_state")
GEO3K = {
    "rollout_interaction_env_path": "examples.geo3k_vlm_multi_turn.env_geo3k", "rm_type": "math",
    # More than the context length of the checkpoint.
    "rollout_max_response_len": 1000, "sglang_context_length": 2000,
}  # fmt: skip


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_seeing_checkpoint(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def figure(tmp_path):
    """Its left half is red, its right half blue."""
    image = Image.new("RGB", (40, 30), "red")
    image.paste("blue", (20, 0, 40, 30))
    image.save(tmp_path / "figure.png")
    return str(tmp_path / "figure.png")


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ("<zoom>50,0,100,50</zoom>", (50, 0, 100, 50)),
        ("see <zoom> 0, 0 , 10,10 </zoom> and <zoom>0,0,100,100</zoom>", (0, 0, 100, 100)),
        ("<zoom>50,0,40,50</zoom>", None),
        ("<zoom>50,0,54,50</zoom>", None),
        ("<zoom>0,0,101,50</zoom>", None),
        ("<zoom>-5,0,50,50</zoom>", None),
        ("<zoom>0.5,0,50,50</zoom>", None),
        ("<zoom>0,0,50", None),
        ("nothing", None),
    ],
)
def test_the_last_part_that_is_asked_for_counts(said, part):
    assert part_of(said) == part


def test_a_part_is_shown_as_large_as_the_figure_allows(figure):
    whole = Image.open(figure)
    right = enlarged(whole, (50, 0, 100, 50))
    assert right.size == (40, 30) and right.getpixel((20, 15)) == (0, 0, 255)
    assert enlarged(whole, (0, 0, 100, 50)).size == (40, 15)
    assert enlarged(Image.new("RGB", (2, 200)), (0, 0, 5, 5)).size == (2, 20)


def seen(figure=None, label="13"):
    content = "Find x." if figure is None else [{"type": "image", "image": figure}, {"type": "text", "text": "Find x."}]
    return Sample(index=0, prompt=[{"role": "user", "content": content}], label=label)


def stepped(sample, *turns):
    """The environment's observations, and whether it is over, turn by turn."""
    args = make_args("none")
    args.rm_type = "math"
    environment = build_env(sample, args)
    return environment, [asyncio.run(environment.step(said)) for said in turns]


def test_what_the_environment_answers(figure):
    turns = (
        "hm",
        "<zoom>9,9,9,9</zoom>",
        "<zoom>50,0,100,50</zoom>",
        "<zoom>0,0,50,50</zoom> \\boxed{12}",
        "\\boxed{13}",
    )
    environment, steps = stepped(seen(figure), *turns)
    assert [step[0]["text"] for step in steps[:2]] == [NEITHER, NO_PART] and steps[3][0]["text"] == WRONG
    assert steps[2][0]["image"].getpixel((20, 15)) == (0, 0, 255)
    assert [step[1] for step in steps] == [False] * 4 + [True]
    assert steps[4][2] == {"looks": 1, "right": True}
    message = environment.format_observation(steps[2][0])
    assert message["role"] == "user" and [part["type"] for part in message["content"]] == ["text", "image"]
    assert environment.format_observation(steps[3][0]) == {"role": "user", "content": WRONG}


def test_a_problem_without_figure_has_no_rules_and_no_parts():
    environment, [step] = stepped(seen(), "<zoom>0,0,50,50</zoom>")
    assert environment.reset() == (None, {"looks": 0, "right": False}) and step[0]["text"] == NO_PART


def test_a_dialogue_about_a_figure(seeing, figure):
    turns = ["<zoom>50,0,100,100</zoom>", "\\boxed{12}<|im_end|>", "\\boxed{13}"]
    answer, requests = spoken(seeing, generate, seen(figure), turns, max_turns=3, **GEO3K)
    assert answer.status is Sample.Status.COMPLETED and answer.metadata["round_number"] == 3
    assert answer.metadata["environment"] == {"looks": 1, "right": True}
    tokenizer = build_tokenizer()
    assert answer.prompt[1] == {"role": "user", "content": RULES}
    assert [len(request["image_data"]) for request in requests] == [1, 2, 2]
    assert answer.multimodal_train_inputs["pixel_values"].shape == (2, 3, 28, 28)
    response = answer.tokens[-answer.response_length :]
    said = [token for token, mask in zip(response, answer.loss_mask, strict=True) if mask]
    assert said == [token for text in turns for token in tokenizer.encode(text, add_special_tokens=False)]
    assert [value != 0.0 for value in answer.rollout_log_probs] == [mask == 1 for mask in answer.loss_mask]
    shown = "This part of the figure:" + PLACEHOLDER
    assert f"<|im_start|>user\n{shown}<|im_end|>" in answer.response and WRONG in answer.response
    placeholder = load_tokenizer(seeing).convert_tokens_to_ids(PLACEHOLDER)
    assert response.count(placeholder) == TOKENS_OF_IMAGE and answer.tokens.count(placeholder) == 2 * TOKENS_OF_IMAGE


@pytest.mark.parametrize(
    ("turns", "rounds"), [(["\\boxed{13}"], 1), (["a", "b", "\\boxed{13}"], 3), (["a", "b", "c"], 3)]
)
def test_a_dialogue_ends_with_the_right_answer_or_the_last_turn_which_the_environment_sees(checkpoint, turns, rounds):
    answer, requests = spoken(checkpoint, generate, seen(), turns, max_turns=3, **GEO3K)
    assert answer.metadata["round_number"] == len(requests) == rounds
    assert answer.metadata["environment"]["right"] == (turns[-1] != "c")
    assert answer.response.endswith(turns[-1]) and answer.status is Sample.Status.COMPLETED


def test_an_environment_of_the_user(checkpoint, tmp_path):
    (tmp_path / "counting.py").write_text(
        "class Counting:\n"
        "    def __init__(self, start):\n"
        "        self.number = start\n"
        "    async def reset(self):\n"
        "        return self.number, {}\n"
        "    def step(self, said):\n"
        "        self.number += len(said)\n"
        "        return self.number, self.number > 6, {'number': self.number}\n"
        "    def format_observation(self, number):\n"
        "        return {'role': 'tool', 'content': f'at {number}'}\n"
        "async def build_env(sample, args):\n"
        "    return Counting(args.start)\n"
    )
    settings = {"rollout_interaction_env_path": f"{tmp_path}/counting.py", "start": 2}
    answer, [first, _] = spoken(checkpoint, generate, seen(), ["abc", "de<|im_end|>"], **settings)
    tokenizer = build_tokenizer()
    assert tokenizer.decode(first["input_ids"]).endswith(
        "<tool_response>\nat 2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert "<tool_response>\nat 5\n</tool_response>" in answer.response
    assert answer.metadata["environment"] == {"number": 7}


@pytest.mark.parametrize(
    ("changes", "prompt", "told"),
    [
        ({**GEO3K, "partial_rollout": True}, [{"role": "user", "content": "x"}], "drop --partial-rollout"),
        (GEO3K, "x", "drop --apply-chat-template"),
        ({}, [{"role": "user", "content": "x"}], "names no rollout_interaction_env_path"),
    ],
)
def test_what_does_not_go_together_is_refused(checkpoint, changes, prompt, told):
    with pytest.raises(UserError, match=told):
        spoken(checkpoint, generate, Sample(index=0, prompt=prompt), ["x"], **changes)


def test_an_answer_is_graded_as_its_row_is():
    sample = seen(label="thirteen")
    said = "thirteen \\boxed{12}"
    assert stepped(sample, said)[1][0][1] is False
    sample.metadata["rm_type"] = "f1"
    assert stepped(sample, said)[1][0][1] is True


@pytest.mark.parametrize("evaluation", [False, True])
def test_a_reward_with_several_entries_says_whether_an_answer_is_right(tmp_path, evaluation):
    (tmp_path / "rewards.py").write_text(
        "async def graded(args, sample, evaluation):\n"
        "    right = sample.prompt[0]['content'] == 'Find x.' and '13' in sample.response\n"
        "    sample.metadata['graded'] = True\n"
        "    return {'score': 1.0 if right != evaluation else -1.0, 'acc': 1.0 if right else 0.0}\n"
    )
    args, sample = make_args("none"), seen()
    sample.custom_rm_path = f"{tmp_path}/rewards.py:graded"
    args.reward_key, args.eval_reward_key = "score", "acc"
    environment = build_env(sample, args)
    with GenerationCall(evaluation=evaluation).under_way():
        steps = [asyncio.run(environment.step(said)) for said in ("\\boxed{12}", "\\boxed{13}")]
    assert [step[1] for step in steps] == [False, True]
    # What a grader notes of a turn is no note of the whole answer.
    assert sample.metadata == {} and sample.reward is None and sample.response == ""
