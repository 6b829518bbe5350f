"""The rules that a run's arguments must satisfy, by topic.

A rule yields one message for each way in which it is broken; the message names the flags, their values, and a value that
would work. All rules are always asked, so that a user reads everything that is wrong at once.
"""

import argparse
from collections.abc import Callable, Iterator

Rule = Callable[[argparse.Namespace], Iterator[str]]
