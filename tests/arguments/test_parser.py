import argparse
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from slime.arguments import groups as packages
from slime.arguments import parse_args
from slime.arguments import parser as parser_module
from slime.arguments.groups import OWN_GROUPS
from slime.arguments.groups import run_flags as run
from slime.arguments.help_text import groups_of
from slime.arguments.parser import build_parser, parse_known
from slime.utils.errors import UserError
from tests.support.models.args import command_line, parse, write_rows
from tests.support.tables.rules import violations

SOURCE = Path(__file__).parents[2] / "slime"


def test_a1_unknown_flag_names_the_nearest_one(tmp_path):
    with pytest.raises(UserError, match=r"unknown flag --rollout-batchsize: did you mean --rollout-batch-size"):
        parse(tmp_path, "--rollout-batchsize", "4")


def test_all_unknown_flags_are_reported_together(tmp_path):
    with pytest.raises(UserError) as error:
        parse(tmp_path, "--tis-clp", "1", "--kl-los-coef=0.1")
    assert "--tis-clp" in str(error.value) and "--kl-loss-coef" in str(error.value)


def test_a2_abbreviations_are_refused(tmp_path):
    with pytest.raises(UserError, match="unknown flag --num-roll"):
        parse(tmp_path, "--num-roll", "3")


def test_a2_load_is_not_taken_for_a_longer_flag(tmp_path):
    dump = tmp_path / "{rollout_id}.pt"
    (tmp_path / "0.pt").write_bytes(b"\x80")
    words = ["--load", str(tmp_path / "run"), "--save", str(tmp_path / "run"), "--load-debug-rollout-data", str(dump)]
    for order in (words, words[4:] + words[:4]):
        args = parse(tmp_path, *order)
        assert args.load == str(tmp_path / "run") and args.load_debug_rollout_data == str(dump)


def test_wrong_type_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="--num-rollout"):
        parse(tmp_path, "--num-rollout", "many")


def test_stray_word_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="unexpected word 'stray'"):
        parse_known(build_parser(), ["stray", *command_line(tmp_path)])


def test_bad_json_object_names_the_flag(tmp_path):
    with pytest.raises(UserError, match="--train-env-vars.*not a JSON object"):
        parse(tmp_path, "--train-env-vars", "[1]")


def test_typed_flags_are_remembered(tmp_path):
    args = parse(tmp_path, "--lr=1e-3")
    assert "lr" in args.typed_flags and "seed" not in args.typed_flags


def test_own_flags_can_be_added(tmp_path):
    def add(parser):
        parser.add_argument("--my-flag", type=int, default=3)
        return parser

    assert parse_args(add, argv=[*command_line(tmp_path), "--my-flag", "5"]).my_flag == 5


def test_own_flags_must_not_repeat_known_ones():
    def add(parser):
        parser.add_argument("--lr", type=float, help="mine")
        return parser

    with pytest.raises(UserError, match="add_custom_arguments.*--lr"):
        build_parser(add)


@pytest.mark.parametrize("flag", ["--role", "--log-dir", "--sglang-model-routers"])
def test_own_flags_must_not_be_named_as_what_a_run_sets(flag):
    def add(parser):
        parser.add_argument("--my-flag")
        parser.add_argument(flag)
        return parser

    name = flag.removeprefix("--").replace("-", "_")
    with pytest.raises(UserError, match=f"^add_custom_arguments defines {name}, which the run itself sets"):
        build_parser(add)


def test_wrong_values_unknown_and_retired_flags_are_reported_together(tmp_path):
    words = ["--num-epoch", "many", "--loss-type", "l2", "--tis-clp", "1", "--use-http2", "--seed", "--lr", "1e-5x"]
    with pytest.raises(UserError) as error:
        parse(tmp_path, *words)
    lines = str(error.value).splitlines()
    assert len(lines) == 6
    for part in (
        "unknown flag --tis-clp", "--use-http2 does not exist any more", "--num-epoch: invalid int value: 'many'",
        "--loss-type: invalid choice: 'l2'", "--seed: expected one argument", "--lr: invalid float value: '1e-5x'",
    ):  # fmt: skip
        assert any(part in line for line in lines), part


