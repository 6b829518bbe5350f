import os

import pytest

from slime.arguments.paths import make_paths_absolute
from tests.support.args import parse
from tests.support.rules import violations


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
    args = parse(tmp_path, "--save", "~/run", "--custom-rm-path", "~/r.py:f", "--dry-run")
    assert args.save == f"{tmp_path}/run" and args.custom_rm_path == f"{tmp_path}/r.py:f"


@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--save", "--prompt-data", "--custom-rm-path", "--eval-config"])
def test_an_empty_path_is_an_unset_variable(tmp_path, flag):
    assert violations(tmp_path, [flag, ""]) == [
        f"{flag}: the path is empty; is a variable of the shell not set? Give a path"
    ]
