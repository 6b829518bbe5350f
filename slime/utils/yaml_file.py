"""YAML and JSON files of the user as mappings in which every key knows its line.

Scalars are read as people mean them: `1e-5` is a number, `12:30` and `2024-01-01` are text, `on` and `no` are booleans.
Beside its value a scalar keeps its text in the file, so that a flag can convert the text by its own type (`run_id: 0012` for a
string flag is "0012"). A key that stands twice is an error, because only one of its values could count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from slime.utils.errors import UserError
from slime.utils.misc import near_name

Text = str | list[str | None] | None

EMPTY_PATH = "the path is empty; is a variable of the shell not set? Give a path"


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
        """Add an entry. `text` is the value's text in the file: a list of texts for a list of scalars, None for others."""
        self[key] = value
        self._lines[key] = line
        self._texts[key] = text

    def where(self, key: str | None = None) -> str:
        """`file:line` of a key, or of the mapping itself."""
        return f"{self.path}:{self.line if key is None else self._lines[key]}"

    def unknown(self, key: str, known: Collection[str], subject: str = "") -> str:
        """The message about a key that is not among those that are `known`: the one that was probably meant, else all of them.

        `subject`: whose keys these are.
        """
        name = key.lstrip("-").replace("-", "_")
        near = name if name in known else near_name(name, known)
        hint = f"did you mean {near}?" if near else f"known: {', '.join(sorted(known))}"
        return f"{self.where(key)}: {f'{subject}: ' if subject else ''}unknown key {key}: {hint}"

    def text(self, key: str) -> Text:
        """The value's text in the file: of a scalar, or of every item of a list of scalars; None for other values."""
        return self._texts[key]


def load_yaml(path: str | Path, flag: str) -> YamlMapping:
    """The mapping in a YAML or JSON file; an empty file is an empty mapping.

    Args:
        flag: named in messages, as in `--eval-config`.

    Raises:
        UserError: no path, no such file, broken syntax, a key that stands twice, or something else than a mapping.
    """
    name = str(path)
    if not name:
        raise UserError(f"{flag}: {EMPTY_PATH}")
    try:
        # The shell leaves a `~` behind `=`.
        text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UserError(f"{flag} {name}: the file cannot be read: {reason}") from error
    if name.endswith(".json"):
        # YAML does not allow tabs as indentation, and JSON has none inside strings.
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
        # Checked before `<<` is replaced by the mappings that it merges: these may repeat keys, and the mapping's own win.
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


# Booleans are those of YAML 1.1, and numbers those of YAML 1.2, since 1.1 reads `1e-5` as text, 12:30 as 750 and 010 as 8.
_REPLACED = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+)$"),
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
