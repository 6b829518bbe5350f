"""The rules that a run's arguments must satisfy, by topic.

A rule yields one message for each way in which it is broken; the message names the flags, their values, and a value that
would work. All rules are always asked, so that a user reads everything that is wrong at once.
"""

import argparse
from collections.abc import Callable, Iterator

Rule = Callable[[argparse.Namespace], Iterator[str]]


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def hint(flag: str, values: list[int]) -> str:
    """ "; --flag 1 or 2 would do" with the largest of `values`, or nothing when there are none."""
    return f"; {flag} {' or '.join(str(value) for value in values[-6:])} would do" if values else ""
