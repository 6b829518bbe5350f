"""`--custom-config-path`: lines of a file as flags."""

import argparse
import json

import pytest

from slime.arguments.config_files.custom_config import apply_custom_config
from slime.arguments.origins import Origin
from slime.arguments.parser import ArgumentParser, parse_known
from slime.arguments.value_types import json_object
from slime.observability.run_record import write_run_record
from slime.utils.errors import UserError
from tests.support.models.args import parse
from tests.support.tables.config_files import parsed_with_file, written


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("--custom-config-path", default=None)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--advantage-estimator", choices=["grpo", "ppo"], default="grpo")
    parser.add_argument("--use-tis", action="store_true")
    parser.add_argument("--tis-clip", type=float, default=2.0)
    parser.add_argument("--disable-std", action="store_false", dest="grpo_std_normalization")
    parser.add_argument("--offload-train", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--rollout-stop", nargs="+", default=None)
    parser.add_argument("--rollout-stop-token-ids", nargs="+", type=int, default=None)
    parser.add_argument("--eval-prompt-data", nargs="+", action="extend", default=None)
    parser.add_argument("--rollout-sample-hook-path", action="append", default=[])
    parser.add_argument("--pair", nargs=2, type=int, default=None)
    parser.add_argument("--train-env-vars", type=json_object, default={})
    parser.add_argument("--wandb-run-id", default=None)
    parser.add_argument("--wandb-key", default=None)
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--custom-rm-path", default=None)
    parser.add_argument("--rollout-function-path", default="slime.rollout.sglang_rollout.generate_rollout")
    return parser


def apply(tmp_path, text, *words):
    parser = make_parser()
    args = parsed_with_file(parser, "--custom-config-path", written(tmp_path, text, "run.yaml"), *words)
    return args, apply_custom_config(args, parser)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("lr: 1e-5", "lr", 1e-5),
        ("lr: 1", "lr", 1.0),
        ("seed: 0x10", "seed", 16),
        ("advantage-estimator: ppo", "advantage_estimator", "ppo"),
        ("--use-tis: true", "use_tis", True),
        ("use_tis: false", "use_tis", False),
        ("grpo_std_normalization: false", "grpo_std_normalization", False),
        ("disable-std: true", "grpo_std_normalization", False),
        ("disable_std: false", "grpo_std_normalization", True),
        ("offload_train: false", "offload_train", False),
        ("no_offload_train: true", "offload_train", False),
        ("no-offload-train: false", "offload_train", True),
        ("offload_train: null", "offload_train", None),
        ("rollout_stop: [a, no, 1.10]", "rollout_stop", ["a", "no", "1.10"]),
        ("rollout_stop: </s>", "rollout_stop", ["</s>"]),
        ("rollout_stop_token_ids: [7, 8]", "rollout_stop_token_ids", [7, 8]),
        ("eval_prompt_data: [a, p]", "eval_prompt_data", ["a", "p"]),
        ("rollout_sample_hook_path: [m.f, m.g]", "rollout_sample_hook_path", ["m.f", "m.g"]),
        ("rollout_sample_hook_path: m.f", "rollout_sample_hook_path", ["m.f"]),
        ("pair: [1, 2]", "pair", [1, 2]),
        ("train_env_vars: {A: '1'}", "train_env_vars", {"A": "1"}),
        ('train_env_vars: \'{"A": "1"}\'', "train_env_vars", {"A": "1"}),
        ("wandb_run_id: 0012", "wandb_run_id", "0012"),
    ],
)
def test_a_line_is_converted_by_its_flag(tmp_path, line, name, value):
    args, violations = apply(tmp_path, line + "\n")
    assert violations == []
    assert getattr(args, name) == value and type(getattr(args, name)) is type(value)
    assert args.origins[name] is Origin.YAML and name in args.typed_flags
    assert args.custom_config == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lr: fast", "lr: invalid float value: 'fast' (the default is 1e-06)"),
        ("seed: 1.5", "seed: invalid int value: '1.5'"),
        ("seed: null", "seed: None is no value for it; give a value or drop the line"),
        ("advantage_estimator: gprp", "invalid choice: 'gprp' (choose from 'grpo', 'ppo')"),
        ("use_tis: 1", "use_tis: 1 is no value for it; give true or false"),
        ("offload_train: maybe", "give true or false"),
        ("seed: [1, 2]", "it takes one value"),
        ("lr: {a: 1}", "it takes one value"),
        ("rollout_stop: []", "give at least one value"),
        ("pair: [1]", "give 2 values"),
        ("train_env_vars: [1]", "is not a JSON object"),
        ("custom_config_path: other.yaml", "a file cannot name another --custom-config-path"),
        ("advantage_estimatr: ppo", "unknown key advantage_estimatr: did you mean advantage_estimator?"),
        ("ues_tis: true", "did you mean use_tis?"),
        ("tis_mode: clip", "A value of your own goes below `custom:`"),
        ("custom: {use-tis: true}", "use-tis is the flag --use-tis: move it out of `custom:`"),
        ("qkv_format: thd", "qkv_format does not exist any more: sequences are always packed"),
        ("warmup-ratio: 0.1", "give --lr-warmup-fraction"),
        ("custom: 3", "expected `name: value` lines below it"),
        ("custom: {origins: 3}", "cannot be the name of a value of your own"),
        ("custom: {role: judge}", "cannot be the name of a value of your own"),
        ("custom: {log_dir: /logs/of/my/tools}", "cannot be the name of a value of your own"),
        ("custom: {tis-mode: 1, tis_mode: 2}", "tis_mode: a second line sets tis_mode; keep one"),
        ("custom: {'a b': 3}", "cannot be the name of a value of your own"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    _, violations = apply(tmp_path, "# a comment\n" + line + "\n")
    assert len(violations) == 1
    assert f"{tmp_path}/run.yaml:2: " in violations[0] and message in violations[0]


def test_all_wrong_lines_are_reported_and_the_others_apply(tmp_path):
    args, violations = apply(tmp_path, "lr: fast\nseed: 3\nlog-levl: DEBUG\n")
    assert [message.split(": ")[0].rsplit(":", 1)[1] for message in violations] == ["1", "3"]
    assert args.seed == 3


def test_two_names_of_one_flag(tmp_path):
    _, (message,) = apply(tmp_path, "grpo_std_normalization: true\ndisable_std: true\n")
    assert "run.yaml:2: disable_std and grpo_std_normalization" in message


def test_a_value_of_ones_own_stands_once_beside_the_flags_and_below_custom(tmp_path):
    text = "tis_mode: 1\ncustom: {tis-mode: 2}\ntis-level: 1\ntis_level: 2\n"
    args, violations = apply(tmp_path, text, "--custom-rm-path", "m.f")
    assert [line.split(": ", 1) for line in violations] == [
        [f"{tmp_path}/run.yaml:2", "tis-mode: a second line sets tis_mode; keep one"],
        [f"{tmp_path}/run.yaml:4", "tis_level: a second line sets tis_level; keep one"],
    ]
    assert args.custom_config == {"tis_mode": 1, "tis_level": 1}


def test_the_file_wins_and_a_typed_flag_is_warned_about(tmp_path, caplog):
    args, _ = apply(tmp_path, "lr: 1e-5\nseed: 3\n", "--lr", "2e-6")
    assert args.lr == 1e-5
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/run.yaml:1: lr 1e-05 replaces 2e-06 of the command line"
    ]


