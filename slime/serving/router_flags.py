"""The flags of the installed router: `python -m slime.serving.router_flags` prints them as JSON.

Every field of the `RouterArgs` dataclass is `--router-<field>` and lives in `args.router_<field>`. Names, types and
defaults come from the dataclass, not from the router's own command line, which lags behind it (policies are missing
there); only help texts are taken from that. None means "not given": the router's own default holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from typing import Any

from slime.arguments.surface import FlagSpec

# Where our default differs from the router's. Circuit breaker and health checks are off: a slow engine must not be taken
# for a dead one, and dead ones are removed by their owner. The last two make start and end of a run quick.
OUR_DEFAULTS: dict[str, Any] = {
    "log_level": "warn",
    "balance_abs_threshold": 10,
    "balance_rel_threshold": 1.2,
    "disable_circuit_breaker": True,
    "disable_health_check": True,
    "worker_startup_check_interval": 1,
    "shutdown_grace_period_secs": 1,
}
# Set by `--sglang-router-request-timeout-secs`, which `--router-request-timeout-secs` is another spelling of.
REQUEST_TIMEOUT_SECONDS = 14400


def describe() -> list[FlagSpec]:
    """One description for every field of the installed `RouterArgs`."""
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    help_texts = {action.dest: action.help for action in parser._actions}
    hints = typing.get_type_hints(RouterArgs)
    return [
        _describe_field(field, hints[field.name], help_texts.get(field.name))
        for field in dataclasses.fields(RouterArgs)
    ]


def _describe_field(field: dataclasses.Field, hint: Any, help_text: str | None) -> FlagSpec:
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    text = " ".join((help_text or "field of RouterArgs").split())
    return FlagSpec(
        flags=(f"--router-{field.name.replace('_', '-')}",),
        dest=f"router_{field.name}",
        default=OUR_DEFAULTS.get(field.name),
        help=f"{text} [router default: {'none' if default is None else json.dumps(default)}]",
        metadata={"field": field.name, "router_default": default},
        **_way_of_reading(hint),
    )


def _way_of_reading(hint: Any) -> dict[str, Any]:
    """`action`, `type` and `nargs` for a value of the annotated type."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = [option for option in typing.get_args(hint) if option is not type(None)]
    scalars = {str: "str", int: "int", float: "float"}
    if hint is bool:
        return {"action": "bool"}
    if hint in scalars:
        return {"type": scalars[hint]}
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin is list and items[0] in scalars:
        return {"type": scalars[items[0]], "nargs": "+"}
    return {"type": "json" if origin is dict else "json_any"}


def main() -> None:
    """Print the descriptions as one line of JSON."""
    print(json.dumps([dataclasses.asdict(spec) for spec in describe()]))


if __name__ == "__main__":
    main()
