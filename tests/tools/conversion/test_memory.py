"""What a process of a converter holds, beside a model that is many times larger."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.tables.shell_arrays import ROOT
from tools import convert_hf_to_fp8, convert_hf_to_int4_direct
from tools.conversion.torch_dist import convert_hf_to_torch_dist

CONVERTERS = (
    "convert_hf_to_torch_dist", "convert_torch_dist_to_hf", "convert_hf_to_fp8", "convert_hf_to_int4_direct", "fp8_cast_bf16",
    "convert_k2_thinking_int4_to_bf16",
)  # fmt: skip
# What a process holds whatever the size of tensors: some strips of half a million numbers in float32. It is 30 MB at most, in
# `fp8_cast_bf16.py`, which makes of tensors nothing but strips.
STRIPS = 32e6
HELD = """
import sys, threading
from pathlib import Path

def anonymous():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def watch():
    global most
    while not ended.wait(0.002):
        most = max(most, anonymous())

main = __import__("importlib").import_module(sys.argv[1]).main
import torch, safetensors.torch, tools.conversion.torch_dist
torch.set_num_threads(1)
# What a tool imports late, as Megatron, is there when the last of its command lines is measured.
*first, words = [line.split() for line in sys.argv[2:]]
for line in first:
    main(line)
ended = threading.Event()
before = most = anonymous()
watching = threading.Thread(target=watch, daemon=True)
watching.start()
main(words)
ended.set()
watching.join()
print(most - before)
"""


def held(tool, *lines):
    """The bytes that a process holds at most during the last of a tool's command lines, beside those that it held before. Pages
    of mapped files are the kernel's, and not counted."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        HELD,
        f"tools.{tool}",
        *(f"{line} --max-workers 1" for line in lines),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return int(result.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("tool", CONVERTERS)
def test_a_process_holds_about_its_largest_tensor(tmp_path, tool):
    """Of a model of which that is a small part."""
    hidden, layers = 2944, 4
    largest = 4 * hidden * hidden * 2
    model, dist, quantised, target = (tmp_path / name for name in ("model", "dist", "quantised", "target"))
    write_bench_like_model(model, hidden, layers)
    lines = [f"--model-dir {model} --save-dir {target}"]
    quantise = ["--model-dir", str(model), "--save-dir", str(quantised), "--max-workers", "1"]
    if tool == "convert_hf_to_torch_dist":
        write_tiny_model(tmp_path / "small")
        lines = [
            f"--hf-checkpoint {tmp_path}/small --save {tmp_path}/other",
            f"--hf-checkpoint {model} --save {target}",
        ]
    if tool == "convert_torch_dist_to_hf":
        run_distributed(_convert_one, 1, (str(model), str(dist)), timeout=300)
        lines = [f"--input-dir {dist} --output-dir {target} --origin-hf-dir {model}"]
    if tool == "fp8_cast_bf16":
        convert_hf_to_fp8.main(quantise)
        lines = [f"--input-fp8-hf-path {quantised} --output-bf16-hf-path {target}"]
    if tool == "convert_k2_thinking_int4_to_bf16":
        convert_hf_to_int4_direct.main(quantise)
        lines = [f"--model-dir {quantised} --output-dir {target}"]
    total = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert largest > 64e6 and total > 60 * largest / 4
    # Beside a tensor there are what is made of it, and a part of it in float32.
    assert held(tool, *lines) < 3 * largest + STRIPS < total / 3
    # Gigabytes, which pytest would keep.
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["convert_hf_to_fp8", "convert_hf_to_int4_direct"])
def test_of_experts_in_one_tensor_a_process_holds_about_one(tmp_path, tool):
    experts, hidden, width = 96, 1024, 384
    model = tmp_path / "model"
    model.mkdir()
    stack = torch.randn(experts, hidden, 2 * width, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"model.language_model.layers.0.mlp.experts.gate_up_proj": stack}, model / "model.safetensors")
    config = {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": hidden, "num_experts": experts}}
    (model / "config.json").write_text(json.dumps(config))
    bound = 3 * stack[0].nbytes + STRIPS
    assert held(tool, f"--model-dir {model} --save-dir {tmp_path}/target") < bound < stack.nbytes / 3


def write_bench_like_model(directory, hidden, layers):
    directory.mkdir()
    one = torch.randn(4 * hidden, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    heads, width = hidden // 64, 64
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, hidden), "self_attn.v_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (4 * hidden, hidden), "mlp.up_proj": (4 * hidden, hidden),
        "mlp.down_proj": (hidden, 4 * hidden), "self_attn.q_norm": (width,), "self_attn.k_norm": (width,),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip

    def cut(shape):
        return one.flatten()[: math.prod(shape)].view(shape).clone()

    ends = {"model.embed_tokens.weight": cut((1024, hidden)), "model.norm.weight": cut((hidden,))}
    save_file(ends, directory / "model-ends.safetensors")
    for layer in range(layers):
        tensors = {f"model.layers.{layer}.{name}.weight": cut(shape) for name, shape in shapes.items()}
        save_file(tensors, directory / f"model-{layer}.safetensors")
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": width,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 1024, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def _convert_one(model, target):
    convert_hf_to_torch_dist(Path(model), Path(target), [], workers=1, force=False, largest=2**28)