def test_no_secret_in_the_warning(tmp_path, caplog):
    apply(tmp_path, "wandb_key: first-secret\n", "--wandb-key", "second-secret")
    assert "wandb_key" in caplog.text and "-secret" not in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        "wandb_key: [SEKRET]",
        "wandb_key: {a: SEKRET}",
        "custom: [{api_key: SEKRET}]",
        "train_env_vars: '{A_KEY: SEKRET}'",
    ],
)
def test_no_secret_in_a_message(tmp_path, line):
    _, (message,) = apply(tmp_path, line + "\n")
    assert "run.yaml:1: " in message and "SEKRET" not in message


def test_a_value_that_equals_the_default_is_the_users(tmp_path):
    args, _ = apply(tmp_path, "seed: 1234\n")
    assert args.origins["seed"] is Origin.YAML and "seed" in args.typed_flags


def test_values_of_ones_own_below_custom(tmp_path):
    args, violations = apply(tmp_path, "custom:\n  tis-mode: clip\n  nested: {a: [1, 1e-3]}\n  use_tiss: true\n")
    assert violations == []
    assert args.tis_mode == "clip" and args.nested == {"a": [1, 1e-3]}
    assert args.custom_config == {"tis_mode": "clip", "nested": {"a": [1, 1e-3]}, "use_tiss": True}
    assert json.loads(json.dumps(args.custom_config)) == args.custom_config


