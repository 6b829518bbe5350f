"""Rows for engine and router flags."""

from slime.arguments.not_yet import NotYet

ROWS: tuple[NotYet, ...] = ()
