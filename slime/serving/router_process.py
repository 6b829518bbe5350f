"""The installed `sglang_router`: its process, and the flags by which a user sets it.

`python -m slime.serving.router_process --arguments-file FILE` runs the unmodified router, which ends with its parent.
`sglang_router.launch_router` is not used: it imports a debugging server whose dependencies take two seconds. The arguments file
may hold an API key: it is deleted when read.

Without a file it prints the flags of the installed router as JSON. Every field of the `RouterArgs` dataclass is
`--router-<field>` and lives in `args.router_<field>`. Names, types and defaults come from the dataclass, not from the router's
own command line, which lags behind it (policies are missing there); only help texts are taken from that. None means "not
given": the router's own default holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.utils.child_process import environment_for_python, exit_when_parent_dies
from slime.utils.errors import UserError
from slime.utils.ports import allow_many_connections, host_for_url

if TYPE_CHECKING:
    from slime.arguments.surface import FlagSpec

# Where our default differs from the router's. Circuit breaker and health checks are off: a slow engine must not be taken
# for a dead one, and dead ones are removed by their owner. Who sends a request tries again, and the router does not: one that
# ended its engine would take the next ones with it, unseen. The last two make start and end of a run quick.
OUR_DEFAULTS: dict[str, Any] = {
    "log_level": "warn",
    "balance_abs_threshold": 10,
    "balance_rel_threshold": 1.2,
    "disable_circuit_breaker": True,
    "disable_health_check": True,
    "disable_retries": True,
    "worker_startup_check_interval": 1,
    "shutdown_grace_period_secs": 1,
}
# What sglang_router 0.3.2 misses without engines, where it asks one that prefills and one that decodes for every request.
NO_PAIRS = "no_prefill_servers"
# Set by `--sglang-router-request-timeout-secs`, which `--router-request-timeout-secs` is another spelling of.
REQUEST_TIMEOUT_SECONDS = 14400


def compute_router_fields(args: Any, host: str, port: int, prometheus_port: int) -> dict[str, Any]:
    """Fields of the `RouterArgs` dataclass: our defaults, then every `args.router_<field>` that is not None.

    Raises:
        UserError: an `args.router_<field>` is unknown to the installed router.
    """
    from sglang_router.router_args import RouterArgs

    known = {field.name for field in dataclasses.fields(RouterArgs)}
    typed = {
        name.removeprefix("router_"): value
        for name, value in vars(args).items()
        if name.startswith("router_") and value is not None
    }
    unknown = sorted(typed.keys() - known)
    if unknown:
        raise UserError(
            f"--router-{unknown[0].replace('_', '-')} is not known to the installed sglang_router; remove it"
        )
    defaults = {
        **OUR_DEFAULTS,
        "request_timeout_secs": getattr(args, "sglang_router_request_timeout_secs", None) or REQUEST_TIMEOUT_SECONDS,
    }
    addresses = {"prometheus_host": host, "prometheus_port": prometheus_port}
    # The router puts its own address before the port as it is, and reads the other one alone.
    return {**defaults, **addresses, **typed, "host": host_for_url(host), "port": port}


def environment_of_router() -> dict[str, str]:
    """The environment of a router's process: ours without its proxies.

    The router asks engines alone, most of them by their IP addresses. `NO_PROXY=*` would not keep those from a proxy: the
    router takes the star for the names of hosts.
    """
    return {name: value for name, value in environment_for_python().items() if not name.lower().endswith("_proxy")}


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
    # A router that starts has no use for the module.
    from slime.arguments.surface import FlagSpec

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


def main(argv: list[str] | None = None) -> None:
    """Serve until the process is told to end; without an arguments file, print the descriptions as one line of JSON."""
    exit_when_parent_dies()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--arguments-file", type=Path)
    arguments_file = parser.parse_args(argv).arguments_file
    if arguments_file is None:
        print(json.dumps([dataclasses.asdict(spec) for spec in describe()]))
    else:
        _serve(arguments_file)


def _serve(arguments_file: Path) -> None:
    fields = json.loads(arguments_file.read_text())
    arguments_file.unlink()
    allow_many_connections()

    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    Router.from_args(RouterArgs(**fields)).start()


if __name__ == "__main__":
    main()
