"""The flags of the installed Megatron-Core, SGLang and router, read from the packages themselves and cached.

Importing those packages takes seconds and would bring torch into the driver. So a child process imports them once per
version, describes their options as JSON, and the answer is kept in the user's cache directory; parsing reads only that.
"""

import argparse
from dataclasses import dataclass, field
from typing import Any

from slime.arguments.types import json_object

# The value types that a description may name.
VALUE_TYPES = {"str": str, "int": int, "float": float, "json": json_object}


@dataclass(frozen=True)
class FlagSpec:
    """One option as a package describes it; it survives a round trip through JSON.

    Attributes:
        flags: spellings with leading dashes, the usual one first.
        dest: attribute of `args`.
        action: `store` (takes a value), `store_true`, `store_false`, or `bool` (`--x` and `--no-x`).
        type: key of `VALUE_TYPES`; for `store` only.
        nargs, choices, default, help: as in argparse.
    """

    flags: tuple[str, ...]
    dest: str
    action: str = "store"
    type: str = "str"
    nargs: str | int | None = None
    choices: tuple[Any, ...] | None = None
    default: Any = None
    help: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


def add_flag(group: argparse._ArgumentGroup, spec: FlagSpec) -> None:
    """Put the option that `spec` describes into the parser group."""
    common = {"dest": spec.dest, "default": spec.default, "help": spec.help.replace("%", "%%")}
    if spec.action == "bool":
        group.add_argument(*spec.flags, action=argparse.BooleanOptionalAction, **common)
    elif spec.action != "store":
        group.add_argument(*spec.flags, action=spec.action, **common)
    else:
        choices = list(spec.choices) if spec.choices else None
        group.add_argument(*spec.flags, type=VALUE_TYPES[spec.type], nargs=spec.nargs, choices=choices, **common)
