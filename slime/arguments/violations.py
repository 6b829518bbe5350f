"""Violations, for which a run is refused. A rule yields them, and each says which flags it is about, and of which kind it is.

Rules read values that others may have got wrong: a size out of its bounds is replaced before they are asked, a flag that nobody
knows leaves the one that was meant at its default. What they say about such a flag is a consequence that nobody wants to read;
it is found by the flags of the violation.
"""

import argparse
import logging
import string
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from slime.arguments.flag import Condition, as_typed, attribute_of, flag_of
from slime.observability.run_record import redacted
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)


class Kind(Enum):
    """The kinds of violations. A plan only takes note of the last two."""

    # The flag is unknown.
    UNKNOWN = auto()
    OUT_OF_BOUNDS = auto()
    # Values do not fit together, or a word has no meaning.
    WRONG = auto()
    # A file, a directory, a package or a plug-in is not there.
    MISSING = auto()
    NOT_BUILT = auto()


NOTED = (Kind.MISSING, Kind.NOT_BUILT)


@dataclass(frozen=True)
class Violation:
    """One way in which the flags of a run are wrong.

    Attributes:
        flags: spellings of the flags that it is about, and derived attributes (`world_size`) that it tells.
        message: names them, their values, and a value that would work.
    """

    flags: tuple[str, ...]
    message: str
    kind: Kind = Kind.WRONG

    def at(self, place: str) -> "Violation":
        """The same with `place: ` before the message."""
        return replace(self, message=f"{place}: {self.message}")


class Refusal(UserError):
    """The flags of a run are refused for `violations`; the message has those of all."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join(violation.message for violation in self.violations))


# All rules are asked, so that a user reads everything that is wrong at once.
Rule = Callable[[argparse.Namespace], Iterator[Violation]]

# Derived numbers in messages -> the flags from which they follow.
_FOLLOWS_FROM = {
    **dict.fromkeys(("world_size", "data_parallel_size"), frozenset({
        "--actor-num-nodes", "--actor-num-gpus-per-node", "--tensor-model-parallel-size", "--pipeline-model-parallel-size",
        "--context-parallel-size",
    })),
    "--global-batch-size": frozenset({"--rollout-batch-size", "--n-samples-per-prompt", "--num-steps-per-rollout"}),
}  # fmt: skip


def broken(
    args: argparse.Namespace, template: str, *flags: str, kind: Kind = Kind.WRONG, **values: object
) -> Violation:
    """The violation that `template` tells: `{--lr}` is that flag, `{--lr=}` the flag with its value, as it would be typed.

    `{0}` and `{0=}` are the same for the first of `flags`. Other names are `values`, or attributes of `args`.
    """
    about, message = dict.fromkeys(flags), ""
    for text, field, _, _ in string.Formatter().parse(template):
        message += text
        if field is None:
            continue
        name = field.removesuffix("=")
        if name in values:
            message += str(values[name])
            continue
        name = flags[int(name)] if name.isdigit() else name
        if name.startswith("--"):
            message += as_given(args, attribute_of(name)) if field.endswith("=") else name
        else:
            message += str(vars(args)[name])
            name = name if name in _FOLLOWS_FROM else flag_of(name)
        about[name] = None
    return Violation(tuple(about), message, kind)


def as_given(args: argparse.Namespace, name: str) -> str:
    """The flag of an attribute with its value as it would be typed; switches stand alone, secrets are not shown."""
    value = vars(args)[name]
    flag = flag_of(name) if value is not False else flag_of(name).replace("--", "--no-", 1)
    return flag if isinstance(value, bool) else f"{flag} {as_typed(redacted({name: value})[name])}"


def about(messages: Iterable[object], *flags: str, kind: Kind = Kind.WRONG) -> Iterator[Violation]:
    """Messages and errors from elsewhere as violations about `flags`."""
    return (Violation(flags, str(message), kind) for message in messages)


def without_consequences(violations: Iterable[Violation], flags: Collection[str]) -> list[Violation]:
    """`violations` without those about `flags`, which the rules saw with another value, or about what follows from them."""
    silenced = {*flags, *(name for name, sources in _FOLLOWS_FROM.items() if not sources.isdisjoint(flags))}
    return [violation for violation in violations if silenced.isdisjoint(violation.flags)]


def refused(when: Condition, template: str) -> Rule:
    """A rule that is broken if `when` holds; `template` as in `broken`."""

    def rule(args: argparse.Namespace) -> Iterator[Violation]:
        if when(args):
            yield broken(args, template)

    return rule


def refused_each(names: Iterable[str], when: Callable[[argparse.Namespace, Any], Any], template: str) -> Rule:
    """A rule that an attribute breaks if `when` holds for its value; in the template `{0}` is its flag, `{value}` the value."""

    def rule(args: argparse.Namespace) -> Iterator[Violation]:
        for name in names:
            if when(args, vars(args)[name]):
                yield broken(args, template, flag_of(name), value=vars(args)[name])

    return rule


def warned(when: Condition, template: str) -> Rule:
    """A rule that warns if `when` holds, and refuses nothing; `template` as in `broken`."""

    def rule(args: argparse.Namespace) -> Iterator[Violation]:
        if when(args):
            logger.warning("%s", broken(args, template).message)
        yield from ()

    return rule


def where(condition: Condition, *rules: Rule) -> tuple[Rule, ...]:
    """The rules, each asked only if `condition` holds."""

    def asked(rule: Rule) -> Rule:
        return lambda args: rule(args) if condition(args) else iter(())

    return tuple(map(asked, rules))


def of_kind(kind: Kind, *rules: Rule) -> tuple[Rule, ...]:
    """The rules, with all their violations of this kind."""

    def asked(rule: Rule) -> Rule:
        return lambda args: (replace(violation, kind=kind) for violation in rule(args))

    return tuple(map(asked, rules))


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def hint(flag: str, values: list[int]) -> str:
    """ "; --flag 1 or 2 would do" with the largest of `values`, or nothing when there are none."""
    return f"; {flag} {' or '.join(str(value) for value in values[-6:])} would do" if values else ""
