"""Paths made absolute, and plug-ins that are looked for before anything starts."""

import importlib
import os
from types import SimpleNamespace

import pytest

from slime.arguments import build_parser
from slime.arguments.flag import flag_of
from slime.arguments.paths import (
    LOADED_BY_RANKS,
    MANAGER_PLUG_INS,
    RANK_PLUG_INS,
    load_plug_ins,
    make_paths_absolute,
)
from slime.utils.errors import UserError
from slime.utils.eval_config import EvalDatasetConfig
from tests.support.models.args import command_line, parse
from tests.support.tables.config_files import written
from tests.support.tables.rules import violations


def test_relative_paths_become_absolute(tmp_path, monkeypatch):
    args = parse(tmp_path)
    monkeypatch.chdir(tmp_path)
    args.save, args.prompt_data = "run", ["data.jsonl@[0:5]"]
    args.eval_prompt_data = ["name", "eval.jsonl"]
    args.custom_rm_path, args.custom_generate_function_path = "mine.py:reward", "package.module.generate"
    args.rollout_sample_hook_path = ["hooks/a.py:first"]
    make_paths_absolute(args)
    here = os.getcwd()
    assert args.save == f"{here}/run" and args.prompt_data == [f"{here}/data.jsonl@[0:5]"]
    assert args.eval_prompt_data == ["name", f"{here}/eval.jsonl"]
    assert args.custom_rm_path == f"{here}/mine.py:reward"
    assert args.custom_generate_function_path == "package.module.generate"
    assert args.rollout_sample_hook_path == [f"{here}/hooks/a.py:first"]


def test_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ("--save=~/run", "--custom-rm-path", "~/r.py:f", "--tensorboard-dir=~/events", "--dry-run")
    args = parse(tmp_path, *words, "--nccl-communicator-config-path=~/nccl.yaml")
    assert args.save == f"{tmp_path}/run" and args.custom_rm_path == f"{tmp_path}/r.py:f"
    assert args.tensorboard_dir == f"{tmp_path}/events"
    assert args.nccl_communicator_config_path == f"{tmp_path}/nccl.yaml"


def test_files_of_settings_and_the_paths_in_them_may_begin_at_home(tmp_path, monkeypatch):
    parse(tmp_path)  # reads the flags of packages, which are kept below the real home
    monkeypatch.setenv("HOME", str(tmp_path))
    files = {
        "--custom-config-path": "seed: 7\n",
        "--megatron-config-path": "megatron: [{role: actor, overrides: {lr: 1e-5}}]\n",
        "--eval-config": "datasets: [{name: a, path: ~/prompts.jsonl}]\n",
        "--sglang-config": "sglang: [{name: a, model_path: ~/model, server_groups: [{num_gpus: 1}]}]\n",
    }
    for flag, text in files.items():
        written(tmp_path, text, f"{flag}.yaml")
    args = parse(tmp_path, "--eval-interval", "1", *(f"{flag}=~/{flag}.yaml" for flag in files))
    assert (args.seed, args.lr) == (7, 1e-5)
    assert args.eval_datasets[0].path == f"{tmp_path}/prompts.jsonl"
    assert args.served_models[0].model_path == args.hf_checkpoint == f"{tmp_path}/model"


@pytest.mark.parametrize(
    "flag",
    [
        "--hf-checkpoint", "--save", "--prompt-data", "--custom-rm-path", "--eval-config", "--rollout-function-path",
        "--data-source-path", "--custom-config-path", "--megatron-config-path", "--eval-prompt-data", "--tensorboard-dir",
        "--nccl-communicator-config-path",
    ],
)  # fmt: skip
def test_an_empty_path_is_an_unset_variable(tmp_path, flag):
    assert violations(tmp_path, [flag, ""]) == [
        f"{flag}: the path is empty; is a variable of the shell not set? Give a path"
    ]


