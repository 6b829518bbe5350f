"""Runs and conversions from Python: which program is called with which words."""

import sys
from pathlib import Path

import pytest

from slime.utils.errors import RunError, UserError
from slime.utils.external_utils import command_utils
from slime.utils.external_utils.command_utils import convert_checkpoint, exec_command, execute_train, model_args


@pytest.fixture
def called(monkeypatch):
    """The words of every command, and what was put into its environment; nothing is run."""
    calls = []
    monkeypatch.setattr(command_utils, "exec_command", lambda words, *_, env=None, **__: calls.append((words, env)))
    return calls


def test_a_text_is_for_bash_and_its_output_comes_back():
    assert exec_command("echo $((1 + 1)) $OWN", True, env={"OWN": "x"}) == "2 x\n"
    assert exec_command([sys.executable, "-c", "print('a b')"], True) == "a b\n"


def test_a_command_that_fails_is_told_with_its_output_and_without_its_words():
    with pytest.raises(RunError, match="bash ended with status 3\nwhy") as caught:
        exec_command("echo why; exit 3 # secret", True)
    assert "secret" not in str(caught.value)


def test_the_flags_of_a_model_are_those_of_its_script():
    words = model_args("qwen3-4B")
    assert words[words.index("--num-layers") + 1] == "36" and "--qk-layernorm" in words
    for name in ("nobody", "../lib/launch"):
        with pytest.raises(UserError, match=f"no scripts/models/{name}.sh; those there are: .*qwen3-4B"):
            model_args(name)


def test_a_run_is_train_py_with_flags_as_words_or_as_they_are_typed(called):
    execute_train("--lr 1e-6 --prompt-data 'my data.jsonl'", 8, extra_env_vars={"A": "b"})
    execute_train(["--lr", "1e-6"], 4, train_script="train_async.py")
    (first, env), (second, _) = called
    assert first[1].endswith("/train.py") and env == {"A": "b"}
    assert first[2:] == ["--num-gpus-per-node", "8", "--lr", "1e-6", "--prompt-data", "my data.jsonl"]
    assert second[1].endswith("/train_async.py") and second[2:] == ["--num-gpus-per-node", "4", "--lr", "1e-6"]


def test_flags_of_the_model_come_before_those_that_are_given(monkeypatch, called):
    monkeypatch.setattr(command_utils, "model_args", lambda name: ["--num-layers", name])
    execute_train(["--num-layers", "2"], 1, "some-model")
    assert called[0][0][4:] == ["--num-layers", "some-model", "--num-layers", "2"]


def test_a_checkpoint_is_converted_once(tmp_path, called):
    save = str(tmp_path / "megatron")
    assert convert_checkpoint("hf", save, extra_args=["--x"]) == save
    words = called[0][0]
    assert words[1].endswith("convert_hf_to_torch_dist.py")
    assert words[2:] == ["--hf-checkpoint", "hf", "--save", save, "--max-workers", "1", "--x"]
    (tmp_path / "megatron").mkdir()
    assert convert_checkpoint("hf", save) == save and len(called) == 1
    convert_checkpoint("hf", f"{save}-2", extra_args="--chunk-size 1000 -f")
    assert called[1][0][-3:] == ["--chunk-size", "1000", "-f"]


def test_relative_paths_begin_where_the_caller_is(tmp_path, monkeypatch):
    """Not in the repository, where a file of that name is another one."""
    repository, here = tmp_path / "repository", tmp_path / "here"
    (repository / "tools").mkdir(parents=True)
    here.mkdir()
    for program in ("train.py", "tools/convert_hf_to_torch_dist.py"):
        (repository / program).write_text("import sys\nopen(sys.argv[-1], 'x').close()\n")
    monkeypatch.setattr(command_utils, "_REPOSITORY", repository)
    monkeypatch.chdir(here)
    execute_train("--save run", 1)
    convert_checkpoint("hf", "megatron", extra_args=["--written", "converted"])
    assert {path.name for path in here.iterdir()} == {"run", "converted"}


@pytest.mark.slow
def test_a_checkpoint_is_converted_by_several_processes(tmp_path):
    from tests.support.models.tiny_model import write_tiny_model
    from tools.conversion.hugging_face import differences
    from tools.conversion.torch_dist import convert_torch_dist_to_hf

    hf, back = tmp_path / "hf", tmp_path / "back"
    write_tiny_model(hf, layers=4)
    save = convert_checkpoint(str(hf), str(tmp_path / "megatron"), num_gpus_per_node=2)
    options = {"workers": 1, "force": False, "largest": 2**30, "model_name": None, "vocab_size": None}
    convert_torch_dist_to_hf(Path(save), back, hf, adds_missing=False, **options)
    assert list(differences(back, hf)) == []
