"""The flags of a parser by every name that a file may use for them.

A key that sets a flag is the name of the attribute (`grpo_std_normalization`) or the flag's (`disable-grpo-std-normalization`),
with dashes or underscores; its value is converted by the flag's own argparse action. Under the name of the flag, `true` gives
the flag and `false` leaves it out; under the name of the attribute the value is the attribute's.
"""

import argparse
import difflib
import json
from dataclasses import dataclass
from typing import Any

from slime.observability.run_record import shown
from slime.utils.errors import UserError
from slime.utils.misc import near_name
from slime.utils.yaml_file import YamlMapping


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
        unset = argparse._HelpAction | argparse._VersionAction
        actions = [
            action
            for action in parser._actions
            if action.option_strings and action.dest != argparse.SUPPRESS and not isinstance(action, unset)
        ]
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
