"""Argument namespaces for tests, made by the real parser."""

import argparse
import copy
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime.arguments import parse_args
from slime.arguments.parser import build_parser, parse_known

TINY_QWEN3_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@functools.cache
def _of_no_words() -> tuple[dict[str, Any], list[str]]:
    """The parser's arguments if no flag is typed, and the names of those that somebody could change in place."""
    values = vars(parse_known(build_parser(), []))
    return values, [name for name, value in values.items() if copy.deepcopy(value) is not value]


def default_args(**values: Any) -> SimpleNamespace:
    """The parser's arguments if no flag is typed, neither derived nor checked; `values` replace some."""
    defaults, changeable = _of_no_words()
    copies = {name: copy.deepcopy(defaults[name]) for name in changeable}
    return SimpleNamespace(**{**defaults, **copies, **values})


def write_config(directory: Path, **changes) -> Path:
    """A Hugging Face directory that holds only a config; `changes` replace its entries."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**TINY_QWEN3_CONFIG, **changes}))
    return directory


def write_stand_ins(directory: Path) -> Path:
    """Write a config and stand-ins for the files of weights and tokenizer, by which a run recognises a model at its start."""
    header = json.dumps({"stand_in": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def write_iteration(
    directory: Path, iteration: int = 1, shapes: dict[str, tuple[int, ...]] | None = None, **changes: int
) -> Path:
    """A torch_dist checkpoint in `directory`, with tensors of `shapes` and the optimizer's state for them.

    Returns the directory of the iteration.

    Without `shapes` there are the weights of `TINY_QWEN3_CONFIG` by which sizes are told apart; `changes` replace flags of
    sizes.
    """
    import torch
    from torch.distributed import checkpoint

    sizes = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": 300, **changes}
    weights = shapes or {
        "decoder.layers.mlp.linear_fc2.weight": (sizes["num_layers"], sizes["hidden_size"], sizes["ffn_hidden_size"]),
        "embedding.word_embeddings.weight": (sizes["vocab_size"], sizes["hidden_size"]),
    }
    state = {f"optimizer.state.exp_avg.{name}": shape for name, shape in weights.items()}
    written = directory / f"iter_{iteration:07d}"
    tensors = {name: torch.zeros(shape) for name, shape in {**weights, **state}.items()}
    checkpoint.save(tensors, checkpoint_id=written, no_dist=True)
    (written / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (directory / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return written


def write_rows(path: Path, count: int = 8) -> Path:
    """Write a prompt file with `count` rows."""
    rows = [{"prompt": f"What is {i}+{i}?", "label": str(2 * i)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command_line(directory: Path) -> list[str]:
    """Words of a valid GRPO command line whose files lie in `directory`."""
    config = write_config(directory / "model")
    data = write_rows(directory / "prompts.jsonl")
    return [
        "--hf-checkpoint", str(config), "--model-args-from-hf", "--prompt-data", str(data), "--num-rollout", "4",
        "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-num-gpus", "1",
        "--actor-num-gpus-per-node", "1", "--rm-type", "math",
    ]  # fmt: skip


def parse(directory: Path, *words: str) -> argparse.Namespace:
    """The checked arguments of `command_line(directory)` plus `words`."""
    return parse_args(argv=[*command_line(directory), *words])
