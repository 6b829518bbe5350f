"""Flags that are known but whose feature is not built yet.

A run refuses them, naming the flag; `--dry-run` plans with them and says so. Nothing is accepted and ignored. Whoever
builds a feature deletes its rows.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime.arguments.plug_ins import flag_of


@dataclass(frozen=True)
class NotYet:
    """`args.{name}` has no effect yet. `works`: values that are fine (None and False always are)."""

    name: str
    feature: str
    works: tuple[Any, ...] = ()


def not_yet_violations(args: argparse.Namespace) -> Iterator[str]:
    """One message for every flag that asks for a feature which is not built."""
    for row in rows():
        value = getattr(args, row.name, None)
        if value is None or value is False or value in row.works:
            continue
        shown = "" if value is True else f" {value}"
        yield f"{flag_of(row.name)}{shown}: {row.feature} is not built yet; drop the flag (--dry-run plans with it)"


def rows() -> tuple[NotYet, ...]:
    """All rows, of our own flags, Megatron's and those of the engines and the router."""
    from slime.arguments.not_yet import megatron, own, sglang

    return (*own.ROWS, *megatron.ROWS, *sglang.ROWS)
