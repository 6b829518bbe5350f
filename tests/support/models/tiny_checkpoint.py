"""A tiny checkpoint with random weights and a byte-level tokenizer, built locally in about a second."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Model type that transformers does not know -> its name for the same model.
KNOWN_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
# Those of them whose config class lies beside the checkpoint (`--trust-remote-code`) -> (its file, the text of the file, the
# class of the model, which the engines have).
_CODE = {
    "mimo": (
        "configuration_mimo.py",
        'from transformers import Qwen2Config\n\n\nclass MiMoConfig(Qwen2Config):\n    model_type = "mimo"\n',
        {"architectures": ["MiMoForCausalLM"], "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}},
    ),
}
# Entries of published configs that classes of transformers do not keep, and engines read.
_LOST = ("full_attention_interval",)
# Types whose published checkpoints have transposed matrices in tensors of all experts.
_STORED_TRANSPOSED = ("qwen3_vl_moe",)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_tokenizer(path: str | Path) -> dict[str, int]:
    """Save a tokenizer of the 256 bytes and four special tokens (ids 256 to 259) to `path`; returns its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL_TOKENS]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(str(path))
    return vocabulary


def make_tiny_checkpoint(
    path: str | Path,
    seed: int = 0,
    vocab_size: int = 320,
    tie: bool = True,
    model_type: str = "qwen3",
    vision: Mapping[str, Any] | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a float32 checkpoint of the family `model_type`, which transformers (or `KNOWN_AS`) must know, to `path`.

    `vocab_size` is at least 260 (the tokenizer's size); `tie` shares the embedding with the head; `config_overrides`
    replace fields of the configuration. With `vision`, the config of a vision tower, they are of the language model beside it.
    The weights depend on `seed` only and are scaled up, so that the
    next-token distribution is far from flat. The global random state is left as it was.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    vocabulary = make_tiny_tokenizer(path)
    config = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": vocabulary["<|im_end|>"],
        "pad_token_id": vocabulary["<|pad|>"],
        "tie_word_embeddings": tie,
        **config_overrides,
    }
    kind = AutoModelForCausalLM
    if vision is not None:
        config = {"text_config": config, "vision_config": vision, "tie_word_embeddings": tie}
        kind = AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(CONFIG_MAPPING[KNOWN_AS.get(model_type, model_type)](**config)).float()
        with torch.no_grad():
            for parameter in model.parameters():
                # Norm weights start as ones. They are changed too, so that a lost one shows.
                if parameter.dim() >= 2:
                    parameter.mul_(4.0)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(str(path))
    if model_type in _STORED_TRANSPOSED:
        transpose_stacked_experts(path)
    _add_lost_entries(path / "config.json", config_overrides)
    if model_type in KNOWN_AS:
        written = json.loads((path / "config.json").read_text())
        file, text, entries = _CODE.get(model_type, (None, "", {}))
        (path / "config.json").write_text(json.dumps({**written, "model_type": model_type, **entries}))
        if file is not None:
            (path / file).write_text(text)
    return path


def _add_lost_entries(file: Path, entries: Mapping[str, Any]) -> None:
    config = json.loads(file.read_text())
    config.get("text_config", config).update({name: entries[name] for name in _LOST if name in entries})
    file.write_text(json.dumps(config))


def transpose_stacked_experts(path: Path) -> None:
    """Store tensors that hold the matrices of all experts as published checkpoints do, whose matrices are transposed."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    stored = {name: tensor.mT.contiguous() if tensor.ndim == 3 else tensor for name, tensor in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})
