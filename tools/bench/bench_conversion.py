"""Converters of checkpoints beside a copy of the same files, in one run.

    python tools/bench/bench_conversion.py --gigabytes 2

The bench writes a random model in the shape of Qwen3 and reads it once, so that it is in the page cache for all. One process
copies the files and syncs them to the disk; then each converter runs on them. Rounds take turns, and the bench prints the
shortest time of each, which for a converter includes the start of its processes. Ratios are speeds: bytes read per second,
divided by those of the copy. Beside them stand the processor seconds of all processes in the fastest round, which other load
changes less. If --only names a converter that reads the result of another one, that other one runs first, without figures.
"""

import argparse
import contextlib
import ctypes
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from slime.utils.filesystem import fsync_tree

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, HEADS, GROUPS, HEAD_DIM, FFN, VOCABULARY = 2048, 16, 8, 128, 6144, 32768
# An option of prctl: orphaned descendants become children of this process, which therefore learns their processor seconds.
_PR_SET_CHILD_SUBREAPER = 36
TOOLS = {
    "convert_hf_to_torch_dist": "--hf-checkpoint {model} --save {target}",
    "convert_torch_dist_to_hf": "--input-dir {torch_dist} --output-dir {target} --origin-hf-dir {model}",
    "convert_hf_to_fp8": "--model-dir {model} --save-dir {target}",
    "convert_hf_to_int4_direct": "--model-dir {model} --save-dir {target}",
    "fp8_cast_bf16": "--input-fp8-hf-path {fp8} --output-bf16-hf-path {target}",
    "convert_k2_thinking_int4_to_bf16": "--model-dir {int4} --output-dir {target}",
}
# Kind of files that a converter above reads → the converter that makes them.
MADE_BY = {"torch_dist": "convert_hf_to_torch_dist", "fp8": "convert_hf_to_fp8", "int4": "convert_hf_to_int4_direct"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=TOOLS, default=list(TOOLS))
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    directory = Path(tempfile.mkdtemp(prefix="bench-conversion-"))
    try:
        tell(options, directory)
    finally:
        shutil.rmtree(directory)


def tell(options: argparse.Namespace, directory: Path) -> None:
    model = directory / "model"
    write_model(model, int(options.gigabytes * 1e9))
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    least: dict[str, tuple[float, float]] = {}
    peaks: dict[str, float] = {}
    for number, tool in enumerate(options.only):
        for kind, maker in MADE_BY.items():
            if f"{{{kind}}}" in TOOLS[tool] and maker not in options.only[:number]:
                convert(maker, directory, options.workers)
    for _ in range(options.rounds):
        note(least, "copy", *copied(model, directory / "copy"))
        for tool in options.only:
            note(least, tool, *convert(tool, directory, options.workers))
            peaks[tool] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    count = len(list(model.glob("*.safetensors")))
    print(f"{size / 1e9:.2f} GB in {count} files, {platform.processor() or platform.machine()}")
    for name, (seconds, processor) in least.items():
        # The kernel only tells the peak of the largest process so far.
        memory = f", at most {peaks[name]:.2f} GB in a process" if name in peaks else ""
        ratio = least["copy"][0] / seconds
        print(
            f"{name:32s} {seconds:7.2f} s  {ratio:5.2f} of the copy's speed  {processor:6.2f} s of processors{memory}"
        )


def convert(tool: str, directory: Path, workers: int) -> tuple[float, float]:
    """Run a converter on the files below `directory`. Returns (wall-clock seconds, processor seconds)."""
    made = {kind: directory / kind for kind in MADE_BY}
    target = next((made[kind] for kind, maker in MADE_BY.items() if maker == tool), directory / "made")
    shutil.rmtree(target, ignore_errors=True)
    words = TOOLS[tool].format(model=directory / "model", target=target, **made).split()
    command = [sys.executable, "-W", "ignore", ROOT / "tools" / f"{tool}.py", *words, "--max-workers", str(workers)]
    start, processor = time.perf_counter(), processor_seconds(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - start
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    return seconds, processor_seconds(resource.RUSAGE_CHILDREN) - processor


def note(least: dict[str, tuple[float, float]], name: str, seconds: float, processor: float) -> None:
    least[name] = min(least.get(name, (float("inf"), 0.0)), (seconds, processor))


def processor_seconds(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def copied(source: Path, target: Path) -> tuple[float, float]:
    """Copy a directory and sync it to the disk. Returns (wall-clock seconds, processor seconds)."""
    shutil.rmtree(target, ignore_errors=True)
    start, processor = time.perf_counter(), processor_seconds(resource.RUSAGE_SELF)
    shutil.copytree(source, target)
    fsync_tree(target)
    return time.perf_counter() - start, processor_seconds(resource.RUSAGE_SELF) - processor


def write_model(directory: Path, nbytes: int) -> None:
    """Write a checkpoint of at least `nbytes`, in files of eight layers."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    heads = HEADS * HEAD_DIM, GROUPS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (heads[0], HIDDEN), "self_attn.k_proj": (heads[1], HIDDEN),
        "self_attn.v_proj": (heads[1], HIDDEN), "self_attn.o_proj": (HIDDEN, heads[0]),
        "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
        "self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,),
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    ends = {"model.embed_tokens.weight": draw(VOCABULARY, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    save_file(ends, directory / "model-ends.safetensors", metadata={"format": "pt"})
    written, layers, layer = sum(tensor.nbytes for tensor in ends.values()), {}, 0
    # All layers share the random numbers of one.
    drawn = {name: draw(*shape) for name, shape in shapes.items()}
    while written < nbytes or layers:
        layers |= {f"model.layers.{layer}.{name}.weight": tensor + layer / 8 for name, tensor in drawn.items()}
        layer += 1
        if layer % 8 == 0:
            save_file(layers, directory / f"model-{layer:05d}.safetensors", metadata={"format": "pt"})
            written, layers = written + sum(tensor.nbytes for tensor in layers.values()), {}
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": layer, "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": VOCABULARY, "max_position_embeddings": 4096,
        "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
