"""All rules together."""

import copy

import pytest

from slime import arguments as validation
from slime.arguments import validate_args
from slime.arguments.violations import Kind, Violation, broken, without_consequences
from slime.utils.errors import UserError
from tests.support.models.args import parse
from tests.support.tables.rules import violations


def test_all_violations_come_in_one_message(tmp_path):
    words = (
        "--rollout-temperature -1 --global-batch-size 3 --save-interval 1 --prompt-data /nowhere/a.jsonl "
        "--attention-dropout 0.1 --sequence-parallel --sglang-dp-size 2 --rm-url host"
    )
    lines = "\n".join(violations(tmp_path, words))
    families = (
        "--rollout-temperature -1.0", "no multiple of --global-batch-size 3", "--save-interval 1 needs --save",
        "there is no file /nowhere/a.jsonl", "--attention-dropout 0.1: dropout in attention", "--sequence-parallel needs",
        "--sglang-dp-size 2", "--rm-url host: it must start",
    )  # fmt: skip
    assert [part for part in families if part not in lines] == []


def test_a_dry_run_has_errors_and_notes(tmp_path):
    with pytest.raises(UserError) as error:
        parse(
            tmp_path,
            "--dry-run",
            "--attention-dropout",
            "0.1",
            "--prompt-data",
            "/nowhere/a.jsonl",
            "--rollout-temperature",
            "0",
        )
    assert str(error.value).startswith("--rollout-temperature 0.0") and str(error.value).count("\n") == 0
    args = parse(tmp_path, "--dry-run", "--attention-dropout", "0.1", "--prompt-data", "/nowhere/a.jsonl")
    assert [note.split(":")[0] for note in args.plan_notes] == [
        "--prompt-data /nowhere/a.jsonl",
        "--attention-dropout 0.1",
    ]


@pytest.mark.parametrize("words", [(), ("--dry-run",), ("--eval-prompt-data", "{tmp}/prompts.jsonl")])
def test_checked_arguments_may_be_checked_again(tmp_path, words):
    args = parse(tmp_path, *(word.format(tmp=tmp_path) for word in words))
    before = copy.deepcopy(vars(args))
    validate_args(args)
    assert vars(args) == before


def test_a_run_has_no_notes(tmp_path):
    assert parse(tmp_path).plan_notes == []


def test_what_is_said_beside_a_refusal_waits_until_the_flags_are_accepted(tmp_path, caplog, monkeypatch):
    """Replaced words, files, derived values and rules all have something to say; with a refusal nobody wants to hear it."""
    # Rules may come to the same conclusion.
    monkeypatch.setattr(validation, "RULES", validation.RULES * 2)
    custom = tmp_path / "custom.yaml"
    custom.write_text("seed: 7\n")
    words = [
        *("--num-rollout", "5", "--seed", "3", "--custom-config-path", str(custom), "--save", str(tmp_path / "run")),
        *("--lr", "0.5", "--wandb-project", "mine"),
    ]
    said = {
        "--num-rollout 5 holds, not 4": "INFO", f"{custom}:1: seed 7 replaces 3": "WARNING",
        "--wandb-project: no effect": "WARNING", "without --save-interval": "WARNING", "--lr 0.5: that is far": "WARNING",
    }  # fmt: skip
    with caplog.at_level("INFO"):
        for refused in (["--eps-clip", "-1"], ["--rollout-temperature", "0"], ["--no-such-flag"], ["--lr", "much"]):
            with pytest.raises(UserError):
                parse(tmp_path, *words, *refused)
        assert [record.getMessage() for record in caplog.records] == []
        args = parse(tmp_path, *words)
        lines = [(record.getMessage(), record.levelname) for record in caplog.records]
        caplog.clear()
        validate_args(args)
    for part, level in said.items():
        assert [of_line for line, of_line in lines if part in line] == [level], part
    # Checked again, the rules say the same again.
    again = [record.getMessage() for record in caplog.records]
    assert len(again) == len(set(again)) > 0 and set(again) < {line for line, _ in lines}


def test_a_violation_says_which_flags_it_is_about(tmp_path):
    args = parse(tmp_path, "--dry-run")
    args.world_size, args.lr = 6, 0.5
    template = "{--lr=} and {--use-wandb}, {0} as {1=}, {world_size} ranks, {num_layers} layers, {word}"
    violation = broken(args, template, "--save", "--fp8-format", word="--seed", kind=Kind.MISSING)
    assert violation.message == "--lr 0.5 and --use-wandb, --save as --fp8-format None, 6 ranks, 2 layers, --seed"
    assert violation.flags == ("--save", "--fp8-format", "--lr", "--use-wandb", "world_size", "--num-layers")
    assert violation.kind is Kind.MISSING and violation.at("run.yaml:3").message.startswith("run.yaml:3: --lr 0.5 and")


def test_what_follows_from_a_flag_is_left_out_with_it():
    one, ranks, batch = (Violation((name,), name) for name in ("--lr", "data_parallel_size", "--global-batch-size"))
    assert without_consequences([one, ranks, batch], {"--tensor-model-parallel-size"}) == [one, batch]
    assert without_consequences([one, ranks, batch], {"--n-samples-per-prompt"}) == [one, ranks]
    assert without_consequences([one, ranks, batch], {"--lr", "--l"}) == [ranks, batch]


def test_secrets_are_no_part_of_a_message(tmp_path):
    assert "s3cret" not in broken(parse(tmp_path, "--wandb-key", "s3cret"), "{--wandb-key=}").message