def test_every_plug_in_flag_is_loaded_by_one_process():
    flags = {action.dest for action in build_parser()._actions if (action.help or "").startswith("plug-in path")}
    assert {*MANAGER_PLUG_INS, *RANK_PLUG_INS} == flags
    assert not set(MANAGER_PLUG_INS) & set(RANK_PLUG_INS)


def args_with(**values) -> SimpleNamespace:
    names = dict.fromkeys((*MANAGER_PLUG_INS, *LOADED_BY_RANKS))
    others = {"rollout_sample_hook_path": [], "group_rm": False, "eval_interval": None, "train_backend": "megatron"}
    return SimpleNamespace(**{**names, **others, **values})


def test_typed_paths_are_imported(tmp_path):
    (tmp_path / "reward.py").write_text("import no_such_package\n")
    path = f"{tmp_path}/reward.py:grade"
    with pytest.raises(UserError, match=rf"--custom-rm-path {path}: the import failed"):
        load_plug_ins(args_with(custom_rm_path=path, typed_flags={"custom_rm_path"}), MANAGER_PLUG_INS)
    with pytest.raises(UserError, match="--rollout-sample-hook-path math.pi: is a float"):
        hooks = ["builtins.print", "math.pi"]
        load_plug_ins(
            args_with(rollout_sample_hook_path=hooks, typed_flags={"rollout_sample_hook_path"}), MANAGER_PLUG_INS
        )


def test_a_coroutine_function_is_refused_at_the_start_wherever_nobody_would_await_it(tmp_path):
    (tmp_path / "late.py").write_text("async def late(*given, **named): ...\n")
    path, refused = f"{tmp_path}/late.py:late", set()
    for name in (*MANAGER_PLUG_INS, *RANK_PLUG_INS):
        value = [path] if name == "rollout_sample_hook_path" else path
        try:
            load_plug_ins(args_with(**{name: value}, typed_flags={name}), (name,))
        except UserError as error:
            assert str(error).startswith(f"{flag_of(name)} {path} is async, and nobody awaits it here; write `def`")
            refused.add(name)
    assert {*MANAGER_PLUG_INS, *RANK_PLUG_INS} - refused == {
        "custom_generate_function_path", "rollout_sample_hook_path", "custom_rm_path", "rollout_all_samples_process_path",
        "rollout_sample_filter_path", "custom_reward_post_process_path", "custom_convert_samples_to_train_data_path",
        "custom_rollout_log_function_path", "custom_eval_rollout_log_function_path",
    }  # fmt: skip


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
    (tmp_path / "own.py").write_text("import my\n\n\ndef loss(*given): ...\n")
    words[-1] = f"{tmp_path}/own.py:loss"
    assert "own.py:1 imports 'my'" in violations(tmp_path, words)[0]
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


def of_set(tmp_path, *lines, words=()):
    """The words of a run with one evaluation set, whose entry has `lines` from line 4 of its file on."""
    command_line(tmp_path)
    entry = "".join(f"    {line}\n" for line in lines)
    (tmp_path / "eval.yaml").write_text(f"datasets:\n  - name: own\n    path: {tmp_path}/prompts.jsonl\n{entry}")
    return ["--eval-interval", "2", "--eval-config", f"{tmp_path}/eval.yaml", *words]


def test_functions_of_evaluation_sets_are_looked_for_as_those_of_flags_are(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "async def generate(args, sample, sampling_params): ...\nasync def reward(args, sample, **kwargs): ...\n"
        "async def of_text(text): ...\n"
    )
    good = [f"custom_generate_function_path: {own}:generate", f"custom_rm_path: {own}:reward"]
    parse(tmp_path, *of_set(tmp_path, *good))
    for key, path, said in [
        ("custom_generate_function_path", f"{own}:of_text", "is `async def of_text(text)`"),
        ("custom_rm_path", f"{own}:of_text", "and it is called as fn(args, sample)"),
        ("custom_rm_path", f"{own}:rewards", "did you mean 'reward'?"),
        ("custom_rm_path", "my.module.missing", "there is no module or package 'my'"),
        ("custom_generate_function_path", f"{tmp_path}/none.py:f", "there is no file"),
    ]:
        words = of_set(tmp_path, f"{key}: {path}")
        (line,) = violations(tmp_path, words)
        assert line.startswith(f"{tmp_path}/eval.yaml:4: {key} {path}: ") and said in line
        assert any(said in note for note in parse(tmp_path, *words, "--dry-run").plan_notes)


