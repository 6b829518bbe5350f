"""The command of the page on low precision: both formats are made, trained for, and exported as engines would be sent them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[3] / "examples/low_precision"


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