def test_a_value_given_to_a_switch_is_reported_with_the_rest(tmp_path):
    with pytest.raises(UserError) as error:
        parse(tmp_path, "--num-epoch", "many", "--balance-data=yes")
    assert "--num-epoch" in str(error.value) and "--balance-data" in str(error.value)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--colocate=true", "--colocate=true: the flag takes no value; --colocate alone turns it on, leave it out to"),
        ("--offload-train=false", "--offload-train alone turns it on, --no-offload-train turns it off"),
    ],
)
def test_a_value_of_a_switch_is_answered_with_what_to_type(word, message):
    with pytest.raises(UserError) as error:
        parse_known(build_parser(), [word, "--seed", "x"])
    first, second = sorted(str(error.value).splitlines(), key=lambda line: "--seed" in line)
    assert message in first and second == "--seed: invalid int value: 'x'"


@pytest.mark.parametrize("words", ["--lr nan", "--lr nan --lr nan", "--eval-top-p nan --seed 3"])
def test_what_is_no_number_replaces_nothing(words):
    parser = build_parser()
    parse_known(parser, words.split())
    assert parser.replacements() == []


@pytest.mark.parametrize(
    ("words", "name", "value", "told"),
    [
        ("--lr 1 --seed 3 --lr 2 --lr 2", "lr", 2.0, "--lr 2.0 holds, not 1.0, which stands before it"),
        ("--prompt-data a b --prompt-data c", "prompt_data", ["c"], "--prompt-data c holds, not a b, which stands before it"),
        ("--rollout-stop a --lr 1 --rollout-stop b c", "rollout_stop", ["b", "c"], "--rollout-stop b c holds, not a,"),
        ("--lr 1 --lr 2 --lr 3", "lr", 3.0, "--lr 3.0 holds, not 1.0 and 2.0, which stand before it"),
        (
            "--router-policy random --sglang-router-strategy round_robin",
            "router_policy", "round_robin",
            "--sglang-router-strategy round_robin holds, not --router-policy random, which stands before it: two names of one",
        ),
        ("--sglang-dp 1 --sglang-dp-size 2", "sglang_dp_size", 2, "--sglang-dp-size 2 holds, not --sglang-dp 1,"),
        ("--moe-layer-freq 1 --moe-layer-freq 2", "moe_layer_freq", 2, "--moe-layer-freq 2 holds, not 1,"),
        ("--offload-train --no-offload-train", "offload_train", False, "--no-offload-train holds, not --offload-train,"),
        ("--wandb-key SEKRET --wandb-key SEKRET2", "wandb_key", "SEKRET2", "--wandb-key <redacted> holds, not <redacted>,"),
    ],
)  # fmt: skip
def test_the_last_value_holds_and_one_line_says_so(words, name, value, told, caplog):
    parser = build_parser()
    for _ in range(2):
        caplog.clear()
        with caplog.at_level("INFO"):
            args = parse_known(parser, words.split())
        assert getattr(args, name) == value
        [line] = [record.getMessage() for record in caplog.records]
        assert line.startswith(told) and "SEKRET" not in line


def test_equal_values_and_sets_that_add_up_are_not_worth_a_line(caplog):
    words = "--lr 2 --lr 2.0 --sglang-dp 2 --sglang-dp-size 2 --prompt-data a --prompt-data a --offload-train --offload-train"
    with caplog.at_level("INFO"):
        args = parse_known(
            build_parser(), [*words.split(), *["--eval-prompt-data", "a", "p", "--eval-prompt-data", "b", "q"]]
        )
    assert (args.lr, args.sglang_dp_size, args.prompt_data, args.offload_train) == (2.0, 2, ["a"], True)
    assert args.eval_prompt_data == ["a", "p", "b", "q"]
    assert caplog.records == []