# The keys of truncated importance sampling plug-ins, which stand beside flags such as --use-tis and --tis-clip.
OWN_KEYS = (
    "use_rs", "tis_level", "rs_level", "tis_mode", "tis_upper_bound", "tis_lower_bound", "rs_lower_bound",
    "rs_upper_bound", "rs_veto_threshold", "tis_batch_normalize",
)  # fmt: skip


@pytest.mark.parametrize("where", ["command line", "file"])
def test_values_of_ones_own_beside_the_flags_when_a_plug_in_is_set(tmp_path, where):
    lines = "".join(f"{key}: 1\n" for key in OWN_KEYS)
    words = ("--custom-rm-path", "m.f") if where == "command line" else ()
    args, violations = apply(tmp_path, lines + ("custom_rm_path: m.f\n" if where == "file" else ""), *words)
    assert violations == []
    assert set(args.custom_config) == set(OWN_KEYS) and args.tis_mode == 1


def test_values_in_a_list_are_refused_without_their_secrets(tmp_path):
    _, (message,) = apply(tmp_path, "custom: [{judge_key: SEKRET, margin: 0.5}]\n")
    assert "lines below it, not [{'judge_key': '<redacted>', 'margin': 0.5}]" in message


def test_a_plug_in_that_the_file_leaves_out_wants_no_values(tmp_path):
    _, (message,) = apply(tmp_path, "tis_level: 1\ncustom_rm_path: null\n")
    assert "goes below `custom:`" in message


def test_a_slip_stays_an_error_with_a_plug_in(tmp_path):
    _, (message,) = apply(tmp_path, "tis_clp: 3\n", "--custom-rm-path", "m.f")
    assert "did you mean tis_clip?" in message


def test_own_keys_are_no_slips_of_any_flag(tmp_path):
    from slime.arguments.config_files.flag_names import FlagNames
    from slime.arguments.parser import build_parser

    names = FlagNames(build_parser())
    assert {key: names.near(key) for key in OWN_KEYS if names.find(key) is None and names.near(key)} == {}


def test_without_the_flag_nothing_happens():
    parser = make_parser()
    args = parse_known(parser, ["--seed", "1"])
    assert apply_custom_config(args, parser) == [] and args.custom_config == {}


def test_a_missing_file_is_a_violation(tmp_path):
    parser = make_parser()
    args = parse_known(parser, ["--custom-config-path", str(tmp_path / "no.yaml")])
    assert "the file cannot be read" in apply_custom_config(args, parser)[0]


def test_a3_contradictions_in_the_file_are_found_and_reported_with_its_mistakes(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("rollout_temperature: 0\nuse-tis: true\nuse_rollout_logprobs: true\nlr: fast\n")
    with pytest.raises(UserError) as caught:
        parse(tmp_path, "--custom-config-path", str(path))
    message = str(caught.value)
    assert "run.yaml:4: lr: invalid float value" in message
    assert "--rollout-temperature 0" in message and "--use-rollout-logprobs" in message and "--use-tis" in message


def test_a4_values_reach_the_run_with_their_origin(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1e-5\nrollout_batch_size: 8\ncustom: {tis_mode: clip}\n")
    args = parse(tmp_path, "--custom-config-path", str(path))
    assert (args.lr, args.rollout_batch_size, args.global_batch_size, args.tis_mode) == (1e-5, 8, 16, "clip")
    assert args.origins["lr"] is Origin.YAML and args.origins["tis_mode"] is Origin.YAML
    write_run_record(args, tmp_path)
    record = json.loads((tmp_path / "args.json").read_text())["arguments"]
    assert record["tis_mode"] == {"value": "clip", "origin": "YAML"}


def test_a_value_of_ones_own_that_the_run_derives_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("custom:\n  world_size: 77\n  use_critic: {judge_key: SEKRET}\n")
    with pytest.raises(UserError, match=r"run.yaml: world_size is set by the run itself.* 77") as error:
        parse(tmp_path, "--custom-config-path", str(path))
    assert "use_critic is set by the run itself" in str(error.value) and "SEKRET" not in str(error.value)
