"""One declaration for each of our own flags: how it is typed, and everything else that this package asks about it.

The tables stand in `slime.arguments.groups`. Whoever adds a flag adds a row there: its bounds, where its path leads, who calls
its plug-in and when it changes nothing are read from the row, and so is the flag reference.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

Condition = Callable[[argparse.Namespace], bool]


@dataclass(frozen=True)
class Bounds:
    """The numbers that a flag takes: from `low` to `high`, both included unless the range is `open` there.

    Attributes:
        replacement: what stands in for a number out of bounds while the other rules are asked; nothing fails on it.
        usual: what a message recommends.
        finite: it must be a finite number; weights, rates and limits of time mean nothing when they are infinite.
        unusual: numbers above the first are possible and nearly always a slip; the second says what is usual.
    """

    low: float | None = None
    high: float | None = None
    low_is_open: bool = False
    high_is_open: bool = False
    replacement: Any = 1
    usual: Any = None
    finite: bool = False
    unusual: tuple[float, str] | None = None

    def problem(self, value: float) -> str | None:
        """What is wrong with a number; None if nothing is. NaN is within no bounds."""
        if self.finite and not math.isfinite(value):
            return "it must be a finite number"
        low = f"{'above' if self.low_is_open else 'at least'} {self.low}"
        high = f"{'below' if self.high_is_open else 'at most'} {self.high}"
        is_low = self.low is not None and not (value > self.low if self.low_is_open else value >= self.low)
        is_high = self.high is not None and not (value < self.high if self.high_is_open else value <= self.high)
        if (is_low or is_high) and self.usual is not None:
            return f"it must be {low} and {high} ({self.usual} is usual)"
        return f"it must be {low if is_low else high}" if is_low or is_high else None


AT_LEAST_ONE = Bounds(low=1)
AT_LEAST_ZERO = Bounds(low=0, replacement=0)
ABOVE_ZERO = Bounds(low=0, low_is_open=True, replacement=1.0)
SECONDS = Bounds(low=0, low_is_open=True, replacement=1.0, finite=True)
# NumPy and the engines take seeds of 32 bits, and every engine adds its rank.
SEED = Bounds(low=0, high=2**31 - 1, replacement=0)


def below_one(usual: float) -> Bounds:
    """Bounds: from 0, below 1."""
    return Bounds(low=0, high=1, high_is_open=True, replacement=usual, usual=usual)


def share(usual: float) -> Bounds:
    """Bounds: from 0 to 1."""
    return Bounds(low=0, high=1, replacement=usual, usual=usual)


def weight(unusual: float | None = None, usual: str = "", *, low: float | None = 0) -> Bounds:
    """Bounds of a finite factor."""
    replacement = 1.0 if low is None else 0
    return Bounds(low=low, replacement=replacement, finite=True, unusual=None if unusual is None else (unusual, usual))


class PathKind(Enum):
    """What a flag's path leads to, which decides how it is made absolute. Files of prompts are treated in their own way."""

    # The processes of the run read it.
    READ = auto()
    # The run writes it, which is checked before.
    WRITTEN = auto()
    # Only the driver reads it, and keeps it as it was typed for its messages.
    HERE = auto()


class Caller(Enum):
    """The processes that call a plug-in."""

    MANAGER = auto()
    RANKS = auto()


