"""Filling one of Megatron's configuration dataclasses from `args`.

A command-line attribute and a dataclass field of the same name mean the same thing; the few fields that Megatron-LM's
parser keeps under another name are in `slime.arguments.megatron.names.FIELD_DESTS`. Command lines know words and numbers:
dtypes and enums arrive as their names and are turned into what the field's annotation says. A field that `args` does not
mention, or holds None for, keeps Megatron's default.
"""

from __future__ import annotations

import dataclasses
import enum
import typing
from typing import Any

from slime.arguments.megatron.names import FIELD_DESTS


def fields_from_args(config_class: type, args: Any) -> dict[str, Any]:
    """The constructor arguments of `config_class` that `args` has a value for."""
    hints = typing.get_type_hints(config_class)
    found = {}
    for field in dataclasses.fields(config_class):
        value = getattr(args, FIELD_DESTS.get(field.name, field.name), None)
        if field.init and value is not None:
            found[field.name] = _typed(value, hints[field.name])
    return found


def params_dtype(args: Any):
    """The torch dtype of the model's parameters: that of `--bf16` or `--fp16`, else float32."""
    import torch

    if args.bf16:
        return torch.bfloat16
    if args.fp16:
        return torch.float16
    return torch.float32


def dtype_of_name(name: str):
    """The torch dtype that the command line calls `name`: fp32, bf16, fp16 or fp8 (kept as bytes)."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}[name]


def _typed(value: Any, annotation: Any) -> Any:
    import torch

    kinds = typing.get_args(annotation) or (annotation,)
    if isinstance(value, str) and torch.dtype in kinds:
        return dtype_of_name(value)
    if isinstance(value, str) and str not in kinds:
        enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, enum.Enum)]
        return enums[0][value] if enums else value
    if isinstance(value, list) and any(typing.get_origin(kind) is tuple for kind in (annotation, *kinds)):
        return tuple(value)
    # The dataclasses change lists in place; the arguments of the run must not change with them.
    return list(value) if isinstance(value, list) else value
