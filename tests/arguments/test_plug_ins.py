import importlib
from types import SimpleNamespace

import pytest

from slime.arguments import build_parser
from slime.arguments.plug_ins import MANAGER_PLUG_INS, RANK_PLUG_INS, load_plug_ins
from slime.utils.errors import UserError
from tests.support.args import parse
from tests.support.rules import violations


def test_every_plug_in_flag_is_loaded_by_one_process():
    flags = {action.dest for action in build_parser()._actions if (action.help or "").startswith("plug-in path")}
    assert {*MANAGER_PLUG_INS, *RANK_PLUG_INS} == flags
    assert not set(MANAGER_PLUG_INS) & set(RANK_PLUG_INS)


def args_with(**values) -> SimpleNamespace:
    names = dict.fromkeys((*MANAGER_PLUG_INS, *RANK_PLUG_INS))
    return SimpleNamespace(**{**names, "rollout_sample_hook_path": [], "group_rm": False, **values})


def test_typed_paths_are_imported(tmp_path):
    (tmp_path / "reward.py").write_text("import no_such_package\n")
    path = f"{tmp_path}/reward.py:grade"
    with pytest.raises(UserError, match=rf"--custom-rm-path {path}: the import failed"):
        load_plug_ins(args_with(custom_rm_path=path, typed_flags={"custom_rm_path"}), MANAGER_PLUG_INS)
    with pytest.raises(UserError, match="--rollout-sample-hook-path math.pi: is a float"):
        hooks = ["math.sqrt", "math.pi"]
        load_plug_ins(
            args_with(rollout_sample_hook_path=hooks, typed_flags={"rollout_sample_hook_path"}), MANAGER_PLUG_INS
        )


def test_defaults_and_the_plug_ins_of_other_processes_are_left_alone():
    args = args_with(rollout_function_path="no.such.default", custom_loss_function_path="no.such.loss")
    args.typed_flags = {"custom_loss_function_path"}
    load_plug_ins(args, MANAGER_PLUG_INS)


def test_a_package_that_does_not_exist_is_told_without_an_import(tmp_path, monkeypatch):
    (line,) = violations(tmp_path, "--custom-rm-path my.module.missing")
    assert line.startswith("--custom-rm-path my.module.missing: there is no module or package 'my'; install it")
    assert any("'my'" in note for note in parse(tmp_path, "--custom-rm-path", "my.f", "--dry-run").plan_notes)
    # Ray's workers look where the command was typed.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text("raise SystemExit\ndef grade(args, sample): ...\n")
    parse(tmp_path, "--custom-rm-path", "my_rewards.grade")


def test_ranks_may_have_a_search_path_of_their_own(tmp_path):
    words = ["--loss-type", "custom_loss", "--custom-loss-function-path", "my.loss"]
    variables = ["--train-env-vars", '{"PYTHONPATH": "/elsewhere"}']
    assert "'my'" in violations(tmp_path, words)[0]
    parse(tmp_path, *words, *variables)


def test_a_misspelt_name_is_told_before_anything_starts_and_nothing_is_run(tmp_path):
    plug_in = tmp_path / "rewards.py"
    plug_in.write_text("raise SystemExit\ndef grade(args, sample): ...\ndef other(args, sample): ...\n")
    assert violations(
        tmp_path, ["--custom-rm-path", f"{plug_in}:grad", "--rollout-sample-hook-path", f"{plug_in}"]
    ) == [
        f"--rollout-sample-hook-path {plug_in}: the file defines grade, other; name one after a colon (file.py:name), or use "
        "a conventional name (rollout_sample_hook)",
        f"--custom-rm-path {plug_in}:grad: {plug_in} has no attribute 'grad'; did you mean 'grade'?",
    ]
    parse(tmp_path, "--custom-rm-path", f"{plug_in}:grade")


def test_a_misspelt_name_of_ours_is_told(tmp_path):
    importlib.import_module("slime.rollout.filter_hub")  # packages may be loaded or not
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_sdt"
    (line,) = violations(tmp_path, ["--dynamic-sampling-filter-path", path])
    assert line.endswith("has no attribute 'check_reward_nonzero_sdt'; did you mean 'check_reward_nonzero_std'?")