@dataclass(frozen=True)
class Idle:
    """If `when` holds a flag has no effect, for the `reason` with which a warning ends.

    Not an error: launch scripts switch one flag off and leave those that belong to it in place. `tells_default`: warn also if
    the typed value is the default.
    """

    when: Condition
    reason: str
    tells_default: bool = False


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        names: spellings, the usual one first.
        action: of argparse; None stores a value.
        bounds: of its number, or of each of its numbers.
        path: what its path leads to; plug_in: who calls what its path names.
        placeholders: what is filled in where the value has `{name}`.
        idle: where it has no effect.
        needs: the end of the message "--x needs …", for a flag that is given without another one: that flag in braces, then
            whatever helps to choose its value.
    """

    names: tuple[str, ...]
    help: str
    dest: str
    type: Callable[[str], Any] | None = None
    default: Any = None
    choices: tuple[str, ...] | None = None
    nargs: str | None = None
    metavar: str | None = None
    action: Any = None
    bounds: Bounds | None = None
    path: PathKind | None = None
    plug_in: Caller | None = None
    placeholders: tuple[str, ...] = ()
    idle: tuple[Idle, ...] = ()
    needs: str | None = None

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Put the flag into a group of a parser."""
        options = {"type": self.type, "choices": self.choices and list(self.choices), "nargs": self.nargs,
                   "metavar": self.metavar, "action": self.action}  # fmt: skip
        given = {name: value for name, value in options.items() if value is not None}
        # Every parser gets a copy of the default, because a repeated flag appends to it.
        default = self.default.copy() if isinstance(self.default, list | dict) else self.default
        group.add_argument(*self.names, dest=self.dest, default=default, help=self.help.replace("%", "%%"), **given)


@dataclass(frozen=True)
class NotYet:
    """`args.{name}` has no effect yet; `name` may be a pattern such as `sglang_lora_*`.

    `works`: values that are fine (None and False always are).
    """

    name: str
    feature: str
    works: tuple[Any, ...] = ()


def features(feature: str, *names: str, **fine: Any) -> tuple[NotYet, ...]:
    """Rows of one feature: first for `names`, of which no value is fine, then for flags that have one."""
    return tuple(NotYet(name, feature) for name in names) + tuple(NotYet(name, feature, (fine[name],)) for name in fine)


@dataclass(frozen=True)
class Group:
    """Flags that `--help` shows together."""

    title: str
    flags: tuple[Flag, ...]

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Put the group into a parser."""
        group = parser.add_argument_group(self.title)
        for flag in self.flags:
            flag.add_to(group)


def flag(
    names: str,
    type: Callable[[str], Any] | None,
    default: Any,
    text: str,
    *choices: str,
    dest: str | None = None,
    idle: Idle | tuple[Idle, ...] = (),
    placeholders: str = "",
    **more: Any,
) -> Flag:
    """A flag that takes a value. `names` and `placeholders` are separated by spaces; further fields as in `Flag`."""
    spellings = tuple(names.split())
    return Flag(
        spellings,
        text,
        dest or attribute_of(spellings[0]),
        type,
        default,
        choices or None,
        idle=idle if isinstance(idle, tuple) else (idle,),
        placeholders=tuple(placeholders.split()),
        **more,
    )


def switch(names: str, text: str, **more: Any) -> Flag:
    """A flag without a value, which is off unless it is given."""
    return flag(names, None, False, text, action="store_true", **more)


def off(names: str, dest: str, text: str, **more: Any) -> Flag:
    """A flag that switches `dest` off."""
    return flag(names, None, True, text, dest=dest, action="store_false", **more)


def either(names: str, text: str, **more: Any) -> Flag:
    """A switch with two sides, `--x` and `--no-x`; what it is when neither is given is derived."""
    return flag(names, None, None, text, action=argparse.BooleanOptionalAction, **more)


def plug_in(names: str, caller: Caller, text: str, default: Any = None, **more: Any) -> Flag:
    """A flag that names a function or class of the user."""
    return flag(names, None, default, f"plug-in path: {text}", plug_in=caller, **more)


# Attributes that are better known by another spelling of their flag.
_SPELLINGS = {"fp8": "--fp8-format", "fp4": "--fp4-format", "layernorm_epsilon": "--norm-epsilon"}
_ATTRIBUTES = {spelling: name for name, spelling in _SPELLINGS.items()}


def attribute_of(name: str) -> str:
    """The attribute of `args` that holds the value of the flag `name`."""
    return _ATTRIBUTES.get(name) or name.removeprefix("--").replace("-", "_")


def flag_of(name: str) -> str:
    """The spelling on the command line of the attribute `name`."""
    return _SPELLINGS.get(name) or "--" + name.replace("_", "-")


def as_typed(value: Any) -> Any:
    """A value for a message: the words of a list as they stand on the command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else value
