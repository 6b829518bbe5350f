"""Flags that are known but whose feature is not built yet.

A run refuses them, naming the flag; `--dry-run` plans with them and says so. Nothing is accepted and ignored. Whoever
builds a feature deletes its rows.
"""

import argparse
import fnmatch
from collections.abc import Iterator

from slime.arguments import server_flags
from slime.arguments.flag import NotYet, as_typed, flag_of
from slime.arguments.groups import OWN_FLAGS
from slime.arguments.megatron import effects
from slime.arguments.origins import Origin
from slime.observability.run_record import redacted

# Our own declare it: nothing but the default is fine.
OWN_ROWS = tuple(
    NotYet(name, flag.not_yet, () if flag.default is None or flag.default is False else (flag.default,))
    for name, flag in OWN_FLAGS.items()
    if flag.not_yet
)


def not_yet_violations(args: argparse.Namespace) -> Iterator[str]:
    """One message for every flag that asks for a feature which is not built.

    A run that only trains ignores the flags of engines and router, so that one script serves both kinds of run.
    """
    for row in rows():
        if row in server_flags.NOT_YET and args.debug_train_only:
            continue
        for name in names_of(row, args):
            value = getattr(args, name)
            if value is None or value is False or value in row.works:
                continue
            # What follows from another flag is that flag's affair: it has a row of its own.
            if args.origins.get(name) in (Origin.DEFAULT, Origin.DERIVED):
                continue
            shown = "" if value is True else f" {as_typed(redacted({name: value})[name])}"
            yield _message(flag_of(name), shown, row.feature, args.origins.get(name))


def _message(flag: str, value: str, feature: str, origin: Origin | None) -> str:
    if origin is Origin.HF_CONFIG:
        # Nobody typed it, so there is no flag to drop.
        return (
            f"config.json of --hf-checkpoint asks for {flag}{value}: {feature} is not built yet; take another model "
            "(--dry-run plans with this one)"
        )
    return f"{flag}{value}: {feature} is not built yet; drop the flag (--dry-run plans with it)"


def names_of(row: NotYet, args: argparse.Namespace) -> list[str]:
    """The attributes of `args` that `row` is about."""
    return fnmatch.filter(vars(args), row.name) if "*" in row.name else [row.name] if hasattr(args, row.name) else []


def rows() -> tuple[NotYet, ...]:
    """All rows, of our own flags, Megatron's and those of the engines and the router."""
    return (*OWN_ROWS, *effects.NOT_YET, *server_flags.NOT_YET)
