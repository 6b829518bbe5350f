"""What is said to those who type flags of other systems, of earlier versions and of servers."""

import re

import pytest

from slime.arguments.parser import build_parser, parse_known
from slime.arguments.unknown_flags import ANSWERS, DERIVED, RETIRED, SAME, answer_to, unknown, why_unknown
from slime.backends.sglang_utils.server_arguments import NOT_EXPOSED
from slime.utils.errors import UserError
from tests.support.models.args import parse


def lines_of(words: str) -> list[str]:
    with pytest.raises(UserError) as error:
        parse_known(build_parser(), words.split())
    return str(error.value).splitlines()


def test_every_answer_names_flags_that_exist_and_no_name_is_a_flag_of_ours():
    known = build_parser()._option_string_actions
    named = {flag for answer in ANSWERS.values() for flag in re.findall(r"--[a-z][\w-]*(?!\w|-?\*)", answer)}
    named |= {flag for flags in SAME.values() for flag in flags}
    assert {flag for flag in named if flag not in known} - {"--sglang-"} == set()
    meant = {flag for name in (*ANSWERS, *SAME) for flag in answer_to(name.replace("*", "x"), known).flags}
    assert meant == named - {"--sglang-"}, "a sentence has its flags in braces"
    names = {f"--{name}" for name in ANSWERS} | set(SAME)
    assert [name for name in names if name in known or why_unknown(name) is not None] == []


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("trainer.nnodes=2", "unexpected word 'trainer.nnodes=2': did you mean --actor-num-nodes?"),
        ("+ref.actor.optim.lr=1e-6", "unexpected word '+ref.actor.optim.lr=1e-6': did you mean --lr?"),
        ("actor_rollout_ref.rollout.n=8", "unexpected word 'actor_rollout_ref.rollout.n=8': did you mean --n-samples-per-prom"),
        ("ref.actor.entropy_coeff=0", "unexpected word 'ref.actor.entropy_coeff=0': did you mean --entropy-coef?"),
        ("policy.dtensor_cfg.cpu_offload=true",
         "unexpected word 'policy.dtensor_cfg.cpu_offload=true': did you mean --train-backend?"),
        ("policy.megatron_cfg.tensor_model_parallel_size=2",
         "unexpected word 'policy.megatron_cfg.tensor_model_parallel_size=2': did you mean --tensor-model-parallel-size?"),
        ("lr=1e-6", "unexpected word 'lr=1e-6': did you mean --lr?"),
        ("trainer.wandb_api_key=abc", "unexpected word 'trainer.wandb_api_key=<redacted>': "),
        ("a.b.c=1", "unexpected word 'a.b.c=1': flags are written `--name value` here; `python train.py --help-grep c` looks"),
    ],
)  # fmt: skip
def test_answers_to_overrides(typed, answer):
    (line,) = lines_of(f"--seed 1 {typed}")
    assert line.startswith(answer) and "abc" not in line


def test_every_override_is_answered_wherever_it_stands():
    lines = lines_of("trainer.nnodes=2 --dry-run a.b.c=1 algorithm.gamma=0.9 stray more")
    assert [line.split(":")[0] for line in lines] == [
        "unexpected word 'trainer.nnodes=2'", "unexpected word 'a.b.c=1'", "unexpected word 'algorithm.gamma=0.9'",
        "unexpected word 'stray'",
    ]  # fmt: skip
    assert lines[2].endswith("did you mean --gamma?")


def test_values_of_flags_are_no_overrides():
    args = parse_known(build_parser(), ["--rollout-stop", "a=1", "x.y=2", "--prompt-data", "rows.jsonl@[0:1]"])
    assert args.rollout_stop == ["a=1", "x.y=2"]


def test_a_name_that_nobody_uses_has_no_answer():
    assert answer_to("--surely-nothing", build_parser()._option_string_actions) is None


def test_words_that_are_common_elsewhere_lead_to_our_flags(tmp_path):
    with pytest.raises(UserError, match="unknown flag --learning-rate: did you mean --lr?"):
        parse(tmp_path, "--learning-rate", "1e-5")


def test_words_that_are_common_elsewhere_in_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-5\n")
    with pytest.raises(UserError, match="run.yaml:1: unknown key learning_rate: did you mean lr?"):
        parse(tmp_path, "--custom-config-path", str(tmp_path / "run.yaml"), "--custom-rm-path", "tests.f")


FLAG = re.compile(r"--[a-z][a-z0-9-]*\*?")


def test_no_retired_flag_is_known_and_every_replacement_is():
    known = build_parser()._option_string_actions
    assert [name for name in RETIRED if name in known] == []
    patterns = tuple(name[:-1] for name in RETIRED if name.endswith("*"))
    assert [flag for flag in known if flag.startswith(patterns)] == []
    named = {flag for text in RETIRED.values() for flag in FLAG.findall(text) if not flag.endswith("*")}
    assert [flag for flag in named if flag not in known] == []
    assert {flag for text in RETIRED.values() for flag in unknown(text).flags} == named, "they stand in braces"


def test_a_family_covers_every_ending_and_nothing_else():
    assert why_unknown("--slime-router-anything") is not None
    assert why_unknown("--slime-routers") is None and why_unknown("--config-file") is None


def test_settings_of_a_server_that_follow_from_the_run(tmp_path):
    words = ["--sglang-model-path", "x", "--sglang-port", "1", "--sglang-random-seed", "2", "--sglang-nnodes", "3"]
    with pytest.raises(UserError) as error:
        parse(tmp_path, *words)
    lines = str(error.value).splitlines()
    assert [line.split(" is set by the run: ")[0] for line in lines] == words[::2]
    assert "--hf-checkpoint" in lines[0] and "--seed" in lines[2]


def test_every_setting_that_is_not_exposed_has_a_reason():
    # --sglang-config is a flag of ours.
    assert set(DERIVED) == {"--sglang-" + name.replace("_", "-") for name in NOT_EXPOSED - {"config"}}
