"""The flags whose values are not their defaults, as they would be typed, with where each value came from."""

import argparse
import json
import os
import shlex
from typing import Any

from slime.arguments.origins import Origin
from slime.arguments.value_types import written_pattern
from slime.observability.run_record import REDACTED, plain_arguments
from slime.plan.structure import ValuePlan

# They say that a plan is wanted, nothing about the run.
_LEFT_OUT = {"help", "help_grep", "dry_run", "dry_run_json"}


def plan_values(args: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[ValuePlan, ...]:
    """In the order of the parser; secrets are redacted."""
    plain = plain_arguments(args)
    actions: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        actions.setdefault(action.dest, []).append(action)
    found = []
    for name, same in actions.items():
        origin = args.origins.get(name, Origin.DEFAULT)
        if name in _LEFT_OUT or name not in plain or origin is Origin.DEFAULT:
            continue
        if not _is_default(getattr(args, name), parser.get_default(name), origin):
            found.append(_value(same, plain[name], str(origin)))
    return tuple(found)


def custom_values(args: argparse.Namespace) -> dict[str, Any]:
    """What YAML brought that belongs to no flag."""
    return plain_arguments(argparse.Namespace(**(getattr(args, "custom_config", None) or {})))


def _is_default(value: Any, default: Any, origin: Origin) -> bool:
    """Also a default path that was made absolute."""
    if value == default:
        return True
    return origin is Origin.DERIVED and isinstance(default, str) and value == os.path.abspath(default)


def _value(actions: list[argparse.Action], value: Any, origin: str) -> ValuePlan:
    if isinstance(value, bool):
        switch = _switch(actions, value)
        if switch is not None:
            return ValuePlan(switch, True, "", origin)
    action = next((action for action in actions if action.nargs != 0), actions[0])
    flag = _long_spellings(action)[0]
    return ValuePlan(flag, value, _typed(action, flag, value), origin)


def _switch(actions: list[argparse.Action], value: bool) -> str | None:
    """The switch that brings the value about; None where there is none (a switch that cannot be taken back)."""
    plain = [action for action in actions if action.nargs == 0 and action.const is value]
    # `--disable-bias-linear` is more usual than `--no-add-bias-linear`.
    for action in plain:
        return _long_spellings(action)[0]
    for action in actions:
        if isinstance(action, argparse.BooleanOptionalAction):
            return next((flag for flag in _long_spellings(action) if flag.startswith("--no-") is not value), None)
    return None


def _long_spellings(action: argparse.Action) -> list[str]:
    return [option for option in action.option_strings if option.startswith("--")]


def _typed(action: argparse.Action, flag: str, value: Any) -> str:
    """The words after the flag, quoted for a shell."""
    kind = getattr(action.type, "__name__", "str")
    if value is None:
        return "(unset)"
    if kind in ("json_object", "json_value") or isinstance(value, dict):
        return _word(value if isinstance(value, str) else json.dumps(value))
    if not isinstance(value, list | tuple):
        return _word(str(value))
    if isinstance(action, argparse._AppendAction) and action.nargs is None:
        return f" {flag} ".join(_word(_text(item)) for item in value)
    if action.nargs in (None, "?") and kind != "str":
        return _word(written_pattern(value) if kind == "layer_pattern" else ",".join(map(str, value)))
    return " ".join(_word(_text(item)) for item in value)


def _text(item: Any) -> str:
    return json.dumps(item) if isinstance(item, dict | list) else str(item)


def _word(text: str) -> str:
    return text if text == REDACTED else shlex.quote(text)
