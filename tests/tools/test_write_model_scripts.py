"""The model scripts are what the families derive from the published configs."""

from pathlib import Path

import pytest

from slime.arguments.hf_config import text_config_of
from tests.support.models.args import write_config
from tests.support.tables.shell_arrays import ROOT, as_flags, source_all
from tools import write_model_scripts
from tools.published_models import PUBLISHED_MODELS
from tools.write_model_scripts import COMMAND, DIRECTORY, MODELS, Model, generated_files, main, script


@pytest.mark.parametrize("name", MODELS)
def test_a_script_is_fresh(name):
    path = DIRECTORY / f"{name}.sh"
    assert (ROOT / path).read_text() == generated_files()[path], f"run `{COMMAND}`"


def test_every_other_script_changes_the_name_or_the_depth_of_one_of_these():
    others = {path.stem: path.read_text() for path in (ROOT / DIRECTORY).glob("*.sh") if path.stem not in MODELS}
    assert len(others) == 13
    assert [name for name, text in others.items() if 'source "$(dirname "${BASH_SOURCE[0]}")/' not in text] == []


def test_check_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(write_model_scripts, "ROOT", tmp_path)
    (tmp_path / DIRECTORY).mkdir(parents=True)
    assert main(["--check"]) == 1
    assert not list((tmp_path / DIRECTORY).iterdir()) and "qwen3-4B.sh is out of date" in capsys.readouterr().out
    assert main([]) == 0 and main(["--check"]) == 0
    assert len(list((tmp_path / DIRECTORY).iterdir())) == len(MODELS)


def test_the_script_of_a_directory(tmp_path, capsys):
    directory = write_config(tmp_path / "model")
    assert main(["--config", str(directory)]) == 0
    written = tmp_path / "mine.sh"
    written.write_text(capsys.readouterr().out.replace('$(dirname "${BASH_SOURCE[0]}")', str(ROOT / DIRECTORY)))
    flags = as_flags(source_all({"mine": written}, ("MODEL_ARGS",), cwd=Path("/"))["mine"]["MODEL_ARGS"])
    assert flags == {
        "--num-layers": ("2",), "--hidden-size": ("64",), "--ffn-hidden-size": ("128",), "--num-attention-heads": ("4",),
        "--vocab-size": ("300",), "--normalization": ("RMSNorm",), "--norm-epsilon": ("1e-6",), "--swiglu": (),
        "--use-rotary-position-embeddings": (), "--rotary-base": ("10000",), "--disable-bias-linear": (),
        "--qk-layernorm": (), "--group-query-attention": (), "--num-query-groups": ("2",), "--kv-channels": ("16",),
    }  # fmt: skip


def test_layers_that_no_pattern_tells():
    config = text_config_of({**PUBLISHED_MODELS["qwen3-30B-A3B"], "mlp_only_layers": [3]})
    with pytest.raises(ValueError, match="moe_layer_freq"):
        script(config, Model("somebody/model"))
