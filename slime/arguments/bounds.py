"""What the declarations of flags say of their values: numbers within bounds, flags that lack another or change nothing.

Bounds are asked for before anything is derived: nothing follows from a size of 0. A number out of its bounds is replaced by
a harmless one, so that the other rules can be asked too; what they say about that flag is left out.
"""

import argparse
import logging
from collections.abc import Iterator
from typing import Any

from slime.arguments.flag import attribute_of, flag_of
from slime.arguments.groups import BOUNDS, OWN_FLAGS
from slime.arguments.violations import Kind, Violation, broken

logger = logging.getLogger(__name__)


def replace_wrong_sizes(args: argparse.Namespace) -> dict[str, Violation]:
    """A violation for every number out of its bounds, by attribute, and for the one size that has no default.

    Afterwards each of these attributes holds a number that nothing fails on.
    """
    wrong: dict[str, Violation] = {}
    if args.rollout_batch_size is None:
        template = "{--rollout-batch-size} is needed: the number of prompts per rollout step, for example 32"
        wrong["rollout_batch_size"] = broken(args, template, kind=Kind.OUT_OF_BOUNDS)
        args.rollout_batch_size = 1
    for name, bounds in BOUNDS.items():
        for number in _numbers(args, name):
            problem = bounds.problem(number)
            if problem is not None:
                wrong[name] = Violation((flag_of(name),), f"{flag_of(name)} {number}: {problem}", Kind.OUT_OF_BOUNDS)
                setattr(args, name, bounds.replacement)
                args.typed_flags.discard(name)
    return wrong


def _numbers(args: argparse.Namespace, name: str) -> list[Any]:
    """The numbers that a flag was given: some take several, of which each has the bounds."""
    value = vars(args)[name]
    return [number for number in (value if isinstance(value, list) else [value]) if number is not None]


def warn_of_unusual_values(args: argparse.Namespace) -> Iterator[Violation]:
    """Warns of numbers that can be meant and rarely are; yields nothing."""
    for name, bounds in BOUNDS.items():
        for number in _numbers(args, name) if bounds.unusual is not None and name in args.typed_flags else ():
            most, usual = bounds.unusual
            if number > most:
                logger.warning("%s %s: that is far above what is usual, %s", flag_of(name), number, usual)
    yield from ()


def missing_needs(args: argparse.Namespace) -> Iterator[Violation]:
    """A violation for every flag that was typed without the one that it needs.

    What follows from another flag is that flag's affair: `--release-train` needs `--save` by itself.
    """
    for name, flag in OWN_FLAGS.items():
        if flag.needs is None or name not in args.typed_flags or vars(args)[name] is None or vars(args)[name] is False:
            continue
        violation = broken(args, "{0=} needs " + flag.needs, flag_of(name))
        if not vars(args)[attribute_of(violation.flags[1])]:
            yield violation


def warn_of_idle_flags(args: argparse.Namespace) -> Iterator[Violation]:
    """Warns of flags that are accepted and change nothing beside the others, once for each reason; yields nothing."""
    for name, flag in OWN_FLAGS.items():
        for idle in flag.idle if name in args.typed_flags else ():
            value = vars(args)[name]
            if value is None or value is False:
                continue
            if (value != flag.default or idle.tells_default) and idle.when(args):
                logger.warning("%s: no effect %s", flag_of(name), idle.reason)
    yield from ()
