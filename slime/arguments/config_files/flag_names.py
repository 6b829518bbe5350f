"""The flags of a parser by every name that a file may use for them.

A key that sets a flag is the name of the attribute (`grpo_std_normalization`) or of the flag
(`disable-grpo-std-normalization`), with dashes or underscores; its value is converted by the flag's own argparse action. Under
the name of the flag, `true` gives the flag and `false` leaves it out; under the name of the attribute the value is the
attribute's.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slime.observability.run_record import shown
from slime.utils.errors import UserError
from slime.utils.yaml_file import YamlMapping

_CLOSE = 0.9
_SHORT_NAME = 12


@dataclass(frozen=True)
class NamedFlag:
    """A flag as a key names it. `option` is the spelling to show; `by_flag`: the key is not the attribute's name."""

    action: argparse.Action
    option: str
    by_flag: bool

    @property
    def dest(self) -> str:
        return self.action.dest


class FlagNames:
    """The flags of a parser by every name that a file may use for them."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        self._flags: dict[str, NamedFlag] = {}
        actions = [action for action in parser._actions if action.option_strings and _settable(action)]
        for action in actions:
            for option in action.option_strings:
                name = attribute_name(option)
                self._flags[name] = NamedFlag(action, option, by_flag=name != action.dest)
        for action in actions:
            self._flags.setdefault(action.dest, NamedFlag(action, action.option_strings[0], by_flag=False))

    def find(self, key: str) -> NamedFlag | None:
        """The flag that `key` names."""
        return self._flags.get(attribute_name(key))

    def near(self, key: str) -> str | None:
        """The name that `key` probably is a slip of, or None where it may well be a name of its own."""
        return near_name(attribute_name(key), self._flags)

    def similar(self, key: str) -> list[str]:
        """Names that remind of `key`, for a hint."""
        return difflib.get_close_matches(attribute_name(key), self._flags, n=2, cutoff=0.7)

    def convert(self, flag: NamedFlag, mapping: YamlMapping, key: str) -> Any:
        """The value of `flag.dest` that the entry `key` of `mapping` asks for.

        Raises:
            UserError: the flag does not take such a value; the message starts with `file:line`.
        """
        try:
            return self._value(flag, mapping, key)
        except argparse.ArgumentError as error:
            default = flag.action.default
            hint = "" if default is None or isinstance(default, bool) else f" (the default is {default})"
            raise UserError(f"{mapping.where(key)}: {key}: {error.message}{hint}") from None
        except _WrongValue as error:
            value = shown(flag.dest, mapping[key])
            raise UserError(f"{mapping.where(key)}: {key}: {value} is no value for it; {error}") from None

    def _value(self, flag: NamedFlag, mapping: YamlMapping, key: str) -> Any:
        action, value = flag.action, mapping[key]
        if value is None and action.default is None:
            return None
        if isinstance(action, argparse.BooleanOptionalAction):
            return _boolean(value) != (flag.by_flag and flag.option.startswith("--no-"))
        if action.nargs == 0:
            return _switch(flag, value)
        if value is None:
            raise _WrongValue("give a value or drop the line")
        values = [value] if not isinstance(value, list) else value
        texts = mapping.text(key) if isinstance(mapping.text(key), list) else [mapping.text(key)] * len(values)
        many = action.nargs not in (None, argparse.OPTIONAL) or isinstance(action, argparse._AppendAction)
        if not many:
            # One value: a list is meant as a whole, by types that read JSON.
            return self._call(action, flag.option, self._convert_one(action, value, mapping.text(key)))
        converted = [self._convert_one(action, *pair) for pair in zip(values, texts, strict=True)]
        if action.nargs == argparse.ONE_OR_MORE and not converted:
            raise _WrongValue("give at least one value")
        if isinstance(action.nargs, int) and len(converted) != action.nargs:
            raise _WrongValue(f"give {action.nargs} values")
        if isinstance(action, argparse._AppendAction) and action.nargs is None:
            return converted
        return self._call(action, flag.option, converted)

    def _convert_one(self, action: argparse.Action, value: Any, text: Any) -> Any:
        if isinstance(value, dict | list):
            if action.type in (None, str, int, float):
                raise _WrongValue("it takes one value" if action.nargs is None else "it takes a list of plain values")
            text = json.dumps(value)
        elif isinstance(value, int) and not isinstance(value, bool) and action.type is int:
            text = str(value)  # the file may say 0x10 or 1_000
        converted = self._parser._get_value(action, text)
        self._parser._check_value(action, converted)
        return converted

    def _call(self, action: argparse.Action, option: str, values: Any) -> Any:
        """What the action itself makes of the values, as if nothing had been typed before."""
        namespace = argparse.Namespace(**{action.dest: None})
        action(self._parser, namespace, values, option)
        return getattr(namespace, action.dest)


class _WrongValue(Exception):
    """The kind of value does not fit; the text says which kind would."""


def attribute_name(key: str) -> str:
    """A flag or key in the spelling of attributes."""
    return key.lstrip("-").replace("-", "_")


def near_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` probably is a slip of: one letter amiss in a short name, two in a longer one."""
    if name in known:
        return None
    allowed = 1 if len(name) < _SHORT_NAME else 2
    best: tuple[float, str] | None = None
    for candidate in known:
        if abs(len(candidate) - len(name)) > allowed:
            continue
        # Cheap bounds first: there are more than a thousand names.
        matcher = difflib.SequenceMatcher(None, candidate, name, autojunk=False)
        if matcher.quick_ratio() < 0.6:
            continue
        distance = _edit_distance(name, candidate)
        if distance <= allowed and (best is None or distance < best[0]):
            best = (distance, candidate)
    if best is not None:
        return best[1]
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)), None)


def _edit_distance(left: str, right: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours that turn one word into the other."""
    before: list[int] = []
    previous = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        current = [i]
        for j, b in enumerate(right, 1):
            cost = min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            current.append(cost)
        before, previous = previous, current
    return previous[-1]


def _settable(action: argparse.Action) -> bool:
    return not isinstance(action, argparse._HelpAction | argparse._VersionAction) and action.dest != argparse.SUPPRESS


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _WrongValue("give true or false")
    return value


def _switch(flag: NamedFlag, value: Any) -> Any:
    const, default = flag.action.const, flag.action.default
    if not isinstance(const, bool):
        if not flag.by_flag and value in (const, default):
            return value
        return const if _boolean(value) else default
    given = _boolean(value)
    return (const if given else not const) if flag.by_flag else given
