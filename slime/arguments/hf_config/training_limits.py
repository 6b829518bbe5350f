"""What a config asks for and the trainer cannot build yet. A run is refused for it; `--dry-run` plans and notes it."""

from collections.abc import Iterator
from typing import Any

from slime.arguments.hf_config import parts
from slime.arguments.hf_config.families import family_of

Config = dict[str, Any]

# Families whose layers this trainer builds.
TRAINED_MODEL_TYPES = ("qwen2", "qwen3", "mimo")


def training_limits(config: Config, derived: dict[str, Any]) -> list[str]:
    """One message for everything that would be built differently from what the engines serve.

    Args:
        config: of a known `model_type`.
        derived: its flags (`model_args_from_hf`).
    """
    return [*_family(config), *_entries(config, derived)]


def _family(config: Config) -> Iterator[str]:
    model_type = config["model_type"]
    if model_type not in TRAINED_MODEL_TYPES:
        yield (
            f"model_type {model_type!r} of --hf-checkpoint is planned by --dry-run, but its layers are not built yet; "
            f"models of type {' or '.join(TRAINED_MODEL_TYPES)} can be trained"
        )


def _entries(config: Config, derived: dict[str, Any]) -> Iterator[str]:
    rope, known = parts.rope_type(config), family_of(config).rope_types
    attention_bias = bool(config.get("attention_bias", False))
    found = (
        ("hidden_act", config.get("hidden_act", "silu"), ("silu",)),
        ("rope_type", rope, known),
        ("use_sliding_window", bool(config.get("use_sliding_window", False)), (False,)),
        ("attention_bias", attention_bias, (True, False) if derived["add_qkv_bias"] else (False,)),
        ("mlp_bias", bool(config.get("mlp_bias", False)), (False,)),
    )
    for name, value, supported in found:
        if value not in supported:
            yield (
                f"config.json of --hf-checkpoint: {name} {value!r} cannot be trained; only "
                f"{' or '.join(repr(option) for option in supported)} is built"
            )
    if derived.get("moe_router_score_function") == "sigmoid" and config.get("norm_topk_prob") is False:
        yield (
            "config.json of --hf-checkpoint: norm_topk_prob False cannot be trained with a sigmoid router; only True is built"
        )
