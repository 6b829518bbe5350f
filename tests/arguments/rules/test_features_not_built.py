"""Features that are not built are refused, and the list of them is honest: what is on it has no reader, the rest has one."""

import argparse
import re
from pathlib import Path

from slime.arguments import parse_args
from slime.arguments.groups import OWN_GROUPS
from slime.arguments.origins import Origin
from slime.arguments.rules.not_built import not_yet_violations
from tests.support.models.args import command_line, parse
from tests.support.tables.rules import violations


def objections(origin: Origin, **values) -> list[str]:
    origins = dict.fromkeys(values, origin)
    args = argparse.Namespace(debug_train_only=False, origins=origins, **values)
    return [violation.message for violation in not_yet_violations(args)]


def test_a_typed_flag_can_be_dropped():
    (message,) = objections(Origin.COMMAND_LINE, te_precision_config_file="x")
    assert message.startswith("--te-precision-config-file x: ") and "drop the flag" in message


def test_what_the_config_asks_for_has_no_flag_to_drop():
    (message,) = objections(Origin.HF_CONFIG, te_precision_config_file="x")
    assert (
        message.startswith("config.json of --hf-checkpoint asks for --te-precision-config-file x: ")
        and "drop" not in message
    )


def test_a_value_that_works_is_accepted_and_no_other():
    assert objections(Origin.COMMAND_LINE, attention_dropout=0.0) == []
    assert objections(Origin.COMMAND_LINE, attention_dropout=0.1)


def test_what_follows_from_another_flag_is_that_flags_affair():
    assert objections(Origin.DERIVED, attention_dropout=0.1) == []


ROOT = Path(__file__).parents[3]
# These say what a flag is, not what it does.
TABLES = (
    "slime/arguments/groups", "slime/arguments/rules", "slime/arguments/paths.py",
    "slime/arguments/megatron/effects.py", "slime/arguments/server_flags.py",
)  # fmt: skip


def own_flags() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    for group in OWN_GROUPS:
        group.add_to(parser)
    return {action.dest: action for action in parser._actions}


def names_in(paths) -> set[str]:
    text = "\n".join(path.read_text() for path in paths)
    return set(re.findall(r"args\.([a-z_0-9]+)", text)) | set(re.findall(r"\"([a-z_0-9]+)\"", text))


def sources(*, outside_arguments: bool) -> list[Path]:
    skipped = ("slime/arguments", "slime/plan") if outside_arguments else TABLES
    files = [path for folder in ("slime", "slime_plugins") for path in (ROOT / folder).rglob("*.py")]
    files += ROOT.glob("train*.py")
    return [path for path in files if not str(path.relative_to(ROOT)).startswith(skipped)]


def test_every_own_flag_has_a_reader_or_a_row():
    # It fills a field of Megatron's.
    read = names_in(sources(outside_arguments=False)) | {"clip_grad"}
    from slime.arguments.megatron.effects import NOT_YET as MEGATRON_ROWS

    assert sorted(set(own_flags()) - read - {row.name for row in MEGATRON_ROWS}) == []


def test_defaults_ask_for_nothing(tmp_path):
    parse(tmp_path)


def test_a_typed_default_asks_for_nothing(tmp_path):
    parse(tmp_path, "--advantage-estimator", "grpo", "--tis-clip", "2.0", "--profile-target", "train_overall")


def test_a_dry_run_notes_it(tmp_path):
    args = parse_args(argv=[*command_line(tmp_path), "--attention-dropout", "0.1", "--dry-run"])
    assert args.plan_notes == [
        "--attention-dropout 0.1: dropout in attention is not built yet; drop the flag (--dry-run plans with it)"
    ]


def test_lists_are_shown_as_they_are_typed(tmp_path):
    lines = violations(tmp_path, "--colocate --rollout-external-engine-addrs 10.0.0.1:1 10.0.0.2:1 10.0.0.1:1")
    twice = "--rollout-external-engine-addrs 10.0.0.1:1: this address is there twice; name each engine once"
    assert twice in lines and len([line for line in lines if "--colocate: the engines of" in line]) == 1
