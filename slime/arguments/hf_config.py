"""The Hugging Face config as source and as check of the model-shape flags. Reads `config.json`; needs no transformers.

Invariant: after `apply_hf_config` every shape flag that the config knows agrees with it, or the run has not started.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from slime.utils.errors import UserError

# Families whose layers this trainer builds, by the config's `model_type`.
SUPPORTED_MODEL_TYPES = ("qwen2", "qwen3")

_NEEDED = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps", "vocab_size",
)  # fmt: skip


def read_hf_config(checkpoint: str | Path, flag: str = "--hf-checkpoint") -> dict[str, Any]:
    """The `config.json` of a Hugging Face directory, `text_config` taken out when there is one.

    Raises:
        UserError: no such directory, no config in it, or broken JSON.
    """
    path = Path(checkpoint) / "config.json"
    if not Path(checkpoint).is_dir():
        raise UserError(f"{flag} {checkpoint}: no such directory; give a Hugging Face checkpoint directory")
    if not path.is_file():
        raise UserError(f"{flag} {checkpoint}: it holds no config.json; give a Hugging Face checkpoint directory")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: broken JSON: {error.msg}") from None
    return {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config


def is_hf_checkpoint(path: str | Path) -> bool:
    """Whether `path` is a Hugging Face directory of a supported family."""
    config = Path(path) / "config.json"
    return config.is_file() and read_hf_config(path).get("model_type") in SUPPORTED_MODEL_TYPES


def model_args_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """Model-shape arguments that describe the model of `config`.

    Raises:
        UserError: a `model_type` that this trainer cannot build.
    """
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UserError(
            f"model_type {model_type!r} of --hf-checkpoint cannot be trained; supported: "
            + ", ".join(SUPPORTED_MODEL_TYPES)
        )
    _require_known_architecture(config)
    heads = config["num_attention_heads"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads", heads),
        "group_query_attention": True,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "norm_epsilon": config["rms_norm_eps"],
        "rotary_base": _rope_base(config),
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config.get("max_position_embeddings"),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "swiglu": True,
        "disable_bias_linear": True,
        "qk_layernorm": model_type == "qwen3",
        "add_qkv_bias": model_type == "qwen2",
    }


def _require_known_architecture(config: dict[str, Any]) -> None:
    """Refuse what would be built differently from what the engine serves."""
    missing = [name for name in _NEEDED if name not in config]
    if missing:
        raise UserError(f"config.json of --hf-checkpoint lacks {', '.join(missing)}")
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = parameters.get("rope_type", parameters.get("type", "default"))
    found = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "rope_type": (rope, "default"),
        "use_sliding_window": (bool(config.get("use_sliding_window", False)), False),
        "attention_bias": (bool(config.get("attention_bias", False)), False),
    }
    for name, (value, supported) in found.items():
        if value != supported:
            raise UserError(
                f"config.json of --hf-checkpoint: {name} {value!r} cannot be trained; only {supported!r} is built"
            )


def apply_hf_config(args: argparse.Namespace, config: dict[str, Any]) -> list[str]:
    """Fill the shape arguments that were not typed (with `--model-args-from-hf`) and compare all of them.

    Returns:
        Violations; one table that starts with `hf_validate_args failed` when arguments and config differ.
    """
    derived = model_args_from_hf(config)
    if args.model_args_from_hf:
        for name, value in derived.items():
            if name not in args.typed_flags:
                setattr(args, name, value)
    compared = {name: value for name, value in derived.items() if name not in ("max_position_embeddings",)}
    rows = [
        f"  --{name.replace('_', '-')}: {_show(getattr(args, name))} here, {_show(value)} in config.json"
        for name, value in compared.items()
        if not _agree(args, name, value)
    ]
    if not rows:
        return []
    hint = "drop the typed values" if args.model_args_from_hf else "correct them, or give --model-args-from-hf"
    return ["\n".join([f"hf_validate_args failed: flags and {args.hf_checkpoint}/config.json differ ({hint})", *rows])]


def _agree(args: argparse.Namespace, name: str, value: Any) -> bool:
    mine = getattr(args, name)
    if name == "kv_channels" and mine is None:
        mine = (args.hidden_size or 0) // (args.num_attention_heads or 1)
    if name == "group_query_attention":
        return mine or args.num_query_groups in (None, args.num_attention_heads)
    if name == "num_query_groups" and not args.group_query_attention:
        mine = args.num_attention_heads
    return mine == value


def _show(value: Any) -> str:
    return "unset" if value is None else str(value)


def _rope_base(config: dict[str, Any]) -> int:
    # Newer configs keep the base in `rope_parameters`; a stale top-level `rope_theta` must not win over it.
    parameters = config.get("rope_parameters") or {}
    base = parameters.get("rope_theta", config.get("rope_theta", 10000))
    return int(base)
