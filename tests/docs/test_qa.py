"""The page of questions and answers: flags that it names are there, and each answer leads to a page that tells more."""

import re

import pytest

from slime.arguments.parser import build_parser
from slime.arguments.unknown_flags import answer_to
from slime.utils.errors import UserError
from tests.support.models.args import parse
from tests.support.tables.page import blocks
from tests.support.tables.shell_arrays import ROOT

PAGE = ROOT / "docs/en/get_started/qa.md"
ANSWERS = dict(re.findall(r"^### ([^\n]+)\n\n(.*?)(?=^#|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("question", ANSWERS)
def test_an_answer_leads_to_a_page(question):
    assert question.endswith("?") and re.search(r"\]\([\w./#-]+\)", ANSWERS[question])


def test_every_question_is_found():
    assert len(ANSWERS) == PAGE.read_text().count("\n### ") > 20


def test_flags_of_the_answers_are_flags_of_a_run():
    known = {word for action in build_parser()._actions for word in action.option_strings}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w-])", PAGE.read_text()))
    assert len(named) > 40 and sorted(named - known) == []


def test_names_of_other_frameworks_are_answered_by_the_flags_beside_them():
    known = {word for action in build_parser()._actions for word in action.option_strings}
    section = PAGE.read_text().partition("| There | Here |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [re.findall(r"`([^`]+)`", line) for line in section.splitlines()]
    pairs = [(name, {word for word in row if word.startswith("--")}) for row in rows for name in row if name[0] != "-"]
    answered = {name: set(answer_to(name, known).flags) for name, _ in pairs}
    assert len(pairs) > 20 and [(name, answered[name]) for name, meant in pairs if not answered[name] & meant] == []


def test_batch_sizes_go_together_as_the_answer_says(tmp_path):
    ((_, equation),) = [block for block in blocks(PAGE) if block[0] == "text"]
    left, right = (re.findall(r"[a-z-]+", side) for side in equation.split("="))
    sizes = {"rollout-batch-size": 6, "n-samples-per-prompt": 4, "num-steps-per-rollout": 3, "global-batch-size": 8}
    assert sorted([*left, *right]) == sorted(sizes)
    words = [f"--{name}={size}" for name, size in sizes.items()]
    args = parse(tmp_path, *words)
    of = vars(args)
    assert (of["rollout_batch_size"] * of["n_samples_per_prompt"], of["num_steps_per_rollout"]) == (24, 3)
    for without in range(2, 4):
        args = parse(tmp_path, *(word for position, word in enumerate(words) if position != without))
        assert (args.num_steps_per_rollout, args.global_batch_size) == (3, 8)
    alone = parse(tmp_path, *words[:2])
    assert (alone.num_steps_per_rollout or 1, alone.global_batch_size) == (1, 24)
    with pytest.raises(UserError, match="--num-steps-per-rollout"):
        parse(tmp_path, *words[:3], "--global-batch-size", "12")
