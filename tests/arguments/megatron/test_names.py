"""Flags that our scripts type are explained in our own words."""

import re
from pathlib import Path

from slime.arguments.help_text import groups_of, meaning_of
from slime.arguments.megatron.names import MEANINGS
from slime.arguments.parser import build_parser
from slime.arguments.surface import load_surface

SCRIPTS = Path(__file__).parents[3] / "scripts"


def typed_flags() -> set[str]:
    lines = [line for script in SCRIPTS.rglob("*.sh") for line in script.read_text().splitlines()]
    return {flag for line in lines if not line.lstrip().startswith("#") for flag in re.findall(r"--[a-z][\w-]*", line)}


def megatron_actions():
    groups = groups_of(build_parser())
    return [action for title, actions in groups if title.startswith("Megatron: ") for action in actions]


def test_every_flag_of_a_script_has_a_meaning_of_ours():
    theirs = {spec.help for spec in load_surface("megatron") if not spec.metadata.get("other_spelling")}
    typed = typed_flags()
    used = [action for action in megatron_actions() if typed & set(action.option_strings)]
    assert len(used) > 70
    unexplained = [action.option_strings[0] for action in used if meaning_of(action) in {"", *theirs}]
    assert unexplained == []


def test_help_shows_every_meaning():
    shown = {(action.dest, meaning_of(action)) for action in megatron_actions()}
    assert [name for name, text in MEANINGS.items() if (name, text) not in shown] == []
