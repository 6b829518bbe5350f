"""How flags are shown: what `--help` and `--help-grep` print, and the words in which the reference tells them, too."""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from slime.observability.run_record import REDACTED, is_secret
from slime.utils.errors import UserError

_WIDEST = 120
_TYPE_NAMES = {
    "str": "TEXT", "int": "INT", "float": "FLOAT", "json_object": "JSON", "json_value": "JSON", "human_int": "INT",
    "integers": "INT,INT", "layer_pattern": "PATTERN", "environment_variables": "JSON",
}  # fmt: skip
# Python 3.11 and 3.12 append this themselves to the help of switches with two sides.
_OWN_SUFFIX = " (default: %(default)s)"


def meaning_of(action: argparse.Action) -> str:
    """The help text, without what argparse would fill in."""
    return (action.help or "").removesuffix(_OWN_SUFFIX).replace("%%", "%")


def default_of(action: argparse.Action) -> str:
    """The default as it would be typed; empty for None and for a switch that is off."""
    default = action.default
    if default in (None, argparse.SUPPRESS, [], {}):
        return ""
    if is_secret(action.dest):
        return REDACTED
    if action.nargs == 0:
        return _default_of_switch(action)
    if isinstance(default, list | tuple):
        return " ".join(map(str, default))
    return json.dumps(default) if isinstance(default, dict) else str(default)


def value_of(action: argparse.Action) -> str:
    """What the flag takes: `INT`, `{a,b}`, `TEXT [TEXT ...]`; empty for switches."""
    if action.nargs == 0:
        return ""
    return argparse.HelpFormatter("", width=_WIDEST)._format_args(action, _metavar_of(action))


def print_page(text: str, file: TextIO | None = None) -> None:
    """Print a long text; a reader that had enough (`| head`) is no error."""
    try:
        print(text, end="", file=file or sys.stdout, flush=True)
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class HelpFormatter(argparse.HelpFormatter):
    """One line of spellings, then the text, both as wide as the terminal; a default is shown where there is one."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns - 2, _WIDEST)
        super().__init__(prog, max_help_position=8, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return " ".join(filter(None, (", ".join(action.option_strings), value_of(action))))

    def _get_help_string(self, action: argparse.Action) -> str:
        default = default_of(action)
        text = meaning_of(action) + (f" (default: {default})" if default else "")
        return text.replace("%", "%%")


class HelpGrepAction(argparse.Action):
    """Prints the entries that contain a word, below the titles of their groups, and ends the process."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, metavar="WORD", **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        page = matching_entries(parser, values)
        if not page:
            raise UserError(f"--help-grep {values}: no flag and no help text has it; try a shorter word")
        print_page(page)
        parser.exit()


def matching_entries(parser: argparse.ArgumentParser, word: str) -> str:
    """The help of all flags whose name or text has a word that begins with `word`; may be empty.

    Capitals, dashes and underscores are alike. With dashes in front `word` is a whole flag.
    """
    before, behind = (r"(?<![\w-])", r"(?![\w-])") if word.startswith("-") else (r"(?<![^\W_])", "")
    pattern = re.compile(before + re.escape(_plain(word)) + behind)
    formatter = parser._get_formatter()
    for title, actions in groups_of(parser):
        texts = [f"{' '.join(action.option_strings)} {meaning_of(action)}" for action in actions]
        found = [action for action, text in zip(actions, texts, strict=True) if pattern.search(_plain(text))]
        if found:
            formatter.start_section(title)
            formatter.add_arguments(found)
            formatter.end_section()
    return formatter.format_help()


def groups_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Titles of the groups and their flags, in the order of `--help`."""
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        if actions:
            yield group.title or "", actions


def _default_of_switch(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return "on" if action.default else "off"
    if isinstance(action.const, bool):
        return "" if action.default != action.const else "on"
    return str(action.default) if action.default == action.const else ""


def _metavar_of(action: argparse.Action) -> str | tuple[str, ...]:
    if action.metavar is not None:
        return action.metavar
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    name = getattr(action.type, "__name__", "str")
    return _TYPE_NAMES.get(name, name.upper())


def _plain(text: str) -> str:
    return text.lower().replace("_", "-")
