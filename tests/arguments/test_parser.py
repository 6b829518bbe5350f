import re
from pathlib import Path

import pytest

from slime.arguments.parser import build_parser, parse_known
from slime.utils.errors import UserError
from tests.support.args import command_line, parse

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
    from slime.arguments import parse_args

    def add(parser):
        parser.add_argument("--my-flag", type=int, default=3)
        return parser

    assert parse_args(add, argv=[*command_line(tmp_path), "--my-flag", "5"]).my_flag == 5


def test_every_flag_has_a_help_text():
    assert [a.option_strings for a in build_parser()._actions if not a.help] == []


# Read by field name when Megatron's configuration dataclasses are filled, or as `sglang_<server argument>`.
READ_BY_FIELD_NAME = {
    "adam_beta1", "adam_beta2", "adam_eps", "add_qkv_bias", "attention_dropout", "attention_softmax_in_fp32", "clip_grad",
    "deterministic_mode", "hidden_dropout", "normalization", "optimizer", "qk_layernorm", "recompute_granularity",
    "recompute_method", "recompute_num_layers",
}  # fmt: skip


def test_a6_every_flag_has_a_reader():
    text = "\n".join(path.read_text() for path in [*SOURCE.rglob("*.py"), SOURCE.parent / "train.py"])
    read = set(re.findall(r"args\.([a-z_0-9]+)", text)) | set(re.findall(r"\"([a-z_0-9]+)\"", text))
    flags = {action.dest for action in build_parser()._actions} - {"help"}
    unread = {name for name in flags - read - READ_BY_FIELD_NAME if not name.startswith("sglang_")}
    # Sampling flags of evaluation are read as eval_<name>.
    assert {name for name in unread if not name.startswith("eval_")} == set()
