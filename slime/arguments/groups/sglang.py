"""Flags of the engines and the router.

Our own come first; then every `ServerArgs` field of the installed sglang as `--sglang-<field>` and every `RouterArgs`
field of the installed router as `--router-<field>`. Where a package is not installed its flags are missing: a run that
only trains does without.
"""

import argparse
from collections.abc import Iterable

from slime.arguments.surface import FlagSpec, add_flag, load_surface, taken

# Families that are read from a package: name for `load_surface`, title in `--help`.
REFLECTED = (
    ("sglang", "SGLang server (an unset flag leaves the default of run or server)"),
    ("router", "Router (fields of its RouterArgs)"),
)


def add_groups(parser: argparse.ArgumentParser) -> None:
    """Add the group of our own flags and one group for each installed package."""
    own = parser.add_argument_group("SGLang engines and router")
    _add_router(own)
    _add_engines(own)
    for package, title in REFLECTED:
        specs = load_surface(package)
        if specs is not None:
            _add_reflected(parser, title, specs)


def _add_reflected(parser: argparse.ArgumentParser, title: str, specs: Iterable[FlagSpec]) -> None:
    own = taken(parser).flags
    group = parser.add_argument_group(title)
    for spec in specs:
        if own.isdisjoint(spec.flags):
            add_flag(group, spec)


def _add_router(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sglang-router-ip",
        default=None,
        metavar="ADDRESS",
        help="use the router that runs at this address (IPv4, IPv6 or host name) instead of starting one; needs "
        "--sglang-router-port. It must not serve engines of others",
    )
    group.add_argument("--sglang-router-port", type=int, default=None, help="port of the router of --sglang-router-ip")
    group.add_argument(
        "--sglang-router-request-timeout-secs",
        "--router-request-timeout-secs",
        type=int,
        default=14400,
        help="seconds that our router gives one request. A router of --sglang-router-ip keeps its own limit; "
        "--http-request-timeout is the limit of our client",
    )
    group.add_argument(
        "--router-policy",
        "--sglang-router-policy",
        "--sglang-router-strategy",
        choices=["cache_aware", "round_robin", "random", "power_of_two", "consistent_hashing"],
        default=None,
        help="how the router chooses the engine of a request; unset: its own default, cache_aware. With "
        "consistent_hashing all requests of one session go to one engine",
    )
    group.add_argument(
        "--router-api-key",
        default=None,
        metavar="KEY",
        help="key that router and engines ask for; unset: one is generated for the run. Give that of the router of "
        "--sglang-router-ip if it has one. Never logged",
    )


def _add_engines(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sglang-server-concurrency",
        type=int,
        default=512,
        help="requests in flight per engine; times the number of engines it bounds what the rollout generates at a time",
    )
    group.add_argument(
        "--prefill-num-servers",
        type=int,
        default=None,
        help="engines of --rollout-num-gpus-per-engine GPUs that only prefill; the others decode. Excludes "
        "--sglang-config and --rollout-external-engine-addrs",
    )
    group.add_argument(
        "--sglang-config",
        default=None,
        metavar="FILE",
        help="YAML with the serving topology: models, groups of engines, overrides of server arguments for each. "
        "Excludes --prefill-num-servers and --rollout-external-engine-addrs",
    )
