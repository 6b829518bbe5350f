"""Rows for our own flags."""

from slime.arguments.not_yet import NotYet

ROWS: tuple[NotYet, ...] = ()
