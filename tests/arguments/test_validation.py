"""All rules together."""

import copy

import pytest

from slime.arguments import validate_args
from slime.utils.errors import UserError
from tests.support.args import parse
from tests.support.rules import violations


def test_all_violations_come_in_one_message(tmp_path):
    words = (
        "--rollout-temperature -1 --global-batch-size 3 --save-interval 1 --prompt-data /nowhere/a.jsonl --use-fault-tolerance "
        "--sequence-parallel --sglang-dp-size 2 --rm-url host"
    )
    lines = "\n".join(violations(tmp_path, words))
    families = (
        "--rollout-temperature -1.0", "no multiple of --global-batch-size 3", "--save-interval 1 needs --save",
        "there is no file /nowhere/a.jsonl", "--use-fault-tolerance: fault tolerance", "--sequence-parallel needs",
        "--sglang-dp-size 2", "--rm-url host: it must start",
    )  # fmt: skip
    assert [part for part in families if part not in lines] == []


def test_a_dry_run_has_errors_and_notes(tmp_path):
    with pytest.raises(UserError) as error:
        parse(
            tmp_path,
            "--dry-run",
            "--use-fault-tolerance",
            "--prompt-data",
            "/nowhere/a.jsonl",
            "--rollout-temperature",
            "0",
        )
    assert str(error.value).startswith("--rollout-temperature 0.0") and str(error.value).count("\n") == 0
    args = parse(tmp_path, "--dry-run", "--use-fault-tolerance", "--prompt-data", "/nowhere/a.jsonl")
    assert [note.split(":")[0] for note in args.plan_notes] == [
        "--prompt-data /nowhere/a.jsonl",
        "--use-fault-tolerance",
    ]


@pytest.mark.parametrize("words", [(), ("--dry-run",), ("--eval-prompt-data", "{tmp}/prompts.jsonl")])
def test_checked_arguments_may_be_checked_again(tmp_path, words):
    args = parse(tmp_path, *(word.format(tmp=tmp_path) for word in words))
    before = copy.deepcopy(vars(args))
    validate_args(args)
    assert vars(args) == before


def test_a_run_has_no_notes(tmp_path):
    assert parse(tmp_path).plan_notes == []
