"""The flags of Megatron-LM's own parser, where the installed megatron-core brings it (`megatron.training`).

They are accepted so that code of the user can read them. What Megatron-Core's dataclasses describe already is left out,
and so are names that mean nothing here: those keep their explanation.
"""

from __future__ import annotations

import argparse
import enum
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from slime.arguments.surface import FlagSpec
from slime.arguments.unknown_flags import advice_on_foreign

_ACTIONS = {"_StoreTrueAction": "store_true", "_StoreFalseAction": "store_false", "BooleanOptionalAction": "bool"}
_PATTERNS = ("moe_freq_type", "la_freq_type", "no_rope_freq_type")


def extra_specs(known: Iterable[FlagSpec]) -> Iterator[FlagSpec]:
    """One description per option that `known` lacks; `metadata["megatron_lm"]` is True."""
    if importlib.util.find_spec("megatron.training") is None:
        return
    try:
        from megatron.training.arguments import add_megatron_arguments
    except ImportError as error:
        print(f"the flags of megatron.training are left out, it cannot be imported: {error}", file=sys.stderr)
        return
    known = list(known)
    dests, flags = {spec.dest for spec in known}, {flag for spec in known for flag in spec.flags}
    for action in add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions:
        free = [flag for flag in action.option_strings if flag not in flags and advice_on_foreign(flag) is None]
        if free and action.dest not in dests and action.dest != "help":
            yield _spec(action, tuple(free))


def _spec(action: argparse.Action, flags: tuple[str, ...]) -> FlagSpec:
    kind = getattr(action.type, "__name__", "str")
    positive = tuple(flag for flag in flags if not flag.startswith("--no-"))
    is_either = type(action).__name__ == "BooleanOptionalAction"
    return FlagSpec(
        flags=positive if is_either else flags,
        dest=action.dest,
        action=_ACTIONS.get(type(action).__name__, "store"),
        type="layer_pattern" if kind in _PATTERNS else kind if kind in ("int", "float") else "str",
        nargs=None if action.nargs == 0 else action.nargs,
        choices=None if action.choices is None else tuple(_plain(choice) for choice in action.choices),
        default=_plain(action.default),
        help=" ".join((action.help or action.dest).split()).replace("%%", "%"),
        metadata={"megatron_lm": True},
    )


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return str(value)
