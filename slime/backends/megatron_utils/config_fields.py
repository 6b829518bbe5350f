"""Filling one of Megatron's configuration dataclasses from `args`.

A command-line attribute and a dataclass field of the same name mean the same thing; only historical flag names need a
table, which the callers hold. A field that `args` does not mention, or holds None for, keeps Megatron's default.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def fields_from_args(config_class: type, args: Any) -> dict[str, Any]:
    """The constructor arguments of `config_class` that `args` has a value for under the field's own name."""
    names = (field.name for field in dataclasses.fields(config_class) if field.init)
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def params_dtype(args: Any):
    """The dtype of the model's parameters: `--bf16`, `--fp16`, else float32."""
    import torch

    if getattr(args, "bf16", False):
        return torch.bfloat16
    if getattr(args, "fp16", False):
        return torch.float16
    return torch.float32
