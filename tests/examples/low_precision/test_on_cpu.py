"""The command of the page on low precision: both formats are made, trained for, and exported as engines would be sent them."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slime.weights.quantisers import modules_by_name

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/low_precision"


@pytest.mark.slow
def test_exports_have_the_format_of_the_engines_checkpoint(tmp_path):
    done = subprocess.run(
        ["bash", str(EXAMPLE / "on_cpu.sh"), "made"], cwd=tmp_path, env={**os.environ, "PYTHON_BIN": sys.executable},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    for form, method in (("fp8", "fp8"), ("int4", "compressed-tensors")):
        made, exported = tensors_of(tmp_path / f"made/model-{form}"), tensors_of(tmp_path / f"made/{form}/hf")
        forms = [{name: (tensor.dtype, tensor.shape) for name, tensor in both.items()} for both in (made, exported)]
        assert forms[0] == forms[1]
        # Two steps of training have changed what is stored.
        assert any(not tensor.equal(made[name]) for name, tensor in exported.items())
        config = json.loads((tmp_path / f"made/{form}/hf/config.json").read_text())
        assert config["quantization_config"]["quant_method"] == method
    plain, original = tensors_of(tmp_path / "made/fp8/hf-bf16"), tensors_of(tmp_path / "made/model")
    assert {name: tensor.shape for name, tensor in plain.items()} == {name: t.shape for name, t in original.items()}


def tensors_of(directory):
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "page",
    ["examples/low_precision/README.md", *(f"docs/{language}/advanced/low-precision.md" for language in ("en", "zh"))],
)
def test_the_command_for_the_scripts_packs_experts_alone_in_groups_of_the_size_that_they_name(page):
    """Those of Kimi-K2-Thinking are published in INT4."""
    [command] = re.findall(
        r"convert_hf_to_int4_direct\.py (.*?--ignore-rules.*)\n```", (ROOT / page).read_text(), re.DOTALL
    )
    words = shlex.split(command)
    left_alone = modules_by_name(words[words.index("--ignore-rules") + 1 :], page)
    others = ("self_attn.q_proj", "self_attn.kv_b_proj", "mlp.down_proj", "mlp.shared_experts.up_proj")
    assert all(left_alone(f"model.layers.0.{name}") for name in others)
    assert not any(left_alone(f"model.layers.1.mlp.experts.7.{name}_proj") for name in ("gate", "up", "down"))
    scripts = [path for path in (ROOT / "scripts/low_precision").glob("*-int4.sh") if "kimi" not in path.name]
    sizes = {re.search(r"INT4_GROUP_SIZE\]=(\d+)", script.read_text())[1] for script in scripts}
    assert len(scripts) == 3 and sizes == {words[words.index("--group-size") + 1]}