def test_what_a_launch_script_sets_is_replaced_behind_it(tmp_path):
    """The words of a script, and then those of its user."""
    args = parse(tmp_path, "--prompt-data", str(write_rows(tmp_path / "mine.jsonl")), "--num-rollout", "9")
    assert (args.prompt_data, args.num_rollout) == (str(tmp_path / "mine.jsonl"), 9)


@pytest.mark.parametrize("words", ["--wandb-key a SEKRET", "--wandb-key=a SEKRET"])
def test_a_stray_word_after_a_secret_is_not_shown(words):
    with pytest.raises(UserError, match="unexpected word .*--wandb-key") as error:
        parse_known(build_parser(), words.split())
    assert "SEKRET" not in str(error.value)


def test_after_an_error_the_parser_is_as_before(tmp_path):
    parser = build_parser()
    for _ in range(2):
        with pytest.raises(UserError) as error:
            parse_known(parser, ["--seed", "x"])
        assert str(error.value) == "--seed: invalid int value: 'x'"
    assert parse_known(parser, ["--seed", "7"]).seed == 7
    with pytest.raises(UserError, match="--seed"):
        parser.parse_args(["--seed", "x"])


@pytest.mark.parametrize(
    "words", [["--adam-eps", "-1e-8"], ["--adam-eps=-1e-8"], ["--adam-eps", "1", "--adam-eps", "-1e-8"]]
)
def test_negative_numbers_repetitions_and_equal_signs(words):
    assert parse_known(build_parser(), words).adam_eps == -1e-8


def test_values_that_look_like_flags_are_values():
    args = parse_known(
        build_parser(), ["--rollout-top-k", "-1", "--rollout-stop", "- a", "-.5", '--train-env-vars={"A": "b c"}']
    )
    assert (args.rollout_top_k, args.rollout_stop, args.train_env_vars) == (-1, ["- a", "-.5"], {"A": "b c"})


def test_a_slip_of_one_dash_is_an_unknown_flag():
    with pytest.raises(UserError, match="unknown flag -seed: did you mean --seed"):
        parse_known(build_parser(), ["-seed", "3"])


def test_the_batch_size_may_come_from_yaml_and_must_come(tmp_path):
    words = command_line(tmp_path)
    at = words.index("--rollout-batch-size")
    without = words[:at] + words[at + 2 :]
    with pytest.raises(UserError, match="--rollout-batch-size is needed"):
        parse_args(argv=without)
    (tmp_path / "run.yaml").write_text("rollout_batch_size: 4\n")
    assert parse_args(argv=[*without, "--custom-config-path", str(tmp_path / "run.yaml")]).rollout_batch_size == 4


def test_the_loop_tells_whether_it_is_asynchronous(tmp_path):
    assert parse(tmp_path).asynchronous is False
    assert parse_args(argv=command_line(tmp_path), asynchronous=True).asynchronous is True


@pytest.fixture
def without_engines(monkeypatch):
    """SGLang and router look as if they were not installed."""
    for module in (parser_module, packages):
        installed = module.load_surface
        monkeypatch.setattr(
            module, "load_surface", lambda name, ask=installed: ask(name) if name == "megatron" else None
        )


def test_without_sglang_a_run_that_only_trains_takes_its_flags(without_engines):
    words = ["--sglang-cuda-graph-bs", "1", "2", "--lr", "1e-3", "--router-any=3", "--sglang-x", "--debug-train-only"]
    args = parse_known(build_parser(), words)
    assert args.lr == 1e-3 and not hasattr(args, "sglang_cuda_graph_bs")
    with pytest.raises(UserError, match="unknown flag --my-flag"):
        parse_known(build_parser(), [*words, "--my-flag", "3"])


def test_without_sglang_other_runs_say_what_is_missing(without_engines):
    with pytest.raises(
        UserError, match="--sglang-mem-fraction-static: it may be a flag of sglang, which is not installed"
    ):
        parse_known(build_parser(), ["--sglang-mem-fraction-static", "0.5"])


def test_without_sglang_a_run_with_engines_is_planned(without_engines, tmp_path):
    assert parse(tmp_path, "--rollout-num-gpus", "2", "--dry-run").rollout_num_engines == 2