def test_a_function_of_the_defaults_is_told_once_and_one_that_no_set_uses_not_at_all(tmp_path):
    words = of_set(tmp_path)
    sets = "".join(f"  {name}: {{path: {tmp_path}/prompts.jsonl}}\n" for name in "ab")
    head = f"defaults: {{custom_rm_path: {tmp_path}/none.py:f}}\ndatasets:\n"
    (tmp_path / "eval.yaml").write_text(head + sets)
    (line,) = violations(tmp_path, words)
    assert line.startswith(f"{tmp_path}/eval.yaml:1: custom_rm_path {tmp_path}/none.py:f: there is no file")
    (tmp_path / "eval.yaml").write_text(head + sets.replace("}", ", custom_rm_path: tests.support.grade}"))
    assert not any("none.py" in line for line in violations(tmp_path, [*words, "--rollout-temperature", "0"]))


def test_a_bare_file_of_a_set_is_looked_into_as_it_will_be_loaded(tmp_path):
    (tmp_path / "own.py").write_text("def batched_custom_rm(args, samples): ...\ndef other(args, sample): ...\n")
    words = of_set(tmp_path, f"custom_rm_path: {tmp_path}/own.py")
    assert "the file defines batched_custom_rm, other" in violations(tmp_path, words)[0]
    parse(tmp_path, *words, "--group-rm")


def test_functions_of_evaluation_sets_are_loaded_by_the_manager_at_its_start(tmp_path):
    (tmp_path / "own.py").write_text("def made(text): ...\nrewards = {'made': made}\nglobals().update(f=made)\n")
    path = f"{tmp_path}/own.py:f"
    args = args_with(typed_flags=set(), eval_interval=1)
    for key, names in (("custom_rm_path", MANAGER_PLUG_INS), ("custom_generate_function_path", MANAGER_PLUG_INS)):
        args.eval_datasets = [EvalDatasetConfig("own", "/a", **{key: path})]
        with pytest.raises(UserError, match=rf"evaluation set own: {flag_of(key)} {path}: is `def made\(text\)`"):
            load_plug_ins(args, names)
    load_plug_ins(args, LOADED_BY_RANKS)
    args.eval_interval = None
    load_plug_ins(args, MANAGER_PLUG_INS)


def test_a_layer_spec_is_looked_for_and_loaded_as_the_plug_ins_of_ranks_are(tmp_path, monkeypatch):
    own = tmp_path / "own.py"
    own.write_text("def layers(args, config): ...\ndef model(pre_process, post_process): ...\n")
    monkeypatch.chdir(tmp_path)
    (line,) = violations(tmp_path, ["--spec", "own.py:layers"])
    assert line.startswith(f"--spec {own}:layers: is `def layers(args, config)`")
    assert "'my'" in violations(tmp_path, ["--spec", "my.package", "layers"])[0]
    parse(tmp_path, "--spec", "my.package", "layers", "--train-env-vars", '{"PYTHONPATH": "/elsewhere"}')
    assert parse(tmp_path, "--spec", "own.py:model").spec == [f"{own}:model"], "ranks run elsewhere"
    parse(tmp_path, "--spec", "own", "model")
    args = args_with(spec=[f"{own}:layers"], typed_flags={"spec"})
    with pytest.raises(UserError, match="it is called as fn"):
        load_plug_ins(args, LOADED_BY_RANKS)
    args.train_backend = "fsdp"
    load_plug_ins(args, LOADED_BY_RANKS)
