"""The flags whose values are not their defaults, with where each value came from."""

import argparse
import os
from typing import Any

from slime.arguments.origins import Origin
from slime.arguments.plan.structure import ValuePlan
from slime.arguments.plug_ins import flag_of
from slime.observability.run_record import plain_arguments

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
            found.append(_value(name, same, plain[name], str(origin)))
    return tuple(found)


def _is_default(value: Any, default: Any, origin: Origin) -> bool:
    """Also a default path that was made absolute."""
    if value == default:
        return True
    return origin is Origin.DERIVED and isinstance(default, str) and value == os.path.abspath(default)


def _value(name: str, actions: list[argparse.Action], value: Any, origin: str) -> ValuePlan:
    """Under the spelling that says the value: a switch that only turns off is shown as turned on."""
    spellings = [option for action in actions for option in action.option_strings if option.startswith("--")]
    if flag_of(name) in spellings:
        return ValuePlan(flag_of(name), value, origin)
    turns_off = all(action.nargs == 0 and action.const is False for action in actions)
    return ValuePlan(spellings[0], not value if turns_off else value, origin)


def custom_values(args: argparse.Namespace) -> dict[str, Any]:
    """What YAML brought that belongs to no flag."""
    return plain_arguments(argparse.Namespace(**(getattr(args, "custom_config", None) or {})))
