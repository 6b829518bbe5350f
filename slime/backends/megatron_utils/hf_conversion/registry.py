"""The supported families, and how one is found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from slime.arguments.hf_config import read_hf_config
from slime.backends.megatron_utils.hf_conversion.family import Family
from slime.backends.megatron_utils.hf_conversion.mimo import MIMO
from slime.backends.megatron_utils.hf_conversion.qwen_dense import QWEN_DENSE
from slime.utils.errors import UserError

FAMILIES: tuple[Family, ...] = (QWEN_DENSE, MIMO)


def supported_model_types() -> list[str]:
    """The `model_type` values of HF configs that can be loaded and exported."""
    return sorted(model_type for family in FAMILIES for model_type in family.model_types)


def family_of_directory(hf_dir: str | Path) -> Family:
    """The family of an HF model directory, by `model_type` in its config.json.

    Raises:
        UserError: no readable config.json, or an unsupported type.
    """
    model_type = read_hf_config(hf_dir, flag="checkpoint").get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    raise UserError(f"{hf_dir}/config.json: model_type {model_type!r} is not one of {supported_model_types()}")


def family_of_name(model_name: str) -> Family:
    """The family of a model or config class name ("qwen3", "Qwen3ForCausalLM", "qwen3config").

    Raises:
        UserError: no family has this name.
    """
    plain = re.sub(r"[^a-z0-9]", "", model_name.lower())
    for family in FAMILIES:
        if family.name_pattern.search(plain):
            return family
    raise UserError(f"--model-name {model_name}: no conversion for this family; supported: {supported_model_types()}")


def family_of_args(args: Any) -> Family:
    """The family of the run's model: `--model-name` if given, else the config of `--hf-checkpoint`."""
    if getattr(args, "model_name", None):
        return family_of_name(args.model_name)
    return family_of_directory(args.hf_checkpoint)