def test_with_sglang_a_run_that_only_trains_refuses_misspelt_flags():
    with pytest.raises(UserError, match="unknown flag --sglang-mem-fraction-statik: did you mean"):
        parse_known(build_parser(), ["--debug-train-only", "--sglang-mem-fraction-statik", "0.5"])


def test_two_groups_cannot_define_one_flag(monkeypatch):
    monkeypatch.setattr(parser_module, "OWN_GROUPS", (run.DATA, run.DATA))
    with pytest.raises(argparse.ArgumentError, match="conflicting option string"):
        build_parser()


def test_one_attribute_has_one_default():
    defaults = defaultdict(list)
    for action in build_parser()._actions:
        if action.default is not argparse.SUPPRESS:
            defaults[action.dest].append(action.default)
    assert {dest: values for dest, values in defaults.items() if any(value != values[0] for value in values)} == {}


def test_every_flag_has_a_help_text():
    assert [a.option_strings for a in build_parser()._actions if not a.help] == []


def test_a6_every_flag_has_a_reader():
    read = words_read_by(path for path in sources() if not path.is_relative_to(SOURCE / "arguments") or settles(path))
    assert not own_flags() - read


def own_flags() -> set[str]:
    titles = {group.title for group in OWN_GROUPS}
    return {action.dest for title, actions in groups_of(build_parser()) if title in titles for action in actions}


def sources() -> list[Path]:
    return [*SOURCE.rglob("*.py"), *SOURCE.with_name("slime_plugins").rglob("*.py"), *SOURCE.parent.glob("train*.py")]


def settles(path: Path) -> bool:
    """Whether a module of the arguments does more with a flag than define or refuse it."""
    telling = {"groups", "rules", "bounds.py", "effects.py", "server_flags.py"}
    return not telling & set(path.relative_to(SOURCE / "arguments").parts)


def words_read_by(paths: Iterable[Path]) -> set[str]:
    text = "\n".join(path.read_text() for path in paths)
    return set(re.findall(r"args\.([a-z_0-9]+)", text)) | set(re.findall(r"\"([a-z_0-9]+)\"", text))


def test_a_stray_word_behind_each_flag_is_told():
    words = "--seed 1 --bf16 1 --colocate True --rollout-stop a b --balance-data 1 2"
    with pytest.raises(UserError) as error:
        parse_known(build_parser(), words.split())
    assert str(error.value).splitlines() == [
        "unexpected word '1': --bf16 takes no such value",
        "unexpected word 'True': --colocate takes no such value",
        "unexpected word '1': --balance-data takes no such value",
    ]


@pytest.mark.parametrize("dash", ["–", "—"])
def test_a_dash_that_a_text_program_made_of_hyphens_is_told(dash):
    with pytest.raises(UserError, match=f"^unexpected word '{dash}lr': its dash is no hyphen$"):
        parse_known(build_parser(), ["--seed", "1", f"{dash}lr", "1e-6"])


def test_unknown_flags_are_told_with_broken_rules(tmp_path):
    assert violations(tmp_path, "--foo 3 --rollout-temperature 0") == [
        "unknown flag --foo: see `python train.py --help` for all flags",
        "--rollout-temperature 0.0: training needs a value above 0 (1.0 is usual); --eval-temperature may be 0",
    ]


def test_what_follows_from_a_misspelt_flag_is_not_told(tmp_path):
    words = [word.replace("--rollout-batch-size", "--rollout-batchsize") for word in command_line(tmp_path)]
    with pytest.raises(UserError) as error:
        parse_args(argv=words)
    assert str(error.value).startswith("unknown flag --rollout-batchsize") and "\n" not in str(error.value)


def test_add_custom_arguments_must_return_the_parser():
    with pytest.raises(UserError, match="add_custom_arguments returned None; end it with `return parser`"):
        build_parser(lambda parser: None)


@pytest.mark.parametrize("level", ["debug", "Debug", "DEBUG"])
def test_log_levels_in_any_case(level):
    assert parse_known(build_parser(), ["--log-level", level]).log_level == "DEBUG"
