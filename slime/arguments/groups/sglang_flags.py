"""Flags of the engines and the router.

Our own come first; then every `ServerArgs` field of the installed sglang as `--sglang-<field>` and every `RouterArgs`
field of the installed router as `--router-<field>`. Where a package is not installed its flags are missing: a run that
only trains does without.
"""

import argparse
from collections.abc import Iterable

from slime.arguments.flag import AT_LEAST_ONE, Group, PathKind, flag
from slime.arguments.surface import FlagSpec, add_flag, load_surface, taken

SERVING = Group("SGLang engines and router", (
    flag("--sglang-router-ip", str, None, "use the router that runs at this address (IPv4, IPv6 or host name) instead of "
        "starting one; needs --sglang-router-port. It must not serve engines of others", metavar="ADDRESS"),
    flag("--sglang-router-port", int, None, "port of the router of --sglang-router-ip"),
    flag("--sglang-router-request-timeout-secs --router-request-timeout-secs", int, 14400, "seconds that our router gives one "
        "request. A router of --sglang-router-ip keeps its own limit; --http-request-timeout is the limit of our client",
        bounds=AT_LEAST_ONE),
    flag("--router-policy --sglang-router-policy --sglang-router-strategy", str, None, "how the router chooses the engine of a "
        "request; unset: its own default, cache_aware. With consistent_hashing all requests of one session go to one engine",
        "cache_aware", "round_robin", "random", "power_of_two", "consistent_hashing"),
    flag("--router-api-key", str, None, "key that router and engines ask for; unset: one is generated for the run. Give that "
        "of the router of --sglang-router-ip if it has one. Never logged", metavar="KEY"),
    flag("--sglang-server-concurrency", int, 512, "requests in flight per engine; times the number of engines it bounds what "
        "the rollout generates at a time", bounds=AT_LEAST_ONE),
    flag("--prefill-num-servers", int, None, "engines of --rollout-num-gpus-per-engine GPUs that only prefill; the others "
        "decode. Excludes --sglang-config and --rollout-external-engine-addrs"),
    flag("--sglang-config", str, None, "YAML with the serving topology: models, groups of engines, overrides of server "
        "arguments for each. Excludes --prefill-num-servers and --rollout-external-engine-addrs", path=PathKind.HERE,
        metavar="FILE"),
))  # fmt: skip

# Families that are read from a package: name for `load_surface`, title in `--help`.
REFLECTED = (
    ("sglang", "SGLang server (an unset flag leaves the default of run or server)"),
    ("router", "Router (fields of its RouterArgs)"),
)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the group of our own flags and one group for each installed package."""
    SERVING.add_to(parser)
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
