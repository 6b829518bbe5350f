"""YAML and JSON files of the user as mappings in which every key knows its line.

Scalars read as people mean them: `1e-5` is a number, `12:30` and `2024-01-01` are text, `on` and `no` are booleans.
Beside its value a scalar keeps the text that stands in the file, so that a flag can convert that by its own type
(`run_id: 0012` for a string flag is "0012"). A key that stands twice is an error: only one of its values could win.

A key that sets a flag is the name of the attribute (`grpo_std_normalization`) or of the flag
(`disable-grpo-std-normalization`), with dashes or underscores; its value is converted by the flag's own argparse action. Under
the name of the flag, `true` gives the flag and `false` leaves it out; under the name of the attribute the value is the
attribute's.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slime.observability.run_record import shown
from slime.utils.errors import UserError

Text = str | list[str | None] | None


class YamlMapping(dict[str, Any]):
    """A mapping of a file: plain values, nested mappings of this class.

    Attributes:
        path: the file, as the user wrote it.
        line: where the mapping starts, from 1.
    """

    def __init__(self, path: str, line: int) -> None:
        super().__init__()
        self.path = path
        self.line = line
        self._lines: dict[str, int] = {}
        self._texts: dict[str, Text] = {}

    def put(self, key: str, value: Any, line: int, text: Text) -> None:
        """Add an entry; `text` is what the file has for it (a list of texts for a list of scalars, else None)."""
        self[key] = value
        self._lines[key] = line
        self._texts[key] = text

    def where(self, key: str | None = None) -> str:
        """`file:line` of a key, or of the mapping itself."""
        return f"{self.path}:{self.line if key is None else self._lines[key]}"

    def text(self, key: str) -> Text:
        """The value's own text: of a scalar, or of every item of a list of scalars; None for everything else."""
        return self._texts[key]


def load_yaml(path: str | Path, flag: str) -> YamlMapping:
    """The mapping in a YAML or JSON file; an empty file is an empty mapping.

    Args:
        flag: named in messages, as in `--eval-config`.

    Raises:
        UserError: no such file, broken syntax, a key that stands twice, or something else than a mapping.
    """
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UserError(f"{flag} {name}: the file cannot be read: {reason}") from error
    if name.endswith(".json"):
        # YAML knows no tabs as indentation, and JSON has none inside of strings.
        text = text.replace("\t", " ")
    try:
        value = _parse(text, name, flag)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(f"{flag}: {name}:{mark.line + 1}: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{flag}: {name}:{line}: the character U+{error.character:04X} is not allowed") from error
    if value is None:
        return YamlMapping(name, 1)
    if not isinstance(value, YamlMapping):
        raise UserError(f"{flag}: {name}:1: the file holds a {type(value).__name__}; expected `key: value` lines")
    return value


def _parse(text: str, name: str, flag: str) -> Any:
    loader = _Loader(text)
    loader.path, loader.flag = name, flag
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def plain(value: Any) -> Any:
    """`value` as builtin dictionaries and lists, which travel to other processes."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


class _Loader(yaml.SafeLoader):
    path: str
    flag: str

    def mapping(self, node: yaml.MappingNode) -> Any:
        result = YamlMapping(self.path, node.start_mark.line + 1)
        yield result  # before its entries, as an anchor may refer to it
        self._refuse_repeated(node)
        self.flatten_mapping(node)
        for key_node, value_node in node.value:
            key = self._key(key_node)
            value = self.construct_object(value_node, deep=True)
            result.put(key, value, key_node.start_mark.line + 1, _text_of(value_node))

    def _refuse_repeated(self, node: yaml.MappingNode) -> None:
        # Before `<<` is replaced by what it merges: that may repeat keys, and loses to the mapping's own.
        first: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = self._key(key_node), key_node.start_mark.line + 1
            if key in first:
                raise UserError(f"{self.flag}: {self.path}:{line}: {key} stands twice, first in line {first[key]}")
            first[key] = line

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise UserError(f"{self.flag}: {self.path}:{node.start_mark.line + 1}: a key must be a name")
        return node.value


def _text_of(node: yaml.Node) -> Text:
    if isinstance(node, yaml.ScalarNode):
        return node.value
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [item.value for item in node.value]
    return None


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node), 0)


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


# The words of YAML 1.1 for booleans, and the numbers of YAML 1.2: 1.1 reads `1e-5` as text, 12:30 as 750 and 010 as 8.
_REPLACED = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"([-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|"
        r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


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
