"""Rows for Megatron's flags."""

from slime.arguments.not_yet import NotYet

ROWS: tuple[NotYet, ...] = ()
